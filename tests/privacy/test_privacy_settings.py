"""The `[privacy]` table, networks that are tried, and a sentence with the cure for what cannot be trained so."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from polyclinic.errors import BadInput
from polyclinic.generators.vqvae2.autoencoder import Codebook
from polyclinic.models import BACKBONES, build
from polyclinic.privacy.dp_sgd import mixes_samples, obstacles, try_gradients
from polyclinic.privacy.epsilon import (
    compute_epsilon,
)
from polyclinic.privacy.settings import Facts, Privacy, check_budget, check_facts
from polyclinic.study import parse_study


class BatchDeviation(nn.Module):
    """Minibatch statistics, as a GAN's critic has them."""

    mixes_samples = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.std(0, keepdim=True)


class DropPath(nn.Identity):
    """As some packages call a layer that drops whole paths."""


class StochasticDepth(nn.Identity):
    """As others call it."""


@pytest.mark.parametrize(
    ("layer", "cause", "cure"),
    [
        (nn.BatchNorm2d(4), "batch norm mixes the images", "model.norm = 'group'"),
        (nn.BatchNorm1d(4, track_running_stats=False), "batch norm mixes the images", "model.norm = 'group'"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "instance norm with running", "model.norm = 'group'"),
        (Codebook(4, 2, "ema"), "moving averages", "generator.codebook = 'gradient'"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), "spectral norm", "switch it off"),
        (nn.utils.spectral_norm(nn.Linear(3, 3)), "spectral norm", "switch it off"),
        (BatchDeviation(), "BatchDeviation computes statistics", "switch it off"),
        (nn.AlphaDropout(), "AlphaDropout drops by an image's place", "use torch.nn.Dropout"),
        (nn.FeatureAlphaDropout(), "FeatureAlphaDropout drops by an image's place", "use torch.nn.Dropout"),
        (DropPath(), "DropPath drops by an image's place", "use torch.nn.Dropout"),
        (StochasticDepth(), "StochasticDepth drops by an image's place", "use torch.nn.Dropout"),
        (nn.ReLU(inplace=True), "ReLU works in place", "inplace=False"),
    ],
)
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


def test_mixing_is_found_by_trying():
    noise = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    norm = nn.BatchNorm1d(3)
    assert mixes_samples(norm, noise)
    assert int(norm.num_batches_tracked) == 0
    assert mixes_samples(BatchDeviation(), noise)
    assert not mixes_samples(nn.Linear(3, 2), noise)


@pytest.mark.parametrize(
    ("on", "facts", "sentence"),
    [
        (["classifier"], Facts("odd", (), method_obstacle="because"), "because"),  # what a method says comes first
        (["classifier"], Facts("odd", ()), "sites train nothing in 'odd'"),
        (["encoder"], Facts("fedavg", ("classifier",)), "choose from classifier"),
        (["generator"], Facts("fedavg", ("classifier",)), r"add the table \[replay\]"),
        (["generator", "prior"], Facts("cwt-replay", ("generator",)), "replay.codes = 'prior'"),
    ],
)
def test_impossible_combinations(on, facts, sentence):
    with pytest.raises(BadInput, match=sentence):
        check_facts(Privacy(on=on), facts)


EVERYTHING = ("classifier", "encoder", "primary", "generator", "prior")


def sentence(privacy: Privacy, facts: Facts) -> str:
    """What is said against it; "" if nothing is."""
    try:
        check_facts(privacy, facts)
    except BadInput as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (["classifier"], "network"),
        (["encoder"], "network"),
        (["encoder", "primary"], "network"),
        (["generator"], "generator"),
        (["generator", "prior"], "generator"),
        (["classifier", "generator"], "generator"),
        (["prior"], "privacy.on: a prior learns codes of a generator"),
        (["primary"], "privacy.on: the latents that the primary model learns"),
        (["primary", "classifier"], "privacy.on: the latents that the primary model learns"),
    ],
)
def test_only_what_is_to_be_private_can_stand_in_the_way(on, words):
    facts = Facts("x", EVERYTHING, network_obstacle="network", generator_obstacle="generator")
    assert sentence(Privacy(on=on), facts).startswith(words)
    clear = sentence(Privacy(on=on), Facts("x", EVERYTHING))
    assert clear.startswith(words) if words.startswith("privacy.on") else clear == ""


