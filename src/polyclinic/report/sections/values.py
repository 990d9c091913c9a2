"""Regression: predicted against true values, and Bland and Altman's differences."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyclinic.metrics.statistics import Interval, bland_altman
from polyclinic.palette import Palette
from polyclinic.report.blocks import Chart, Section, Table, Text
from polyclinic.report.evidence import RunEvidence
from polyclinic.report.theme import legend, plain, tidy
from polyclinic.runner.evaluate.case_scores import Cases

#: images that a scatter of points shows
MOST_POINTS = 2000


def section(run: RunEvidence) -> Section:
    cases = run.judged
    assert cases is not None, "asked for only where cases were kept"
    if len(cases) < 2:
        return Section("values", "Predicted and true values", [Text("One image only: nothing to draw.")])
    note = (
        "Bland-Altman's limits count every image as independent; with several images of a patient they are too narrow."
    )
    return Section(
        "values", "Predicted and true values", [_scatter(run, cases), *_differences(run, cases), Text(note, "note")]
    )


def _columns(run: RunEvidence, cases: Cases) -> Table:
    assert cases.predictions is not None
    unit = f" ({run.unit})" if run.unit else ""
    rows = [
        [str(cases.sites[s]), float(t), float(p)]
        for s, t, p in zip(cases.site, cases.labels, cases.predictions, strict=True)
    ]
    return Table(("site", f"true{unit}", f"predicted{unit}"), rows)


def _scatter(run: RunEvidence, cases: Cases) -> Chart:
    assert cases.predictions is not None
    truth, found, unit = cases.labels.astype(float), cases.predictions, f" ({plain(run.unit)})" if run.unit else ""
    low, high = float(min(truth.min(), found.min())), float(max(truth.max(), found.max()))

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        axes.plot([low, high], [low, high], color=theme.faint, linewidth=0.8, linestyle=":")
        _points(axes, theme, cases, truth, found)
        axes.set_aspect("equal")
        tidy(axes, theme, x=f"true{unit}", y=f"predicted{unit}")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1, 1))

    note = "On the dotted line the prediction is right." + _few(cases)
    return Chart("scatter", "Predicted against true values", draw, _columns(run, cases), note, (6.4, 4.4))


def _few(cases: Cases) -> str:
    return f" The first {MOST_POINTS:,} of {len(cases):,} images are drawn." if len(cases) > MOST_POINTS else ""


def _points(axes: Any, theme: Palette, cases: Cases, x: np.ndarray, y: np.ndarray) -> None:
    """A marker and colour for each of the first sites; the others share the last one."""
    most = len(theme.series)
    for i, name in enumerate(cases.sites.tolist()):
        rows = np.flatnonzero(cases.site[:MOST_POINTS] == i)
        if len(rows):
            label = (
                plain(name) if i < most - 1 or len(cases.sites) <= most else ("other sites" if i == most - 1 else None)
            )
            axes.scatter(x[rows], y[rows], s=14, alpha=0.7, color=theme.colour(min(i, most - 1)),
                         marker=theme.marker(min(i, most - 1)), label=label, linewidths=0)  # fmt: skip


def _differences(run: RunEvidence, cases: Cases) -> list[Chart | Table]:
    assert cases.predictions is not None
    truth, found, unit = cases.labels.astype(float), cases.predictions, f" ({plain(run.unit)})" if run.unit else ""
    agreed = bland_altman(found, truth)
    middle, apart = (found + truth) / 2, found - truth

    def draw(figure: Any, theme: Palette) -> None:
        axes = figure.subplots()
        _points(axes, theme, cases, middle, apart)
        for one, style in ((agreed.bias, "-"), (agreed.lower, "--"), (agreed.upper, "--")):
            axes.axhline(one.value, color=theme.ink, linewidth=1.3, linestyle=style)
            axes.axhspan(one.low, one.high, color=theme.faint, alpha=0.18, linewidth=0)
            axes.annotate(f"{one.value:.3g}", (1.01, one.value), xycoords=("axes fraction", "data"), fontsize=8,
                          va="center", color=theme.ink)  # fmt: skip
        tidy(axes, theme, x=f"mean of predicted and true{unit}", y=f"predicted - true{unit}")
        legend(axes, theme, loc="upper left", bbox_to_anchor=(1.08, 1))

    rows = [[str(cases.sites[s]), float(m), float(d)] for s, m, d in zip(cases.site, middle, apart, strict=True)]
    table = Table(("site", "mean of predicted and true", "predicted - true"), rows)
    note = "Solid line: bias. Dashed lines: limits of agreement. Bands: 95 % intervals." + _few(cases)
    return [
        Chart("bland-altman", "Bland-Altman plot", draw, table, note, (6.4, 4.2)),
        Table(
            ("", f"value{unit}", "low", "high"),
            [_row("bias", agreed.bias), _row("lower limit", agreed.lower), _row("upper limit", agreed.upper)],
            f"Agreement over {agreed.n} images",
        ),
    ]


def _row(name: str, one: Interval) -> list[str | float | int | None]:
    return [name, one.value, one.low, one.high]
