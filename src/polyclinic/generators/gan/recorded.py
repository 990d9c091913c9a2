"""A GAN's training step as a CUDA graph (`training.graphs`), with random numbers drawn outside, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from polyclinic.generators.gan.trainer import Dice
from polyclinic.training.graphs import GraphedFunction

Told = dict[str, Tensor]


class Tape(Dice):
    """Dice whose draws of one step are kept: first it notes them, then it gives the same tensors again and again."""

    def __init__(self, dice: Dice) -> None:
        self.dice, self.device = dice, dice.device
        self.draws: list[tuple[Callable[[], Tensor], Tensor]] = []
        self.place = 0  # of the next draw

    def normal(self, *shape: int) -> Tensor:
        return self._kept(lambda: self.dice.normal(*shape))

    def uniform(self, *shape: int) -> Tensor:
        return self._kept(lambda: self.dice.uniform(*shape))

    def below(self, bound: int, *shape: int) -> Tensor:
        return self._kept(lambda: self.dice.below(bound, *shape))

    def rewind(self) -> None:
        """The next draw is the first one of a step."""
        self.place = 0

    def renew(self) -> None:
        """New numbers in the same tensors."""
        for draw, kept in self.draws:
            kept.copy_(draw())

    def _kept(self, draw: Callable[[], Tensor]) -> Tensor:
        if self.place == len(self.draws):
            self.draws.append((draw, draw()))
        self.place += 1
        return self.draws[self.place - 1][1]


class Recorded:
    """`step(*dice)` as a CUDA graph. It must do the same at every call, and read no number of the GPU's."""

    def __init__(self, step: Callable[..., Told], dice: Sequence[Dice]) -> None:
        self.step = step
        self.tapes = [Tape(one) for one in dice]
        self.graphed = GraphedFunction(self._step, "a GAN's training step")

    def __call__(self) -> Told:
        """What the step returned; a later call overwrites the same tensors."""
        for tape in self.tapes:
            tape.renew()
        return self.graphed()

    def _step(self) -> Told:
        for tape in self.tapes:
            tape.rewind()
        return self.step(*self.tapes)
