"""Plot of a study's sites: label histograms, heterogeneity and sample images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from polyclinic.data.contact_sheet import draw_rows
from polyclinic.data.heterogeneity import pairwise_ks
from polyclinic.palette import FAINT, INK, SERIES

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
) -> Figure:
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
    _what_they_hold(figure.add_subplot(grid[0, 0] if differ else grid[0, :]), labels, classes, unit)
    if differ:
        _how_they_differ(figure.add_subplot(grid[0, 1]), labels)
    shown = {name: images for name, (_, images) in sites.items()}
    _what_they_look_like(figure.add_subplot(grid[1, :]), shown, samples)
    return figure


def _what_they_hold(axes: Axes, labels: Mapping[str, np.ndarray], classes: Sequence[str], unit: str) -> None:
    if classes:
        _stacked_bars(axes, labels, classes)
    else:
        _ridges(axes, labels, unit)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0)


def _stacked_bars(axes: Axes, labels: Mapping[str, np.ndarray], classes: Sequence[str]) -> None:
    """A bar per site, from top to bottom in order, one colour per class."""
    from matplotlib.colors import to_rgb

    counts = np.array([np.bincount(values, minlength=len(classes)) for values in labels.values()])
    left, places = np.zeros(len(counts)), np.arange(len(counts))
    longest = counts.sum(axis=1).max()
    for c, (name, colour) in enumerate(zip(classes, class_colours(len(classes)), strict=True)):
        axes.barh(places, counts[:, c], left=left, height=0.72, color=colour, label=name, edgecolor="white")
        for y, (count, start) in enumerate(zip(counts[:, c], left, strict=True)):
            if len(counts) <= MOST_ROWS and count > 0.06 * longest:
                dark = np.mean(to_rgb(colour)) < 0.6
                axes.text(start + count / 2, y, f"{count:,}", ha="center", va="center", fontsize=9,
                          color="white" if dark else INK)  # fmt: skip
        left += counts[:, c]
    for y, total in enumerate(left):
        if len(counts) <= MOST_ROWS:
            axes.text(total + 0.01 * longest, y, f"{int(total):,}", va="center", fontsize=9, color=FAINT)
    _name_rows(axes, list(labels))
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.09)
    axes.set_xlabel("training images of each class" if len(classes) > 1 else "training images", color=INK)
    columns = min(len(classes), 5)
    if 1 < len(classes) <= MOST_NAMED:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, borderaxespad=0.2)


def _ridges(axes: Axes, labels: Mapping[str, np.ndarray], unit: str) -> None:
    """A histogram per site, one above the other, with the median marked and the count named."""
    everything = np.concatenate(list(labels.values()))
    edges = np.histogram_bin_edges(everything, bins=min(40, max(10, int(np.sqrt(len(everything))))))
    heights = [np.histogram(values, edges)[0] / max(1, len(values)) for values in labels.values()]
    tallest = max(height.max() for height in heights)
    for y, (values, height, colour) in enumerate(zip(labels.values(), heights, site_colours(len(labels)), strict=True)):
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


def _name_rows(axes: Axes, names: list[str], shift: float = 0.0) -> None:
    """Names of the sites at their rows; of many sites only every so many, so that they can be read."""
    every = -(-len(names) // MOST_ROWS)
    axes.set_yticks([k + shift for k in range(0, len(names), every)], names[::every])


def _how_they_differ(axes: Axes, labels: Mapping[str, np.ndarray]) -> None:
    """The KS statistic of each pair as a heat map, and their mean in the title."""
    table = pairwise_ks(labels)
    pairs = table[np.triu_indices(len(table), k=1)]
    mean = pairs.mean() if len(pairs) else 0.0
    axes.imshow(table, cmap="BuPu", vmin=0, vmax=1)
    if len(table) <= MOST_ROWS:
        size = 10 if len(table) <= 8 else 7
        for i, j in np.ndindex(*table.shape):
            colour = "white" if table[i, j] > 0.55 else INK
            axes.text(
                j, i, "" if i == j else f"{table[i, j]:.2f}", ha="center", va="center", fontsize=size, color=colour
            )
    _name_rows(axes, list(labels))
    every = -(-len(labels) // MOST_ROWS)
    axes.set_xticks(range(0, len(labels), every), list(labels)[::every], rotation=35, ha="right")
    axes.set_title(f"Labels differ: mean pairwise KS {mean:.2f}", fontsize=12, color=INK, loc="left")
    axes.tick_params(colors=INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _what_they_look_like(axes: Axes, samples: Mapping[str, np.ndarray], title: str) -> None:
    """A row of images per site."""
    shown = {name: images[:MOST_SAMPLES] for name, images in list(samples.items())[:MOST_ROWS]}
    draw_rows(axes, shown, size=10)
    axes.set_anchor("W")
    axes.tick_params(colors=INK)
    left_out = len(samples) - len(shown)
    some = f" (the first {len(shown)} of {len(samples)} sites)" if left_out else ""
    axes.set_title(title + some, fontsize=12, color=INK, loc="left")


def class_colours(count: int) -> list[str] | np.ndarray:
    """A colour per class: named ones for a few, a colour map for many."""
    from matplotlib import colormaps

    return list(SERIES[:count]) if count <= len(SERIES) else colormaps["turbo"](np.linspace(0, 1, count))


def site_colours(count: int) -> np.ndarray:
    """A colour per site, from dark to light."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0.15, 0.85, count))
