"""Codes of latents are decoded to latents, and these to images: an audit of `replay.space = "latents"`."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import save_file

from polyclinic.audits.audit import audit
from polyclinic.models import build, initial_weights

SMALL = {
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
    done = undisturbed(tiny("cwt-replay", {**SMALL, "model.weights": public_file}, rounds=1))
    shutil.copytree(done.folder, tmp_path / "run")
    report = audit(tmp_path / "run")
    by_kind = {parcel["kind"]: parcel for parcel in report["parcels"]}
    found, decoded = by_kind["codes"]["findings"]
    assert decoded["attack"] == "learned-decoder"
    assert found["attack"] == "latent-inversion"
    assert found["picture"]
    assert by_kind["generator"]["findings"] == []
    assert "makes latents and no images" in str(by_kind["generator"])
