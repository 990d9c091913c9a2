"""How weights (`engine.wire`), images, codes and latents travel in fewer bytes, and what a receiver makes of them.

`fp16` and `int8` round: each tensor (int8: each row of it) has a scale of its own, so that nothing overflows. `delta`
loses nothing: the bits that differ from a tensor that both ends have, which are few while training moves slowly.
All of them are compressed. Whoever unpacks knows from the declared shape how many bytes may come, before any do.

Images are compressed without loss (WebP), many of them in one strip: against a file for each image that saves headers,
and lets small images share their statistics. Codes take ceil(log2 K) bits each.
"""

import io
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from polyclinic.errors import BadInput

Encoding = Literal["exact", "fp16", "int8", "delta"]
#: encodings of which the receiver gets other numbers than were sent
ROUNDING = frozenset({"fp16", "int8"})


#: kinds whose numbers may travel so; sums, scores, codes and keys stay as they are
SHORTENED = frozenset({"weights", "gradients", "activations", "latents", "generator"})
#: tensors of fewer numbers travel as they are: biases and statistics of norms, in which small errors matter
SMALLEST = 1024
#: tensors with larger numbers, or with NaN, travel as they are: a scale of them would overflow
MOST = 2**40  #: numbers along a side of a tensor
LARGEST = 1e38
#: quick compression: what is left to gain is small, and a wire is often faster than a thorough one
LEVEL = 1

#: a parcel becomes no more bytes than so many times its own, or than there is always room for: it is read before one
#: knows whether it was expected. A sender leaves as it lies what would become more than that
EXPANDS = 64
ROOM = 2**26

_TYPES = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}


class NotOnWire(Exception):  # noqa: N818
    """Bytes that are not what their description says."""


