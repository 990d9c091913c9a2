"""Figures of claims: bars for arms, curves where metrics are points along an axis; minutes as measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyclinic_lab.figure import _by_count, _panel, draw, shown_metrics

pytest.importorskip("matplotlib")


def row(label: str, metric: str, mean: float) -> dict:
    return {"label": label, "metric": metric, "mean": mean, "std": 0.1}


def found(*rows: dict, paper: tuple[dict, ...] = ()) -> dict:
    return {"ours": list(rows), "paper_numbers": list(paper), "axis": "", "rule": "auc of a is at least 1"} | {
        "paper": "P",
        "place": "T",
        "verdict": "yes",
    }


def test_bars_and_curves_are_drawn(tmp_path: Path) -> None:
    curves = found(*(row("few", f"epsilon after {n} epochs", n / 10) for n in (1, 2, 3)))
    bars = found(row("a", "mae", 1.0), row("b", "mae", 2.0), paper=(row("a", "mae", 1.5),))
    both = found(*(row("1", f"score after {n} steps", n / 10) for n in (100, 200)), row("1", "auc", 0.7))
    assert shown_metrics(both) == ["auc"]
    for name, content in (("curves", curves), ("bars", bars), ("both", both)):
        draw(content, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_of_the_rule_and_of_the_paper_come_first() -> None:
    rows = [row("a", metric, 1.0) for metric in ("MB", "seconds", "loss", "auc", "mae")]
    assert shown_metrics(found(*rows, paper=(row("a", "mae", 1.0),))) == ["auc", "mae", "MB", "seconds"]


def test_metrics_of_the_same_training_set_come_next() -> None:
    rows = [row("a", metric, 1.0) for metric in ("cat, real", "dog, real", "auc, augmented", "cat, augmented")]
    told = found(*rows) | {"rule": "cat, augmented of a is at least 1"}
    assert shown_metrics(told) == ["cat, augmented", "auc, augmented", "cat, real", "dog, real"]


def test_deviations_larger_than_a_mean_do_not_pull_the_axis_below_zero() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    _panel(axes, found(row("a", "failed", 0.05), row("c", "failed", 0.0)), "failed", ["a", "b", "c"])
    assert axes.get_ylim()[0] == 0
    assert axes.get_xlim() == pytest.approx((-0.6, 2.6))  # b has no bar


def test_real_images_alone_are_a_dashed_line() -> None:
    from matplotlib.figure import Figure

    rows = [row("a", "auc, real", 0.6), row("b", "auc, real", 0.8), row("a", "auc, augmented", 0.5)]
    lines = []
    for metric in ("auc, augmented", "auc, real"):
        axes = Figure().subplots()
        _panel(axes, found(*rows), metric, ["a", "b"])
        lines.append([line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == "--"])
    assert lines == [[pytest.approx(0.7)], []]


def test_arms_that_differ_in_the_number_of_sites_are_curves(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row(f"{name}, {count} sites", "auc", count / 10) for name in ("feder", "fedavg") for count in (6, 2)]
    axes = Figure().subplots()
    _by_count(axes, found(*rows), "auc", [])
    handles, names = axes.get_legend_handles_labels()
    assert names == ["feder", "fedavg"]
    assert list(handles[0].lines[0].get_xdata()) == [2, 6]
    draw(found(*rows), tmp_path / "sites.png")
    assert (tmp_path / "sites.png").read_bytes().startswith(b"\x89PNG")
