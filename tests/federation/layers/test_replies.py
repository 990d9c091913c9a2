"""Sites that lie: whatever a site sends, the liar fails and is named, and the others go on."""

import json
from dataclasses import replace

import pytest
import torch

from polyclinic.engines.in_process import InProcess
from polyclinic.federation.call import Reply
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
]
SETTINGS = {"splitnn": {"model.cut": "conv1"}, "fedreplay": {"model.cut": "conv1", "method.encoder_site": "site-1"}}
#: rounds from which on a lie can be told: inflated scores differ from the honest ones of the round before
FROM_ROUND = {"inflated": 2}


@pytest.mark.parametrize(("method", "operation", "name", "lie"), LIES, ids=["-".join(one[:3]) for one in LIES])
def test_a_liar_fails_and_is_named(tiny, tmp_path, monkeypatch, method, operation, name, lie):
    honest = InProcess.call
    begins = FROM_ROUND.get(name, 0)

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            if asked.site == LIAR and asked.operation == operation and asked.round >= begins:
                yield Reply(LIAR, tuple(lie(list(answer.parcels))), answer.head, answer.head_soon)
            else:
                yield answer

    monkeypatch.setattr(InProcess, "call", call)
    settings = {"data.samples": 36, **SETTINGS.get(method, {})}
    if operation == "count":
        settings["method.encoder_site"] = "largest"
    result = run(tiny(method, settings, rounds=2), tmp_path / "run")
    failed = {site: words for line in history(result.folder) for site, words in line["failed"].items()}
    early = json.loads((result.folder / "result.json").read_text())["failures"]
    assert set(failed) | {one["site"] for one in early} == {LIAR}
    assert all(one["operation"] == operation for one in early)


@pytest.mark.parametrize("encoder_site", ["largest", "random"])
def test_another_site_trains_the_encoder_in_place_of_a_liar(tiny, tmp_path, monkeypatch, encoder_site):
    honest, asked_to_train = InProcess.call, []

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            if asked.operation == "train_encoder":
                asked_to_train.append(asked.site)
                if len(asked_to_train) == 1:
                    answer = Reply(asked.site, tuple(WEIGHTS["times 10^6"](list(answer.parcels))), answer.head)
            yield answer

    monkeypatch.setattr(InProcess, "call", call)
    settings = {"data.samples": 36, "model.cut": "conv1", "method.encoder_site": encoder_site}
    result = run(tiny("fedreplay", settings, rounds=1), tmp_path / "run")
    liar, other = asked_to_train
    assert [(one["site"], one["operation"]) for one in result["failures"]] == [(liar, "train_encoder")]
    assert result["encoder"] == {"site": other}


@pytest.mark.parametrize("silent", [1, 2])
def test_a_site_cannot_send_scores_of_one_model_and_nothing_of_another(tiny, tmp_path, monkeypatch, silent):
    """Each of Ditto's models is scored at each site: nothing was said of these images before the first one."""
    honest, tested = InProcess.call, []

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            if (asked.operation, asked.site, asked.arguments.get("split")) == ("evaluate", LIAR, "test"):
                tested.append(asked)
                answer = Reply(LIAR, (), answer.head, answer.head_soon) if len(tested) == silent else answer
            yield answer

    monkeypatch.setattr(InProcess, "call", call)
    result = run(tiny("ditto", {"data.samples": 36}, rounds=1), tmp_path / "run")
    assert {(one["site"], one["operation"]) for one in result["failures"]} == {(LIAR, "evaluate")}


def test_the_first_scores_cannot_be_of_a_million_times_as_many_images(tiny, tmp_path, monkeypatch):
    honest = InProcess.call
    grown = tensors("metrics", lambda s: {name: (t.double() * 1e6).to(t.dtype) for name, t in s.items()})

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            if (asked.operation, asked.site, asked.arguments.get("split")) == ("evaluate", LIAR, "test"):
                answer = Reply(LIAR, tuple(grown(list(answer.parcels))), answer.head, answer.head_soon)
            yield answer

    monkeypatch.setattr(InProcess, "call", call)
    result = run(tiny("fedsgd", {"data.samples": 36}, rounds=1), tmp_path / "run")
    assert [(one["site"], one["operation"]) for one in result["failures"]] == [(LIAR, "evaluate")]


def history(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
