"""Training passes through torch.compile (`engine.compiled`): faster steps after a while of compilation.

Compiled passes round differently. So which batches get them follows from the number of their images alone, and whether
a network could be compiled is noted in the run folder: worker processes and a resumed run take the same way.
"""

from __future__ import annotations

import itertools
import json
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.errors import Damaged, Notice
from polyclinic.files import atomic_write, lock, read_json
from polyclinic.training.inductor import inductor_options

#: in the run folder: which networks were compiled, and why others were not
FILE = "compiled.json"
#: held by a process that writes it
LOCK = ".compiled.lock"
#: batches may be so many times as large as `optimizer.batch_size`: real images, joined by replayed ones
LARGEST = 4
LONGEST_REASON = 400
_NUMBERS = itertools.count()  # of compiled functions

#: what torch compiles with: a name that it knows, or a function
Backend = str | Callable[..., Any]
INDUCTOR = "inductor"
#: images [B, ...] to the network's output
Network = Callable[[Tensor], Tensor]


# --- what the run folder knows -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compilation:
    """How passes are compiled. `batch_size`: the study's. `folder`: the run's; None: nothing is noted."""

    batch_size: int
    folder: Path | None = None
    backend: Backend = INDUCTOR  #: what torch compiles with; others are for tests

    def includes(self, images: int) -> bool:
        """Whether batches of so many images are compiled: whole batches, alone or with half a batch or more of replayed
        images, which makes 7 sizes at most. Each costs a compilation; a rule of first come, first served would hang on
        the order of sites."""
        return self.batch_size <= images <= LARGEST * self.batch_size and 2 * images % self.batch_size == 0

    def noted(self) -> dict[str, Any]:
        """By network and shape of a batch: whether it was compiled, and the reason where it could not be (any more)."""
        return read_noted(self.folder) if self.folder else {}

    def note(self, name: str, reason: str | None) -> bool:
        """Note that a network was compiled or, with a reason, was not; whether it was before. A reason stays: another
        process may have had it a moment ago."""
        if self.folder is None:
            return False
        with lock(self.folder / LOCK):
            noted = self.noted()
            before = noted.get(name, {"compiled": False, "reason": None})
            now = {"compiled": before["compiled"] or reason is None, "reason": before["reason"] or reason}
            if now != before:
                atomic_write(self.folder / FILE, json.dumps({**noted, name: now}, indent=1) + "\n")
        return bool(before["compiled"])


def any_compiled(folder: Path) -> bool:
    """Whether a run took compiled steps, as its processes noted."""
    return any(one["compiled"] for one in read_noted(folder).values())


def refusals(folder: Path) -> list[str]:
    """A sentence for each network that could not be compiled."""
    noted = read_noted(folder).items()
    return [_sentence(name, one["reason"], before=one["compiled"]) for name, one in noted if one["reason"]]


def read_noted(folder: Path) -> dict[str, Any]:
    """What a run folder knows, by network and shape of a batch; Damaged if the file holds something else."""
    file = folder / FILE
    noted = read_json(file) if file.exists() else {}
    if not all(name.isprintable() and _is_note(one) for name, one in noted.items()):
        raise Damaged(f"{file}: is damaged (it does not say which networks were compiled); bring it back from a copy")
    return noted


def _is_note(one: object) -> bool:
    if not isinstance(one, dict) or one.keys() != {"compiled", "reason"}:
        return False
    reason = one["reason"]
    said = reason is None or (isinstance(reason, str) and reason.isprintable() and len(reason) <= LONGEST_REASON)
    return isinstance(one["compiled"], bool) and said


def _sentence(name: str, reason: str, *, before: bool) -> str:
    if before:
        return (
            f"engine.compiled: {name} runs without torch.compile from here on, though the run was begun with it, so "
            f"that its last bits are others: {reason}"
        )
    return f"engine.compiled: {name} runs without torch.compile, more slowly: {reason}"


# --- a network -----------------------------------------------------------------------------------------------


