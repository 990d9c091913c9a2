"""A coordinator's private steps on latents: one latent less moves the sum by no more than the clipping norm."""

from types import SimpleNamespace

import torch
from torch import nn

from polyclinic.federation.traffic import Coverage
from polyclinic.privacy.settings import Privacy
from polyclinic.tasks import TASKS, Target
from polyclinic.training import private_latents
from polyclinic.training.optimizer import Optimizer

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
