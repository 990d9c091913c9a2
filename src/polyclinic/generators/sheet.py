"""A contact sheet: real, reconstructed and sampled images in rows, one above the other, for a human to look at."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from polyclinic.errors import BadInput

INCH = 1.1  # side of an image on the sheet
LETTERS = 14  # of a row's name that fit beside an image


def contact_sheet(rows: Mapping[str, Tensor], path: Path, captions: Sequence[str] = ()) -> None:
    """Write a picture with a row for each entry of `rows` (uint8 [N, C, H, W], C 1 or 3) under its name.

    Columns belong together: an image, below it its reconstruction, below it a sample with its label. `captions`
    are written above the columns.
    """
    columns = max((len(images) for images in rows.values()), default=0)
    if not columns:
        raise BadInput("sheet: there are no images to show")
    figure = Figure(figsize=(INCH * columns + 1.0, INCH * len(rows) + 0.4), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, (name, images) in zip(axes, rows.items(), strict=True):
        for column, axis in enumerate(row):
            axis.set_xticks([])
            axis.set_yticks([])
            axis.set_frame_on(False)
            if column < len(images):
                axis.imshow(_picture(images[column]), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        row[0].set_ylabel(textwrap.fill(name, LETTERS, break_long_words=False), fontsize=9)
    for axis, caption in zip(axes[0], captions, strict=False):
        axis.set_title(caption, fontsize=8)
    figure.savefig(path, dpi=110)


def _picture(image: Tensor):
    return image[0].numpy() if len(image) == 1 else image.movedim(0, -1).numpy()
