"""Writes lab/pages/performance.md, its picture and lab/pages/campaigns.md from the files in lab/figures.

    python lab/benchmarks/overhead.py --json figures.json
    python lab/benchmarks/performance_page.py --keep figures.json --command "python ..." --machine "two cores, no GPU"
    python lab/benchmarks/performance_page.py              writes the pages

A kept file has the figures of one benchmark or campaign, the command that measures them again, and for each measurement
its own command, machine, date and commit.
"""

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

LAB = Path(__file__).parents[1]
FIGURES, PAGES = LAB / "figures", LAB / "pages"
LONGEST_LINE = 100
#: the programs of peers.py, by the names that people know
PROGRAMS = {"bare": "bare loop", "polyclinic": "Polyclinic", "pfl": "pfl-research", "fedlab": "FedLab"}
PROGRAMS |= {"flower": "Flower, simulation", "nvflare": "NVFlare, simulator"}
#: Okabe and Ito's colours, which colour-blind readers tell apart
COLOURS = {"GPU": "#0072B2", "CPU": "#E69F00"}

PEERS = "cpu, ratio to polyclinic"

Figures = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def gpu_round(figures: Figures) -> str:
    rows = [[case["case"], case["bare_seconds"], case["seconds"], case["ratio"]] for case in figures["cases"]]
    return table(["case", "bare loop, s a round", "Polyclinic, s a round", "ratio"], rows)


def overhead(figures: Figures) -> str:
    rows = []
    for case in figures["cases"]:
        ratios = [case["cpu_ratio"], case["wall_ratio"]]
        cells = [f"{one['median']:.3f} ({one['q1']:.3f} to {one['q3']:.3f})" for one in ratios]
        rows.append([case["case"], *cells, case["added_cpu_ms_per_site_and_round"]])
    return table(["case", "CPU seconds, ratio (quartiles)", "wall, ratio", "added ms a site and round"], rows)


def scaling(figures: Figures) -> str:
    keys = ("seconds_per_round", "ms_per_site_and_round", "peak_mib", "folder_mib")
    rows = [[f"{row['sites']:,}", *(row[key] for key in keys)] for row in figures["points"]]
    return table(["sites", "s a round", "ms a site at work", "peak memory, MiB", "run folder, MiB"], rows)


def steps(figures: Figures) -> str:
    rows = []
    for row in (one for one in figures["rows"] if "milliseconds" in one):
        found = row["milliseconds"]
        recorded = found.get("graph, fused optimiser", found.get("graph", ""))
        cells = [found["eager"], recorded, found.get("stacked, graph", "")]
        name = f"{row['backbone']}, {row['size']} px, batches of {row['batch']}"
        rows.append([name, row["networks"], *cells, f"{found['eager'] / min(found.values()):.1f}"])
    head = ["network", "networks", "plain loop, ms", "recorded, one by one", "recorded, stacked", "times as fast"]
    return table(head, rows)


def dp_steps(figures: Figures) -> str:
    rows = []
    for row in figures["steps"]:
        found = row["milliseconds"]
        plain, private = found["plain in a graph"], found["ghost in a graph"]
        name = f"{row['backbone']}, {row['size']} px, batches of {row['batch']}"
        rows.append([name, plain, private, f"{private / plain:.2f}"])
    return table(["network", "plain step, ms", "private step, ms", "ratio"], rows)


def generator_steps(figures: Figures) -> str:
    rows = [[row["generator"], f"{row['images a second']:,} images"] for row in figures["stylegan2"]]
    rows += [[row["generator"], f"{row['images a second']:,} images"] for row in figures["vqvae2"]]
    rows += [[row["generator"], f"{row['steps a second']:,} steps"] for row in figures["gan"]]
    for row in figures["stacks"]:
        for way, rate in row["steps a second"].items():
            rows.append([f"{row['generator']}, {row['members']} sites, {way}", f"{rate:,} steps of all"])
    return table(["generator", "a second"], rows)


def attacks(figures: Figures) -> str:
    keys = ("case", "targets", "steps", "seconds_at_once", "seconds_one_by_one_scaled_to_all", "ratio")
    rows = [[row[key] for key in keys] for row in figures["rows"]]
    return table(["attack", "targets", "steps", "all at once, s", "one by one, s", "times as fast"], rows)


