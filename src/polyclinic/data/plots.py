"""Plot of a study's sites: label histograms, heterogeneity and sample images. Contact sheets: rows of images."""

import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from polyclinic.data.labels import pairwise_ks
from polyclinic.errors import BadInput
from polyclinic.extras import is_installed
from polyclinic.palette import FAINT, INK, LIGHT, heat_map, stacked_bars

if TYPE_CHECKING:  # where it is used: not everybody has it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 12  # sites shown with sample images, and named one by one
MOST_SAMPLES = 12
MOST_NAMED = 20  # classes that the legend names

#: a site's labels [n] and some of its images, uint8 [k, C, H, W]
Site = tuple[np.ndarray, np.ndarray]


def draw(
    sites: Mapping[str, Site],
    *,
    classes: Sequence[str] = (),
    unit: str = "",
    title: str = "",
    samples: str = "Training images",
) -> "Figure":
    """Counts per site and class (or the distribution of values in `unit`), pairwise KS, and sample images.

    `samples` says which images are shown. One site has nothing to differ from, and no panel about that; so have images
    of one class, as those with masks and no label.
    Save it with `figure.savefig(path, dpi=150)`; it belongs to no window and no global state.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    labels = {name: np.asarray(values) for name, (values, _) in sites.items()}
    rows = min(len(sites), MOST_ROWS)
    columns = min(MOST_SAMPLES, max(len(images) for _, images in sites.values()))
    above, below = max(2.6, 0.42 * rows + 1.4), rows * min(1.3, 10.8 / max(1, columns))
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(12, above + below + 1.2), facecolor="white", layout=layout)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.9, 1), height_ratios=(above, below))
    figure.suptitle(title or f"{len(sites)} sites", x=0.01, ha="left", fontsize=17, weight="bold", color=INK)
    differ = len(sites) > 1 and len(classes) != 1
    counts = figure.add_subplot(grid[0, 0] if differ else grid[0, :])
    if classes:
        _stacked_bars(counts, labels, classes)
    else:
        _ridges(counts, labels, unit)
    for side in ("top", "right", "left"):
        counts.spines[side].set_visible(False)
    counts.spines["bottom"].set_color(FAINT)
    counts.tick_params(colors=INK, length=0)
    if differ:
        _how_they_differ(figure.add_subplot(grid[0, 1]), labels)
    axes = figure.add_subplot(grid[1, :])
    draw_rows(axes, {name: images[:MOST_SAMPLES] for name, (_, images) in [*sites.items()][:MOST_ROWS]}, size=10)
    axes.set_anchor("W")
    axes.tick_params(colors=INK)
    some = f" (the first {rows} of {len(sites)} sites)" if len(sites) > rows else ""
    axes.set_title(samples + some, fontsize=12, color=INK, loc="left")
    return figure


def _stacked_bars(axes: "Axes", labels: Mapping[str, np.ndarray], classes: Sequence[str]) -> None:
    """A bar per site, from top to bottom in order, one colour per class, with its numbers."""
    counts = {name: np.bincount(values, minlength=len(classes)).tolist() for name, values in labels.items()}
    words = "training images of each class" if len(classes) > 1 else "training images"
    stacked_bars(axes, LIGHT, counts, classes, words)
    if len(counts) <= MOST_ROWS:
        longest, totals = max(map(sum, counts.values())), [f"{sum(own):,}" for own in counts.values()]
        for bars in axes.containers:
            shown = [f"{count:,.0f}" if count > 0.06 * longest else "" for count in bars.datavalues]  # type: ignore[attr-defined]
            dark = np.mean(bars[0].get_facecolor()[:3]) < 0.6
            axes.bar_label(bars, shown, label_type="center", fontsize=9, color="white" if dark else INK)  # type: ignore[arg-type]
        axes.bar_label(axes.containers[-1], totals, padding=3, fontsize=9, color=FAINT)  # type: ignore[arg-type]
    _name_rows(axes, list(labels))
    if (named := axes.get_legend()) and not 1 < len(classes) <= MOST_NAMED:
        named.remove()


def _ridges(axes: "Axes", labels: Mapping[str, np.ndarray], unit: str) -> None:
    """A histogram per site, one above the other, with the median marked and the count named."""
    from matplotlib import colormaps

    colours = colormaps["viridis"](np.linspace(0.15, 0.85, len(labels)))  # from dark to light
    everything = np.concatenate(list(labels.values()))
    edges = np.histogram_bin_edges(everything, bins=min(40, max(10, int(np.sqrt(len(everything))))))
    heights = [np.histogram(values, edges)[0] / max(1, len(values)) for values in labels.values()]
    tallest = max(height.max() for height in heights)
    for y, (values, height, colour) in enumerate(zip(labels.values(), heights, colours, strict=True)):
        base = len(labels) - 1 - y
        top = base + 0.92 * height / tallest
        axes.stairs(top, edges, baseline=base, fill=True, color=colour, alpha=0.9)
        axes.hlines(base, edges[0], edges[-1], color=FAINT, linewidth=0.6)
        if len(labels) <= MOST_ROWS and len(values):
            middle = float(np.median(values))
            axes.vlines(middle, base, base + 0.5, color=INK, linewidth=1.4)
            words = f"{len(values):,} images\nmedian {middle:.0f} {unit}".rstrip()
            axes.text(1.0, base + 0.12, words, fontsize=9, color=INK, transform=axes.get_yaxis_transform())
    _name_rows(axes, list(labels)[::-1], shift=0.2)
    axes.set_xlabel(unit or "label", color=INK)


def _name_rows(axes: "Axes", names: list[str], shift: float = 0.0) -> None:
    """Names of the sites at their rows; of many sites only every so many, so that they can be read."""
    every = -(-len(names) // MOST_ROWS)
    axes.set_yticks([k + shift for k in range(0, len(names), every)], names[::every])


def _how_they_differ(axes: "Axes", labels: Mapping[str, np.ndarray]) -> None:
    """The KS statistic of each pair as a heat map, and their mean in the title."""
    table, names = pairwise_ks(labels), list(labels)
    mean = table[np.triu_indices(len(table), k=1)].mean()
    np.fill_diagonal(table, np.nan)
    heat_map(axes, LIGHT, table, (names, names))
    if len(names) > MOST_ROWS:
        _name_rows(axes, names)
        axes.set_xticks([])
    axes.set_title(f"Labels differ: mean pairwise KS {mean:.2f}", fontsize=12, color=INK, loc="left")


# --- contact sheet ------------------------------------------------------------------------------------------


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


def draw_rows(axes: "Axes", rows: Mapping[str, Images], captions: Sequence[str] = (), *, size: float = 9) -> None:
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
    shown = []
    for images in rows.values():  # the pixels of small ones are repeated to about `SIDE`, to be looked at
        times = max(1, round(SIDE / max(images.shape[-2:])))
        shown.append(np.asarray(images).repeat(times, axis=-2).repeat(times, axis=-1))
    pixels = mosaic(shown)
    height, width = (side + GAP for side in shown[0].shape[-2:])
    left = MARGIN * TEXT
    wide = max(left + pixels.shape[1], NARROWEST if title else 0)
    lines = textwrap.wrap(title, wide // LETTER)
    fit = partial(textwrap.fill, width=max(CAPTION, width // LETTER), break_long_words=False)
    words = ["\n".join(map(fit, one.split("\n"))) for one in captions]
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


@lru_cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The font of all our figures, which comes with matplotlib; without it Pillow's own, which lacks many letters."""
    if not is_installed("matplotlib"):
        return ImageFont.load_default(size)
    import matplotlib  # here: every process of a run would pay for it

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)