def pack(
    tensors: Mapping[str, Tensor], encoding: Encoding, base: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that travel in fewer bytes, as bytes, and what a receiver must know of each: type and shape."""
    blobs, told = {}, {}
    ample = encoding == "delta" or sum(tensor.nbytes for tensor in tensors.values()) <= ROOM
    for name, tensor in tensors.items():
        known = base.get(name)
        if not _is_eligible(tensor, encoding, known):
            continue
        plain = tensor.detach().cpu().contiguous()
        if (
            encoding == "delta" and known is not None
        ):  # the bits that differ, the same byte of all numbers together: the
            raw = np.ascontiguousarray((_bits(plain) ^ _bits(known)).T).tobytes()  # first ones are mostly zero
        else:
            raw = _rounded(plain, encoding)
        blob = zlib.compress(raw, LEVEL)
        if not ample and plain.nbytes > EXPANDS * len(blob):
            continue
        blobs[name] = torch.from_numpy(np.frombuffer(blob, np.uint8).copy())
        told[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    return blobs, told


def unpack(
    blobs: Mapping[str, Tensor], described: Any, limit: int, base: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """The tensors that were packed; NotOnWire for anything that is not as described, or above `limit` bytes in all."""
    encoding, told = _checked(described, blobs)
    sizes = {name: _raw_size(encoding, _TYPES[one["dtype"]], one["shape"]) for name, one in told.items()}
    unpacked = sum(math.prod(one["shape"]) * _TYPES[one["dtype"]].itemsize for one in told.values())
    if max(unpacked, sum(sizes.values())) > limit:
        raise NotOnWire(f"{unpacked} bytes are declared, and the limit is {limit}")
    for name, one in told.items() if encoding == "delta" else ():  # before a byte is decompressed
        known = (base or {}).get(name)
        if known is None or known.dtype != _TYPES[one["dtype"]] or list(known.shape) != one["shape"]:
            raise NotOnWire(f"tensor '{name}' is a difference to one that the receiver does not have")
    found = {}
    for name, one in told.items():
        raw = _inflated(blobs[name], sizes[name])
        dtype, shape = _TYPES[one["dtype"]], tuple(one["shape"])
        if encoding == "delta":
            differing = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1).T
            flat = np.ascontiguousarray(differing ^ _bits((base or {})[name])).reshape(-1)
            found[name] = torch.from_numpy(flat).view(dtype).reshape(shape)
        else:
            found[name] = _unrounded(raw, encoding, shape)
    return found


def _is_eligible(tensor: Tensor, encoding: str, known: Tensor | None) -> bool:
    if tensor.numel() < SMALLEST:
        return False
    if encoding == "delta":
        same = known is not None and known.dtype == tensor.dtype and known.shape == tensor.shape
        return same and str(tensor.dtype).removeprefix("torch.") in _TYPES
    return tensor.dtype == torch.float32 and float(tensor.abs().max()) < LARGEST  # not for NaN, either


def _checked(described: Any, blobs: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    if not isinstance(described, dict) or described.get("encoding") not in ("fp16", "int8", "delta"):
        raise NotOnWire("its encoding is unknown")
    told = described.get("tensors")
    if not isinstance(told, dict) or not all(_is_described(one) for one in told.values()):
        raise NotOnWire("its tensors must come with types and shapes")
    if not all(name in blobs and blobs[name].dtype == torch.uint8 and blobs[name].dim() == 1 for name in told):
        raise NotOnWire("a tensor that it describes is not there as bytes")
    if described["encoding"] != "delta" and any(one["dtype"] != "float32" for one in told.values()):
        raise NotOnWire("only float32 is rounded")
    return described["encoding"], told


def _is_described(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("dtype"), str) or one["dtype"] not in _TYPES:
        return False
    shape = one.get("shape")
    return isinstance(shape, list) and len(shape) <= 8 and all(type(side) is int and 0 < side <= MOST for side in shape)


def _raw_size(encoding: str, dtype: torch.dtype, shape: list[int]) -> int:
    numbers = math.prod(shape)
    if encoding == "fp16":
        return 4 + 2 * numbers
    return 4 * _rows(shape) + numbers if encoding == "int8" else dtype.itemsize * numbers


def _rows(shape: list[int] | tuple[int, ...]) -> int:
    """Scales of an int8 tensor: one for each row of a matrix or kernel, one for a vector."""
    return shape[0] if len(shape) > 1 else 1


def _inflated(blob: Tensor, size: int) -> bytes:
    """The bytes that were compressed; NotOnWire unless they are exactly `size`, and never more in memory."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(blob.numpy().tobytes(), size + 1)
    except zlib.error as error:
        raise NotOnWire(f"its bytes cannot be decompressed ({error})") from None
    if len(raw) != size or not inflater.eof or inflater.unused_data:
        raise NotOnWire(f"other bytes came than the {size} that it declares")
    return raw


# --- rounding -----------------------------------------------------------------------------------------


def _rounded(tensor: Tensor, encoding: str) -> bytes:
    """Scales, then codes; those of fp16 with their first bytes together, which are alike."""
    if encoding == "fp16":
        scale = _never_zero(tensor.abs().max().reshape(1))
        halves = (tensor / scale).half().numpy().view(np.uint8).reshape(-1, 2)
        return scale.numpy().tobytes() + np.ascontiguousarray(halves.T).tobytes()
    rows = tensor.reshape(_rows(tensor.shape), -1)
    steps = _never_zero(rows.abs().amax(1, keepdim=True) / 127)
    codes = (rows / steps).round().clamp(-127, 127).to(torch.int8)
    return steps.numpy().tobytes() + codes.numpy().tobytes()


def _never_zero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _unrounded(raw: bytes, encoding: str, shape: tuple[int, ...]) -> Tensor:
    count = 1 if encoding == "fp16" else _rows(shape)
    scales = torch.from_numpy(np.frombuffer(raw, np.float32, count).copy())
    if not bool(torch.isfinite(scales).all()) or bool((scales <= 0).any()):
        raise NotOnWire("a scale is not a number above zero")
    codes = np.frombuffer(raw, np.uint8, offset=4 * count)
    if encoding == "fp16":
        halves = np.ascontiguousarray(codes.reshape(2, -1).T).view(np.float16)
        return (torch.from_numpy(halves).float() * scales).reshape(shape)
    rows = torch.from_numpy(codes.view(np.int8).copy()).float().reshape(count, -1)
    return (rows * scales[:, None]).reshape(shape)


# --- differences --------------------------------------------------------------------------------------


def _bits(tensor: Tensor) -> np.ndarray:
    """The bytes of each number: [numbers, bytes of one]."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().reshape(-1, tensor.element_size())


LONGEST = 16383  # px, the longest side of a WebP picture
#: bytes before each strip that say how long it is
PREFIX = 4
#: beyond half of the effort sizes hardly shrink (2 % for radiographs), and time doubles
EFFORT = {"method": 3, "quality": 50}


class NotPictures(Exception):  # noqa: N818
    """Bytes that are not the pictures they were said to be."""


def can_pack_images(images: Tensor) -> bool:
    """Whether these are images that `pack_images` takes: uint8 [N, 1 or 3, H, W] with sides of at most 16,383 px."""
    return images.dtype == torch.uint8 and images.dim() == 4 and images.shape[1] in (1, 3) and _fits(images.shape)


def pack_images(images: Tensor) -> Tensor:
    """Images uint8 [N, C, H, W] as bytes, uint8 [B]."""
    pixels = images.cpu().permute(0, 2, 3, 1).contiguous().numpy()
    count, height, width, channels = pixels.shape
    data = bytearray()
    for start in range(0, count, _in_strip(height)):
        rows = pixels[start : start + _in_strip(height)].reshape(-1, width, channels)
        buffer = io.BytesIO()
        Image.fromarray(rows.squeeze(-1) if channels == 1 else rows).save(buffer, "WEBP", lossless=True, **EFFORT)
        data += len(buffer.getvalue()).to_bytes(PREFIX, "little") + buffer.getvalue()
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def unpack_images(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """What `pack_images` was given, uint8 of this shape; NotPictures where the bytes are something else."""
    if len(shape) != 4 or min(shape) < 0 or shape[1] not in (1, 3) or not _fits(shape) or packed.dtype != torch.uint8:
        raise NotPictures(f"images of shape {list(shape)} cannot be in there")
    count, channels, height, width = shape
    data, at, strips = packed.cpu().numpy().tobytes(), 0, []
    for start in range(0, count, _in_strip(height)):
        length = int.from_bytes(data[at : at + PREFIX], "little")
        strip = data[at + PREFIX : at + PREFIX + length]
        wanted = (width, height * min(_in_strip(height), count - start))
        strips.append(_pixels(strip, wanted, channels).reshape(-1, height, width, channels))
        at += PREFIX + length
    if at != len(data):
        raise NotPictures("there are more bytes than pictures")
    pixels = np.concatenate(strips) if strips else np.zeros((0, height, width, channels), np.uint8)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def unpack_all_images(tensors: dict[str, Tensor], shapes: object, limit: int) -> dict[str, Tensor]:
    """The tensors, with those that are images as they were; NotPictures for others, or for more than `limit` bytes."""
    if not isinstance(shapes, dict) or not all(
        isinstance(shape, list) and len(shape) == 4 and all(type(side) is int and side >= 0 for side in shape)
        for shape in shapes.values()
    ):
        raise NotPictures("compressed images must come with their shapes")
    size = sum(math.prod(shape) for shape in shapes.values())
    if size > limit:
        raise NotPictures(f"{size} bytes of images are above the limit of {limit}")
    return {**tensors, **{name: unpack_images(tensors[name], shape) for name, shape in shapes.items()}}


def _pixels(data: bytes, size: tuple[int, int], channels: int) -> np.ndarray:
    """One strip; its size is compared before its pixels are read, so that no small file makes large memory."""
    try:
        with Image.open(io.BytesIO(data), formats=["WEBP"]) as picture:
            if picture.size != size:
                raise NotPictures(f"a strip of {picture.size} px came where {size} was expected")
            return np.asarray(picture.convert("RGB"))[:, :, :channels]
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise NotPictures(f"a strip cannot be read: {error}") from error


def _in_strip(height: int) -> int:
    """Images of this height in one strip; at least one, as no image is higher than `LONGEST`."""
    return LONGEST // height


def _fits(shape: Sequence[int]) -> bool:
    return 0 < shape[2] <= LONGEST and 0 < shape[3] <= LONGEST


#: discrete codes of N images by level, each int16 [N, h, w]
Codes = Mapping[str, Tensor]
Precision = Literal["fp32", "fp16", "int8"]

CHUNK = 2**18  # codes packed at a time, a multiple of 8; in between, each of their bits takes a byte
LARGEST_FP16 = 65504.0


# --- codes ----------------------------------------------------------------------------------------------


def bits_for(size: int) -> int:
    """Bits that tell `size` codes apart."""
    return max(1, (size - 1).bit_length())


def pack_codes(codes: Tensor, size: int) -> Tensor:
    """Codes of any shape, each in 0 .. size - 1, as uint8 [ceil(numbers * bits / 8)]: the lowest bit comes first."""
    flat = codes.flatten().cpu().numpy().astype(np.int64)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < size:
        raise BadInput(f"codes: they run from {flat.min()} to {flat.max()}, but the codebook has {size}")
    places = np.arange(bits_for(size))
    pieces = [np.packbits((flat[at : at + CHUNK, None] >> places) & 1, axis=None) for at in range(0, flat.size, CHUNK)]
    return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros(0, np.uint8))


def unpack_codes(packed: Tensor, size: int, shape: tuple[int, ...]) -> Tensor:
    """What `pack_codes` packed, int16 of the shape it had; BadInput where the bytes are not that many codes."""
    bits, numbers = bits_for(size), int(np.prod(shape))
    if packed.dtype != torch.uint8 or tuple(packed.shape) != (-(-numbers * bits // 8),):
        raise BadInput(f"codes: {packed.numel()} bytes are not {numbers} codes of {bits} bits; pack them again")
    data, piece = packed.cpu().numpy(), CHUNK * bits // 8
    codes = []
    for at in range(0, len(data), piece):
        ones = np.unpackbits(data[at : at + piece])
        whole = ones[: len(ones) // bits * bits].reshape(-1, bits).astype(np.int32)
        codes.append((whole << np.arange(bits, dtype=np.int32)).sum(1).astype(np.int16))
    flat = np.concatenate(codes)[:numbers] if codes else np.zeros(0, np.int16)
    if flat.size and int(flat.max()) >= size:
        raise BadInput(f"codes: the bytes hold code {flat.max()}, but the codebook has {size}; pack them again")
    return torch.from_numpy(flat).reshape(shape)


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
