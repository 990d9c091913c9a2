"""Pixels: bounds on what image files may declare; crop, resize and colour to a square uint8 image; Graham's fundus.

Bounds are checked by the sizes that a file declares, before anything is decoded: a few kilobytes can declare an image
of gigabytes.
"""

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
from PIL import Image, ImageFile

if TYPE_CHECKING:
    from torch import Tensor  # an exported model's preparation works without torch

#: pixels of one image, or of one slice of a volume: 8192 x 8192
MOST_PIXELS = 2**26
#: a volume may have so many times the pixels of the largest image
VOLUME = 8
#: what pictures may be inside, whatever their name; Pillow knows others that start programs, or unpack much
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM", "JPEG2000")
#: bytes that come before the pixels of a file, once they are unpacked
MOST_HEADER = 2**23
#: pixels of a tile of a picture that is smaller than its tile, and tiles of one picture: a decoder makes room for both
MOST_OF_A_TILE, MOST_TILES = 2**22, 2**12
MOST_VALUES = 20  #: different values of a mask that are structures; more are soft edges
SOFT = 0.25  #: share of a mask's pixels between its lowest and its highest value, up to which these are soft edges


def check_pixels(width: int, height: int, most: int, slices: int = 1) -> None:
    """ValueError for an image that declares more pixels than the study allows, or a volume eight times as many."""
    pixels = width * height
    if pixels > most:
        raise ValueError(f"the image has {width} x {height} pixels, above the limit of {most}; raise data.max_pixels")
    if pixels * slices > VOLUME * most:
        raise ValueError(
            f"the volume has {width} x {height} x {slices} voxels, above the limit of {VOLUME} x {most}; "
            "raise data.max_pixels"
        )