@pytest.mark.parametrize(
    ("score_noise", "obstacle", "words"), [(5.0, "why", "why"), (5.0, None, ""), (None, "why", "")]
)
def test_scores_that_cannot_be_noised_matter_where_noise_is_wanted(score_noise, obstacle, words):
    facts = Facts("x", ("classifier",), score_obstacle=obstacle)
    assert sentence(Privacy(score_noise=score_noise), facts) == words


@pytest.mark.parametrize(
    ("settings", "facts", "words"),
    [
        ({}, {}, ""),
        ({}, {"parts": ("classifier", "generator", "prior")}, "to be private; name generator, prior in privacy.on"),
        ({}, {"uncovered": ("codes", "labels")}, "codes of real images leave the sites"),
        ({}, {"uncovered": ("latents", "labels")}, "'x' releases labels, latents of real images"),
        ({}, {"scores": True}, "scores on validation and test images are released as they are"),
        ({"score_noise": 5.0}, {"scores": True}, ""),
        ({"score_noise": 5.0}, {}, ""),
        ({"cover": "named"}, {"scores": True, "uncovered": ("codes",), "parts": ("classifier", "prior")}, ""),
    ],
)
def test_a_study_that_is_to_be_covered_in_all_says_what_is_not(settings, facts, words):
    found = sentence(
        Privacy(**{"cover": "all", **settings}), Facts(**{"method": "x", "parts": ("classifier",), **facts})
    )
    assert words in found
    assert found.startswith("privacy.cover: ") if words else found == ""


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


def test_delta_is_one_over_the_number_of_images_unless_given():
    assert Privacy().delta_for(1144) == 1 / 1144
    assert (Privacy().delta_for(2), Privacy().delta_for(1)) == (0.5, 0.5)
    assert Privacy(delta=1e-5).delta_for(1144) == 1e-5


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


@pytest.mark.parametrize(
    ("method", "privacy", "tables", "sentence"),
    [
        ({"name": "fedavg"}, {}, {"model": {"norm": "batch"}}, "model.norm = 'group'"),
        ({"name": "fedbn"}, {}, {"model": {"norm": "batch"}}, "model.norm = 'group'"),
        ({"name": "splitnn"}, {}, {}, "activations and labels"),
        ({"name": "centralized"}, {}, {}, "federated method"),
        ({"name": "fedavg-share"}, {}, {}, "real images"),
        ({"name": "cwt", "weighted_loss": True}, {}, {}, "method.weighted_loss"),
        ({"name": "fedreplay"}, {}, {}, "choose from encoder, primary"),
        ({"name": "fedreplay"}, {"on": ["primary"]}, {}, "name 'encoder' beside 'primary'"),
        ({"name": "fedavg"}, {"on": ["generator"]}, {}, r"\[replay\]"),
        ({"name": "cwt-replay"}, {"on": ["generator"]}, {}, "generator.codebook = 'gradient'"),
        ({"name": "fedavg"}, {"noise_multiplier": -1}, {}, "privacy.noise_multiplier"),
    ],
)
def test_studies_that_cannot_say_why_and_what_helps(method, privacy, tables, sentence):
    with pytest.raises(BadInput, match=sentence):
        study(method, privacy, **tables)


def test_a_study_looks_at_the_network_without_drawing_weights():
    before = torch.random.get_rng_state()
    study({"name": "fedavg"}, {})
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_primary_model_cannot_be_private_for_patients_and_others_can():
    facts = Facts("fedreplay", ("encoder", "primary", "classifier"))
    check_facts(Privacy(on=("classifier",), unit="patient"), facts)
    check_facts(Privacy(on=("encoder", "primary"), unit="image"), facts)
    with pytest.raises(BadInput, match=r"privacy\.unit: the coordinator does not know"):
        check_facts(Privacy(on=("encoder", "primary"), unit="patient"), facts)


def test_dropout_is_no_reason_against_gradients_of_single_images():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    assert try_gradients(model, torch.rand(4, 1, 4, 4)) is None


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