def peers(figures: Figures) -> str:
    """CPU seconds; on a GPU wall time, as its work takes no CPU seconds."""
    kind, word = ("wall", "s") if figures.get("device") == "cuda" else ("cpu", "CPU s")
    rows = [
        [PROGRAMS[row["program"]], row[f"{kind} seconds a round"], row[f"{kind}, ratio to the bare loop"], row["turns"]]
        for row in figures["rows"]
    ]
    return table([f"program, {figures['sites']} sites", f"{word} a round", "to the bare loop", "turns"], rows)


def faults(figures: Figures) -> str:
    rows = [[kind, f"{found['tried']:,}", found["failed"]] for kind, found in figures["kinds"].items()]
    return table(["fault", "tried", "failed"], rows)


def transport(figures: Figures) -> str:
    rows = []
    for group in ("faults", "studies"):
        for name, ended in sorted(figures[group].items()):
            went_on, resumed = ended.get("same weights", 0), ended.get("stopped, resumed, same weights", 0)
            rows.append([name, sum(ended.values()), went_on, resumed, sum(ended.values()) - went_on - resumed])
    rows.append(
        ["all", figures["trials"], *(sum(row[at] for row in rows if row[0] in figures["studies"]) for at in (2, 3, 4))]
    )
    return table(
        ["trials with", "number", "went on: same weights", "stopped with a sentence, resumed: same weights", "failed"],
        rows,
    )


def fuzz(figures: Figures) -> str:
    rows = [[name, f"{one['tried']:,}", f"{one['accepted']:,}"] for name, one in figures["targets"].items()]
    told = f"{figures['tried']:,} inputs, {len(figures['failures'])} failed."
    return f"{told}\n\n{table(['input', 'tried', 'read all the same'], rows)}"


def honest(figures: Figures) -> str:
    told = f"{figures['studies']} honest studies, {figures['parcels']} kept parcels: {len(figures['alarms'])} alarms"
    rows = [[why, count] for why, count in figures["open"].items()]
    left = table(["not carried out again", "parcels"], rows)
    return f"{told}; {figures['recomputed']} parcels came out bit for bit.\n\n{left}"


Section = tuple[str, Callable[[Figures], str]]
#: file in lab/figures -> heading and what its table shows
SECTIONS: dict[str, Section] = {
    "overhead": ("A round on a CPU beside a bare loop", overhead),
    "gpu_round": ("A round on a GPU beside a bare loop", gpu_round),
    "gpu_round_tuned": ("The same beside a loop that is recorded as a CUDA graph, too", gpu_round),
    "steps": ("Training steps on a GPU", steps),
    "steps_stacked": ("Stacked networks on a GPU", steps),
    "dp_steps": ("Private steps on a GPU", dp_steps),
    "generator_steps": ("Generators on a GPU", generator_steps),
    "attacks": ("Gradient inversion of many targets on a GPU", attacks),
    "peers": ("The same job by other programs, on a CPU", peers),
    "peers_two_sites": ("The same with two sites", peers),
    "peers_gpu": ("The same job by another program, on a GPU", peers),
    "scaling": ("Many sites", scaling),
}
CAMPAIGNS: dict[str, Section] = {
    "faults": ("Faults: kills, power cuts, damaged files, full disks, lying sites", faults),
    "transport": ("The real transport: networks, processes, clocks, disks, servers", transport),
    "fuzz": ("Changed inputs", fuzz),
    "audit_honest": ("Honest runs before the audit's search for hidden images", honest),
}
INTRODUCTION = """# {title}

This page is written by `python lab/benchmarks/performance_page.py` from the files in `lab/figures`;
a test compares both. {meaning}
"""
SPEED = """Speed is a ratio of two loops that were measured in turns in one process, or seconds.
Each command measures its table again; a file says when and by which code it was measured.

**Figures of a GPU are of the present code**, but for the comparison with another program; those of a CPU are older."""
JUDGED = """A trial fails if it ends in a traceback, hangs, or ends well with another result than
without the fault. A command that says in a sentence what is wrong has not failed."""
MEANING = """1 is as fast. On a CPU, and beside other programs, CPU seconds are compared. A bare loop has no
gate, no ledger and no digests; a recorded loop is a CUDA graph as well."""


class Row(NamedTuple):
    """How many times as fast something is as what stands beside it."""

    device: str
    what: str
    beside: str
    times: float

    @property
    def figure(self) -> str:
        return f"{self.times:.0f}" if self.times >= 10 else f"{self.times:.{2 if self.times < 2 else 1}f}"


