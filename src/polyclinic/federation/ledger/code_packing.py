"""Encoding of codes and latents: bit packing of codes at ceil(log2 K) bits each; latents as fp32, fp16 or int8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from polyclinic.errors import BadInput

#: discrete codes of N images by level, each int16 [N, h, w]
Codes = Mapping[str, Tensor]
Precision = Literal["fp32", "fp16", "int8"]

CHUNK = 2**18  # codes packed at a time, a multiple of 8; in between, each of their bits takes a byte
LARGEST_FP16 = 65504.0


# --- codes ----------------------------------------------------------------------------------------------


def bits_for(size: int) -> int:
    """Bits that tell `size` codes apart."""
    return max(1, (size - 1).bit_length())


def pack(codes: Tensor, size: int) -> Tensor:
    """Codes of any shape, each in 0 .. size - 1, as uint8 [ceil(numbers * bits / 8)]: the lowest bit comes first."""
    flat = codes.flatten().cpu().numpy().astype(np.int64)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < size:
        raise BadInput(f"codes: they run from {flat.min()} to {flat.max()}, but the codebook has {size}")
    places = np.arange(bits_for(size))
    pieces = [np.packbits((flat[at : at + CHUNK, None] >> places) & 1, axis=None) for at in range(0, flat.size, CHUNK)]
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros(0, np.uint8))


def unpack(packed: Tensor, size: int, shape: tuple[int, ...]) -> Tensor:
    """What `pack` packed, int16 of the shape it had; BadInput where the bytes are not that many codes."""
    bits, numbers = bits_for(size), int(np.prod(shape))
    if packed.dtype != torch.uint8 or tuple(packed.shape) != (-(-numbers * bits // 8),):
        raise BadInput(f"codes: {packed.numel()} bytes are not {numbers} codes of {bits} bits; pack them again")
    data, piece = packed.cpu().numpy(), CHUNK * bits // 8
    codes = [_codes_in(data[at : at + piece], bits) for at in range(0, len(data), piece)]
    flat = np.concatenate(codes)[:numbers] if codes else np.zeros(0, np.int16)
    if flat.size and int(flat.max()) >= size:
        raise BadInput(f"codes: the bytes hold code {flat.max()}, but the codebook has {size}; pack them again")
    return torch.from_numpy(flat).reshape(shape)


def _codes_in(data: np.ndarray, bits: int) -> np.ndarray:
    ones = np.unpackbits(data)
    whole = ones[: len(ones) // bits * bits].reshape(-1, bits).astype(np.int32)
    return (whole << np.arange(bits, dtype=np.int32)).sum(1).astype(np.int16)


# --- latents --------------------------------------------------------------------------------------------


def shrink(latents: Tensor, precision: Precision) -> dict[str, Tensor]:
    """Latents [N, C, ...] as tensors of a parcel.

    "int8" spreads 256 steps evenly between the smallest and the largest number of each channel, and adds those two
    (as `low` and `step`, float32 [C]): an error of at most half a step. "fp16" keeps 11 bits of each number.
    """
    latents = latents.detach().cpu().float()
    if not latents.isfinite().all():
        raise BadInput("latents: some are not finite; lower the learning rate of the network that made them")
    if precision == "fp32":
        return {"latents": latents.contiguous()}
    if precision == "fp16":
        return {"latents": latents.clamp(-LARGEST_FP16, LARGEST_FP16).half().contiguous()}
    low, high = (bound(latents.transpose(0, 1).flatten(1), 1).values for bound in (torch.min, torch.max))
    step = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).tiny)
    along = _along_channels(latents)
    spread = ((latents - along(low)) / along(step)).round() - 128
    return {"latents": spread.clamp(-128, 127).to(torch.int8).contiguous(), "low": low, "step": step}


def restore(tensors: Mapping[str, Tensor]) -> Tensor:
    """float32 latents from what `shrink` gave."""
    latents = tensors["latents"].float()
    if tensors["latents"].dtype != torch.int8:
        return latents
    along = _along_channels(latents)
    return (latents + 128) * along(tensors["step"]) + along(tensors["low"])


def _along_channels(latents: Tensor) -> Callable[[Tensor], Tensor]:
    shape = (-1, *[1] * (latents.dim() - 2))
    return lambda values: values.reshape(shape)
