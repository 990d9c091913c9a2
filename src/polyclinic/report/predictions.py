"""Sections of regression and segmentation: predicted against true values, Bland and Altman's differences; Dice of each
image, distances between outlines, and the worst, middle and best masks."""

from typing import Any

import numpy as np

from polyclinic.data.volumes.planes import grey_planes, mask_planes
from polyclinic.data.volumes.volume import Volume
from polyclinic.metrics.statistics import bland_altman
from polyclinic.palette import Palette, legend, plain, tidy
from polyclinic.report.blocks import Block, Chart, Picture, Section, Table, Text, counted
from polyclinic.report.evidence import RunEvidence, rows_png
from polyclinic.runner.evaluate.case_scores import Cases

#: images that a scatter of points shows, points of a box, and boxes of a figure
MOST_POINTS, MOST_IN_BOX, MOST_BOXES = 2000, 300, 20
#: outlines: true and predicted, as on the picture
TRUE, PREDICTED = (0, 158, 115), (230, 120, 0)
INDEPENDENT = "Bland-Altman's limits count every image as independent; with several of a patient they are too narrow."


def values_section(run: RunEvidence, cases: Cases) -> Section:
    """Predicted and true values of a regression."""
    blocks: list[Block] = [Text("One image only: nothing to draw.")]
    if len(cases) > 1:
        blocks = [_scatter(run, cases), *_differences(run, cases), Text(INDEPENDENT, "note")]
    return Section("values", "Predicted and true values", blocks)


def _points(axes: Any, theme: Palette, cases: Cases, x: np.ndarray, y: np.ndarray) -> None:
    """A marker and colour for each of the first sites; the others share the last one."""
    last, many = len(theme.series) - 1, len(cases.sites) > len(theme.series)
    for i, name in enumerate(cases.sites.tolist()):
        rows = np.flatnonzero(cases.site[:MOST_POINTS] == i)
        if len(rows):
            label = plain(name) if i < last or not many else "other sites" if i == last else None
            axes.scatter(x[rows], y[rows], s=14, alpha=0.7, color=theme.colour(min(i, last)),
                         marker=theme.marker(min(i, last)), label=label, linewidths=0)  # fmt: skip


def _rows(cases: Cases, x: np.ndarray, y: np.ndarray) -> list[list[Any]]:
    return [[str(cases.sites[s]), float(a), float(b)] for s, a, b in zip(cases.site, x, y, strict=True)]


def _few(cases: Cases) -> str:
    return f" The first {MOST_POINTS:,} of {len(cases):,} images are drawn." if len(cases) > MOST_POINTS else ""


def _scatter(run: RunEvidence, cases: Cases) -> Chart:
    assert cases.predictions is not None
    truth, found, unit = cases.labels.astype(float), cases.predictions, f" ({run.unit})" if run.unit else ""
    ends = [float(min(truth.min(), found.min())), float(max(truth.max(), found.max()))]

    def draw(axes: Any, theme: Palette) -> None:
        axes.plot(ends, ends, color=theme.faint, linewidth=0.8, linestyle=":")
        _points(axes, theme, cases, truth, found)
        axes.set_aspect("equal")
        tidy(axes, theme, x=f"true{plain(unit)}", y=f"predicted{plain(unit)}")
        legend(axes, theme)

    table = Table(("site", f"true{unit}", f"predicted{unit}"), _rows(cases, truth, found))
    note = "On the dotted line the prediction is right." + _few(cases)
    return Chart("scatter", "Predicted against true values", draw, table, note, (6.4, 4.4))


def _differences(run: RunEvidence, cases: Cases) -> list[Block]:
    assert cases.predictions is not None
    truth, found, unit = cases.labels.astype(float), cases.predictions, f" ({plain(run.unit)})" if run.unit else ""
    agreed = bland_altman(found, truth)
    middle, apart = (found + truth) / 2, found - truth
    lines = {"bias": agreed.bias, "lower limit": agreed.lower, "upper limit": agreed.upper}

    def draw(axes: Any, theme: Palette) -> None:
        _points(axes, theme, cases, middle, apart)
        for name, one in lines.items():
            axes.axhline(one.value, color=theme.ink, linewidth=1.3, linestyle="-" if name == "bias" else "--")
            axes.axhspan(one.low, one.high, color=theme.faint, alpha=0.18, linewidth=0)
            axes.annotate(f"{one.value:.3g}", (1.01, one.value), xycoords=("axes fraction", "data"), fontsize=8,
                          va="center", color=theme.ink)  # fmt: skip
        tidy(axes, theme, x=f"mean of predicted and true{unit}", y=f"predicted - true{unit}")
        legend(axes, theme, beside=1.08)

    table = Table(("site", "mean of predicted and true", "predicted - true"), _rows(cases, middle, apart))
    note = "Solid line: bias. Dashed lines: limits of agreement. Bands: 95 % intervals." + _few(cases)
    rows = [[name, one.value, one.low, one.high] for name, one in lines.items()]
    return [
        Chart("bland-altman", "Bland-Altman plot", draw, table, note, (6.4, 4.2)),
        Table(("", f"value{unit}", "low", "high"), rows, f"Agreement over {agreed.n} images"),
    ]


