"""Sites that lie: whatever a site sends, the liar fails and is named, and the others go on."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from run_folders import history

from polyclinic.engines.in_process import InProcess
from polyclinic.federation.call import AS_SENT, Call, Failure, Reply
from polyclinic.federation.layers.replies import checked_keys
from polyclinic.federation.ledger.keys import SeedKeys
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.run.run import run

LIAR = "site-2"


def metadata(**changes):
    """Other numbers beside the tensors of the first parcel; None takes a number away."""

    def lie(parcels):
        told = {**parcels[0].metadata, **changes}
        return [replace(parcels[0], metadata={n: v for n, v in told.items() if v is not None}), *parcels[1:]]

    return lie


def tensors(kind, change):
    """Other tensors in the parcel of a kind."""

    def lie(parcels):
        return [replace(p, tensors=change(dict(p.tensors))) if p.kind == kind else p for p in parcels]

    return lie


def each(change):
    """The same change of every tensor of floating-point numbers."""
    return lambda found: {name: change(t) if t.is_floating_point() else t for name, t in found.items()}


def first(change):
    """A change of the first tensor only."""

    def apply(found):
        name = next(iter(found))
        return {**found, name: change(found[name])}

    return apply


def nothing(parcels):
    return []


def twice(parcels):
    return [*parcels, parcels[0]]


def other_kind(parcels):
    return [Parcel("latents", parcels[0].tensors, parcels[0].metadata)]


def without(kind):
    return lambda parcels: [parcel for parcel in parcels if parcel.kind != kind]


def fewer(found):
    return dict(list(found.items())[1:])


def more(found):
    return {**found, "another": torch.zeros(3)}


WEIGHTS = {
    "nothing": nothing,
    "twice": twice,
    "other kind": other_kind,
    "samples missing": metadata(samples=None),
    "samples text": metadata(samples="many"),
    "samples 10^400": metadata(samples=10**400),
    "samples none": metadata(samples=0),
    "loss text": metadata(loss="low"),
    "one NaN": tensors("weights", first(lambda t: t.clone().fill_(torch.nan))),
    "times 10^6": tensors("weights", each(lambda t: t * 1e6)),
    "times -10^6": tensors("weights", each(lambda t: t * -1e6)),
    "shapes": tensors("weights", each(lambda t: t[..., None])),
    "fewer names": tensors("weights", fewer),
    "more names": tensors("weights", more),
    "no names": tensors("weights", lambda found: {}),
}
GRADIENTS = {
    "nothing": nothing,
    "no gradients": without("gradients"),
    "no statistics": without("statistics"),
    "times 10^6": tensors("gradients", each(lambda t: t * 1e6)),
    "times -10^6": tensors("gradients", each(lambda t: t * -1e6)),
    "shapes": tensors("gradients", each(lambda t: t.flatten())),
    "fewer names": tensors("gradients", fewer),
    "more names": tensors("statistics", more),
    "samples missing": lambda parcels: [replace(p, metadata={}) for p in parcels],
}
ACTIVATIONS = {
    "nothing": nothing,
    "no labels": without("labels"),
    "no activations": without("activations"),
    "class 99": tensors("labels", first(lambda t: t + 99)),
    "class -1": tensors("labels", first(lambda t: t - 99)),
    "classes as floats": tensors("labels", first(lambda t: t.float())),
    "fewer labels": tensors("labels", first(lambda t: t[1:])),
    "no image": lambda parcels: [replace(p, tensors={n: t[:0] for n, t in p.tensors.items()}) for p in parcels],
    "shapes": tensors("activations", first(lambda t: t[:, :1])),
    "another name": tensors("activations", lambda found: {"x": next(iter(found.values()))}),
}
LATENTS = {
    "nothing": nothing,
    "class 99": tensors("labels", first(lambda t: t + 99)),
    "fewer labels": tensors("labels", first(lambda t: t[1:])),
    "shapes": tensors("latents", first(lambda t: t[..., :1])),
    "more names": tensors("latents", more),
    "times 10^6": tensors("latents", each(lambda t: t * 1e6)),
    "times -1000": tensors("latents", each(lambda t: t * -1000)),
}
SHARED = {
    "nothing": nothing,
    "no names": tensors("real-images", lambda found: {}),
    "no labels": tensors("labels", lambda found: {}),
    "no image": lambda parcels: [replace(p, tensors={n: t[:0] for n, t in p.tensors.items()}) for p in parcels],
    "shapes": tensors("real-images", first(lambda t: t[..., :1])),
    "fewer labels": tensors("labels", first(lambda t: t[:-1])),
    "more names": tensors("real-images", more),
}
SCORES = {
    "twice": twice,
    "negative": tensors("metrics", lambda s: {**s, "confusion": -s["confusion"]}),
    "negative loss": tensors("metrics", lambda s: {**s, "loss": -s["loss"] - 1}),
    "NaN": tensors("metrics", lambda s: {**s, "loss": s["loss"] * torch.nan}),
    "inflated": tensors("metrics", lambda s: {**s, "confusion": s["confusion"] * 10**6, "count": s["count"] * 10**6}),
    "counts differ": tensors("metrics", lambda s: {**s, "count": s["count"] + 1}),
    "shapes": tensors("metrics", lambda s: {**s, "confusion": s["confusion"].flatten()}),
    "a sum missing": tensors("metrics", lambda s: {n: t for n, t in s.items() if n != "histograms"}),
    "no count": tensors("metrics", lambda s: {n: t for n, t in s.items() if n != "count"}),
    "wrapping": tensors(
        "metrics",
        lambda s: {**s, "confusion": torch.tensor([[2**62 + 100, 2**62], [2**62, 2**62]]), "count": torch.tensor(100)},
    ),
    "endless histograms": tensors("metrics", lambda s: {**s, "histograms": s["histograms"].double() + 1e308}),
    "float8": tensors("metrics", lambda s: {**s, "loss": s["loss"].to(torch.float8_e4m3fn)}),
    "sealed": lambda parcels: [Parcel("sealed", parcels[0].tensors, {"kind": "metrics"})],
    "floats": tensors("metrics", lambda s: {n: t.double() for n, t in s.items()}),
}


def in_all(change):
    return lambda parcels: [replace(one, tensors={n: change(t) for n, t in one.tensors.items()}) for one in parcels]


def outside(**said):
    return lambda parcels: [replace(one, metadata={**one.metadata, **said}) for one in parcels]


def other_box(parcels):
    return [replace(one, tensors={"box": one.tensors["box"].flip(0)}) for one in parcels]


KEYS = {
    "a short key": in_all(lambda key: key[:3]),
    "floats": in_all(lambda key: key.float()),
    "nothing": nothing,
    "of another": lambda parcels: [Parcel("keys", {"site-1": parcels[0].tensors[LIAR]})],
    "of all": lambda parcels: [Parcel("keys", {LIAR: parcels[0].tensors[LIAR], "site-1": torch.zeros(32)})],
}
BOXES = {
    "garbage": other_box,
    "cut": in_all(lambda box: box[:20]),
    "numbers": in_all(lambda box: box.float()),
    "for another": outside(**{"from": "site-1"}),
    "of another operation": outside(operation="prepare"),
    "of another kind": outside(kind="generator"),
    "open": lambda parcels: [Parcel("synthetic-images", {"images": torch.zeros(8, 1, 28, 28, dtype=torch.uint8)})],
    "nothing": nothing,
}
IMAGES = {
    "nothing": nothing,
    "no tensors": lambda parcels: [replace(one, tensors={}, compressed=()) for one in parcels],
    "shapes": in_all(lambda t: t[..., :1] if t.dim() > 1 else t),
    "floats": in_all(lambda t: t.float()),
    "classes": in_all(lambda t: t + 99 if t.dim() == 1 else t),
    "few labels": in_all(lambda t: t[1:] if t.dim() == 1 else t),
}
FORMS = ("nothing", "no tensors", "shapes")
LIES = [
    *[("fedavg", "train", name, lie) for name, lie in WEIGHTS.items()],
    *[("cwt", "train", name, WEIGHTS[name]) for name in ("nothing", "fewer names", "times 10^6")],
    *[("scaffold", "train", "no gradients", without("gradients"))],
    *[("scaffold", "train", "shapes of gradients", tensors("gradients", each(lambda t: t.flatten())))],
    *[("scaffold", "train", "gradients times 10^6", tensors("gradients", each(lambda t: t * 1e6)))],
    *[("fedsgd", "gradient", name, lie) for name, lie in GRADIENTS.items()],
    *[("splitnn", "forward", name, lie) for name, lie in ACTIVATIONS.items()],
    *[("splitnn", "begin", f"steps {steps}", metadata(steps=steps)) for steps in (None, "3", 10**9, -1)],
    *[("splitnn", "finish", name, WEIGHTS[name]) for name in ("fewer names", "times 10^6", "times -10^6")],
    *[("fedavg-share", "give_share", name, lie) for name, lie in SHARED.items()],
    *[("fedreplay", "give_latents", name, lie) for name, lie in LATENTS.items()],
    *[("fedreplay", "count", "samples missing", metadata(samples=None))],
    *[("fedavg", "evaluate", name, lie) for name, lie in SCORES.items()],
    *[("feder", "give_key", name, lie) for name, lie in KEYS.items()],
    *[("feder", "hand_over", name, lie) for name, lie in BOXES.items()],
    *[("felicia", "start_round", name, IMAGES[name]) for name in FORMS],
    *[("felicia", "generator_step", name, IMAGES[name]) for name in FORMS],
    *[("felicia, local", "train_locally", name, IMAGES[name]) for name in FORMS],
    *[("felicia, shared", "give_images", name, lie) for name, lie in IMAGES.items()],
]
GAN = {"name": "dcgan", "width": 4, "latent": 8, "steps": 2}
FELICIA = {"generator": GAN, "method.steps": 2, "method.learner_steps": 3}
SETTINGS = {
    "splitnn": {"model.cut": "conv1"},
    "fedreplay": {"model.cut": "conv1", "method.encoder_site": "site-1"},
    "feder": {"generator": GAN, "tuning.on": False, "method.buffer": 8, "sites.count": 3},
    "felicia": FELICIA,
    "felicia, local": {**FELICIA, "method.schedule": "local", "method.exchange_every": 1},
    "felicia, shared": {**FELICIA, "method.share_images": True},
}
#: rounds from which on a lie can be told: inflated scores differ from the honest ones of the round before
FROM_ROUND = {"inflated": 2}


@pytest.fixture
def lying(monkeypatch):
    """From now on what a site answers to some calls is what `lie` makes of it."""

    def begin(when, lie):
        honest = InProcess.call

        def call(engine, calls):
            for asked, answer in zip(calls, honest(engine, calls), strict=True):
                if answer and when(asked):
                    answer = Reply(asked.site, tuple(lie(list(answer.parcels))), answer.head, answer.head_soon)
                yield answer

        monkeypatch.setattr(InProcess, "call", call)

    return begin


@pytest.mark.parametrize(("method", "operation", "name", "lie"), LIES, ids=["-".join(one[:3]) for one in LIES])
def test_a_liar_fails_and_is_named(tiny, tmp_path, lying, method, operation, name, lie):
    begins = FROM_ROUND.get(name, 0)
    lying(lambda call: (call.site, call.operation) == (LIAR, operation) and call.round >= begins, lie)
    settings = {"data.samples": 36, **SETTINGS.get(method, {})}
    if operation == "count":
        settings["method.encoder_site"] = "largest"
    rounds = max(begins, 1)
    result = run(tiny(method.partition(",")[0], settings, rounds=rounds), tmp_path / "run")
    failed = {site: words for line in history(result.folder) for site, words in line["failed"].items()}
    early = json.loads((result.folder / "result.json").read_text())["failures"]
    assert set(failed) | {one["site"] for one in early} == {LIAR}
    assert all(one["operation"] == operation for one in early)


@pytest.mark.parametrize("encoder_site", ["largest", "random"])
def test_another_site_trains_the_encoder_in_place_of_a_liar(tiny, tmp_path, lying, encoder_site):
    asked = []
    lying(
        lambda call: call.operation == "train_encoder" and not asked.append(call.site) and len(asked) == 1,
        WEIGHTS["times 10^6"],
    )
    settings = {"data.samples": 36, "model.cut": "conv1", "method.encoder_site": encoder_site}
    result = run(tiny("fedreplay", settings, rounds=1), tmp_path / "run")
    liar, other = asked
    assert [(one["site"], one["operation"]) for one in result["failures"]] == [(liar, "train_encoder")]
    assert result["encoder"] == {"site": other}


def test_a_receiver_that_refuses_what_all_others_seal_is_dropped(tiny, tmp_path, monkeypatch):
    """It is believed once: nobody else can open a box. Whoever disagrees with several sites is the one that lies."""
    honest = InProcess.call

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            lies = asked.site == LIAR and asked.operation == "receive"
            yield Failure(LIAR, "receive", f"it does not open{AS_SENT}") if lies else answer

    monkeypatch.setattr(InProcess, "call", call)
    settings = {"data.samples": 48, **SETTINGS["feder"], "sites.count": 4, "engine.quorum": 0.5}
    found = run(tiny("feder", settings, rounds=5), tmp_path / "run").values["failures"]
    senders = {words.split("'")[1] for one in found if (words := one["reason"]).startswith("site '")}
    blamed = [one["site"] for one in found]
    assert len(blamed) == 5
    assert LIAR in blamed[:3]
    assert set(blamed[blamed.index(LIAR) :]) == {LIAR}
    assert senders <= {LIAR}


REPLAY = {"epochs": 1, "width": 4, "blocks": 1, "top_codes": 8, "bottom_codes": 8, "prior_epochs": 1, "prior_width": 4}
HANDED_ON = {
    "no codes": without("codes"),
    "no labels": without("labels"),
    "codes of fewer sites": tensors("codes", fewer),
    "codes of a stranger": tensors("codes", lambda t: {**t, "site-9/top": t[f"{LIAR}/top"]}),
    "fewer labels": tensors("labels", lambda t: {**t, LIAR: t[LIAR][1:]}),
    "nothing": nothing,
    "another network": tensors("generator", fewer),
    "one more tensor": tensors("generator", more),
    "a million times": tensors("generator", lambda t: {n: (x * 1e6).to(x.dtype) for n, x in t.items()}),
    "labels of another": tensors("labels", lambda t: {**t, "site-1": 1 - t["site-1"]}),
}
FIGURES = {"no figures": without("metrics"), "other names": tensors("metrics", lambda t: {"x": torch.tensor(1.0)})}
REPLAY_LIES = [
    *[("train_generator", "as-trained", name) for name in HANDED_ON],
    ("encode_images", "final-encoder", "no codes"),
    *[("look_at_replay", "final-encoder", name) for name in FIGURES],
]


@pytest.mark.parametrize(("operation", "codes", "name"), REPLAY_LIES, ids=["-".join(one) for one in REPLAY_LIES])
def test_what_the_next_site_could_not_work_with_is_the_failure_of_who_sent_it(
    tiny, tmp_path, lying, operation, codes, name
):
    """CWT+Replay: the run goes on without that site; no other is blamed."""
    lying(lambda call: (call.site, call.operation) == (LIAR, operation), {**HANDED_ON, **FIGURES}[name])
    settings = {"data.samples": 36, "sites.count": 3, "generator": REPLAY, "replay": {"codes": codes, "probe": False}}
    found = run(tiny("cwt-replay", settings, rounds=1, local_steps=1), tmp_path / "run").values["failures"]
    assert {one["site"] for one in found} == (set() if operation == "look_at_replay" else {LIAR})
    assert all(one["operation"] == operation or "nothing to replay" in one["reason"] for one in found)


def test_a_key_that_is_not_the_confirmed_one_is_the_failure_of_its_site():
    """Passed on, every other site would refuse it: all of them would fail, and not the one whose key is wrong."""
    coordinator, asked = SimpleNamespace(keys=SeedKeys(0)), Call(LIAR, "give_key", 1)

    def came(key):
        key = torch.frombuffer(bytearray(key), dtype=torch.uint8)
        checked_keys(coordinator, asked, Reply(LIAR, (Parcel("keys", {LIAR: key}),)))

    came(SeedKeys(0).public(LIAR))
    with pytest.raises(ParcelRejected, match="is not the one that was confirmed for site 'site-2'"):
        came(SeedKeys(1).public(LIAR))
