"""Planted codes: held-out images, half of whose codes are other images'; they keep the shape of what a site sends."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.audits.attack import Seen
from polyclinic.audits.audit import without_unread
from polyclinic.audits.planting import EXCHANGED, exchange, planted_codes
from polyclinic.audits.truth import Truth
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import VQVAE2
from polyclinic.generators.replay_stream import from_groups
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.tasks import Target

SMALL = {"width": 8, "code_width": 4, "top_codes": 16, "bottom_codes": 16, "blocks": 0, "prior_epochs": 0}


def part(count: int, name: str) -> ImageSet:
    images = numpy_rng("planted codes", name).integers(0, 256, (count, 1, 28, 28)).astype(np.uint8)
    return ImageSet(images=images, labels=np.arange(count) % 2)


def test_half_of_the_places_have_another_images_code():
    codes = torch.arange(400, dtype=torch.int16).reshape(100, 2, 2)
    mixed = exchange(codes, EXCHANGED, torch_rng("exchange"))
    kept = (mixed == codes).double().mean()
    assert 0.4 < float(kept) < 0.62
    assert torch.equal(mixed % 4, codes % 4)  # a code stays at its place in the image
    assert torch.equal(exchange(codes, 0.0, torch_rng("exchange")), codes)


@pytest.fixture(scope="module")
def model():
    return VQVAE2(**SMALL).build(channels=1, size=28, target=Target(classes=("a", "b")), seed=0)


def test_planted_codes_are_read_as_a_sites_own(model):
    tools = SimpleNamespace(
        effort=SimpleNamespace(candidates=10), seed=0, assembly=SimpleNamespace(study=SimpleNamespace(in_latents=False))
    )
    sent = (Parcel("codes", {}), Parcel("labels", {}), Parcel("generator", model.state()))
    seen = Seen("north", sent[0], sent, lambda kind: {}, 1, 0, tools)
    truth = Truth([], SiteData("north", part(20, "train"), part(16, "validation"), part(16, "test")), 0)
    (planted,) = planted_codes(seen, truth, model)
    groups = {kind: planted.seen.companion(kind).tensors for kind in ("codes", "labels")}
    found = from_groups(groups, model)["north"]
    real = model.encode(planted.truth.data.train.images)
    assert len(found) == 10
    for level, codes in real.items():
        assert found.codes[level].shape == codes.shape
        assert 0.3 < float((found.codes[level] == codes).double().mean()) <= 1.0
    assert planted.seen.companion("generator") is sent[2]
    held_out = {one.tobytes() for split in (truth.data.validation, truth.data.test) for one in split.images}
    assert {one.tobytes() for one in planted.truth.data.train.images} <= held_out


def test_too_few_held_out_images_plant_no_codes(model):
    tools = SimpleNamespace(effort=SimpleNamespace(candidates=10), seed=0)
    few = Truth([], SiteData("north", part(20, "train"), part(3, "validation"), part(0, "test")), 0)
    assert planted_codes(Seen("north", None, (), dict, 1, 0, tools), few, model) == []


@pytest.mark.parametrize("kind", ["codes", "generator"])
def test_what_lies_beside_codes_and_generators_is_named(model, kind):
    """A plug-in method may put anything beside them: nothing attacks it, so nothing has withstood."""
    study = SimpleNamespace(in_latents=False, generator=VQVAE2(**SMALL), seed=0)
    assembly = SimpleNamespace(study=study, target=Target(classes=("a", "b")))
    tools = SimpleNamespace(assembly=assembly, image_shape=(1, 28, 28), device="cpu")
    own = {"codes": {f"north/{level}": torch.zeros(4) for level in model.codebook_sizes}, "generator": model.state()}
    spoiled = Parcel(kind, {**own[kind], "south/top": torch.zeros(3, 8, 8)}, {})
    sent = (spoiled, Parcel("labels", {}), Parcel("generator", model.state()))
    clean, (gap,) = without_unread(Seen("north", spoiled, sent, lambda kind: {}, 1, 0, tools))
    assert clean.parcel.tensors.keys() == own[kind].keys()
    assert "'south/top', which no attack reads" in gap.why
    assert without_unread(clean) == (clean, [])
