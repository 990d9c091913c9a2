"""A site whose key is wrong, or that hands garbage on, fails and is named, whoever finds out; the others go on."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from polyclinic.engines.in_process import InProcess
from polyclinic.federation.call import AS_SENT, Call, Failure, Reply
from polyclinic.federation.layers.replies import checked_keys
from polyclinic.federation.ledger.keys import SeedKeys
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.run.run import run

LIAR = "site-2"
GAN = {"name": "dcgan", "width": 4, "latent": 8, "steps": 2}
FELICIA = {"generator": GAN, "method.steps": 2, "method.learner_steps": 3}
SETTINGS = {
    "feder": {"generator": GAN, "tuning.on": False, "method.buffer": 8},
    "felicia": FELICIA,
    "felicia, local": {**FELICIA, "method.schedule": "local", "method.exchange_every": 1},
    "felicia, shared": {**FELICIA, "method.share_images": True},
}


def changed(change):
    return lambda parcels: [replace(one, tensors={n: change(t) for n, t in one.tensors.items()}) for one in parcels]


def outside(**said):
    return lambda parcels: [replace(one, metadata={**one.metadata, **said}) for one in parcels]


def other_box(parcels):
    return [replace(one, tensors={"box": one.tensors["box"].flip(0)}) for one in parcels]


KEYS = {
    "a short key": changed(lambda key: key[:3]),
    "floats": changed(lambda key: key.float()),
    "nothing": lambda parcels: [],
    "of another": lambda parcels: [Parcel("keys", {"site-1": parcels[0].tensors[LIAR]})],
    "of all": lambda parcels: [Parcel("keys", {LIAR: parcels[0].tensors[LIAR], "site-1": torch.zeros(32)})],
}
BOXES = {
    "garbage": other_box,
    "cut": changed(lambda box: box[:20]),
    "numbers": changed(lambda box: box.float()),
    "for another": outside(**{"from": "site-1"}),
    "of another operation": outside(operation="prepare"),
    "of another kind": outside(kind="generator"),
    "open": lambda parcels: [Parcel("synthetic-images", {"images": torch.zeros(8, 1, 28, 28, dtype=torch.uint8)})],
    "nothing": lambda parcels: [],
}
IMAGES = {
    "nothing": lambda parcels: [],
    "no tensors": lambda parcels: [replace(one, tensors={}, compressed=()) for one in parcels],
    "shapes": changed(lambda t: t[..., :1] if t.dim() > 1 else t),
    "floats": changed(lambda t: t.float()),
    "classes": changed(lambda t: t + 99 if t.dim() == 1 else t),
    "few labels": changed(lambda t: t[1:] if t.dim() == 1 else t),
}
FORMS = ("nothing", "no tensors", "shapes")
LIES = [
    *[("feder", "give_key", name, lie) for name, lie in KEYS.items()],
    *[("feder", "hand_over", name, lie) for name, lie in BOXES.items()],
    *[("felicia", "start_round", name, IMAGES[name]) for name in FORMS],
    *[("felicia", "generator_step", name, IMAGES[name]) for name in FORMS],
    *[("felicia, local", "train_locally", name, IMAGES[name]) for name in FORMS],
    *[("felicia, shared", "give_images", name, lie) for name, lie in IMAGES.items()],
]


@pytest.mark.parametrize(("method", "operation", "name", "lie"), LIES, ids=["-".join(one[:3]) for one in LIES])
def test_who_sends_what_cannot_be_used_fails_and_the_others_go_on(
    tiny, tmp_path, monkeypatch, method, operation, name, lie
):
    honest = InProcess.call

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            if answer and asked.site == LIAR and asked.operation == operation:
                answer = Reply(LIAR, tuple(lie(list(answer.parcels))), answer.head, answer.head_soon)
            yield answer

    monkeypatch.setattr(InProcess, "call", call)
    settings = {"data.samples": 36, "sites.count": 3, **SETTINGS[method]}
    methods = {key.removeprefix("method."): settings.pop(key) for key in [*settings] if key.startswith("method.")}
    result = run(tiny(method.partition(",")[0], settings, rounds=2, **methods), tmp_path / "run")
    found = json.loads((result.folder / "result.json").read_text())["failures"]
    assert {(one["site"], one["operation"]) for one in found} == {(LIAR, operation)}


def test_a_receiver_that_refuses_what_all_others_seal_is_dropped(tiny, tmp_path, monkeypatch):
    """It is believed once: nobody else can open a box. Whoever disagrees with several sites is the one that lies."""
    honest = InProcess.call

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            lies = asked.site == LIAR and asked.operation == "receive"
            yield Failure(LIAR, "receive", f"it does not open{AS_SENT}") if lies else answer

    monkeypatch.setattr(InProcess, "call", call)
    settings = {"data.samples": 48, "sites.count": 4, **SETTINGS["feder"]}
    buffer = {"buffer": settings.pop("method.buffer")}
    study = tiny("feder", {**settings, "engine.quorum": 0.5}, rounds=5, **buffer)
    found = run(study, tmp_path / "run").values["failures"]
    senders = {words.split("'")[1] for one in found if (words := one["reason"]).startswith("site '")}
    blamed = [one["site"] for one in found]
    assert len(blamed) == 5
    assert LIAR in blamed[:3]
    assert set(blamed[blamed.index(LIAR) :]) == {LIAR}
    assert senders <= {LIAR}


def kind_changed(kind, change):
    return lambda parcels: [replace(p, tensors=change(dict(p.tensors))) if p.kind == kind else p for p in parcels]


def without(kind):
    return lambda parcels: [one for one in parcels if one.kind != kind]


REPLAY = {"epochs": 1, "width": 4, "blocks": 1, "top_codes": 8, "bottom_codes": 8, "prior_epochs": 1, "prior_width": 4}
HANDED_ON = {
    "no codes": without("codes"),
    "no labels": without("labels"),
    "codes of fewer sites": kind_changed("codes", lambda t: dict(list(t.items())[1:])),
    "codes of a stranger": kind_changed("codes", lambda t: {**t, "site-9/top": t[f"{LIAR}/top"]}),
    "fewer labels": kind_changed("labels", lambda t: {**t, LIAR: t[LIAR][1:]}),
}
OF_A_GENERATOR = {
    "nothing": lambda parcels: [],
    "another network": kind_changed("generator", lambda t: dict(list(t.items())[1:])),
    "one more tensor": kind_changed("generator", lambda t: {**t, "more": torch.zeros(3)}),
    "a million times": kind_changed("generator", lambda t: {n: (x * 1e6).to(x.dtype) for n, x in t.items()}),
    "labels of another": kind_changed("labels", lambda t: {**t, "site-1": 1 - t["site-1"]}),
}
FIGURES = {"no figures": without("metrics"), "other names": kind_changed("metrics", lambda t: {"x": torch.tensor(1.0)})}
REPLAY_LIES = [
    *[("train_generator", "as-trained", name) for name in HANDED_ON | OF_A_GENERATOR],
    ("encode_images", "final-encoder", "no codes"),
    *[("look_at_replay", "final-encoder", name) for name in FIGURES],
]


@pytest.mark.parametrize(("operation", "codes", "name"), REPLAY_LIES, ids=["-".join(one) for one in REPLAY_LIES])
def test_what_the_next_site_could_not_work_with_is_the_failure_of_who_sent_it(
    tiny, tmp_path, monkeypatch, operation, codes, name
):
    """CWT+Replay: the run goes on without that site; no other is blamed."""
    honest, lie = InProcess.call, {**HANDED_ON, **OF_A_GENERATOR, **FIGURES}[name]

    def call(engine, calls):
        for asked, answer in zip(calls, honest(engine, calls), strict=True):
            if answer and asked.site == LIAR and asked.operation == operation:
                answer = Reply(LIAR, tuple(lie(list(answer.parcels))), answer.head, answer.head_soon)
            yield answer

    monkeypatch.setattr(InProcess, "call", call)
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
