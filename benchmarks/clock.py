"""The clock of benchmarks: a GPU is asked for its work long before it has done it, so the clock waits for it."""

from __future__ import annotations

import time

import torch


def now() -> float:
    """Seconds, when all work that a GPU was asked for is done; as `time.perf_counter` where there is none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
