"""Steps of a network on a GPU, recorded once and then replayed: a small network waits for Python, not for the GPU.

What is recorded is fixed: shapes, addresses and decisions. Numbers that change from step to step must therefore be
tensors on the GPU, and random ones be drawn there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: calls before a recording: optimisers make their state, libraries choose their algorithms
WARM_UP = 2
#: one recording at a time: several networks may learn in threads of one process, each on a stream of its own
_RECORDING = threading.Lock()


class Recorded:
    """A function of tensors that changes networks in place and gives a tensor, for as long as their shapes stay.

    Each call does the work once, whether it is done for the first time, recorded or replayed. What it gives is
    overwritten by the next call. `rng` draws the function's random numbers, and goes on drawing new ones.
    """

    def __init__(self, function: Callable[..., Any], rng: torch.Generator, stream: torch.cuda.Stream) -> None:
        self.function, self.rng, self.stream = function, rng, stream
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.given: Any = None
        self.calls = 0

    def __call__(self, *inputs: Tensor) -> Any:
        self.calls += 1
        if self.calls <= WARM_UP or (self.inputs and not self._fits(inputs)):
            return self._aside(inputs)
        if self.graph is None:
            self._record(inputs)
        for kept, new in zip(self.inputs, inputs, strict=True):
            kept.copy_(new)
        assert self.graph is not None
        self.graph.replay()
        return self.given

    def _fits(self, inputs: tuple[Tensor, ...]) -> bool:
        return [one.shape for one in inputs] == [one.shape for one in self.inputs]

    def _aside(self, inputs: tuple[Tensor, ...]) -> Any:
        """Just called, on the stream that is recorded later."""
        now = torch.cuda.current_stream()
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            given = self.function(*inputs)
        now.wait_stream(self.stream)
        return given

    def _record(self, inputs: tuple[Tensor, ...]) -> None:
        self.inputs = tuple(one.clone() for one in inputs)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(self.rng)
        with _RECORDING, torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
            self.given = self.function(*self.inputs)
