"""Figures of claims: bars for arms, curves where metrics are points along an axis; minutes as measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyclinic_lab.figure import _by_count, draw, shown_metrics

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
