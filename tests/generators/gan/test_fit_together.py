"""GANs of several sites in one stack learn what each learns alone, up to rounding, also with other numbers of steps."""

from __future__ import annotations

import pytest
import torch

from polyclinic.generators import GENERATORS
from polyclinic.generators.base import FitOptions
from polyclinic.generators.gan.stack import Learner, fit_together
from polyclinic.tasks import Target

TWO = Target(classes=("dark", "bright"))


def learner(place: int, name: str, told: list, **changes) -> Learner:
    settings = GENERATORS[name](**{"width": 2, "latent": 4, "batch_size": 4, **changes})
    model = settings.build(channels=1, size=28, target=TWO, seed=place)
    rng = torch.Generator().manual_seed(place)
    count = 8 + 4 * place  # a larger site takes more steps
    images = torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=rng).numpy()
    return Learner(model, images, (torch.arange(count) % 2).numpy(), rng, lambda *one: told.append((place, *one)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gan", {"critic_steps": 2}),
        ("dcgan", {"discriminator_norm": "spectral", "augment": True, "labels": "even"}),
    ],
)
def test_a_stack_learns_what_each_learns_alone(name, changes, monkeypatch):
    monkeypatch.setattr("polyclinic.generators.gan.settings.PASSES", 2)
    told: list = []
    alone, stacked = ([learner(place, name, told, **changes) for place in (0, 1, 2)] for _ in range(2))
    wanted = [one.model.fit(one.images, one.labels, one.rng, FitOptions(progress=one.progress)) for one in alone]
    reports, _ = sorted(told), told.clear()
    found = fit_together(stacked)
    assert [entry[:4] for entry in sorted(told)] == [entry[:4] for entry in reports]
    for a, b in zip(wanted, found, strict=True):
        assert b["generator"] == pytest.approx(a["generator"], rel=1e-3)
    for a, b in zip(alone, stacked, strict=True):
        for key, value in b.model.state().items():
            torch.testing.assert_close(value, a.model.state()[key], rtol=1e-2, atol=1e-4, msg=key)
