"""The sum of clipped gradients of a batch's patients: the gradients of all images of a patient are added up, and that
sum is clipped. Each patient has a pass of its own, which any network allows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from polyclinic.privacy.clipped_sums import MOST_ROWS, Batch, Losses
from polyclinic.privacy.ghost_clipping import TINY


class PatientSums:
    """Computes sums of clipped gradients, of which every patient has one. The last tensor of a batch, int64 [B], says
    whose each row is; it is not given to `losses`. A piece of a batch holds all rows of its patients."""

    @property
    def ghost(self) -> bool:
        """False: passes are in float32, as lengths are computed from what they give."""
        return False

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        yield

    def total(
        self, losses: Losses, pieces: Iterable[Batch], clip: float, parameters: list[nn.Parameter]
    ) -> list[Tensor]:
        """For each of the parameters, the sum of the clipped gradients of all patients of a batch."""
        totals = [torch.zeros_like(one) for one in parameters]
        for *rows, patients in pieces:
            for patient in patients.unique():
                own = [tensor[(patients == patient).to(tensor.device)] for tensor in rows]
                torch._foreach_add_(totals, _clipped(_gradients(losses, own, parameters), clip))
        return totals


def _gradients(losses: Losses, rows: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """The gradients of the summed loss of these rows, a piece at a time; zeros where a parameter took no part."""
    totals = [torch.zeros_like(one) for one in parameters]
    for piece in zip(*(tensor.split(MOST_ROWS) for tensor in rows), strict=True):
        found = torch.autograd.grad(losses(*piece).sum(), parameters, allow_unused=True)
        for total, gradient in zip(totals, found, strict=True):
            if gradient is not None:
                total += gradient
    return totals


def _clipped(gradients: list[Tensor], clip: float) -> list[Tensor]:
    """Gradients as one vector, no longer than `clip`. A patient whose gradient is not finite counts as one without:
    whoever is refused for it would learn that the patient is there."""
    length = torch.stack([one.double().norm() for one in gradients]).norm()
    if not bool(length.isfinite()):
        return [torch.zeros_like(one) for one in gradients]
    factor = float((clip / (length + TINY)).clamp(max=1.0))
    return [factor * one for one in gradients]
