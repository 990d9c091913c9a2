"""Every random draw has an address: (study seed, site, purpose, round, ...), and every address its own stream.

Nothing draws from global state, so the order in which sites work, the engine that carries them and an
interrupted run do not change a result. Generators are seeded here and nowhere else: torch's on the CPU (mt19937)
takes 32 bits of a seed only, and of some 65,000 such seeds two are likely the same, so its whole state is set.
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch  # takes seconds: imported where it draws

#: what torch tells of a generator on the CPU: the seed, two int32 (numbers left before the words are mixed again;
#: whether it is seeded), the next word's place, the words of mt19937 as uint64 each, and normal numbers kept for later
STATE_BYTES = 5056
WORDS = 624
SEED_AT, WORDS_AT = 0, 24


def seed_of(*address: str | int) -> int:
    """A 63-bit seed, the same on every machine, for the given address."""
    return int.from_bytes(hashlib.sha256(_text(*address)).digest()[:8], "big") >> 1


def torch_rng(*address: str | int) -> "torch.Generator":
    """A fresh CPU generator of torch for the given address."""
    import torch

    return seed_generator(torch.Generator(), *address)


def device_rng(device: "torch.device", *address: str | int) -> "torch.Generator":
    """A fresh generator of torch for the given address, which draws on the device."""
    import torch

    return seed_generator(torch.Generator(device), *address)


def numpy_rng(*address: str | int) -> np.random.Generator:
    """A fresh generator of NumPy for the given address."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(_text(*address)).digest(), "big")))


def seed_generator(generator: "torch.Generator", *address: str | int) -> "torch.Generator":
    """The same generator, at the beginning of the stream of the given address. A GPU's takes the 63-bit seed."""
    if generator.device.type == "cpu":
        return generator.set_state(_cpu_state(*address))
    return generator.manual_seed(seed_of(*address))


@contextlib.contextmanager
def seeded(*address: str | int, gpus: "Sequence[torch.device | int]" = ()) -> Iterator[None]:
    """A while in which draws from torch's global state, on the CPU and these GPUs, are those of the given address.

    For what can draw from there only, as dropout and new layers do. The global state is put back afterwards; that of
    other GPUs is not touched.
    """
    import torch

    before = torch.default_generator.get_state()
    try:
        seed_generator(torch.default_generator, *address)
        with _seeded_gpus(gpus, *address) if gpus else contextlib.nullcontext():
            yield
    finally:
        torch.default_generator.set_state(before)


@contextlib.contextmanager
def _seeded_gpus(gpus: "Sequence[torch.device | int]", *address: str | int) -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=list(gpus)):
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed_of(*address))
        yield


def _text(*address: str | int) -> bytes:
    return "\x1f".join([f"{type(part).__name__}:{part}" for part in address]).encode()


def _cpu_state(*address: str | int) -> "torch.Tensor":
    """The state of a CPU generator at the beginning of its stream: all words of mt19937 come from the address."""
    import torch

    state = _fresh_state().copy()
    words = np.frombuffer(hashlib.shake_256(_text(*address)).digest(4 * WORDS), "<u4")
    state[SEED_AT : SEED_AT + 8].view(np.uint64)[:] = seed_of(*address)
    state[WORDS_AT : WORDS_AT + 8 * WORDS].view(np.uint64)[:] = words
    return torch.from_numpy(state)


@functools.cache
def _fresh_state() -> np.ndarray:
    """The state of a generator that has drawn nothing yet, uint8 [5056]."""
    import torch

    state = torch.Generator().manual_seed(0).get_state().numpy()
    if state.shape != (STATE_BYTES,):
        raise RuntimeError(
            f"torch {torch.__version__} keeps the state of a generator in {state.size} bytes instead of {STATE_BYTES}; "
            "install a version of torch that polyclinic names in its dependencies"
        )
    return state