def masks_section(run: RunEvidence, cases: Cases) -> Section:
    """Dice, distances and examples of a segmentation."""
    figures = [_dice(cases), _distances(cases)] if cases.scores is None else _structures(cases)
    return Section("masks", "Masks", [*figures, *_examples(run, cases)])


def _structures(cases: Cases) -> list[Block]:
    """Of volumes: scores, and by how much the volume is wrong, by site and structure."""
    assert cases.scores is not None
    assert cases.structures is not None
    scores = {"Dice": cases.scores[:, :, 0], "HD95 (mm)": cases.scores[:, :, 1], "surface dice": cases.scores[:, :, 2]}
    figures = {name: scores[name] for name in ("Dice", "HD95 (mm)")}
    if cases.millilitres is not None:
        true, found = cases.millilitres[:, :, 0], cases.millilitres[:, :, 1]
        figures["predicted - true volume (ml)"] = found - true
        scores |= {"true (ml)": true, "predicted (ml)": found}
    names, sites = cases.structures.tolist(), cases.sites[cases.site]
    rows = [
        [
            str(site),
            name,
            *(None if np.isnan(some[case, place]) else float(some[case, place]) for some in scores.values()),
        ]
        for case, site in enumerate(sites)
        for place, name in enumerate(names)
    ]
    table = Table(("site", "structure", *scores), rows)
    return [
        _structure_chart(cases, f"structures-{number}", title, values, table if number == 0 else None)
        for number, (title, values) in enumerate(figures.items())
        if np.isfinite(values).any()
    ]


def _structure_chart(cases: Cases, name: str, title: str, values: np.ndarray, table: Table | None) -> Chart:
    """A box of each structure at each site; those without a number are left out."""
    assert cases.structures is not None
    parts = {
        f"{structure}, {site}": some
        for place, structure in enumerate(cases.structures)
        for number, site in enumerate(cases.sites)
        if len(some := (column := values[cases.site == number, place])[np.isfinite(column)])
    }

    def draw(axes: Any, theme: Palette) -> None:
        _boxes(axes, theme, parts, title)

    rows = [[part, len(some), *map(float, np.quantile(some, (0.25, 0.5, 0.75)))] for part, some in parts.items()]
    table = table or Table(("structure and site", "cases", "lower quarter", "median", "upper quarter"), rows)
    note = "Of each case; a box holds the middle half, a line marks the median."
    note += f" The first {MOST_BOXES} of {len(parts)} are drawn." if len(parts) > MOST_BOXES else ""
    high = 1.2 + 0.34 * min(MOST_BOXES, len(parts))
    return Chart(name, f"{title} by structure and site", draw, table, note, (6.4, high))


def _dice(cases: Cases) -> Chart:
    assert cases.areas is not None
    dices, outlined = cases.dices, cases.areas[:, 2] > 0
    rows = [[str(cases.sites[s]), float(d), int(t), int(p)]
            for s, d, (_, p, t) in zip(cases.site, dices, cases.areas, strict=True)]  # fmt: skip
    parts = {str(name): dices[(cases.site == i) & outlined] for i, name in enumerate(cases.sites)}
    parts = {name: values for name, values in parts.items() if len(values)}

    def draw(axes: Any, theme: Palette) -> None:
        _boxes(axes, theme, parts, "Dice of an image")

    empty = int((~outlined).sum())
    note = "Of each image that has a true mask; a box holds the middle half, a line marks the median."
    note += f" Without a true mask, and not drawn: {counted(empty, 'image')}." if empty else ""
    table = Table(("site", "Dice", "true pixels", "predicted pixels"), rows)
    return Chart("dice", "Dice of each image", draw, table, note, (6.4, 1.2 + 0.34 * max(1, len(parts))))


