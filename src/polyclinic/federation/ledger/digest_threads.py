"""Threads beside training: digests of large parcels in simulations.

A parcel that one simulated site hands over in its process is a reference to tensors; nobody waits for its bytes. What
reads a digest or a ledger waits for the thread, so nothing can be read before it is complete. A deployed site does not
use them: there the line is on disk before a byte leaves.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

#: parcels of fewer bytes are digested at once: handing over to a thread takes as long
PAYS_FROM = 2**20
#: bytes of parcels that may wait for a thread; whoever adds more waits
MOST_WAITING = 2**29


class Background:
    """A few threads, which begin what they are given in order."""

    def __init__(self, threads: int | None = None) -> None:
        """As many threads as given, or one less than there are cores, and at most four."""
        self.threads = threads or min(4, max(1, (os.cpu_count() or 1) - 1))
        self._waiting: deque[tuple[Future, int]] = deque()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, thread_name_prefix="polyclinic-digests")

    def submit(self, work: Callable[[], T], tensors: list[Tensor]) -> Future[T]:
        """Have `work` done beside other work; it sees these tensors as they are now."""
        size = sum(tensor.nbytes for tensor in tensors)
        while self._waiting and (self._waiting[0][0].done() or self._bytes + size > MOST_WAITING):
            self._waiting.popleft()[0].exception()
        future = self._pool.submit(_on_own_stream, work, tensors, _ready(tensors))
        self._waiting.append((future, size))
        return future

    def settle(self) -> None:
        """Wait until all is done; whoever wants a digest sees what went wrong."""
        while self._waiting:
            self._waiting.popleft()[0].exception()

    @property
    def _bytes(self) -> int:
        return sum(size for _, size in self._waiting)


#: the one of this process
BACKGROUND = Background()
_LOCAL = threading.local()


def _ready(tensors: list[Tensor]) -> torch.cuda.Event | None:
    """When the GPU will have computed the tensors; None where all lie on the CPU."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return torch.cuda.current_stream(devices.pop()).record_event() if devices else None


def _on_own_stream(work: Callable[[], T], tensors: list[Tensor], ready: torch.cuda.Event | None) -> T:
    """Do the work; on a GPU beside the training's stream, as soon as the tensors are computed."""
    if ready is None:
        return work()
    device = next(tensor.device for tensor in tensors if tensor.is_cuda)
    with torch.cuda.stream(_stream(device)):
        torch.cuda.current_stream(device).wait_event(ready)
        return work()


def _stream(device: torch.device) -> torch.cuda.Stream:
    """The one of this thread."""
    if not hasattr(_LOCAL, "stream"):
        _LOCAL.stream = torch.cuda.Stream(device)
    return _LOCAL.stream


def pieces_of_gpu(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The bytes of tensors of a GPU, which come over in one copy for each type."""
    device = next(tensor.device for tensor in tensors if tensor.is_cuda)
    for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
        joined = torch.cat([tensor.detach().to(device, non_blocking=True).flatten() for tensor in group])
        copy = _staging(joined.nbytes).copy_(joined.view(torch.uint8), non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        yield copy


def _staging(size: int) -> Tensor:
    """Pinned memory for so many bytes, which this thread has until it asks again: a copy to any other memory holds up
    the training's own calls to the GPU, and rounds of ResNet-18 take twice as long."""
    held: Tensor | None = getattr(_LOCAL, "staging", None)
    if held is None or len(held) < size:
        held = _LOCAL.staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return held[:size]
