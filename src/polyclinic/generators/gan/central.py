"""The central discriminator of FELICIA (Rajotte et al. 2021): it tells owners apart by the images they make.

It sees synthetic images only, from its first step to its last. What it finds comes back to an owner as the gradient of
lambda·R with respect to that owner's own images.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.generators.gan.losses import Phi, another_owner, taken_for, told_apart
from polyclinic.generators.gan.networks import refine
from polyclinic.generators.gan.trainer import BETAS, Dice, adam
from polyclinic.settings import Settings


class CentralTerm(Settings):
    """How the central discriminator learns, and what its word counts."""

    weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="lambda: what the central term counts beside the owner's own; 0: none",
    )
    towards: Literal["away", "other"] = Field(
        "away",
        description="what a generator pays: phi of being recognised (Eq. 6), or the cross-entropy of being taken for "
        "another owner, drawn at random (PrivGAN's code)",
    )
    central_lr: float | None = Field(None, gt=0, description="learning rate of the central discriminator, if another")
    warm_up: int = Field(0, ge=0, description="first steps in which the central term does not act yet")
    frozen: int = Field(
        0, ge=0, description="first steps in which the central discriminator does not learn, while its term acts"
    )

    def learns(self, step: int) -> bool:
        """Whether the central discriminator learns in this step; steps count from 0."""
        return self.weight > 0 and step >= self.frozen

    def acts(self, step: int) -> bool:
        return self.weight > 0 and step >= self.warm_up

    def settled(self, step: int) -> bool:
        """Whether all steps from this one on are alike."""
        return step >= max(self.frozen, self.warm_up)


class Central:
    """One network (or a stack of F networks, for F federations at once) and its optimiser.

    Images are [..., N, C, H, W] in [-1, 1] and `owner` [..., N] the number of the owner that made each; `network` gives
    logits [..., N, K].
    """

    def __init__(
        self,
        network: Callable[..., Tensor],
        parameters: list[nn.Parameter],
        phi: Phi,
        term: CentralTerm,
        *,
        owners: int,
        lr: float,
        refine_norms: Callable[[], None],
        precision: str = "fp32",
        device: torch.device | str = "cpu",
        recordable: bool = False,
    ) -> None:
        self.network, self.phi, self.term, self.owners = network, phi, term, owners
        self.optimizer = adam(parameters, term.central_lr or lr, betas=BETAS, recordable=recordable)
        self.refine_norms, self.precision, self.device = refine_norms, precision, torch.device(device)

    @classmethod
    def of(cls, network: nn.Module, phi: Phi, term: CentralTerm, *, owners: int, lr: float, **where: Any) -> Central:
        """With one network."""
        network.train()
        return cls(
            network,
            list(network.parameters()),
            phi,
            term,
            owners=owners,
            lr=lr,
            refine_norms=lambda: refine(network),
            **where,
        )

    def judge(self, images: Tensor, owner: Tensor) -> Tensor:
        """A step on made images; the share of them whose owner it named, [...]."""
        self.refine_norms()
        logits = self._logits(images.detach())
        self.optimizer.zero_grad(set_to_none=True)
        told_apart(logits, owner).mean(-1).sum().backward()
        self.optimizer.step()
        return (logits.argmax(-1) == owner).float().mean(-1).detach()

    def slope(self, images: Tensor, owner: Tensor, dice: Dice | None = None) -> Tensor:
        """The gradient of R, summed over images, with respect to each image: what lambda and a mean over an owner's
        images make of it is up to the owner."""
        images = images.detach().requires_grad_()
        logits = self._logits(images)
        if self.term.towards == "other":
            assert dice is not None
            paid = taken_for(logits, another_owner(owner, self.owners, dice))
        else:
            paid = self.phi.found_out(logits, owner)
        (slope,) = torch.autograd.grad(paid.sum(), images)
        return slope

    def _logits(self, images: Tensor) -> Tensor:
        with self._autocast():
            return self.network(images, images.new_zeros(images.shape[:-3]))

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)
