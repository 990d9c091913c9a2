"""The `[privacy]` table, networks that are tried, and a sentence with the cure for what cannot be trained so."""

import re

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import Codebook
from polyclinic.models import BACKBONES, build
from polyclinic.privacy.dp_sgd import mixes_samples, obstacles, try_gradients
from polyclinic.privacy.epsilon import compute_epsilon
from polyclinic.privacy.settings import Facts, Privacy, check_budget, check_facts
from polyclinic.study import parse_study


class BatchDeviation(nn.Module):
    """Minibatch statistics, as a GAN's critic has them."""

    mixes_samples = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.std(0, keepdim=True)


@pytest.mark.parametrize(("layer", "cause", "cure"), [
    (nn.BatchNorm2d(4), "batch norm mixes the images", "model.norm = 'group'"),
    (nn.BatchNorm1d(4, track_running_stats=False), "batch norm mixes the images", "model.norm = 'group'"),
    (nn.InstanceNorm2d(4, track_running_stats=True), "instance norm with running", "model.norm = 'group'"),
    (Codebook(4, 2, "ema"), "moving averages", "generator.codebook = 'gradient'"),
    (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "spectral norm", "switch it off"),
    (nn.utils.spectral_norm(nn.Linear(3, 3)), "spectral norm", "switch it off"),
    (BatchDeviation(), "BatchDeviation computes statistics", "switch it off"),
    (nn.AlphaDropout(), "AlphaDropout drops by an image's place", "use torch.nn.Dropout"),
    (nn.FeatureAlphaDropout(), "FeatureAlphaDropout drops by an image's place", "use torch.nn.Dropout"),
    *(
        (type(name, (nn.Identity,), {})(), f"{name} drops by an image's place", "use torch.nn.Dropout")
        for name in ("DropPath", "StochasticDepth")  # as packages call a layer that drops whole paths
    ),
    (nn.ReLU(inplace=True), "ReLU works in place", "inplace=False"),
])  # fmt: skip
def test_every_layer_that_breaks_the_guarantee_is_named_once_with_the_cure(layer, cause, cure):
    [sentence] = obstacles(nn.Sequential(nn.Linear(3, 3), layer, layer))
    assert cause in sentence
    assert cure in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize("name", list(BACKBONES))
def test_every_backbone_can_be_trained_with_group_norm(name):
    size = (32, 32, 32) if BACKBONES[name].volumes else 32
    assert obstacles(build(name, channels=1, outputs=2, size=size, norm="group")) == []


@pytest.mark.parametrize(
    "layer", [Codebook(4, 2, "gradient"), nn.InstanceNorm2d(4), nn.GroupNorm(2, 4), nn.Dropout(), nn.ReLU()]
)
def test_layers_that_keep_to_one_image_are_fine(layer):
    assert obstacles(layer) == []


def test_mixing_is_found_by_trying_and_dropout_is_no_reason_against_privacy():
    noise = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    norm = nn.BatchNorm1d(3)
    assert mixes_samples(norm, noise)
    assert int(norm.num_batches_tracked) == 0
    assert mixes_samples(BatchDeviation(), noise)
    assert not mixes_samples(nn.Linear(3, 2), noise)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    assert try_gradients(model, torch.rand(4, 1, 4, 4)) is None


EVERYTHING = ("classifier", "encoder", "primary", "generator", "prior")


def sentence(privacy: Privacy, facts: Facts) -> str:
    """What is said against it; "" if nothing is."""
    try:
        check_facts(privacy, facts)
    except BadInput as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("form", ["per-batch", "per-image"])
@pytest.mark.parametrize(("count", "batch"), [(64, 16), (9, 9), (4, 16), (1, 1)])
def test_a_target_is_compared_with_the_epsilon_of_one_step_of_the_sites_own_batches(form, count, batch):
    """Noise for each image adds up to the square root of the expected batch, which is never more than all images."""
    rate, expected = min(1.0, batch / count), min(batch, count)
    noise = 0.3 * (expected**0.5 if form == "per-image" else 1.0)
    one = compute_epsilon(rate, noise, 1, 1 / max(count, 2))
    assert one > 1e-3
    check_budget(Privacy(noise_multiplier=0.3, noise_form=form, target_epsilon=one + 1e-6), {"a": count}, batch)
    with pytest.raises(BadInput, match=rf"^privacy\.target_epsilon: at site 'a' \({count} training images\) a single"):
        check_budget(Privacy(noise_multiplier=0.3, noise_form=form, target_epsilon=one - 1e-6), {"a": count}, batch)


@pytest.mark.parametrize(
    "wrong", [{"noise_multiplier": float("inf")}, {"on": []}, {"on": ["prior", "prior"]}, {"sigma": 1}]
)
def test_a_table_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValidationError):
        Privacy(**wrong)


def test_delta_is_one_over_the_images_and_a_study_looks_without_drawing_weights():
    assert Privacy().delta_for(1144) == 1 / 1144
    assert (Privacy().delta_for(2), Privacy().delta_for(1)) == (0.5, 0.5)
    assert Privacy(delta=1e-5).delta_for(1144) == 1e-5
    before = torch.random.get_rng_state()
    study({"name": "fedavg"}, {})
    assert torch.equal(before, torch.random.get_rng_state())


STUDY = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 64},
    "sites": {"partition": "iid", "count": 2},
    "model": {"backbone": "small-cnn", "norm": "group"},
}


