"""A training step as one CUDA graph: recorded once, then launched as a whole instead of kernel by kernel.

Small networks leave a GPU waiting for the next kernel most of the time. The arithmetic is that of the step itself; what
it draws is drawn outside, in the same order, into tensors that stay where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from polyclinic.generators.gan.trainer import Dice

WARM_UP = 3  # steps before the recording, in which libraries choose their kernels and optimisers make their state

Told = dict[str, Tensor]


class Tape(Dice):
    """Dice whose draws of one step are kept: first it notes them, then it gives the same tensors again and again."""

    def __init__(self, dice: Dice) -> None:
        self.dice, self.device = dice, dice.device
        self.draws: list[tuple[Callable[[], Tensor], Tensor]] = []
        self.place: int | None = None  # of the next draw; None while they are noted

    def normal(self, *shape: int) -> Tensor:
        return self._kept(lambda: self.dice.normal(*shape))

    def uniform(self, *shape: int) -> Tensor:
        return self._kept(lambda: self.dice.uniform(*shape))

    def below(self, bound: int, *shape: int) -> Tensor:
        return self._kept(lambda: self.dice.below(bound, *shape))

    def renew(self) -> None:
        """New numbers in the same tensors, for a step that starts from the first of them."""
        self.place = 0
        for draw, kept in self.draws:
            kept.copy_(draw())

    def _kept(self, draw: Callable[[], Tensor]) -> Tensor:
        if self.place is None:
            self.draws.append((draw, draw()))
            return self.draws[-1][1]
        self.place += 1
        return self.draws[self.place - 1][1]


class Recorded:
    """`step(*dice)`, recorded after a few calls. It must do the same at every call, and read no number of the GPU's.

    Where a recording fails, steps go on one kernel at a time, and a warning says why.
    """

    def __init__(self, step: Callable[..., Told], dice: Sequence[Dice]) -> None:
        self.step, self.dice = step, list(dice)
        self.tapes: list[Tape] = []
        self.calls = 0
        self.failed = False
        self.play: Callable[[], None] | None = None
        self.told: Told = {}

    def __call__(self) -> Told:
        """What the step returned; a later call overwrites the same tensors."""
        if self.failed:
            return self.step(*self.dice)
        self.calls += 1
        if self.calls <= WARM_UP:
            self.tapes = [Tape(dice) for dice in self.dice]
            return self.aside(lambda: self.step(*self.tapes))
        renew(self.tapes)
        if self.play is None:
            try:
                self.play = self.record()
            except RuntimeError as error:
                warnings.warn(f"steps are not recorded as a CUDA graph: {error}", stacklevel=2)
                self.failed, self.tapes = True, []
                return self.step(*self.dice)
        self.play()
        return self.told

    def aside(self, step: Callable[[], Told]) -> Told:
        """Run on a stream of its own, as a recording will be."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            told = step()
        torch.cuda.current_stream().wait_stream(stream)
        return told

    def record(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.told = self.step(*self.tapes)
        return graph.replay


def renew(tapes: Iterable[Tape]) -> None:
    for tape in tapes:
        tape.renew()
