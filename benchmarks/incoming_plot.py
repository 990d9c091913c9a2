"""Recovery against alarms of the incoming check: a panel for each backbone, a mark for each attack and strength.

    python benchmarks/incoming_plot.py PICTURE LOG...

draws the lines that `incoming.py --part attacks` printed, also those of a run that was stopped.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """`rows` of incoming_attacks; each mark is the mean over sites with the same attack and strength."""
    backbones = list(dict.fromkeys(row["backbone"] for row in rows))
    figure, panels = plt.subplots(1, len(backbones), figsize=(3.4 * len(backbones), 4.6), sharey=True, squeeze=False)
    names = list(dict.fromkeys(_family(row["attack"]) for row in rows))
    colours = {name: plt.get_cmap("tab20")(place % 20) for place, name in enumerate(names)}
    for panel, backbone in zip(panels[0], backbones, strict=True):
        for (family, _, _), (alarms, share) in _means([r for r in rows if r["backbone"] == backbone]).items():
            marker = "s" if family == "honest" else "o"
            beside = 1.5 * (names.index(family) - len(names) / 2)  # so that marks do not cover each other
            panel.scatter(100 * alarms + beside, 100 * share, color=[colours[family]], marker=marker, s=36)
        panel.set_title(backbone)
        panel.set_xlabel("sites that give alarm (%)")
        panel.set_xlim(-16, 116)
        panel.set_xticks([0, 50, 100])
        panel.set_ylim(-4, 104)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("images identified, less by chance (%)")
    marks = [
        plt.Line2D([], [], ls="", marker="s" if name == "honest" else "o", color=colours[name], label=name)
        for name in names
    ]
    figure.legend(handles=marks, loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06 + 0.035 * ((len(names) + 3) // 4), 1, 1))
    figure.savefig(file, dpi=110)


def _family(attack: str) -> str:
    return attack.split(",")[0].lstrip("0123456789 ").replace("-", " ")


def _means(rows: list[dict[str, Any]]) -> dict[tuple[str, str, float], tuple[float, float]]:
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for row in (one for one in rows if one["of"]):
        groups.setdefault((_family(row["attack"]), row["attack"], row["strength"]), []).append(row)
    return {
        key: (
            sum(bool(row["alarms"]) for row in group) / len(group),
            sum(max(0, row["identified"] - row["by_chance"]) / row["of"] for row in group) / len(group),
        )
        for key, group in groups.items()
    }


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The rows that `incoming.py --part attacks` printed, one a line; other lines are passed over."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"backbone"')]


if __name__ == "__main__":
    draw([row for log in sys.argv[2:] for row in lines_of(Path(log))], Path(sys.argv[1]))