def glance(kept: Mapping[str, Figures]) -> list[Row]:
    """What somebody wants to see first, from the figures by the name of their file."""
    found = [
        Row("GPU", f"a round: {case['case'].removesuffix(', tuned loop')}", beside, 1 / case["ratio"])
        for name, beside in (("gpu_round", "a bare loop"), ("gpu_round_tuned", "a recorded loop"))
        for case in kept[name]["cases"]
    ]
    found += [
        Row("GPU", f"a step of {row['networks']} small CNNs, stacked", "one after the other", _gain(row))
        for row in kept["steps_stacked"]["rows"]
        if row.get("backbone") == "small-cnn" and row["networks"] >= 16
    ]
    found += [
        Row("GPU", f"{row['members']} small GANs, stacked", "one after the other", row["times as fast"])
        for row in kept["generator_steps"]["stacks"]
    ]
    found += [
        Row("GPU", f"gradient inversion: {row['case']}", "one by one", row["ratio"]) for row in kept["attacks"]["rows"]
    ]
    found += [
        Row(device, f"the same rounds, {kept[name]['sites']} sites", PROGRAMS[row["program"]], row[PEERS])
        for name, device in (("peers_gpu", "GPU"), ("peers", "CPU"), ("peers_two_sites", "CPU"))
        for row in kept[name]["rows"]
        if row["program"] not in ("bare", "polyclinic")
    ]
    found += [
        Row("CPU", f"a round: {case['case']}", "a bare loop", 1 / case["cpu_ratio"]["median"])
        for case in kept["overhead"]["cases"]
    ]
    return found


def _gain(row: Figures) -> float:
    return row["milliseconds"]["eager"] / row["milliseconds"]["stacked, graph"]


def draw(rows: Sequence[Row], file: Path) -> None:
    """A bar for each row, from 1 (as fast) on a scale of powers of ten."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 0.34 * len(rows) + 1.1), layout="constrained")
    places = range(len(rows))[::-1]
    axes.barh(places, [row.times - 1 for row in rows], left=1, color=[COLOURS[row.device] for row in rows])
    for place, row in zip(places, rows, strict=True):
        axes.text(max(row.times, 1) * 1.06, place, row.figure, va="center", fontsize=9)
    axes.set_yticks(places, [f"{row.device}, {row.what}\nbeside {row.beside}" for row in rows], fontsize=7.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlim=(0.7, 300), xlabel="times as fast")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200], ["1", "2", "5", "10", "20", "50", "100", "200"])
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, metadata={"Software": None})
    plt.close(figure)


def read(name: str) -> dict[str, Any]:
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def section(name: str, heading: str, show: Callable[[Figures], str]) -> str:
    kept = read(name)
    machines = "; ".join(dict.fromkeys(one["machine"] for one in kept["measured"]))
    words = [f"`{kept['again']}`; measured on {machines}.", kept.get("note", "")]
    told = [textwrap.fill(one, LONGEST_LINE, break_long_words=False, break_on_hyphens=False) for one in words if one]
    return "\n\n".join([f"## {heading}", told[0], show(kept["figures"]), *told[1:]]) + "\n"


def performance() -> str:
    first = f"![how many times as fast as other ways; the tables below](performance.png)\n\n{MEANING}\n"
    parts = [section(name, *one) for name, one in SECTIONS.items()]
    return "\n".join([INTRODUCTION.format(title="Performance", meaning=SPEED), first, *parts])


def campaigns() -> str:
    parts = [section(name, *one) for name, one in CAMPAIGNS.items()]
    return "\n".join([INTRODUCTION.format(title="Campaigns", meaning=JUDGED), *parts])


def keep(options: argparse.Namespace) -> None:
    """Put the figures of one run where the pages are written from."""
    figures = json.loads(options.keep.read_text(encoding="utf-8"))
    own = {"command": options.command, "machine": options.machine, "commit": options.commit}
    own["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    kept = {"again": options.command, "measured": [own], "figures": figures}
    if options.note:
        kept["note"] = options.note
    target = FIGURES / f"{options.name or figures['benchmark']}.json"
    target.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="figures that a benchmark wrote with --json")
    parser.add_argument("--name", help="another name to keep them under than the benchmark's")
    for name, words in (("command", "the command that measured them"), ("machine", "in words"), ("commit", "")):
        parser.add_argument(f"--{name}", default="unknown", help=words)
    parser.add_argument("--note", default="", help="what a reader must know beside the table")
    options = parser.parse_args()
    if options.keep:
        keep(options)
    (PAGES / "performance.md").write_text(performance(), encoding="utf-8")
    (PAGES / "campaigns.md").write_text(campaigns(), encoding="utf-8")
    draw(glance({name: read(name)["figures"] for name in SECTIONS}), PAGES / "performance.png")


if __name__ == "__main__":
    main()
