"""SGD, Adam and AdamW: torch's own, in a process that compiles nothing.

At the first step torch's optimisers import the compiler (`torch._dynamo`, about two seconds) only to tell it to leave
them alone. Every command, worker and Ray actor would wait for that, and hardly a run compiles anything. Those here
take the same steps: `inspect.unwrap` gives the functions that torch's decorators hold. `torch.compile` works as ever.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

#: numbers of four bytes that a GPU reads at once
ALIGNED = 4


def _step_of(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    step = inspect.unwrap(kind.step)

    @functools.wraps(step)
    def take_step(self: torch.optim.Optimizer, closure: Callable[[], float] | None = None) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, closure)

    return take_step


class _Plain(torch.optim.Optimizer):
    """What torch's decorators make import the compiler, without them."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


def zero_moments(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Give a fresh SGD or Adam the state that its first step would make, as parts of one block of zeros: on a GPU that
    is one kernel and not three for each parameter. The block, which makes the optimiser fresh again where it is filled
    with zeros. SGD's first step then adds the gradient to zero momentum, which is what it does without a state."""
    given = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    adam = isinstance(optimizer, torch.optim.Adam)
    names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    sizes = [-(-one.numel() // ALIGNED) * ALIGNED for one in given]  # each begins where a GPU reads fastest
    block = torch.zeros(len(names) * sum(sizes) + ALIGNED * len(given) * adam, device=given[0].device)
    place = 0
    for one, size in zip(given, sizes, strict=True):
        if adam:
            optimizer.state[one]["step"] = block[place]
            place += ALIGNED
        for name in names:
            optimizer.state[one][name] = block.as_strided(one.shape, one.stride(), place)
            place += size
    return block


def moments_fit(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether `zero_moments` knows the state of these: float32, without gaps in memory."""
    known = all(one.dtype == torch.float32 and _is_one_block(one) for one in parameters)
    return known and any(one.requires_grad for one in parameters)


def _is_one_block(one: torch.Tensor) -> bool:
    return one.is_contiguous() or (one.dim() == 4 and one.is_contiguous(memory_format=torch.channels_last))


class SGD(_Plain, torch.optim.SGD):
    step = _step_of(torch.optim.SGD)


class Adam(_Plain, torch.optim.Adam):
    step = _step_of(torch.optim.Adam)


class AdamW(_Plain, torch.optim.AdamW):
    step = _step_of(torch.optim.AdamW)
