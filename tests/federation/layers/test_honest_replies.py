"""Replies that look odd and are honest: none of them is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.layers.replies import ReplyCheck
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.tasks.classification import Classification
from polyclinic.tasks.task import Target

TASK, TARGET = Classification(), Target(tuple("abcdefgh"))
FEDERATION = SimpleNamespace(trainer=SimpleNamespace(task=TASK, target=TARGET, privacy=None))


class Anything:
    """A method that takes every reply."""

    def operation_named(self, name):
        return None

    def check_reply(self, federation, call, reply): ...


def check(checker, operation, *parcels):
    checker.check(FEDERATION, Call("s", operation, 1), Reply("s", parcels))


def scores(predicted, least=10):
    """What a deployed site tells of 80 images, ten of each class, of which these classes were predicted."""
    labels = torch.arange(8).repeat_interleave(10)
    logits = torch.nn.functional.one_hot(predicted, 8).double() * 4
    return TASK.coarse(TASK.sums(logits, labels, None, TARGET), least, TARGET)


def test_coarse_scores_of_other_models_are_of_the_same_images():
    checker, drawn = ReplyCheck(Anything()), torch.Generator().manual_seed(0)
    for predicted in (
        torch.zeros(80, dtype=torch.long),
        torch.randint(8, (80,), generator=drawn),
        torch.arange(8).repeat_interleave(10),
    ):
        check(checker, "evaluate", Parcel("metrics", scores(predicted)))


def test_scores_that_a_site_keeps_back_are_no_lie():
    check(ReplyCheck(Anything()), "evaluate", Parcel("metrics", {}))


@pytest.mark.parametrize("liar", [False, True])
def test_scores_may_begin_when_there_is_a_model_to_score(liar):
    """Also where one site says that it has scored a model that nobody has yet."""
    checker, given = ReplyCheck(Anything()), Parcel("metrics", scores(torch.zeros(80, dtype=torch.long)))
    for parcels in ((), (given,), (given,)):
        for site in ("s", "t", "u"):
            sent = (given,) if liar and site == "s" else parcels
            checker.check(FEDERATION, Call(site, "evaluate", 1), Reply(site, sent))


def test_sums_of_a_task_that_is_built_on_ours_may_have_other_names():
    sums = TASK.sums(torch.randn(80, 8).double(), torch.arange(8).repeat_interleave(10), None, TARGET)
    check(ReplyCheck(Anything()), "evaluate", Parcel("metrics", {**sums, "log_odds": torch.tensor(-3.0)}))


def test_many_latents_in_half_precision_are_finite():
    latents = torch.full((2000, 16, 8, 8), 60.0, dtype=torch.float16)
    check(ReplyCheck(Anything()), "give_latents", Parcel("latents", {"latents": latents}))


def test_numbers_of_numpy_are_numbers():
    told = {"samples": 3, "loss": np.float64(0.5)}
    check(ReplyCheck(Anything()), "train", Parcel("weights", {"w": torch.ones(2)}, told))