def _boxes(axes: Any, theme: Palette, parts: dict[str, np.ndarray], label: str) -> None:
    """A box and the single points of each part."""
    few = dict(list(parts.items())[:MOST_BOXES])
    if not few:
        axes.text(0.5, 0.5, "no image has a true mask", ha="center", color=theme.ink, transform=axes.transAxes)
    for y, values in enumerate(few.values()):
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        axes.barh(y, high - low, left=low, height=0.5, color=theme.colour(0), alpha=0.3)
        values = values[:MOST_IN_BOX]
        spread = y + 0.18 * np.sin(np.arange(len(values)) * 2.4)  # apart, so that points can be told apart
        axes.scatter(values, spread, s=9, color=theme.colour(0), alpha=0.6, linewidths=0)
        axes.plot([middle, middle], [y - 0.32, y + 0.32], color=theme.colour(1), linewidth=2)
    axes.set_yticks(range(len(few)), [plain(name) for name in few])
    axes.set_ylim(max(1, len(few)) - 0.5, -0.5)
    tidy(axes, theme, x=label, grid="x")


def _distances(cases: Cases) -> Block:
    if cases.distances is None:
        return Text("Distances between outlines were not measured: set task.surface_distances = true and run it again.")
    known = np.isfinite(cases.distances[:, 0])
    if not known.any():
        return Text("No image has both a true and a predicted mask, so there is no distance between outlines.")
    names = ("Hausdorff distance (95 %)", "average surface distance")
    parts = {name: cases.distances[known, i] for i, name in enumerate(names)}
    rows = [[str(cases.sites[cases.site[i]]), *map(float, cases.distances[i])] for i in np.flatnonzero(known)]

    def draw(axes: Any, theme: Palette) -> None:
        _boxes(axes, theme, parts, "pixels")

    missed = int((~known).sum())
    note = f"Lower is better. {counted(missed, 'image')} of {len(known)} have an empty mask and no distance."
    return Chart("distances", "Distances between outlines", draw, Table(("site", *names), rows), note, (6.4, 1.9))


def _examples(run: RunEvidence, cases: Cases) -> list[Block]:
    if cases.examples is None or cases.masks is None or not len(cases.examples):
        return [Text("The run kept no masks of single images.")]
    chosen, dices = cases.examples.tolist(), cases.dices
    rows = [[str(cases.sites[cases.site[row]]), int(row), float(dices[row])] for row in chosen]
    table = Table(("site", "image", "Dice"), rows, "Worst, middle and best cases, in this order")
    if run.images.why_none:
        return [table, Text(run.images.why_none)]
    pairs = [_outlined(run, cases, row, mask) for row, mask in zip(chosen, cases.masks, strict=True)]
    pictures = [pair for pair in pairs if pair is not None]
    if len(pictures) < len(pairs):
        return [table, Text("The images of these cases do not fit the masks that the run kept.")]
    words = (
        f"From worst to best: Dice {', '.join(f'{dices[row]:.2f}' for row in chosen)}. Green: the true outline; "
        "orange: the predicted one. The upper row has the images alone. Of a volume there are three planes."
    )
    rows_of_images = [np.stack(some) for some in zip(*pictures, strict=True)]
    return [table, Picture("examples", rows_png(rows_of_images), words)]


def _outlined(run: RunEvidence, cases: Cases, row: int, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """An image and the same with both outlines, uint8 [3, H, W]; None where it is not the image of this mask."""
    site = str(cases.sites[cases.site[row]])
    part = getattr(run.images.sites.get(site), run.split, None)
    place = row - int(np.flatnonzero(cases.site == cases.site[row])[0])
    if part is None or place >= len(part):
        return None
    picture: Any = part.images[place]
    truth = None if part.masks is None else np.asarray(part.masks[place])
    if isinstance(picture, Volume):
        picture, truth = grey_planes(picture), mask_planes(picture)
    if truth is None or truth.shape != mask.shape:
        return None
    image = np.broadcast_to(np.asarray(picture), (3, *mask.shape))
    drawn = image.copy()
    for values, colour in ((truth, TRUE), (mask, PREDICTED)):
        for value in np.unique(values[values > 0]):
            drawn[:, edge(values == value)] = np.array(colour)[:, None]
    return image, drawn


def edge(mask: np.ndarray) -> np.ndarray:
    """The pixels of a mask bool [H, W] that touch its outside."""
    padded = np.pad(mask, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return mask & ~inner
