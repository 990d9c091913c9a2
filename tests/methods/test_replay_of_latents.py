"""Replay of latents of frozen public layers (`replay.space = "latents"`), and finer codes (`generator.cell`)."""

import json

import pytest
import torch

from polyclinic.errors import BadInput
from polyclinic.methods.shared.replay_space import Limits
from polyclinic.models import public_weights

PUBLIC = {"backbone": "efficientnet-lite0", "weights": "public", "input_size": 32, "freeze": "block5"}
PLAIN = {"lr": 0.01, "augment": []}
FINE = {"cell": 1, "prior_epochs": 0}
LATENTS = {"space": "latents"}


def lines_of(result, site):
    text = (result.folder / "ledger" / f"{site}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("method", ["cwt-replay", pytest.param("fedavg-replay", marks=pytest.mark.slow)])
def test_latents_are_replayed(tiny_run, method):
    few = {"model": PUBLIC, "optimizer": PLAIN, "data": {"samples": 48}}
    result = tiny_run({"name": method, "rounds": 1}, **few, generator=FINE, replay=LATENTS)
    in_images = {**few, "replay": {"ratio": 0.0}}
    assert result["weights_sha256"] != tiny_run({"name": method, "rounds": 1}, **in_images)["weights_sha256"]
    assert result["replay"]["psnr"] > 0
    kinds = {line["kind"] for site in ("site-1", "site-2", "site-3") for line in lines_of(result, site)}
    assert {"generator", "codes", "labels", "weights"} <= kinds
    assert not {"latents", "real-images"} & kinds  # the latents themselves stay at the site


def test_codes_of_latents_have_the_grid_of_the_frozen_layers(tiny_run):
    """Images of 32 px give maps of 4 x 4 after block 5: 16 codes of the bottom level, 4 of the top, 4 bits each."""
    arguments = {"model": PUBLIC, "optimizer": PLAIN, "generator": FINE, "replay": LATENTS}
    result = tiny_run({"name": "cwt-replay", "rounds": 1}, **arguments)
    [encoded] = [
        line for line in lines_of(result, "site-1") if line["operation"] == "encode_images" and line["kind"] == "codes"
    ]
    images = result["data"]["counts"]["site-1"]["train"]
    assert encoded["bytes"] - images * (16 + 4) // 2 < 400  # the rest is the header


def test_the_frozen_layers_stay_as_they_are(tiny_run):
    from safetensors.torch import load_file

    arguments = {"model": PUBLIC, "optimizer": PLAIN, "generator": FINE, "replay": LATENTS}
    result = tiny_run({"name": "cwt-replay", "rounds": 1}, **arguments)
    found, public = load_file(result.folder / "model.safetensors"), public_weights("efficientnet-lite0").tensors
    for name in ("conv_stem.weight", "block5._bn1.running_mean", "block5._project_conv.weight"):
        assert torch.equal(found[name], public[name])
    assert not torch.equal(found["block16._project_conv.weight"], public["block16._project_conv.weight"])


def test_bytes_give_latents_back_up_to_half_a_step():
    latents = (
        torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 5.0, 0.2])[:, None, None]
    )
    limits = Limits.of(latents)
    again = limits.to_latents(limits.to_bytes(latents.numpy()).float() / 255)
    step = (limits.high - limits.low) / 255
    assert bool(((again - latents).abs() <= 0.51 * step).all())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {**PUBLIC, "freeze": None}}, r"model\.freeze: replay\.space = 'latents' replays what frozen layers"),
        ({"model": {"freeze": "pool1"}}, r"model\.freeze: "),
        ({"optimizer": {"augment": ["flip"]}}, r"optimizer\.augment: replay\.space = 'latents' has no images"),
        ({"model": {**PUBLIC, "cut": "block1"}}, r"model\.cut: .* leave model\.cut out"),
        ({"generator": {"name": "dcgan"}, "replay": {**LATENTS, "codes": "prior"}}, r"replay\.space: .* vqvae2"),
    ],
)
def test_studies_that_have_no_latents_are_refused(study_of, changes, words):
    tables = {"model": PUBLIC, "optimizer": PLAIN, "replay": LATENTS, **changes}
    with pytest.raises(BadInput, match=words):
        study_of({"name": "cwt-replay"}, **tables)
