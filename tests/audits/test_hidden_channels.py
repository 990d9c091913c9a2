"""Methods of a plug-in that hide images in what they send: each is found, or what it sent was not tested."""

import functools
import json
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from small_audits import SMALL, opened

from polyclinic import FedAvg, Parcel, operation
from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD
from polyclinic.audits import audit as audit_module
from polyclinic.audits.audit import Clock, audit, look_inside
from polyclinic.methods import METHODS
from polyclinic.methods.fedreplay import FedReplay
from polyclinic.methods.fedsgd import FedSGD
from polyclinic.runner.run.run import run

SETTINGS = {**SMALL, "data.samples": 160}
SECRET = np.random.default_rng(11)


class Sender:
    """`spoil(parcels, site)` changes what an honest operation made; nobody checks what arrives."""

    @staticmethod
    def spoil(parcels, site):
        return parcels

    def check_reply(self, federation, call, reply) -> None:
        """Takes everything."""


class Gradients(Sender, FedSGD):
    name: Literal["hiding-gradients"] = "hiding-gradients"

    @operation("gradients", "statistics")
    def gradient(self, site, weights):
        return self.spoil(super().gradient(site, weights), site)


class Weights(Sender, FedAvg):
    name: Literal["hiding-weights"] = "hiding-weights"

    @operation("weights")
    def train(self, site, weights):
        made = yield from super().train(site, weights)
        return self.spoil((made,), site)


class Latents(Sender, FedReplay):
    name: Literal["hiding-latents"] = "hiding-latents"

    @operation("latents", "labels", "masks", takes={"weights": "front"})
    def give_latents(self, site, weights):
        return self.spoil(super().give_latents(site, weights), site)


def image_of(site, number: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.array(site.data.train.images[number])).float() / 255


def largest(parcel: Parcel) -> str:
    return max(parcel.tensors, key=lambda name: parcel.tensors[name].numel())


def replaced(parcel: Parcel, name: str, tensor: torch.Tensor) -> Parcel:
    return Parcel(parcel.kind, {**parcel.tensors, name: tensor}, dict(parcel.metadata))


def bits_of(site) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(np.array(site.data.train.images[0])).astype(np.int32))


def in_largest(change: Callable) -> Callable:
    """`change(flat, site)` of the numbers of the largest tensor, in one row."""

    @functools.wraps(change)
    def spoil(parcels, site):
        first, *rest = parcels
        name = largest(first)
        flat = change(first.tensors[name].flatten().clone(), site)
        return (replaced(first, name, flat.view_as(first.tensors[name])), *rest)

    return spoil


@in_largest
def inverted_and_turned(flat, site):
    """The image, inverted and turned, as the first numbers of the largest tensor."""
    image = (0.5 - image_of(site).rot90(1, (-2, -1))).mean(0).flatten() * float(flat.abs().max())
    flat[: len(image)] = image
    return flat


@in_largest
def in_every_third_number(flat, site):
    """Mirrored and in 32 grey levels, in every third number from the hundredth on."""
    image = (image_of(site).mean(0).flip(-1) * 31).round().flatten() / 31 * float(flat.abs().max())
    flat[100 : 100 + 3 * len(image) : 3] = image
    return flat


def with_last_bits(flat, bits):
    flat = flat.view(torch.int32)
    flat[: len(bits)] = flat[: len(bits)] & ~1 | bits
    return flat.view(torch.float32)


@in_largest
def in_last_bits(flat, site):
    """A bit of the image in the last bit of each weight."""
    return with_last_bits(flat, bits_of(site))


@in_largest
def scrambled_last_bits(flat, site):
    """The same behind a secret key, which no search can see."""
    bits = bits_of(site)
    return with_last_bits(flat, bits ^ torch.from_numpy(SECRET.integers(0, 2, len(bits)).astype(np.int32)))


@in_largest
def in_signs_of_zeros(flat, site):
    """Zeros are positive or negative, as the image says; their numbers are equal."""
    bits = bits_of(site).bool()
    zeros = (flat == 0).nonzero().flatten()[: len(bits)]
    flat[zeros] = torch.where(bits[: len(zeros)], -0.0, 0.0)
    flat[:8] = torch.where(bits[:8], -0.0, 0.0)
    return flat


def permuted_and_quantised(parcels, site):
    """Latents in another order of their numbers, which only the coordinator knows, in sixteen levels."""
    first, *rest = parcels
    latents = first.tensors["latents"].flatten(1)
    order = torch.randperm(latents.shape[1], generator=torch.Generator().manual_seed(5))
    low, high = latents.min(), latents.max()
    levels = ((latents[:, order] - low) / (high - low) * 15).round() / 15
    return (replaced(first, "latents", levels.view_as(first.tensors["latents"])), *rest)


def in_metadata(parcels, site):
    first, *rest = parcels
    hidden = {**first.metadata, "version": np.array(site.data.train.images[0])[:, ::4, ::4].tobytes().hex()}
    return (Parcel(first.kind, dict(first.tensors), hidden), *rest)


