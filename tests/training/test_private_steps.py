"""Which images or patients a private step takes."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput
from polyclinic.federation.layers.replies import Coverage
from polyclinic.privacy.settings import Privacy
from polyclinic.tasks import TASKS, Target
from polyclinic.training import private_latents
from polyclinic.training.optimizer import Optimizer
from polyclinic.training.private_steps import find_units, once_each

ADDRESS = (0, "secret", "north")


def images(count, cases=None):
    pixels = np.random.default_rng(0).integers(0, 255, (count, 1, 4, 4), dtype=np.uint8)
    return ImageSet(pixels, np.zeros(count), cases=cases)


def taken(units, steps=40, rate=0.3, by_name=True):
    return [set(batch.tolist()) for batch in itertools.islice(units.draw(rate, ADDRESS, by_name=by_name), steps)]


def without(part, missing):
    keep = np.delete(np.arange(len(part)), missing)
    cases = None if part.cases is None else part.cases[keep]
    return ImageSet(part.images[keep], part.labels[keep], cases=cases), keep


@pytest.mark.parametrize("by_name", [True, False])
def test_one_image_less_changes_no_other_ones_draws(by_name):
    part = images(12)
    fewer, keep = without(part, 4)
    whole = taken(find_units(part, "image", "north"), by_name=by_name)
    found = [{int(keep[one]) for one in batch} for batch in taken(find_units(fewer, "image", "north"), by_name=by_name)]
    assert (found == [batch - {4} for batch in whole]) == by_name


def test_a_patients_images_take_part_together_and_one_patient_less_changes_no_other_draws():
    cases = np.array([5, 5, 9, 9, 9, 1, 5])
    units = find_units(images(7, cases), "patient", "north")
    assert len(units) == 3
    for batch in taken(units):
        for case in (1, 5, 9):
            own = set(np.flatnonzero(cases == case).tolist())
            assert batch & own in (set(), own)
    share = np.mean([0 in batch for batch in taken(units, 2000)])
    assert share == pytest.approx(0.3, abs=0.04)
    cases = np.array([0, 0, 1, 1, 2, 3])
    part = images(6, cases)
    fewer, keep = without(part, [0, 1])
    fewer.cases[:] -= 1  # as a source would count them
    whole = taken(find_units(part, "patient", "north"))
    found = [{int(keep[one]) for one in batch} for batch in taken(find_units(fewer, "patient", "north"))]
    assert found == [batch - {0, 1} for batch in whole]


def test_equal_images_unknown_patients_and_empty_sites():
    assert once_each(["a", "b", "a", "a"]) == ["a", "b", "a 2", "a 3"]
    part = images(3)
    part.images[1] = part.images[0]
    found = taken(find_units(part, "image", "north"))
    assert any((0 in batch) != (1 in batch) for batch in found)
    with pytest.raises(BadInput, match="nobody knows which images of site 'north' are of one patient"):
        find_units(images(3), "patient", "north")
    none = next(find_units(images(0), "image", "north").draw(0.5, ADDRESS, by_name=True))
    assert torch.equal(none, torch.zeros(0).long())


CLIP = 0.05
LATENTS = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(9) % 2


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2))


def private_sum(keep: list[int]) -> torch.Tensor:
    """The clipped sum over some of the latents, all in one batch, with noise too small to see."""
    trainer = SimpleNamespace(
        privacy=Privacy(on=("encoder", "primary"), noise_multiplier=1e-6, max_grad_norm=CLIP),
        task=TASKS["classification"](name="classification"),
        target=Target(("clear", "ill")),
        optimizer=Optimizer(batch_size=100),
        device=torch.device("cpu"),
    )
    federation = SimpleNamespace(
        trainer=trainer, seed=0, round=1, engine=SimpleNamespace(simulation=True), coverage=Coverage()
    )
    primary = network()
    accounts = private_latents.open_accounts(federation, {"north": len(keep)})
    before = torch.cat([weight.detach().flatten().clone() for weight in primary.parameters()])
    optimizer = torch.optim.SGD(primary.parameters(), lr=1.0)
    kept = private_latents.train(federation, accounts, primary, (LATENTS[keep], LABELS[keep]), optimizer)
    assert kept["spent"]["north"] == [[1e-6, 1.0, 1]]
    after = torch.cat([weight.detach().flatten() for weight in primary.parameters()])
    return (before - after) * len(keep)


def test_removing_one_latent_moves_the_sum_by_no_more_than_the_clipping_norm_in_spite_of_dropout():
    whole = private_sum(list(range(9)))
    assert float(whole.norm()) > CLIP
    for missing in (0, 4, 8):
        moved = float((whole - private_sum([place for place in range(9) if place != missing])).norm())
        assert 0 < moved <= CLIP * 1.01
