"""CUDA graphs: record a function's GPU kernels once for each shape of its inputs, then launch them all at once.

Small networks spend most of their time on kernel launches from Python; a CUDA graph avoids them. All users (training
steps, GAN steps, iterations of an attack) share one policy: `WARM_UP` ordinary calls first, one recording at a time
in a process, and ordinary calls for ever, with one warning, where CUDA cannot record the function.

Local epochs: batches are put into a table on the GPU, drawn as ever, but fetched and augmented all at once. A recorded
step takes the batch at a counter, which lies on the GPU, computes both passes and the optimiser's step, and moves the
counter on. One graph for a whole epoch is no faster: the GPU is busy either way.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyclinic.federation.collaborators import Batch
from polyclinic.training.batches import take_batches
from polyclinic.training.optimizer import kept_optimizer

if TYPE_CHECKING:
    from polyclinic.training.loop import Trainer

#: ordinary calls with inputs of a shape before they are recorded: libraries choose kernels, optimisers make their state
WARM_UP = 3
#: graphs of one function, each of which keeps the memory of its pass; inputs of further shapes get ordinary calls
MOST_GRAPHS = 8
#: CUDA allows one recording at a time in a process, and networks may learn in several threads
_RECORDING = threading.Lock()

#: images, targets and what else there is, to the loss
Loss = Callable[..., Tensor]


class GraphedFunction:
    """`function(*inputs)` on a GPU, replayed as a CUDA graph after `WARM_UP` calls with inputs of the same shapes.

    Every call does the work exactly once, whether it is an ordinary call or a replay. The output of a replay is
    overwritten by the next one. The function must take the same decisions at every call and read no number from the
    GPU; networks and optimisers that it changes must keep their tensors. `name` says in the warning what is slower;
    `rngs` are the CUDA generators that the function draws from: a replay draws new numbers. `pool`: graphs that share
    one share their memory; none may run beside another, and an output is lost when another one runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        rngs: Sequence[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
        warm_up: int = WARM_UP,
        pool: Any = None,
    ) -> None:
        self.function, self.name, self.rngs = function, name, list(rngs)
        self.warm_up, self.pool = warm_up, pool
        self.stream = stream or torch.cuda.Stream()
        self.calls: Counter[tuple] = Counter()
        self.graphs: dict[tuple, Graph] = {}
        self.failed = False

    def __call__(self, *inputs: Tensor) -> Any:
        shapes = tuple((one.shape, one.dtype) for one in inputs)
        if shapes not in self.graphs:
            self.calls[shapes] += 1
            full = len(self.graphs) >= MOST_GRAPHS
            if self.failed or full or self.calls[shapes] <= self.warm_up or not self._record(shapes, inputs):
                return self._call(inputs)
        return self.graphs[shapes].replay(inputs)

    def _call(self, inputs: tuple[Tensor, ...]) -> Any:
        """An ordinary call, on the stream that is used for recording."""
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            output = self.function(*inputs)
        now.wait_stream(self.stream)
        return output

    def _record(self, shapes: tuple, inputs: tuple[Tensor, ...]) -> bool:
        try:
            self.graphs[shapes] = Graph(self, inputs)
        except RuntimeError as error:
            self.failed = True
            _leave_recording(self.rngs)
            warnings.warn(f"{self.name} runs without a CUDA graph, more slowly: {error}", stacklevel=3)
        return not self.failed


class GraphedStep:
    """A function of tensors, some of which may be None, as a CUDA graph; without `graphed` it is called as it is."""

    def __init__(self, function: Callable[..., Any], name: str, *, graphed: bool) -> None:
        self.function = function
        self.missing: list[bool] = []
        self.recorded = GraphedFunction(self._call, name) if graphed else self._call

    def __call__(self, *inputs: Tensor | None) -> Any:
        self.missing = [one is None for one in inputs]
        return self.recorded(*[one for one in inputs if one is not None])

    def _call(self, *present: Tensor) -> Any:
        given = iter(present)
        return self.function(*[None if missing else next(given) for missing in self.missing])


class Graph:
    """A function's CUDA graph for inputs of one shape. Recording it runs nothing: the work is done by `replay`."""

    def __init__(self, of: GraphedFunction, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(one.clone() for one in inputs)
        self.graph = torch.cuda.CUDAGraph()
        for rng in of.rngs:
            self.graph.register_generator_state(rng)
        # the outer `stream` brings the caller's stream back when a recording fails: `graph` alone does not
        with (
            _RECORDING,
            torch.cuda.stream(of.stream),
            torch.cuda.graph(self.graph, pool=of.pool, stream=of.stream, capture_error_mode="thread_local"),
        ):
            self.output = of.function(*self.inputs)

    def replay(self, inputs: tuple[Tensor, ...]) -> Any:
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        self.graph.replay()
        return self.output


def new_pool(device: torch.device) -> Any:
    """Memory that several graphs share; see `GraphedFunction`."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _leave_recording(rngs: Sequence[torch.Generator]) -> None:
    """A failed recording leaves its generators in recording mode, in which they refuse ordinary draws: give each a
    copy of its state, which is not in that mode. The next numbers are those that were due before the recording."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    for rng in [default, *rngs]:
        rng.graphsafe_set_state(rng.clone_state())


class GraphedGradients:
    """`loss(images, targets, ...)` and its gradients w.r.t. the parameters of `model`, a CUDA graph for each shape.

    The model must be in training mode, and its parameters must stay where they are. Optimisers, which are made anew in
    every round, take their steps outside.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.loss = loss
        self.passes = GraphedFunction(self._passes, "engine.graphs: a training step")

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The loss; its gradients are left in the parameters' `grad`."""
        return self._leave(*self.passes(*inputs))

    def compute(self, *inputs: Tensor) -> Tensor:
        """The same as an ordinary call, which may be a part of another graph."""
        return self._leave(*self._passes(*inputs))

    def _leave(self, loss: Tensor, gradients: list[Tensor | None]) -> Tensor:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _passes(self, *inputs: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Forward and backward pass. Gradients get new tensors, which lie in the memory of the graph."""
        for one in self.parameters:
            one.grad = None
        loss = self.loss(*inputs)
        loss.backward()
        return loss.detach(), [one.grad for one in self.parameters]


# --- local epochs ---------------------------------------------------------------------------------


#: shapes of batches that have a table and a graph, which bounds their memory; batches of further shapes get ordinary
#: steps. A pass over a site's images has two shapes at most, and replayed images may bring two more
MOST_TABLES = 4

#: steps of which the batches are put on the GPU together, and bytes that their images may take there: both bound
#: memory. Tables of 4 to 32 steps were measured on an H200; a table of 2**27 bytes holds the 32 batches of the small
#: networks, and 6 batches of 32 images of 224 px
MOST_STEPS, TABLE_BYTES = 32, 2**27

#: images and targets; a weight for each image where images are weighed
Fields = tuple[Tensor, ...]


def steps_in_table(image_bytes: int) -> int:
    """Steps of which the batches are put on the GPU together, by the bytes of the images of one, as float32."""
    return max(1, min(MOST_STEPS, TABLE_BYTES // image_bytes))


class BatchTable:
    """Room on a device for the batches of so many steps, all in the shape of `like`, and the counter."""

    def __init__(self, like: Fields, steps: int) -> None:
        self.steps = steps
        self._turned = [one.dim() == 4 and one.stride(1) == 1 for one in like]  # channels last
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
            given = [_fields(batch, weigh) for batch in take_batches(batches, steps, steps_in_table)]
            if not given:  # a source that ends
                break
            for shapes, some in itertools.groupby(given, _shapes):
                alike = list(some)
                if shapes not in self.tables and len(self.tables) < MOST_TABLES:
                    room = steps_in_table(alike[0][0].nbytes)
                    self.tables[shapes] = TableSteps(self, BatchTable(alike[0], room))
                if shapes in self.tables:
                    self.tables[shapes](alike)
                else:
                    for batch in alike:
                        self.take_step(batch, recorded=True)
            steps -= len(given)
        return float(self.total)

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


# --- of a trainer's network -----------------------------------------------------------------------


def learner(
    trainer: Trainer, model: nn.Module, optimizer: torch.optim.Optimizer | None, class_weights: Tensor | None
) -> RecordedSteps | Callable[[Tensor, Tensor], Tensor] | None:
    """Whole steps of the network by this optimiser as graphs; where these cannot be recorded, what gives the loss of a
    batch and leaves its gradients in the network, or in the part of it that learns. None where nothing can be recorded.
    """
    trainer.state()  # forgets what was recorded of layers that were replaced
    # only the trainer's network, or a part that was cut from it; and nobody may have hooked into its layers but our own
    # random shares: what was recorded before would leave such a hook out
    children = dict(trainer.model.named_children())
    if type(model) is not type(trainer.model) or any(children.get(n) is not one for n, one in model.named_children()):
        return None
    if trainer.shares is None and hooks_of(trainer.model) | hooks_of(model) != trainer.hooks:
        return None
    weighed = class_weights is not None
    if trainer.records_steps and model is trainer.model and optimizer is not None and trainer.shares is None:
        kept = kept_optimizer(optimizer, trainer.kept)
        if kept is not None:
            if weighed not in kept.recorded:
                gradients = _graphed_gradients(trainer, model, weighed=weighed)
                kept.recorded[weighed] = RecordedSteps(gradients, optimizer, trainer.device)
            return kept.recorded[weighed]
    graphed = _graphed_gradients(trainer, model, weighed=weighed or trainer.shares is not None)

    def learn(images: Tensor, targets: Tensor) -> Tensor:
        return graphed(*_fields((images, targets), lambda targets: trainer.image_weights(targets, class_weights)))

    return learn


def hooks_of(network: nn.Module) -> set[int]:
    """The numbers of the hooks of all layers; torch gives each hook a number of its own."""
    found: set[int] = set()
    for layer in network.modules():
        found.update(layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return found


def _graphed_gradients(trainer: Trainer, model: nn.Module, *, weighed: bool) -> GraphedGradients:
    """A recorded step of the network or a part: one for each choice of stages and of weights that are trained.

    `weighed`: its inputs are images, targets and a weight for each image."""
    trained = [one.requires_grad for one in model.parameters()]
    key = f"graph: {getattr(model, 'present', '')} {trained} {weighed} {trainer.shares is not None}"

    def loss(images: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return trainer.task.loss(trainer.forward(images, model).float(), targets, trainer.target, weights)

    if key not in trainer.kept:
        trainer.kept[key] = GraphedGradients(model, loss)
    return trainer.kept[key]
