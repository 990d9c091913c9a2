"""Lossless compression of images in a parcel (WebP), many images in one strip.

Against a file for each image a strip saves their headers, and lets small images share their statistics.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

LONGEST = 16383  # px, the longest side of a WebP picture
#: bytes before each strip that say how long it is
PREFIX = 4
#: beyond half of the effort sizes hardly shrink (2 % for radiographs), and time doubles
EFFORT = {"method": 3, "quality": 50}


class NotPictures(Exception):  # noqa: N818
    """Bytes that are not the pictures they were said to be."""


def can_pack(images: Tensor) -> bool:
    """Whether these are images that `pack` takes: uint8 [N, 1 or 3, H, W] with sides of at most 16,383 px."""
    return images.dtype == torch.uint8 and images.dim() == 4 and images.shape[1] in (1, 3) and _fits(images.shape)


def pack(images: Tensor) -> Tensor:
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


def unpack(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """What `pack` was given, uint8 of this shape; NotPictures where the bytes are something else."""
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
