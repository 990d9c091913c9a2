"""A batch's loss and gradients on a GPU, recorded once for a shape and replayed: small networks wait for Python.

Only forward and backward pass are recorded. Optimisers, which are made anew in every round, take their steps as ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

#: batches of a shape before the recording, on the stream of the recording: libraries choose their algorithms
WARM_UP = 2

#: images and targets to the loss
Loss = Callable[[Tensor, Tensor], Tensor]


class RecordedGradients:
    """`loss(images, targets)` and its gradients in the parameters of `model`, whose addresses must stay.

    Each call does the work once, whether it is done for the first time, recorded or replayed. The model must be in the
    mode for training. A loss that asks the GPU for a number cannot be recorded: then all goes on kernel by kernel, and
    a warning says why.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.loss = loss
        self.stream = torch.cuda.Stream()
        self.seen: dict[tuple, int] = {}
        self.recordings: dict[tuple, Recording] = {}
        self.gave_up = False

    def __call__(self, images: Tensor, targets: Tensor) -> Tensor:
        shape = (images.shape, targets.shape, targets.dtype)
        if shape not in self.recordings:
            self.seen[shape] = self.seen.get(shape, 0) + 1
            if self.gave_up or self.seen[shape] <= WARM_UP or not self._record(shape, images, targets):
                return self._aside(images, targets)
        return self.recordings[shape].replay(images, targets)

    def _record(self, shape: tuple, images: Tensor, targets: Tensor) -> bool:
        try:
            self.recordings[shape] = Recording(self, images, targets)
        except RuntimeError as error:
            self.gave_up = True
            warnings.warn(f"engine.graphs: a training step cannot be recorded ({error})", stacklevel=2)
        return not self.gave_up

    def gradients(self, images: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward pass, as they are recorded."""
        for one in self.parameters:
            one.grad = None
        loss = self.loss(images, targets)
        loss.backward()
        return loss.detach()

    def _aside(self, images: Tensor, targets: Tensor) -> Tensor:
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            loss = self.gradients(images, targets)
        now.wait_stream(self.stream)
        return loss


class Recording:
    """The passes of batches of one shape."""

    def __init__(self, of: RecordedGradients, images: Tensor, targets: Tensor) -> None:
        self.parameters = of.parameters
        self.images, self.targets = images.clone(), targets.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=of.stream):
            self.loss = of.gradients(self.images, self.targets)
        self.gradients = [one.grad for one in self.parameters]

    def replay(self, images: Tensor, targets: Tensor) -> Tensor:
        self.images.copy_(images)
        self.targets.copy_(targets)
        self.graph.replay()
        for one, gradient in zip(self.parameters, self.gradients, strict=True):
            one.grad = gradient
        return self.loss