class CompiledNetwork:
    """A network in training mode, whose passes are compiled once for each shape of a whole batch.

    Batches of other sizes, and all batches of a network that cannot be compiled, are ordinary calls.
    """

    def __init__(self, network: nn.Module, compilation: Compilation) -> None:
        self.network, self.compilation = network, compilation
        self._compiled: dict[torch.Size, Network] = {}  # the network itself where it could not be compiled

    def __call__(self, images: Tensor) -> Tensor:
        if not self.compilation.includes(len(images)):
            found: Tensor = self.network(images)
            return found
        # torch compiles anew for another order in memory
        layout = torch.channels_last if images.is_cuda and images.dim() == 4 else torch.contiguous_format
        images = images.contiguous(memory_format=layout)
        if images.shape not in self._compiled:
            self._compiled[images.shape] = self._compile(images)
        try:
            return self._compiled[images.shape](images)
        except Exception as error:
            # torch compiles anew what has changed since, some times at most, before it computes anything
            if not type(error).__module__.startswith("torch._dynamo"):
                raise
            self._compiled[images.shape] = self._refuse(images, error)
            return self._compiled[images.shape](images)

    def _compile(self, images: Tensor) -> Network:
        """The compiled network, or the network itself, with a warning, where torch cannot compile it."""
        name = _name(self.network, images)
        if self.compilation.noted().get(name, {}).get("reason"):  # the run was begun without, or has lost it
            return self.network
        try:
            compiled = compile_network(self.network, self.compilation.backend)
            _try_passes(self.network, compiled, images)
        except Exception as error:  # whatever a compiler may raise
            return self._refuse(images, error)
        self.compilation.note(name, None)
        return compiled

    def _refuse(self, images: Tensor, error: Exception) -> Network:
        """The network itself; why is said and noted."""
        name, reason = _name(self.network, images), _reason(error)
        before = self.compilation.note(name, reason)
        warnings.warn(_sentence(name, reason, before=before), Notice, stacklevel=3)
        return self.network


def compile_network(network: nn.Module, backend: Backend = INDUCTOR) -> Network:
    """The network as one compiled function for batches of one shape; torch compiles it at its first call."""

    def compute(images: Tensor) -> Tensor:
        found: Tensor = network(images)
        return found

    # torch bounds the compilations of a code object, which all calls of this function would share
    code = compute.__code__.replace(co_name=f"compute_{next(_NUMBERS)}")
    own = types.FunctionType(code, compute.__globals__, closure=compute.__closure__)
    options = inductor_options() if backend == INDUCTOR else None
    # a graph for the whole network or none: a part of one that fails later would have moved batch norm already
    compiled: Network = torch.compile(own, backend=backend, fullgraph=True, dynamic=False, options=options)
    return compiled


def _try_passes(network: nn.Module, compiled: Network, images: Tensor) -> None:
    """Both passes once, for nothing: torch compiles the second one when it is first wanted, and no step may be left
    half done. Draws and batch-norm statistics are as if nothing had happened."""
    kept = [(buffer, buffer.clone()) for buffer in network.buffers()]
    try:
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            trained = [one for one in network.parameters() if one.requires_grad]
            torch.autograd.grad(compiled(images).float().sum(), trained, allow_unused=True)
    finally:
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)


#: what torch raises in words of its own, by the name of its class
_WORDS = {
    "InvalidCxxCompiler": "no working C++ compiler was found; install g++, or name another one in the variable CXX",
    "FailOnRecompileLimitHit": "something in it changes between steps, and torch would compile it again and again",
}


def _reason(error: Exception) -> str:
    """The first line of what a compiler says in many; torch wraps what its backend has raised."""
    cause = getattr(error, "inner_exception", error)
    kind = type(cause).__name__
    lines = (line.strip() for line in str(cause).splitlines())
    words = _WORDS.get(kind) or next((line for line in lines if line), kind)
    return "".join(one if one.isprintable() else " " for one in words)[:LONGEST_REASON]


def _name(network: nn.Module, images: Tensor) -> str:
    """A network, or the part of it, and the batch, for people."""
    part = getattr(network, "present", ())
    whole = tuple(getattr(network, "stages", part))
    name = getattr(network, "name", type(network).__name__)
    shown = name if tuple(part) == whole else f"{name} ({', '.join(part)})"
    return f"{shown}, {' x '.join(str(side) for side in images.shape)}"
