"""SGD, Adam and AdamW: torch's own, in a process that compiles nothing.

At the first step torch's optimisers import the compiler (`torch._dynamo`, about two seconds) only to tell it to leave
them alone. Every command, worker and Ray actor would wait for that, and hardly a run compiles anything. Those here
take the same steps: `inspect.unwrap` gives the functions that torch's decorators hold. `torch.compile` works as ever.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


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


class SGD(_Plain, torch.optim.SGD):
    step = _step_of(torch.optim.SGD)


class Adam(_Plain, torch.optim.Adam):
    step = _step_of(torch.optim.Adam)


class AdamW(_Plain, torch.optim.AdamW):
    step = _step_of(torch.optim.AdamW)
