"""Segmentation: Dice of each image, distances between outlines, and the worst, middle and best cases."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyclinic.palette import Palette
from polyclinic.report.blocks import Block, Chart, Picture, Section, Table, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.metric_names import counted
from polyclinic.report.pictures import rows_png
from polyclinic.report.theme import plain, tidy
from polyclinic.runner.evaluate.case_scores import Cases

#: points of a part that are drawn
MOST_POINTS = 300
#: outlines: true and predicted, as on the picture
TRUE, PREDICTED = (0, 158, 115), (230, 120, 0)


def section(run: RunEvidence) -> Section:
    cases = run.judged
    assert cases is not None, "asked for only where cases were kept"
    return Section("masks", "Masks", [_dice(run, cases), *_distances(cases), *_examples(run, cases)])


def _dice(run: RunEvidence, cases: Cases) -> Chart:
    assert cases.areas is not None
    dices, outlined = cases.dices, cases.areas[:, 2] > 0
    rows = [
        [str(cases.sites[s]), float(d), int(t), int(p)]
        for s, d, (_, p, t) in zip(cases.site, dices, cases.areas, strict=True)
    ]
    parts = {str(name): dices[(cases.site == i) & outlined] for i, name in enumerate(cases.sites)}
    parts = {name: values for name, values in parts.items() if len(values)}

    def draw(figure: Any, theme: Palette) -> None:
        box_of_each(figure.subplots(), theme, parts, "Dice of an image")

    empty = int((~outlined).sum())
    note = "Of each image that has a true mask; a box holds the middle half, a line marks the median."
    note += f" Without a true mask, and not drawn: {counted(empty, 'image')}." if empty else ""
    table = Table(("site", "Dice", "true pixels", "predicted pixels"), rows)
    return Chart("dice", "Dice of each image", draw, table, note, (6.4, 1.2 + 0.34 * max(1, len(parts))))


def box_of_each(axes: Any, theme: Palette, parts: dict[str, np.ndarray], label: str) -> None:
    """A box and the single points of each part."""
    few = dict(list(parts.items())[:20])
    if not few:
        axes.text(0.5, 0.5, "no image has a true mask", ha="center", color=theme.ink, transform=axes.transAxes)
    for y, values in enumerate(few.values()):
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        axes.barh(y, high - low, left=low, height=0.5, color=theme.colour(0), alpha=0.3)
        values = values[:MOST_POINTS]
        spread = y + 0.18 * np.sin(np.arange(len(values)) * 2.4)  # apart, so that points can be told apart
        axes.scatter(values, spread, s=9, color=theme.colour(0), alpha=0.6, linewidths=0)
        axes.plot([middle, middle], [y - 0.32, y + 0.32], color=theme.colour(1), linewidth=2)
    axes.set_yticks(range(len(few)), [plain(name) for name in few])
    axes.set_ylim(max(1, len(few)) - 0.5, -0.5)
    tidy(axes, theme, x=label, grid="x")


def _distances(cases: Cases) -> list[Block]:
    if cases.distances is None:
        return [
            Text("Distances between outlines were not measured: set task.surface_distances = true and run it again.")
        ]
    known = np.isfinite(cases.distances[:, 0])
    if not known.any():
        return [Text("No image has both a true and a predicted mask, so there is no distance between outlines.")]
    names = ("Hausdorff distance (95 %)", "average surface distance")
    parts = {name: cases.distances[known, i] for i, name in enumerate(names)}
    rows = [[str(cases.sites[cases.site[i]]), *map(float, cases.distances[i])] for i in np.flatnonzero(known)]

    def draw(figure: Any, theme: Palette) -> None:
        box_of_each(figure.subplots(), theme, parts, "pixels")

    missed = int((~known).sum())
    note = f"Lower is better. {counted(missed, 'image')} of {len(known)} have an empty mask and no distance."
    return [Chart("distances", "Distances between outlines", draw, Table(("site", *names), rows), note, (6.4, 1.9))]


def _examples(run: RunEvidence, cases: Cases) -> list[Block]:
    if cases.examples is None or cases.masks is None or not len(cases.examples):
        return [Text("The run kept no masks of single images.")]
    chosen, dices = cases.examples.tolist(), cases.dices
    rows = [[str(cases.sites[cases.site[row]]), int(row), float(dices[row])] for row in chosen]
    table = Table(("site", "image", "Dice"), rows, "Worst, middle and best cases, in this order")
    if run.images.why_none:
        return [table, Text(run.images.why_none)]
    pictures = [_outlined(run, cases, row, mask) for row, mask in zip(chosen, cases.masks, strict=True)]
    shown = [picture for picture in pictures if picture is not None]
    if len(shown) < len(pictures):
        return [table, Text("The images of these cases do not fit the masks that the run kept.")]
    words = (
        f"From worst to best: Dice {', '.join(f'{dices[row]:.2f}' for row in chosen)}. Green: the true outline; "
        "orange: the predicted one. The upper row has the images alone."
    )
    plain_images = np.stack([image for image, _ in shown])
    drawn = np.stack([outlined for _, outlined in shown])
    return [table, Picture("examples", rows_png([plain_images, drawn]), words)]


def _outlined(run: RunEvidence, cases: Cases, row: int, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """An image and the same with both outlines, uint8 [3, H, W]; None where it is not the image of this mask."""
    site = str(cases.sites[cases.site[row]])
    part = getattr(run.images.sites.get(site), run.split, None)
    place = row - int(np.flatnonzero(cases.site == cases.site[row])[0])
    if part is None or part.masks is None or place >= len(part) or part.masks[place].shape != mask.shape:
        return None
    image = np.broadcast_to(np.asarray(part.images[place]), (3, *mask.shape)).copy()
    drawn = image.copy()
    for outline, colour in ((edge(np.asarray(part.masks[place]) > 0), TRUE), (edge(mask > 0), PREDICTED)):
        for channel, value in enumerate(colour):
            drawn[channel][outline] = value
    return image, drawn


def edge(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask bool [H, W] that touch its outside."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner
