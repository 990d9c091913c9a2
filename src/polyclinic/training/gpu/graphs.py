"""CUDA graphs: record a function's GPU kernels once for each shape of its inputs, then launch them all at once.

Small networks spend most of their time on kernel launches from Python; a CUDA graph avoids them. All users (training
steps, GAN steps, iterations of an attack) share one policy: `WARM_UP` ordinary calls first, one recording at a time
in a process, and ordinary calls for ever, with one warning, where CUDA cannot record the function.

A training step is recorded without its optimiser's step: fused, that is one launch, and with it (or with the batches of
an epoch put on the GPU at once) rounds on an H200 were no shorter.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from polyclinic.training.loop import Trainer

#: ordinary calls with inputs of a shape before they are recorded: libraries choose kernels, optimisers make their state
WARM_UP = 3
#: graphs of one function, each of which keeps the memory of its pass; inputs of further shapes get ordinary calls
MOST_GRAPHS = 8
#: CUDA allows one recording at a time in a process, and networks may learn in several threads
_RECORDING = threading.Lock()

#: of a recorded function: tensors, some of which may be None
Inputs = tuple[Tensor | None, ...]
#: images, targets and what else there is, to the loss
Loss = Callable[..., Tensor]


class GraphedFunction:
    """`function(*inputs)` on a GPU, replayed as a CUDA graph after `WARM_UP` calls with inputs of the same shapes.

    Every call does the work exactly once, whether it is an ordinary call or a replay. The output of a replay is
    overwritten by the next one. The function must take the same decisions at every call and read no number from the
    GPU; networks and optimisers that it changes must keep their tensors. `name` says in the warning what is slower;
    `rngs` are the CUDA generators that the function draws from: a replay draws new numbers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        rngs: Sequence[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
        warm_up: int = WARM_UP,
    ) -> None:
        self.function, self.name, self.rngs = function, name, list(rngs)
        self.warm_up = warm_up
        self.stream = stream or torch.cuda.Stream()
        self.calls: Counter[tuple] = Counter()
        self.graphs: dict[tuple, Graph] = {}
        self.failed = False

    def __call__(self, *inputs: Tensor | None) -> Any:
        shapes = tuple(one if one is None else (one.shape, one.dtype) for one in inputs)
        if shapes not in self.graphs:
            self.calls[shapes] += 1
            full = len(self.graphs) >= MOST_GRAPHS
            if self.failed or full or self.calls[shapes] <= self.warm_up or not self._record(shapes, inputs):
                return self._call(inputs)
        return self.graphs[shapes].replay(inputs)

    def _call(self, inputs: Inputs) -> Any:
        """An ordinary call, on the stream that is used for recording."""
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            output = self.function(*inputs)
        now.wait_stream(self.stream)
        return output

    def _record(self, shapes: tuple, inputs: Inputs) -> bool:
        try:
            self.graphs[shapes] = Graph(self, inputs)
        except RuntimeError as error:
            self.failed = True
            _leave_recording(self.rngs)
            warnings.warn(f"{self.name} runs without a CUDA graph, more slowly: {error}", stacklevel=3)
        return not self.failed


class Graph:
    """A function's CUDA graph for inputs of one shape. Recording it runs nothing: the work is done by `replay`."""

    def __init__(self, of: GraphedFunction, inputs: Inputs) -> None:
        self.inputs = tuple(one if one is None else one.clone() for one in inputs)
        self.graph = torch.cuda.CUDAGraph()
        for rng in of.rngs:
            self.graph.register_generator_state(rng)
        # the outer `stream` brings the caller's stream back when a recording fails: `graph` alone does not
        with (
            _RECORDING,
            torch.cuda.stream(of.stream),
            torch.cuda.graph(self.graph, stream=of.stream, capture_error_mode="thread_local"),
        ):
            self.output = of.function(*self.inputs)

    def replay(self, inputs: Inputs) -> Any:
        for kept, new in zip(self.inputs, inputs, strict=True):
            if kept is not None and new is not None:
                kept.copy_(new)
        self.graph.replay()
        return self.output


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
        loss, gradients = self.passes(*inputs)
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


# --- of a trainer's network -----------------------------------------------------------------------


def learner(
    trainer: "Trainer", model: nn.Module, class_weights: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """A recorded step of the network, or of a part of it: gives the loss of a batch and leaves its gradients. None
    where nothing can be recorded."""
    trainer.state()  # forgets what was recorded of layers that were replaced
    # only the trainer's network, or a part that was cut from it; and nobody may have hooked into its layers but our own
    # random shares: what was recorded before would leave such a hook out
    children = dict(trainer.model.named_children())
    if type(model) is not type(trainer.model) or any(children.get(n) is not one for n, one in model.named_children()):
        return None
    if trainer.shares is None and hooks_of(trainer.model) | hooks_of(model) != trainer.hooks:
        return None
    # a graph for each choice of stages and of weights that are trained
    trained, shared = [one.requires_grad for one in model.parameters()], trainer.shares is not None
    key = f"graph: {getattr(model, 'present', '')} {trained} {shared or class_weights is not None} {shared}"
    if key not in trainer.kept:

        def loss(images: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
            return trainer.task.loss(trainer.forward(images, model).float(), targets, trainer.target, weights)

        trainer.kept[key] = GraphedGradients(model, loss)

    graphed: GraphedGradients = trainer.kept[key]

    def learn(images: Tensor, targets: Tensor) -> Tensor:
        weights = trainer.image_weights(targets, class_weights)
        return graphed(images, targets) if weights is None else graphed(images, targets, weights)

    return learn


def hooks_of(network: nn.Module) -> set[int]:
    """The numbers of the hooks of all layers; torch gives each hook a number of its own."""
    found: set[int] = set()
    for layer in network.modules():
        found.update(layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return found
