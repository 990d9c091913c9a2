"""What joins a stack's batches, and how many stacks are kept."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from polyclinic.training import stacking
from polyclinic.training.replayed import ReplayedBatches
from polyclinic.training.stacking import Member, stacked_batches, stacked_trainer


class Counting:
    """A trainer's way to batches: images that tell which site and which place they are of."""

    def __init__(self, site: int) -> None:
        self.site, self.optimizer = site, SimpleNamespace(batch_size=3, augment=())

    def indices(self, part, rng):
        return (torch.tensor([step, step + 1, step + 2]) for step in itertools.count())

    def batch(self, part, index, rng):
        return (100.0 * self.site + index)[:, None], index


def replayed(site: int) -> ReplayedBatches:
    return ReplayedBatches(
        ((torch.full((2, 1), -100.0 * site - k), torch.tensor([k, k])) for k in itertools.count()), 2
    )


def test_each_site_has_its_own_replayed_images_behind_its_own(monkeypatch):
    monkeypatch.setattr(stacking, "AHEAD_BYTES", 50)  # two batches ahead
    part = Part(torch.zeros(9, 1).numpy())
    members = [Member(Counting(site), part, torch.Generator(), replayed(site)) for site in (1, 2)]
    assert {member.rows for member in members} == {(3, 2)}
    together = itertools.islice(stacked_batches(members), 3)
    alone = [replayed(site).join(batches_of(Counting(site))) for site in (1, 2)]
    for (images, targets), *each in zip(together, *alone, strict=False):
        assert torch.equal(images, torch.stack([own for own, _ in each]))
        assert torch.equal(targets, torch.stack([own for _, own in each]))


class Part:
    def __init__(self, images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)


def batches_of(trainer: Counting):
    return (trainer.batch(None, index, None) for index in trainer.indices(None, None))


def test_the_stacks_that_were_used_last_are_kept(monkeypatch):
    made: list[int] = []
    monkeypatch.setattr(stacking, "StackedTrainer", lambda trainer, members, losses: made.append(members) or [members])
    trainer = SimpleNamespace(kept={})
    for members in (2, 3, 4, 5, 2, 6):
        assert stacked_trainer(trainer, members) == [members]
    assert made == [2, 3, 4, 5, 6]
    assert [members for members, _ in trainer.kept["stacks"]] == [4, 5, 2, 6]  # that of three was not used for longest
    stacked_trainer(trainer, 3)
    assert made[-1] == 3
    assert len(trainer.kept["stacks"]) == stacking.MOST_STACKS


def test_a_stack_that_cannot_be_made_is_not_kept(monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(stacking, "StackedTrainer", fail)
    trainer = SimpleNamespace(kept={})
    with pytest.raises(RuntimeError):
        stacked_trainer(trainer, 2)
    assert trainer.kept["stacks"] == {}
