"""The bound of latents: what the encoder cannot give is refused, whatever form it came in."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.wire import shrink
from polyclinic.methods.shared import reply_checks


class Trainer:
    """One layer that doubles its images; with it, trial images up to 1 give latents up to 2."""

    device = torch.device("cpu")

    def __init__(self):
        self.model = nn.Conv2d(1, 1, 1, bias=False)
        self.kept, self.loaded = {}, 0

    def load(self, weights):
        self.loaded += 1
        self.model.load_state_dict(weights)
        return self.model

    def split(self, model):
        return model, None

    def forward(self, images, model):
        return model(images)


@pytest.fixture
def federation():
    return SimpleNamespace(trainer=Trainer(), image_shape=(1, 8, 8))


DOUBLES = {"weight": torch.full((1, 1, 1, 1), 2.0)}
#: twenty times the largest of the trial images, and one
BOUND = 41.0


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_latents_within_the_encoders_range_pass_and_larger_ones_do_not(federation, precision, sign):
    latents = torch.zeros(4, 1, 8, 8)
    latents[2, 0, 3, 3] = sign * (BOUND - 0.5)
    reply_checks.check_latents(federation, DOUBLES, shrink(latents, precision))
    latents[2, 0, 3, 3] = sign * (BOUND + 0.5)
    with pytest.raises(ParcelRejected, match=r"numbers up to 41\.5, and the encoder gives no more than 41"):
        reply_checks.check_latents(federation, DOUBLES, shrink(latents, precision))


def test_latents_of_mirrored_images_are_looked_at_too(federation):
    sent = {**shrink(torch.ones(2, 1, 8, 8), "fp32"), "flipped_latents": torch.full((2, 1, 8, 8), 99.0)}
    with pytest.raises(ParcelRejected, match="flipped_latents"):
        reply_checks.check_latents(federation, DOUBLES, sent)


def test_the_range_is_worked_out_once_an_encoder(federation):
    for encoder in (DOUBLES, DOUBLES, {"weight": torch.full((1, 1, 1, 1), 4.0)}):
        reply_checks.check_latents(federation, encoder, shrink(torch.ones(2, 1, 8, 8), "fp32"))
    assert federation.trainer.loaded == 2


def test_an_encoder_that_is_training_still_does_afterwards(federation):
    for training in (True, False):
        federation.trainer.kept.clear()
        federation.trainer.model.train(training)
        reply_checks.check_latents(federation, DOUBLES, shrink(torch.ones(2, 1, 8, 8), "fp32"))
        assert federation.trainer.model.training is training


def test_trial_images_are_plain_striped_and_random():
    images = reply_checks._trial_images((2, 6, 9))
    assert images.shape == (8, 2, 6, 9)
    assert [set(image.flatten().tolist()) for image in images[:3]] == [{0.0}, {0.5}, {1.0}]
    rows, columns = images[3], images[4]
    assert all(rows[:, row].unique().tolist() == [float(row in (2, 3))] for row in range(6)), "in pairs"
    assert all(columns[..., at].unique().tolist() == [float(4 <= at < 8)] for at in range(9)), "in fours"
    assert len(images[5:].unique()) > 300
    assert 0 <= float(images[5:].min()) < 0.05
    assert 0.95 < float(images[5:].max()) < 1
