"""Mixed mini-batches: real images of a site, joined by replayed (synthetic) ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from polyclinic.federation.collaborators import Batch


@dataclass(frozen=True)
class ReplayedBatches:
    """An endless stream of replayed mini-batches, `size` images each."""

    stream: Iterator[Batch]
    size: int

    def join(self, real: Iterator[Batch]) -> Iterator[Batch]:
        """Each real mini-batch with the next replayed one behind it."""
        for (images, targets), (more, others) in zip(real, self.stream, strict=False):
            yield torch.cat([images, more]), torch.cat([targets, others])
