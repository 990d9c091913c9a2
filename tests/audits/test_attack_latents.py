"""Latents and codes of latents: decoders that an attacker trains."""

import shutil

import pytest
import torch

from polyclinic.audits.attack_latents import verdict_of
from polyclinic.audits.audit import audit, build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.recovery import recovery
from polyclinic.audits.truth import AttackerImages, Truth, attacker_images
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng
from polyclinic.study.tables import Audit

SMALL = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}


@pytest.fixture(autouse=True)
def _hurried(hurry) -> None:
    hurry(latent_steps=60, candidates=30)


@pytest.fixture
def folder(tiny, undisturbed, tmp_path):
    done = undisturbed(tiny("fedreplay", SMALL, rounds=1))
    return shutil.copytree(done.folder, tmp_path / "run")


@pytest.mark.slow
def test_latents_leak_and_the_right_image_is_picked_out(folder):
    report = audit(folder, kinds=["latents"])
    (parcel,) = [p for p in report["parcels"] if p["kind"] == "latents"][:1]
    (finding,) = [f for f in parcel["findings"] if f["attack"] == "learned-decoder"]
    assert finding["verdict"] == "leaks"
    assert finding["evidence"]["picked"] > 5 / finding["evidence"]["picked_among"]
    assert "point to the right one of" in finding["words"]
    assert finding["assumed"] == ["the attacker's own: held-out images of the other sites"]
    assert (folder / finding["picture"]).stat().st_size > 1000


@pytest.mark.parametrize(("wanted", "words"), [
    ("auto", "held-out images of the other sites"), ("held-out", "half of the site's own held-out images"),
    ("phantoms", "chest-phantom, hand-phantom, brain-phantom"), ("chest-phantom", "images of chest-phantom"),
    ("chest-fantom", ""),
])  # fmt: skip
def test_whose_images_the_attacker_has(folder, wanted: str, words: str):
    assembly, _ = open_run(folder)
    study = assembly.study.model_copy(update={"audit": Audit(own_images=wanted)})
    tools = build_tools(type(assembly)(study, assembly.prepared, folder), "quick", "pixels", "cpu")
    site = assembly.prepared.names[0]
    if not words:
        with pytest.raises(BadInput, match=rf"audit\.own_images: no such choice: '{wanted}'"):
            attacker_images(tools, site, Truth([], tools.site_data(site), 0))
        return
    found = attacker_images(tools, site, Truth([], tools.site_data(site), 0))
    assert words in found.words
    assert tuple(found.images.shape[1:]) == tools.image_shape
    assert 0 <= float(found.images.min()) <= float(found.images.max()) <= 1
    flat = {tuple(image.flatten().tolist()) for image in found.images}
    assert not any(tuple(image.flatten().tolist()) in flat for image in found.held_out)


def test_reconstructions_that_point_nowhere_are_no_leak():
    rng = torch_rng("decoder verdict")
    truth, others, found = (torch.rand(20, 1, 8, 8, generator=rng) for _ in range(3))
    result = recovery(found, truth, others, in_order=True)
    own = AttackerImages(others, "", others)
    assert not verdict_of(result, own).leak
    told = verdict_of(recovery(0.3 * truth + 0.5, truth, others, in_order=True), own)
    assert told.leak
    assert told.evidence["picked"] == 1
    assert not torch.isnan(torch.tensor(told.evidence["picked_by_chance"]))
