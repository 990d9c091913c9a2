"""How far a deployed site's coarse scores may be from the exact ones: an interval for every metric, by arithmetic.

A site rounds counts in steps and merges cells of histograms (`Task.coarse`); its policy says how coarsely, and nobody
else knows. But no count that it tells is smaller than its `min_cohort`, so the smallest one bounds every error. The
intervals hold what an exact count would have given, for certain. They say nothing about other patients.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.metrics.statistics.disclosure import step_above
from polyclinic.tasks import Target, Task
from polyclinic.tasks.classification import BINS, TAIL, WIDTH, cells_of

#: what to say beside such intervals
ROUNDED = (
    "scores leave the sites in coarse steps: each figure lies between these bounds, for certain; how it would be for "
    "other patients, the sites tell with evaluation.statistics = true"
)
MOST_PAIRS = (
    4_000_000  #: of cells, beyond which the bounds of an AUC take too long: 60 sites with all cells they can have
)
Sums = Mapping[str, Tensor]
Interval = tuple[float, float]


def rounding_intervals(task: Task, target: Target, sites: Mapping[str, Sums]) -> JsonObject:
    """`pooled`, `mean` (over sites) and `per_site`: `low` and `high` of each metric; empty where there is none.

    `sites` has the sums that sites told. A metric that is not here cannot be bounded, and is not to be shown.
    """
    told = {site: sums for site, sums in sites.items() if int(sums.get("count", 0))}
    if all("histograms" in sums and not sums["histograms"].is_floating_point() for sums in told.values()):
        return {}  # policies that let scores out as they are
    # a plug-in's task may have other sums
    of = _of_classes if all({"confusion", "histograms"} <= sums.keys() for sums in told.values()) else _of_means
    pooled = of(task, target, list(told.values())) if told else {}
    per_site = {site: of(task, target, [sums]) for site, sums in told.items()}
    known = {name: [own[name] for own in per_site.values() if name in own] for name in pooled}
    mean = {
        name: (sum(low for low, _ in ends) / len(ends), sum(high for _, high in ends) / len(ends))
        for name, ends in known.items()
        if ends
    }
    of_sites = {site: _plain(own) for site, own in per_site.items()}
    tables = {"pooled": _plain(pooled), "mean": _plain(mean), "per_site": of_sites}
    return tables if pooled else {}


def _plain(found: Mapping[str, Interval]) -> JsonObject:
    return {name: {"low": low, "high": high} for name, (low, high) in found.items()}


def intervals_of_cells(task: Task, sums: Sums) -> JsonObject:
    """The same tables of scores that were added up in cells (`Classification.summable`): counts are exact, and an AUC
    depends on the order of images in a cell. Empty where the task has no such cells."""
    if "histograms" not in sums:
        return {}
    exact = {name: (value, value) for name, value in task.finish(dict(sums)).items()}
    cells = cells_of(sums["histograms"]).double()
    ends = []
    for others, own in cells[1:] if len(cells) == 2 and "confusion" in sums else cells:
        if not (pairs := float(others.sum() * own.sum())):
            continue
        below = float((own * (others.cumsum(0) - others)).sum())
        ends.append((below / pairs, (below + float((own * others).sum())) / pairs))
    if ends:
        low, high = np.mean(ends, axis=0).tolist()
        exact["auc"] = (low, high)
    return {"pooled": _plain(exact), "mean": {}, "per_site": {}}


def in_words(intervals: JsonMapping, name: str) -> str:
    """An interval as a table has it."""
    if name not in intervals:
        return "-"
    low, high = intervals[name]["low"], intervals[name]["high"]
    return f"{low:.3f}" if low == high else f"{low:.2f} to {high:.2f}"


def extreme(values: np.ndarray, low: np.ndarray, high: np.ndarray, sign: int) -> float:
    """The largest (`sign` 1) or smallest (-1) weighted mean of values, whose weights lie between `low` and `high`."""
    order = np.argsort(-sign * values, kind="stable")
    values, low, high = values[order], low[order], high[order]
    # the first k have their largest weights, the others their smallest
    tops, rest = np.r_[0, (high * values).cumsum()], np.r_[(low * values)[::-1].cumsum()[::-1], 0]
    weights = np.r_[0, high.cumsum()] + np.r_[low[::-1].cumsum()[::-1], 0]
    means = (tops + rest)[weights > 0] / weights[weights > 0]
    return float((means * sign).max() * sign) if len(means) else float("nan")


# --- classes: counts in boxes -------------------------------------------------------------------------


def _of_classes(task: Task, target: Target, told: Sequence[Sums]) -> dict[str, Interval]:
    confusions = [np.asarray(sums["confusion"], float) for sums in told]
    cells = [[[_cells(row) for row in pair] for pair in np.asarray(sums["histograms"], float)] for sums in told]
    smallest = [
        min([*counts[counts > 0], *(images for pair in pairs for row in pair for _, _, images, _ in row)])
        if sums["histograms"].is_floating_point()  # merged cells are spread over their bins
        else 1.0  # the policy lets scores out as they are
        for sums, counts, pairs in zip(told, confusions, cells, strict=True)
    ]
    boxes = [_box(counts, least) for counts, least in zip(confusions, smallest, strict=True)]
    low, high = (np.sum([box[end] for box in boxes], axis=0) for end in (0, 1))
    classes = len(low)
    right, wrong = np.eye(classes, dtype=bool), ~np.eye(classes, dtype=bool)
    found = {"accuracy": (_share(low, high, right, wrong), _share(high, low, right, wrong))}
    rows = [
        (_share(low[i], high[i], right[i], wrong[i]), _share(high[i], low[i], right[i], wrong[i]))
        for i in range(classes)
    ]
    seen = [row for row, counts in zip(rows, np.sum(confusions, axis=0), strict=True) if counts.sum()]
    hidden = classes - len(seen)  # of a class without a count there may be a few images
    ends = [np.array([row[end] for row in seen]) for end in (0, 1)]
    found["balanced_accuracy"] = (
        float(min(ends[0].mean(), ends[0].sum() / classes)),
        float(max(ends[1].mean(), (ends[1].sum() + hidden) / classes)),
    )
    areas = [_area(cells, smallest, number) for number in ([1] if classes == 2 else range(classes))]
    known = [area for area in areas if area is not None]
    if len(known) == len(areas):
        found["auc"] = (float(np.mean([area[0] for area in known])), float(np.mean([area[1] for area in known])))
    return found


def _box(counts: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray]:
    """What the exact counts lie between, where no step of the site's is larger than `least`."""
    high = np.where(counts > 0, counts + least // 4, (least + 1) // 2 - 1)
    return np.maximum(counts - least // 2, 0), np.maximum(high, 0)


def _share(mine: np.ndarray, others: np.ndarray, right: np.ndarray, wrong: np.ndarray) -> float:
    total = mine[right].sum() + others[wrong].sum()
    return float(mine[right].sum() / total) if total else 0.0


def _cells(row: np.ndarray) -> list[tuple[int, int, float, int]]:
    """(first bin, last bin, images, cells that it may be) of each run of equal bins that are not 0; a run at an end may
    hold images of the tail, too."""
    edges = np.flatnonzero(np.diff(row, prepend=np.nan, append=np.nan) != 0)
    found = []
    for first, after in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if row[first] > 0:
            ends = (0 if first == TAIL else first, BINS - 1 if after == BINS - TAIL else after - 1)
            found.append((*ends, round(float(row[first:after].sum()), 6), (after - first) // WIDTH))
    return found


def _area(cells: Sequence[Sequence[Sequence[list]]], smallest: Sequence[float], number: int) -> Interval | None:
    """Bounds of the AUC of a class: images lie anywhere in their cells, and counts anywhere in their boxes."""
    sides = []
    for side in (0, 1):  # other classes, the class itself
        rows = []
        for pairs, least in zip(cells, smallest, strict=True):
            for first, last, images, merged in pairs[number][side]:  # no cell is off by more than a half of its images
                low, high = min(images / 2, merged * (least // 2)), min(images / 4, merged * (least // 4))
                rows.append((first, last, images - low, images + high))
            if not pairs[number][side]:  # fewer than a site tells about, anywhere
                rows.append((0, BINS - 1, 0, least - 1))
        sides.append(np.array(rows, float))
    others, own = sides
    if not others[:, 2].sum() or not own[:, 2].sum() or len(others) * len(own) > MOST_PAIRS:
        return None
    found = []
    for sign, (mine, theirs) in (
        (-1, (0, 1)),
        (1, (1, 0)),
    ):  # its images at the lowest bins, the others' at the highest
        above = (np.sign(own[:, mine][:, None] - others[:, theirs][None]) + 1) / 2
        shares = np.array([extreme(row, others[:, 2], others[:, 3], sign) for row in above])
        found.append(extreme(shares, own[:, 2], own[:, 3], sign))
    return found[0], found[1]


# --- values and masks: rounded means ------------------------------------------------------------------


def _of_means(task: Task, target: Target, told: Sequence[Sums]) -> dict[str, Interval]:
    ends: list[dict[str, Tensor]] = [dict(told[0]), dict(told[0])]
    for name, (bound, count) in task.bounds(target).items():
        if not all(name in sums and int(sums.get(count, 0)) for sums in told):
            continue
        counts = np.array([int(sums[count]) for sums in told], float)
        means = np.array([float(sums[name]) for sums in told]) / counts
        # at least half of the images that a site tells are there, so that no step of its is larger than this
        errors = np.array([step_above(2 * bound / images) for images in counts]) / 2
        for end, sign in zip(ends, (-1, 1), strict=True):
            mean = extreme((means + sign * errors).clip(-bound, bound), counts / 2, counts * 1.25, sign)
            end[name] = told[0][name].new_tensor(max(mean, 0.0) * int(told[0][count]))
    low, high = (task.finish(end) for end in ends)
    # distances between outlines do not leave, and so are the same in both
    return {name: (low[name], high[name]) for name in low if name in high and low[name] < high[name]}
