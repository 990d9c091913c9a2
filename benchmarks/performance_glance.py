"""Figures of docs/performance.md that somebody wants to see first: how many times as fast as what, in one picture.

On a CPU, and for other programs, CPU seconds are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: the programs of peers.py, by the names that people know
PROGRAMS = {"pfl": "pfl-research", "fedlab": "FedLab", "flower": "Flower", "nvflare": "NVFlare's simulator"}
#: Okabe and Ito's colours, which colour-blind readers tell apart
COLOURS = {"GPU": "#0072B2", "CPU": "#E69F00"}

#: below the table
MEANING = """1 is as fast. On a CPU, and beside other programs, CPU seconds are compared. A bare loop has no
gate, no ledger and no digests; a recorded loop is a CUDA graph as well. How each was measured
stands below."""

Kept = Mapping[str, Mapping[str, Any]]


class Row(NamedTuple):
    device: str
    what: str
    beside: str
    times: float  #: as fast


def rows(kept: Kept) -> list[Row]:
    """From the figures by the name of their file."""
    return [*_rounds(kept), *_stacks(kept), *_attacks(kept), *_generators(kept), *_peers(kept), *_cpu(kept)]


def _rounds(kept: Kept) -> list[Row]:
    found = []
    for name, beside in (("gpu_round", "a bare loop"), ("gpu_round_tuned", "a recorded loop")):
        for case in kept[name]["cases"]:
            what = "a round: " + case["case"].removesuffix(", tuned loop")
            found.append(Row("GPU", what, beside, 1 / case["ways"]["by reference"]["ratio"]))
    return found


def _stacks(kept: Kept) -> list[Row]:
    found = []
    for row in kept["steps_stacked"]["rows"]:
        if row.get("backbone") == "small-cnn" and row["networks"] >= 16:
            took = row["milliseconds"]
            what = f"a step of {row['networks']} small CNNs, stacked"
            found.append(Row("GPU", what, "one after the other", took["eager"] / took["stacked, graph"]))
    return found


def _attacks(kept: Kept) -> list[Row]:
    cases = kept["attacks"]["rows"]
    return [Row("GPU", f"gradient inversion: {one['case']}", "one by one", one["ratio"]) for one in cases]


def _generators(kept: Kept) -> list[Row]:
    speeds = [case["images per second"] for case in kept["stylegan2"]["cases"].values()]
    (stacks,) = kept["gan_stacks"]["rows"]
    steps = stacks["steps a second"]
    return [
        Row("GPU", "StyleGAN2, 256 px", "plain layers", max(speeds) / min(speeds)),
        Row(
            "GPU",
            f"{stacks['members']} small GANs, stacked",
            "one after the other",
            steps["stacked"] / steps["one after the other"],
        ),
    ]


def _peers(kept: Kept) -> list[Row]:
    found = []
    for name, device in (("peers_gpu", "GPU"), ("peers", "CPU"), ("peers_two_sites", "CPU")):
        for row in kept[name]["rows"]:
            if row["program"] in PROGRAMS:
                what = f"the same rounds, {kept[name]['sites']} sites"
                found.append(Row(device, what, PROGRAMS[row["program"]], row["cpu, ratio to polyclinic"]))
    return found


def _cpu(kept: Kept) -> list[Row]:
    cases = kept["overhead"]["cases"]
    return [Row("CPU", f"a round: {one['case']}", "a bare loop", 1 / one["cpu_ratio"]["median"]) for one in cases]


def draw(found: list[Row], file: Path) -> None:
    """A bar for each row, from 1 (as fast) on a scale of powers of ten."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 0.34 * len(found) + 1.1), layout="constrained")
    places = range(len(found))[::-1]
    axes.barh(places, [row.times - 1 for row in found], left=1, color=[COLOURS[row.device] for row in found])
    for place, row in zip(places, found, strict=True):
        axes.text(max(row.times, 1) * 1.06, place, _times(row), va="center", fontsize=9)
    axes.set_yticks(places, [f"{row.device}, {row.what}\nbeside {row.beside}" for row in found], fontsize=7.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlim=(0.7, 300), xlabel="times as fast")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200], ["1", "2", "5", "10", "20", "50", "100", "200"])
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, metadata={"Software": None})
    plt.close(figure)


def _times(row: Row) -> str:
    return f"{row.times:.0f}" if row.times >= 10 else f"{row.times:.2f}" if row.times < 2 else f"{row.times:.1f}"


def section(found: list[Row], picture: str) -> str:
    """The picture, and the same as a table."""
    head = "| on a | what | beside | times as fast |\n|---|---|---|---|\n"
    lines = [f"| {row.device} | {row.what} | {row.beside} | {_times(row)} |" for row in found]
    words = f"![how many times as fast as other ways: the table below]({picture})"
    return f"## At a glance\n\n{words}\n\n{head}" + "\n".join(lines) + f"\n\n{MEANING}\n"