class WeightsOfOthers(Weights):
    """Changes what came in place, so that its honest training begins where the image says."""

    name: Literal["hiding-in-what-came"] = "hiding-in-what-came"

    @operation("weights")
    def train(self, site, weights):
        flat = max(weights.values(), key=torch.Tensor.numel).view(-1)
        image = image_of(site).mean(0).flatten()
        flat[: len(image)] += 1e-3 * (image - 0.5)
        return (yield from FedAvg.train(self, site, weights))


class State(Weights):
    """Keeps what it will hide as the momentum of the next round's optimiser."""

    name: Literal["hiding-in-state"] = "hiding-in-state"

    @operation("weights")
    def train(self, site, weights):
        image = image_of(site).mean(0).flatten()
        for name in [one for one in site.state if site.state[one].numel() > len(image)]:
            flat = site.state[name].flatten().clone()
            flat[: len(image)] = image - 0.5
            site.state[name] = flat.view_as(site.state[name])
        return (yield from FedAvg.train(self, site, weights))


class OneRound(Weights):
    """Honest in the first and the last round, which sites keep."""

    name: Literal["hiding-in-between"] = "hiding-in-between"

    @operation("weights")
    def train(self, site, weights):
        made = yield from FedAvg.train(self, site, weights)
        return in_last_bits((made,), site) if site.round == 2 else made


class Stranger(Sender, FedAvg):
    """Sends weights by an operation that no method of ours has."""

    name: Literal["hiding-strangely"] = "hiding-strangely"

    def run(self, federation):
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            federation.ask_all("secretly", weights=state.weights)
        return state.weights

    @operation("weights")
    def secretly(self, site, weights):
        return scrambled_last_bits((Parcel("weights", dict(weights), {"samples": 1, "steps": 1}),), site)


CASES: list[tuple[type, Callable | None, dict[str, Any], str]] = [
    (Gradients, inverted_and_turned, {}, LEAKS),
    (Latents, permuted_and_quantised, {}, LEAKS),
    (Gradients, in_every_third_number, {}, LEAKS),
    (Weights, in_last_bits, {}, LEAKS),
    (Weights, scrambled_last_bits, {}, NOT_TESTED),
    (Gradients, in_signs_of_zeros, {}, NOT_TESTED),
    (Weights, in_metadata, {}, NOT_TESTED),
    (WeightsOfOthers, None, {}, NOT_TESTED),
    (State, None, {"optimizer.momentum": 0.9, "optimizer.keep_state": True}, NOT_TESTED),
    (OneRound, None, {}, NOT_TESTED),
    (Stranger, None, {}, NOT_TESTED),
]


@pytest.fixture(autouse=True)
def _quick(hurried, monkeypatch) -> None:
    monkeypatch.setattr(audit_module, "draw_plot", lambda draw, path: False)


def audited(tiny, tmp_path, method: type, spoil: Callable | None, changes: dict[str, Any], rounds: int = 1):
    kind = type(method.__name__, (method,), {"spoil": staticmethod(spoil)}) if spoil else method
    kind.__module__ = "audit_plants"
    name = method.model_fields["name"].default
    METHODS[name] = kind
    study = tiny(name, {**SETTINGS, **changes}, rounds=rounds)
    folder = run(study, tmp_path / "run").folder
    return audit(folder, kinds=["gradients", "latents", "weights"], sites=["site-1", "site-2"])


@pytest.mark.parametrize(
    ("method", "spoil", "changes", "wanted"), CASES, ids=lambda one: getattr(one, "__name__", None) or ""
)
def test_what_hides_is_found_or_nothing_is_said(tiny, tmp_path, method, spoil, changes, wanted):
    report = audited(tiny, tmp_path, method, spoil, changes, 3 if method in (State, OneRound) else 1)
    kind = {Gradients: "gradients", Latents: "latents"}.get(method, "weights")
    found = report["verdicts"][kind]
    words = [one["verdict"] for one in found.get("questions", {}).values()]
    assert WITHSTOOD not in [found["verdict"], *words], found["words"]
    if wanted == LEAKS:
        assert found["verdict"] == LEAKS
        assert "image" in found["words"]  # which one, or how many
    assert any("recomputation" in one for one in found["not_tried"]), json.dumps(found, indent=1)


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedavg", {"optimizer.name": "adam", "optimizer.keep_state": True, "optimizer.augment": ["flip"]}),
        ("fedavg", {"privacy.noise_multiplier": 1.0, "model.norm": "group"}),
        ("fedavg", {"defence.name": "quantise", "defence.bits": 8, "engine.wire": "fp16"}),
        ("fedsgd", {}),
        ("scaffold", {}),
        ("fedreplay", {}),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(one),
)
def test_what_an_honest_method_sends_is_recomputed_and_no_image_is_found_in_it(tiny, undisturbed, method, changes):
    folder = undisturbed(tiny(method, {**SETTINGS, **changes}, rounds=2)).folder
    tools, parcels = opened(folder)
    for one in parcels:
        assert look_inside(one, one.seen(tools), one.truth(tools), Clock()) == ([], "")


def test_a_plugin_that_changes_nothing_at_the_site_is_recomputed(tiny, tmp_path):
    """Its sites send what FedAvg's would: the method is another one at the coordinator only."""
    report = audited(tiny, tmp_path, Weights, lambda parcels, site: parcels, {})
    assert [one["recomputed"] for one in report["parcels"] if one["kind"] == "weights" and one["digests"]] == [True] * 2