def check_picture(picture: ImageFile.ImageFile, most: int) -> None:
    """ValueError for a picture that declares more pixels than the study allows, or tiles that take far more memory: a
    TIFF of 64 x 64 pixels may have one tile of a gigabyte, a JPEG 2000 of 151 bytes 65,535 tiles."""
    check_pixels(*picture.size, most)
    tags = getattr(picture, "tag_v2", {})
    wide, high = int(tags.get(322) or 0), int(tags.get(323) or 0)
    if wide * high > max(picture.width * picture.height, MOST_OF_A_TILE):
        raise ValueError(f"its tiles have {wide} x {high} pixels, more than the image; export it again")
    if picture.format != "JPEG2000" or not picture.fp:
        return
    place = picture.fp.tell()
    picture.fp.seek(0)
    content = picture.fp.read()
    picture.fp.seek(place)
    for found in re.finditer(rb"\xff\x4f\xff\x51", content):
        size = struct.unpack_from(">8I", content[found.end() + 4 : found.end() + 36].ljust(32, b"\0"))
        (wide, high), tile = (size[0] - size[2], size[1] - size[3]), size[4:6]
        if (tiles := -(-wide // max(tile[0], 1)) * -(-high // max(tile[1], 1))) > MOST_TILES:
            raise ValueError(f"it declares {tiles} tiles, above the limit of {MOST_TILES}; export it again")


@overload
def to_uint8(values: np.ndarray) -> np.ndarray: ...


@overload
def to_uint8(values: "Tensor") -> "Tensor": ...


def to_uint8(values: "np.ndarray | Tensor") -> "np.ndarray | Tensor":
    """Intensities in [0, 1] times 255, rounded; what lies outside is clipped. A tensor comes back on the CPU.

    Halves are rounded up in arrays (images that are read or drawn), and to even in tensors (images that a network
    makes). Results of both are recorded to the last bit, so both rules stay.
    """
    if isinstance(values, np.ndarray | np.generic):
        return (np.clip(values, 0, 1) * 255 + 0.5).astype(np.uint8)
    return values.float().clamp(0, 1).mul(255).round().byte().contiguous().cpu()


# --- fit ----------------------------------------------------------------------------------------------------


Shape = Literal["squash", "pad", "crop"]
Channels = Literal["auto", 1, 3]


@dataclass(frozen=True)
class Fit:
    """Side in pixels, what to do with oblong images, and how many channels to make."""

    size: int
    shape: Shape = "squash"
    channels: Channels = "auto"


def fit_image(pixels: np.ndarray, fit: Fit, channels: int) -> np.ndarray:
    """uint8 [H, W] or [H, W, 3] to uint8 [channels, size, size]."""
    pixels = make_square(_check(pixels), fit.shape)
    picture = Image.fromarray(np.ascontiguousarray(pixels)).convert("L" if channels == 1 else "RGB")
    if picture.size != (fit.size, fit.size):
        picture = picture.resize((fit.size, fit.size), Image.Resampling.BICUBIC)
    array = np.asarray(picture)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def fit_mask(mask: np.ndarray, fit: Fit) -> np.ndarray:
    """[H, W] to uint8 [size, size] of 0/1: a pixel is inside when most of what it covers is."""
    check_mask(mask)
    inside = make_square((mask > 0).astype(np.uint8) * 255, fit.shape)
    picture = Image.fromarray(inside)
    if picture.size != (fit.size, fit.size):
        picture = picture.resize((fit.size, fit.size), Image.Resampling.BOX)
    return (np.asarray(picture) >= 128).astype(np.uint8)


def check_mask(mask: np.ndarray) -> None:
    """ValueError for a mask of another form, or of several structures."""
    if mask.ndim != 2:
        raise ValueError(f"a mask must be [H, W], not {mask.shape}")
    if several := structures(mask):
        raise ValueError(
            f"its mask has the values {several}, which are several structures, and one is learnt: save masks of "
            "the one that you want, or of all together, as 0 and 1"
        )


def structures(mask: np.ndarray) -> str:
    """The values of a mask of several structures, in words; nothing for a mask of one, whose edges may be soft."""
    values, counts = np.unique(mask[mask > 0], return_counts=True)
    if not 2 <= len(values) <= MOST_VALUES:
        return ""
    low, high = float(values[0]), float(values[-1])
    between = (values > 0.1 * high) & (values < 0.9 * high)
    are_numbers = high <= MOST_VALUES and bool((values == np.rint(values)).all()) and low >= 1
    if not are_numbers and counts[between].sum() < SOFT * counts.sum():
        return ""
    shown = [f"{value:g}" for value in values[:6].tolist()]
    return ", ".join([*shown, *(["..."] if len(values) > 6 else [])])


def make_square(pixels: np.ndarray, shape: Shape) -> np.ndarray:
    """Pads with zeros around the centre, or crops to it; "squash" leaves the sides to the resizing."""
    height, width = pixels.shape[:2]
    if shape == "squash" or height == width:
        return pixels
    if shape == "crop":
        return crop_centre(pixels, min(height, width))
    side = max(height, width)
    above, left = (side - height) // 2, (side - width) // 2
    around = [(above, side - height - above), (left, side - width - left), (0, 0)]
    return np.pad(pixels, around[: pixels.ndim])


def crop_centre(pixels: np.ndarray, side: int) -> np.ndarray:
    """The central square of `side` pixels, or the whole of an edge that is shorter."""
    above, left = ((max(edge - side, 0)) // 2 for edge in pixels.shape[:2])
    return pixels[above : above + side, left : left + side]


def is_colour(pixels: np.ndarray) -> bool:
    """True where the three channels differ; many grey radiographs are stored as colour."""
    return pixels.ndim == 3 and bool((pixels[..., :1] != pixels).any())


def _check(pixels: np.ndarray) -> np.ndarray:
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ValueError(f"pixels must be uint8 [H, W] or [H, W, 3], not {pixels.dtype} {pixels.shape}")
    if 0 in pixels.shape:
        raise ValueError("the image is empty")
    return pixels


# --- Graham's preprocessing -----------------------------------------------------------------------------------


RADIUS = 300  # of the eye in pixels, as Graham has it
KEPT = 0.9  # of the radius: the rim of the eye, where the local average is of black, is cut away
GREY = 128  # what an eye without detail becomes


def graham(pixels: np.ndarray) -> np.ndarray:
    """uint8 [H, W, 3] to uint8 [540, 540, 3].

    The eye is brought to a radius of 300 pixels, its local average colour is taken away (and what is left made four
    times stronger, around grey), and the rim is cropped.
    """
    from scipy.ndimage import gaussian_filter  # here: every process of a run would pay for it

    eye = scale_radius(pixels).astype(np.float32)
    average = gaussian_filter(eye, sigma=(RADIUS / 30, RADIUS / 30, 0), truncate=3)
    detail = np.clip(4 * (eye - average) + GREY, 0, 255)
    return _inner_disc(detail + 0.5).astype(np.uint8)


def scale_radius(pixels: np.ndarray) -> np.ndarray:
    """The image resized so that the eye, as its middle row shows it, has a radius of 300 pixels."""
    if pixels.ndim != 3:
        raise ValueError("a fundus photograph must have colour")
    bright = pixels[pixels.shape[0] // 2].sum(axis=1, dtype=np.int64)
    radius = int((bright > bright.mean() / 10).sum()) / 2
    if radius == 0:
        raise ValueError("the middle row of the image is black: there is no eye")
    factor = RADIUS / radius
    height, width = (max(1, round(edge * factor)) for edge in pixels.shape[:2])
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def _inner_disc(image: np.ndarray) -> np.ndarray:
    """The square around the centre that holds 90 % of the eye's radius, grey outside that disc."""
    reach = round(RADIUS * KEPT)
    out = np.full((2 * reach, 2 * reach, 3), GREY, dtype=image.dtype)
    height, width = (min(edge, 2 * reach) for edge in image.shape[:2])
    top, left = ((edge - size) // 2 for edge, size in zip(image.shape[:2], (height, width), strict=True))
    above, before = (2 * reach - height) // 2, (2 * reach - width) // 2
    out[above : above + height, before : before + width] = image[top : top + height, left : left + width]
    at = np.arange(2 * reach) - reach + 0.5
    outside = at[:, None] ** 2 + at[None, :] ** 2 > reach**2
    out[outside] = GREY
    return out
