"""Methods that begin with public weights: a public front, replay of latents of frozen layers, other first weights."""

import pytest
import torch
from run_folders import kinds_of, lines_of
from safetensors.torch import load_file

from polyclinic.errors import BadInput
from polyclinic.methods.shared.replay_space import Limits
from polyclinic.models import public_weights

PUBLIC = {"backbone": "efficientnet-lite0", "weights": "public", "input_size": 32}
FEW = {"data": {"samples": 40}, "sites": {"partition": "iid", "count": 2}}


def test_a_public_front_stays_as_it_is_and_wants_weights(tiny_run, study_of):
    method = {"name": "fedreplay", "front": "public", "flips": True, "rounds": 1}
    result = tiny_run(method, model={**PUBLIC, "cut": "block3"}, **FEW)
    found, public = load_file(result.folder / "model.safetensors"), public_weights("efficientnet-lite0").tensors
    assert torch.equal(found["block3._bn1.weight"], public["block3._bn1.weight"])
    assert torch.equal(found["block3._bn1.running_mean"], public["block3._bn1.running_mean"])
    assert not torch.equal(found["block4._bn1.weight"], public["block4._bn1.weight"])
    plain = tiny_run({**method, "flips": False}, model={**PUBLIC, "cut": "block3"}, **FEW)
    kinds = [run["communication"]["by_kind"] for run in (result, plain)]
    assert kinds[0]["latents"] == pytest.approx(2 * kinds[1]["latents"], rel=0.05)
    assert "encoder" not in result.values
    with pytest.raises(BadInput, match=r"model\.weights: 'fedreplay' keeps the first weights up to the cut"):
        study_of({"name": "fedreplay", "front": "public"})
    with pytest.raises(BadInput, match=r"model\.norm: 'frozen' keeps the statistics of the first weights"):
        study_of({"name": "fedavg"}, model={"norm": "frozen"})
    with pytest.raises(BadInput, match=r"method\.flips: two latents of one image"):
        study_of({"name": "fedreplay", "flips": True}, privacy={"noise_multiplier": 1.0, "on": ["primary"]})


@pytest.mark.parametrize("method", ["cwt-replay", pytest.param("fedavg-replay", marks=pytest.mark.slow), "feder"])
def test_replay_begins_with_public_weights(tiny_run, method):
    feder = {"generator": {"name": "dcgan", "width": 4, "steps": 1}, "tuning": {"on": False}}
    settings = feder if method == "feder" else {}
    model = {**PUBLIC, "freeze": "block16"}
    result = tiny_run({"name": method, "rounds": 1}, model=model, optimizer={"lr": 0.01}, **FEW, **settings)
    assert (result.folder / "weights.json").exists()
    name = "block2._project_conv.weight"
    found, public = load_file(result.folder / "model.safetensors"), public_weights("efficientnet-lite0").tensors
    kept = [tensor for full, tensor in found.items() if full.endswith(name)]
    assert kept
    assert all(torch.equal(tensor, public[name]) for tensor in kept)


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_the_head_of_an_encoder_is_trained_in_private_steps(tiny_run, method):
    model = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
    result = tiny_run(
        {"name": method, "rounds": 1}, model=model, privacy={"noise_multiplier": 1.0}, optimizer={"augment": []}
    )
    assert result["privacy"]["epsilon"] > 0
    assert set(load_file(result.folder / "model.safetensors")) == {"fc.weight", "fc.bias"}


def test_a_unet_begins_with_public_weights_and_keeps_what_is_frozen(tiny_run):
    result = tiny_run(
        {"name": "cwt", "rounds": 1},
        data={"source": "brain-phantom", "samples": 40},
        sites={"partition": "iid", "count": 2},
        task={"name": "segmentation"},
        model={**PUBLIC, "backbone": "unet-efficientnet-lite0", "freeze": "block1"},
        optimizer={"augment": []},
    )
    assert 0 <= result.metrics["test"]["dice"] <= 1
    found, public = load_file(result.folder / "model.safetensors"), public_weights("efficientnet-lite0").tensors
    assert torch.equal(found["conv_stem.weight"], public["conv_stem.weight"])
    assert not torch.equal(found["block2._bn1.weight"], public["block2._bn1.weight"])


FROZEN = {**PUBLIC, "freeze": "block5"}
PLAIN = {"lr": 0.01, "augment": []}
FINE = {"cell": 1, "prior_epochs": 0}
LATENTS = {"space": "latents"}


@pytest.mark.parametrize("method", ["cwt-replay", pytest.param("fedavg-replay", marks=pytest.mark.slow)])
def test_latents_are_replayed(tiny_run, method):
    few = {"model": FROZEN, "optimizer": PLAIN, "data": {"samples": 48}}
    result = tiny_run({"name": method, "rounds": 1}, **few, generator=FINE, replay=LATENTS)
    in_images = tiny_run({"name": method, "rounds": 1}, **few, replay={"ratio": 0.0})
    assert result["weights_sha256"] != in_images["weights_sha256"]
    assert result["replay"]["psnr"] > 0
    kinds = {kind for kinds in kinds_of(result).values() for kind in kinds}
    assert {"generator", "codes", "labels", "weights"} <= kinds
    assert not {"latents", "real-images"} & kinds  # the latents themselves stay at the site


def test_codes_and_bytes_of_latents(tiny_run):
    """Images of 32 px give maps of 4 x 4 after block 5: 16 codes of the bottom level, 4 of the top, 4 bits each."""
    result = tiny_run({"name": "cwt-replay", "rounds": 1}, **ARGUMENTS)
    made = [line for line in lines_of(result, "site-1") if line["operation"] == "encode_images"]
    [encoded] = [line for line in made if line["kind"] == "codes"]
    images = result["data"]["counts"]["site-1"]["train"]
    assert encoded["bytes"] - images * (16 + 4) // 2 < 400  # the rest is the header
    found, public = load_file(result.folder / "model.safetensors"), public_weights("efficientnet-lite0").tensors
    for name in ("conv_stem.weight", "block5._bn1.running_mean", "block5._project_conv.weight"):
        assert torch.equal(found[name], public[name])
    assert not torch.equal(found["block16._project_conv.weight"], public["block16._project_conv.weight"])
    latents = (
        torch.randn(50, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 5.0, 0.2])[:, None, None]
    )
    limits = Limits.of(latents)
    again = limits.to_latents(limits.to_bytes(latents.numpy()).float() / 255)
    step = (limits.high - limits.low) / 255
    assert bool(((again - latents).abs() <= 0.51 * step).all())


@pytest.mark.parametrize(("changes", "words"), [
    ({"model": {**FROZEN, "freeze": None}}, r"model\.freeze: replay\.space = 'latents' replays what frozen layers"),
    ({"model": {"freeze": "pool1"}}, r"model\.freeze: "),
    ({"optimizer": {"augment": ["flip"]}}, r"optimizer\.augment: replay\.space = 'latents' has no images"),
    ({"model": {**FROZEN, "cut": "block1"}}, r"model\.cut: .* leave model\.cut out"),
    ({"generator": {"name": "dcgan"}, "replay": {**LATENTS, "codes": "prior"}}, r"replay\.space: .* vqvae2"),
])  # fmt: skip
def test_studies_that_have_no_latents_are_refused(study_of, changes, words):
    tables = {"model": FROZEN, "optimizer": PLAIN, "replay": LATENTS, **changes}
    with pytest.raises(BadInput, match=words):
        study_of({"name": "cwt-replay"}, **tables)


ARGUMENTS = {"model": FROZEN, "optimizer": PLAIN, "generator": FINE, "replay": LATENTS}
