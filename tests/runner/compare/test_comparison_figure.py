"""`comparison.png`: as high as the means, side by side for several comparisons."""

import matplotlib.figure
import pytest

from polyclinic.runner.compare.outcome import draw
from polyclinic.tasks import TASKS


def summary(**means: float) -> dict:
    spread = {"std": 0.5, "n": 3}
    return {"methods": {name: {"test_mae": {"mean": mean, **spread}} for name, mean in means.items()}, "rows": []}


@pytest.fixture
def axes(monkeypatch):
    """The axes of what is drawn."""
    found = []
    subplots = matplotlib.figure.Figure.subplots
    monkeypatch.setattr(matplotlib.figure.Figure, "subplots", lambda self: found.append(subplots(self)) or found[-1])
    return found


def test_bars_are_the_means_and_groups_stand_side_by_side(tmp_path, axes):
    groups = {"KS 0.02": summary(fedavg=18.0, cwt=16.0), "KS 0.97": summary(fedavg=32.0), "failed": summary()}
    draw(groups, TASKS["regression"](name="regression"), tmp_path / "comparison.png", "months")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    bars = sorted((bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes[0].patches)
    assert [height for _, height in bars] == [18.0, 16.0, 32.0]
    assert [place for place, _ in bars] == pytest.approx([-0.2, 0.2, 0.8])
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["KS 0.02", "KS 0.97"]
    assert axes[0].get_ylabel() == "mae, months, on test images (lower is better)"
    assert axes[0].get_title(loc="left") == "Mean of 3 runs of each method\nlines: ± standard deviation"


def test_methods_of_one_comparison_are_named_under_their_bars_beside_a_guess(tmp_path, axes):
    found = {**summary(fedavg=18.0, cwt=16.0), "without_images": {"mae": 33.0}}
    draw({"": found}, TASKS["regression"](name="regression"), tmp_path / "comparison.png", "months")
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["fedavg", "cwt"]
    assert [line.get_ydata()[0] for line in axes[0].lines if line.get_linestyle() == "--"] == [33.0]
    assert axes[0].get_figure().legends == []