def study(method: dict, privacy: dict, **tables: dict):
    return parse_study({**STUDY, **tables, "method": method, "privacy": privacy})


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedavgm", "scaffold", "ditto", "cwt", "fedsgd", "standalone"])
def test_methods_whose_sites_train_the_classifier_can(name):
    made = study({"name": name}, {"noise_multiplier": 1.1})
    assert made.privacy.on == ("classifier",)
    assert parse_study(made.as_tables()) == made


@pytest.mark.parametrize(("method", "privacy", "tables", "sentence"), [
    ({"name": "fedavg"}, {}, {"model": {"norm": "batch"}}, "model.norm = 'group'"),
    ({"name": "fedbn"}, {}, {"model": {"norm": "batch"}}, "model.norm = 'group'"),
    ({"name": "splitnn"}, {}, {}, "activations and labels"), ({"name": "centralized"}, {}, {}, "federated method"),
    ({"name": "fedavg-share"}, {}, {}, "real images"),
    ({"name": "cwt", "weighted_loss": True}, {}, {}, "method.weighted_loss"),
    ({"name": "fedreplay"}, {}, {}, "choose from encoder, primary"),
    ({"name": "fedreplay"}, {"on": ["primary"]}, {}, "name 'encoder' beside 'primary'"),
    ({"name": "fedavg"}, {"on": ["generator"]}, {}, r"\[replay\]"),
    ({"name": "cwt-replay"}, {"on": ["generator"]}, {}, "generator.codebook = 'gradient'"),
    ({"name": "fedavg"}, {"noise_multiplier": -1}, {}, "privacy.noise_multiplier"),
])  # fmt: skip
def test_studies_that_cannot_say_why_and_what_helps(method, privacy, tables, sentence):
    with pytest.raises(BadInput, match=sentence):
        study(method, privacy, **tables)


class Mixing(nn.Module):
    """A share of the batch's mean is in every row, in numbers of some size."""

    def __init__(self, share, size):
        super().__init__()
        self.share, self.size = share, size

    def forward(self, rows):
        return self.size * (rows + self.share * rows.mean(0))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_hundredth_of_other_rows_is_noticed_in_numbers_of_any_size(size):
    rows = torch.tensor([[1.0], [2.0], [-3.0], [5.0]])
    assert mixes_samples(Mixing(0.01, size), rows)
    assert not mixes_samples(Mixing(0.0, size), rows)
    assert not mixes_samples(Mixing(0.0, 0.0), rows)


OBSTACLES = {"parts": EVERYTHING, "network_obstacle": "network", "generator_obstacle": "generator"}
CLEAR, ALL_COVERED = {"parts": EVERYTHING}, {"cover": "all"}
PRIMARY = "privacy.on: the latents that the primary model learns"


@pytest.mark.parametrize(("settings", "facts", "words"), [
    ({}, {"parts": (), "method_obstacle": "because"}, "because"),  # what a method says comes first
    ({}, {"parts": ()}, ".*sites train nothing in 'x'"),
    ({"on": ["encoder"]}, {}, ".*choose from classifier"),
    ({"on": ["generator"]}, {}, r".*add the table \[replay\]"),
    ({"on": ["generator", "prior"]}, {"parts": ("generator",)}, ".*replay.codes = 'prior'"),
    # only what is to be private can stand in the way
    *(({"on": on}, OBSTACLES, "network") for on in (["classifier"], ["encoder"], ["encoder", "primary"])),
    *(({"on": [*more, "generator"]}, OBSTACLES, "generator") for more in ([], ["prior"], ["classifier"])),
    *(({"on": on}, CLEAR, "") for on in (["classifier"], ["encoder", "primary"], ["generator"])),
    *(({"on": ["prior"]}, one, "privacy.on: a prior learns codes of a generator") for one in (OBSTACLES, CLEAR)),
    *(({"on": ["primary"]}, one, PRIMARY) for one in (OBSTACLES, CLEAR)),
    ({"on": ["primary", "classifier"]}, CLEAR, PRIMARY),
    ({"on": ["encoder", "primary"], "unit": "patient"}, CLEAR, "privacy.unit: the coordinator does not know"),
    ({"unit": "patient"}, CLEAR, ""),
    # scores that cannot be noised matter where noise is wanted
    ({"score_noise": 5.0}, {"score_obstacle": "why"}, "why"),
    *(({"score_noise": noise}, {"score_obstacle": why}, "") for noise, why in ((5.0, None), (None, "why"))),
    # a study that is to be covered in all says what is not
    *((ALL_COVERED, {}, ""), ({**ALL_COVERED, "score_noise": 5.0}, {"scores": True}, "")),
    (ALL_COVERED, {"parts": ("classifier", "generator", "prior")}, "privacy.cover: .*; name generator, prior in"),
    (ALL_COVERED, {"uncovered": ("codes", "labels")}, "privacy.cover: .*codes of real images leave the sites"),
    (ALL_COVERED, {"uncovered": ("latents", "labels")}, "privacy.cover: 'x' releases labels, latents of real imag"),
    (ALL_COVERED, {"scores": True}, "privacy.cover: .*scores on validation and test images are released as they"),
    ({"cover": "named"}, {"scores": True, "uncovered": ("codes",), "parts": ("classifier", "prior")}, ""),
])  # fmt: skip
def test_what_a_method_and_a_table_of_privacy_say_to_each_other(settings, facts, words):
    found = sentence(Privacy(**settings), Facts(**{"method": "x", "parts": ("classifier",), **facts}))
    assert re.match(words, found)
    assert bool(words) == bool(found)
