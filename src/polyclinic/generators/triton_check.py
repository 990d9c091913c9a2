"""Whether kernels written in Triton can be compiled and run on a device. PyTorch for NVIDIA's GPUs brings Triton along.

Without it, or without the C compiler that it needs, whoever has such kernels computes in another way.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

import torch

FOUND = importlib.util.find_spec("triton") is not None


@functools.cache
def kernels_work(device: torch.device) -> bool:
    """Tried once in a process, with a small kernel."""
    if not FOUND or device.type != "cuda":
        return False
    try:
        from polyclinic.generators.vqvae2 import triton_kernels

        rows = torch.eye(16, device=device)
        return bool((triton_kernels.nearest(rows, rows, rows.sum(1)) == torch.arange(16, device=device)).all())
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(f"generator: trains without fused kernels, more slowly: {error}", stacklevel=2)
        return False
