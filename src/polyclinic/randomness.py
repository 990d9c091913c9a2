"""Every random draw has an address: (study seed, site, purpose, round, ...).

Nothing draws from global state, so the order in which sites work, the engine that carries them and an
interrupted run do not change a result.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def seed_of(*address: str | int) -> int:
    """A 63-bit seed, the same on every machine, for the given address."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in address)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def torch_rng(*address: str | int) -> torch.Generator:
    """A fresh CPU generator of torch for the given address."""
    return torch.Generator().manual_seed(seed_of(*address))


def numpy_rng(*address: str | int) -> np.random.Generator:
    """A fresh generator of NumPy for the given address."""
    return np.random.Generator(np.random.PCG64(seed_of(*address)))
