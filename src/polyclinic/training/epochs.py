"""Local epochs on a GPU without any work of Python between their steps.

The batches of an epoch are put into a table on the GPU: drawn as ever, but fetched and augmented all at once. A
recorded step is one CUDA graph: it takes the batch at a counter, which lies on the GPU, computes both passes and the
optimiser's step, and moves the counter on. An epoch of many steps is so many launches. One graph for a whole epoch was
tried, and is no faster (`benchmarks/figures/epochs.json`): the GPU is busy either way.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from polyclinic.federation.collaborators import Batch
from polyclinic.training import choices
from polyclinic.training.batches import take_batches
from polyclinic.training.graphs import GraphedFunction, GraphedGradients, new_pool

#: shapes of batches that have a table and a graph, which bounds their memory; batches of further shapes get ordinary
#: steps. A pass over a site's images has two shapes at most, and replayed images may bring two more
MOST_TABLES = 4

#: images and targets; a weight for each image where images are weighed
Fields = tuple[Tensor, ...]


class BatchTable:
    """Room on a device for the batches of so many steps, all in the shape of `like`, and the counter."""

    def __init__(self, like: Fields, steps: int) -> None:
        self.steps = steps
        self._turned = [_is_channels_last(one) for one in like]
        self._rows = [one.new_empty((steps, *self._stored(place, one).shape)) for place, one in enumerate(like)]
        self.place = torch.zeros(1, dtype=torch.int64, device=like[0].device)

    def fill(self, batches: Sequence[Fields]) -> None:
        """Put batches at the beginning, and begin there."""
        for place, rows in enumerate(self._rows):
            given = [self._stored(place, batch[place]) for batch in batches]
            torch._foreach_copy_(list(rows[: len(given)].unbind()), given)
        self.place.zero_()

    def take(self) -> Fields:
        """The batch at the counter, which moves on."""
        found = [rows.index_select(0, self.place)[0] for rows in self._rows]
        self.place += 1
        return tuple(
            one.permute(0, 3, 1, 2) if turned else one for one, turned in zip(found, self._turned, strict=True)
        )

    def _stored(self, place: int, one: Tensor) -> Tensor:
        """Images keep their order in memory, with channels last or not: it decides which kernels compute with them."""
        return one.permute(0, 2, 3, 1) if self._turned[place] else one


class RecordedSteps:
    """Steps of one optimiser on the gradients of one network, from batches in tables."""

    def __init__(self, gradients: GraphedGradients, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.gradients, self.optimizer = gradients, optimizer
        self.total = torch.zeros((), device=device)  # of the losses since `train` began
        self.tables: dict[tuple, TableSteps] = {}
        self.pool = new_pool(device)

    def train(self, batches: Iterator[Batch], steps: int, weigh: Callable[[Tensor], Tensor | None]) -> float:
        """Take steps; the sum of their losses. `weigh` gives a weight for each image by the targets, or None."""
        self.total.zero_()
        while steps > 0:
            given = [_fields(batch, weigh) for batch in take_batches(batches, steps, choices.steps_in_table)]
            if not given:  # a source that ends
                break
            for shapes, some in itertools.groupby(given, _shapes):
                self._take_steps(shapes, list(some))
            steps -= len(given)
        return float(self.total)

    def _take_steps(self, shapes: tuple, batches: list[Fields]) -> None:
        if shapes not in self.tables and len(self.tables) < MOST_TABLES:
            room = choices.steps_in_table(batches[0][0].nbytes)
            self.tables[shapes] = TableSteps(self, BatchTable(batches[0], room))
        if shapes in self.tables:
            self.tables[shapes](batches)
            return
        for batch in batches:
            self.take_step(batch, recorded=True)

    def take_step(self, batch: Fields, *, recorded: bool = False) -> None:
        """One step, in the recording of a graph or outside; `recorded`: its passes are a graph of their own."""
        self.total += self.gradients(*batch) if recorded else self.gradients.compute(*batch)
        self.optimizer.step()
        for one in self.gradients.parameters:
            one.grad = None  # its memory is free for the next step


class TableSteps:
    """Steps on the batches of one table, each a launch of the same graph."""

    def __init__(self, of: RecordedSteps, table: BatchTable) -> None:
        self.table = table
        steps = weakref.proxy(of)  # with a cycle, an optimiser that is forgotten would keep its tables on the GPU
        self.step = GraphedFunction(
            lambda: steps.take_step(table.take()), "engine.graphs: a training step with its optimiser", pool=of.pool
        )

    def __call__(self, batches: list[Fields]) -> None:
        for start in range(0, len(batches), self.table.steps):
            some = batches[start : start + self.table.steps]
            self.table.fill(some)
            for _ in some:
                self.step()


def _fields(batch: Batch, weigh: Callable[[Tensor], Tensor | None]) -> Fields:
    weights = weigh(batch[1])
    return batch if weights is None else (*batch, weights)


def _shapes(batch: Fields) -> tuple:
    return tuple((one.shape, one.stride(), one.dtype) for one in batch)


def _is_channels_last(one: Tensor) -> bool:
    return one.dim() == 4 and one.stride(1) == 1
