"""Latents and codes of latents: decoders that an attacker trains."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from polyclinic.audits.attack_latents import verdict_of
from polyclinic.audits.audit import audit, build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.recovery import recovery
from polyclinic.audits.truth import AttackerImages, Truth, attacker_images
from polyclinic.errors import BadInput
from polyclinic.models import build, initial_weights
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


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("auto", "held-out images of the other sites"),
        ("held-out", "half of the site's own held-out images"),
        ("phantoms", "chest-phantom, hand-phantom, brain-phantom"),
        ("chest-phantom", "images of chest-phantom"),
        ("chest-fantom", ""),
    ],
)
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


CODED = {
    "audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4, "optimizer.batch_size": 2, "optimizer.augment": [],
    "model.backbone": "small-cnn", "model.freeze": "conv1", "replay.space": "latents", "replay.probe": False,
    "generator.name": "vqvae2", "generator.epochs": 1, "generator.prior_epochs": 0, "generator.width": 8,
    "generator.cell": 1, "generator.top_codes": 8, "generator.bottom_codes": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def public_file(tmp_path_factory):
    """Weights that everybody has: drawn once."""
    file = tmp_path_factory.mktemp("public") / "small.safetensors"
    save_file(initial_weights(lambda: build("small-cnn", channels=3, outputs=2, size=28), 7), file)
    return str(file)


@pytest.mark.slow
def test_codes_of_latents_are_inverted_and_their_generator_has_no_images(
    tiny, undisturbed, tmp_path, hurry, public_file
):
    hurry(projected=6)
    done = undisturbed(tiny("cwt-replay", {**CODED, "model.weights": public_file}, rounds=1))
    shutil.copytree(done.folder, tmp_path / "run")
    report = audit(tmp_path / "run")
    by_kind = {parcel["kind"]: parcel for parcel in report["parcels"]}
    found, decoded = by_kind["codes"]["findings"]
    assert decoded["attack"] == "learned-decoder"
    assert found["attack"] == "latent-inversion"
    assert found["picture"]
    assert by_kind["generator"]["findings"] == []
    assert "makes latents and no images" in str(by_kind["generator"])
