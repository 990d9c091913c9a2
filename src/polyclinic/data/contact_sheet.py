"""Contact sheets: rows of images, one above the other, for a human to look at."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.extras import is_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE = 112  # of a small image on the sheet, in pixels, or as near as its own pixels can be repeated
TEXT = 14  # pixels: the height of the letters
MARGIN = 9  # for the names of rows, in heights of letters
LETTERS = 14  # of a row's name that fit beside an image
CAPTION = 13  # letters of a caption that fit above an image
LETTER = 9  # pixels that a letter is wide, at most but for a few
LINE = 18  # pixels from one line of text to the next
NARROWEST = 480  # pixels that a sheet with a title is wide, at least
#: the colour map of that name at even steps, so that codes can be drawn without matplotlib
VIRIDIS = ((68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140), (40, 174, 128), (94, 201, 98),
           (173, 220, 48), (253, 231, 37))  # fmt: skip
GAP = 2  # white pixels between images

#: uint8 [N, C, H, W], C 1 or 3
Images = Tensor | np.ndarray


def mosaic(rows: Sequence[Images], gap: int = GAP) -> np.ndarray:
    """Rows of images of one size as one white picture, uint8 [rows * (H + gap), columns * (W + gap), 3]."""
    height, width = rows[0].shape[-2:]
    columns = max(1, max(len(row) for row in rows))
    sheet = np.full((len(rows) * (height + gap), columns * (width + gap), 3), 255, dtype=np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            top, left = r * (height + gap), c * (width + gap)
            sheet[top : top + height, left : left + width] = np.moveaxis(np.asarray(image), 0, -1)
    return sheet


def coloured(codes: Tensor, count: int, size: int) -> Tensor:
    """Maps of codes 0 to `count` - 1, int [N, h, w], as uint8 images [N, 3, size, size]: a colour for each code."""
    places, shares = np.linspace(0, 1, len(VIRIDIS)), codes.numpy() / max(1, count - 1)
    colours = np.stack([np.interp(shares, places, channel) for channel in zip(*VIRIDIS, strict=True)], -1)
    maps = torch.from_numpy(np.moveaxis(colours.round().astype(np.uint8), -1, 1).copy())
    return F.interpolate(maps, size=(size, size), mode="nearest-exact")


def outlined(images: Images, masks: np.ndarray, colour: tuple[int, int, int] = (255, 190, 0)) -> np.ndarray:
    """Images uint8 [N, C, H, W] in colour, with the edge of their masks [N, H, W] drawn on them."""
    inside = np.asarray(masks).astype(bool)
    core = inside.copy()
    for axis in (1, 2):
        for step in (-1, 1):
            core &= np.roll(inside, step, axis)  # a mask that reaches the border has no edge there that matters
    drawn = np.broadcast_to(np.asarray(images), (len(images), 3, *inside.shape[1:])).copy()
    edge = inside & ~core
    for channel, value in enumerate(colour):
        drawn[:, channel][edge] = value
    return drawn


def draw_rows(axes: Axes, rows: Mapping[str, Images], captions: Sequence[str] = (), *, size: float = 9) -> None:
    """Draw rows of images into `axes` of matplotlib: names at the left, captions above the columns, in font `size`."""
    picture = mosaic(list(rows.values()))
    axes.imshow(picture, interpolation="antialiased")
    height, width = (side + GAP for side in next(iter(rows.values())).shape[-2:])
    names = [textwrap.fill(name, LETTERS, break_long_words=False) for name in rows]
    axes.set_yticks([(k + 0.5) * height for k in range(len(rows))], names, fontsize=size)
    words = [textwrap.fill(one, CAPTION, break_long_words=False) for one in captions]
    axes.set_xticks([(k + 0.5) * width for k in range(len(captions))], words, fontsize=size - 1)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_frame_on(False)


def label_words(labels: Sequence[float] | np.ndarray | Tensor, classes: Sequence[str], unit: str = "") -> list[str]:
    """The labels of images as captions: names of classes, or values in their unit."""
    known = dict(enumerate(classes))
    words = [known.get(number, f"{number:.4g} {unit}".strip()) for number in np.asarray(labels).tolist()]
    return [one if len(one) <= 2 * CAPTION else f"{one[: 2 * CAPTION - 1]}…" for one in words]


def contact_sheet(rows: Mapping[str, Images], path: Path, captions: Sequence[str] = (), title: str = "") -> None:
    """Write a picture with a row for each entry of `rows` under its name.

    Columns belong together: an image, below it its reconstruction, below it a sample with its label. `captions`
    are written above the columns. `title` says what is shown, of whom, and how many there are. Drawn with Pillow, as
    every site of a run may make one: matplotlib takes ten times as long.
    """
    if not any(len(images) for images in rows.values()):
        raise BadInput("sheet: there are no images to show")
    shown = [_enlarged(images) for images in rows.values()]
    pixels = mosaic(shown)
    height, width = (side + GAP for side in shown[0].shape[-2:])
    left = MARGIN * TEXT
    wide = max(left + pixels.shape[1], NARROWEST if title else 0)
    lines = textwrap.wrap(title, wide // LETTER)
    words = [_wrapped(one, max(CAPTION, width // LETTER)) for one in captions]
    above = TEXT // 2 + LINE * len(lines)
    top = above + LINE * max((one.count("\n") + 1 for one in words), default=0)
    sheet = Image.new("RGB", (wide, top + pixels.shape[0]), "white")
    sheet.paste(Image.fromarray(pixels), (left, top))
    pen, font = ImageDraw.Draw(sheet), _font(TEXT)
    pen.multiline_text((TEXT // 2, TEXT // 4), "\n".join(lines), fill="black", font=font)
    for k, name in enumerate(rows):
        place = (left - TEXT // 2, top + round((k + 0.5) * height))
        wrapped = textwrap.fill(name, LETTERS, break_long_words=False)
        pen.multiline_text(place, wrapped, fill="black", font=font, anchor="rm", align="right")
    for k, one in enumerate(words):
        place = (left + round((k + 0.5) * width), (above + top) // 2)
        pen.multiline_text(place, one, fill="black", font=font, anchor="mm", align="center")
    sheet.save(path, format="PNG")


def _wrapped(words: str, letters: int) -> str:
    """Lines of at most so many letters; those that are there stay."""
    return "\n".join(textwrap.fill(line, letters, break_long_words=False) for line in words.split("\n"))


def _enlarged(images: Images) -> Images:
    """Small images, their pixels repeated to about `SIDE`, so that one can look at them."""
    times = max(1, round(SIDE / max(images.shape[-2:])))
    return np.asarray(images).repeat(times, axis=-2).repeat(times, axis=-1)


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font of all our figures, which comes with matplotlib; without it Pillow's own, which lacks many letters."""
    if not is_installed("matplotlib"):
        return ImageFont.load_default(size)
    import matplotlib  # here: every process of a run would pay for it

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
