"""Writes docs/performance.md from the figures that benchmarks have measured, which lie in benchmarks/figures.

    python benchmarks/overhead.py --json figures.json
    python benchmarks/performance_page.py --keep figures.json --machine "two cores, no GPU" --commit 1a2b3c4
    python benchmarks/performance_page.py              writes the page
    python benchmarks/performance_page.py --check      exit 1 if the page is not what the figures say

A kept file has the figures, the command, the machine, the date and the commit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import performance_glance

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "figures"
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "performance.png"
LONGEST_LINE = 100  # of prose in docs

Figures = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def gpu_round(figures: Figures) -> str:
    """Seconds of a round each way, and what takes longest."""
    rows = []
    for case in figures["cases"]:
        for way, found in case["ways"].items():
            rows.append([case["case"], way, found["bare_seconds"], found["seconds"], found["ratio"]])
    text = table(["case", "parcels", "bare loop, s a round", "Polyclinic, s a round", "ratio"], rows)
    for profile in figures.get("profiles", []):
        for way in (name for name in profile if name != "case"):
            text += f"\n\nWhat takes longest, {profile['case']}, {way}:\n\n"
            text += table(
                ["Python function", "own ms a round"],
                [[f"`{where}`", own] for own, _, where in profile[way]["python_ms"][:8]],
            )
            if profile[way]["gpu_ms"]:
                kernels = [[f"`{name[:60]}`", own] for own, _, name in profile[way]["gpu_ms"][:5]]
                text += "\n\n" + table(["GPU kernel", "ms a round"], kernels)
    return text


def overhead(figures: Figures) -> str:
    """Ratios to the bare loop on a CPU."""
    rows = [
        [
            case["case"],
            f"{case['cpu_ratio']['median']:.3f} ({case['cpu_ratio']['q1']:.3f} to {case['cpu_ratio']['q3']:.3f})",
            f"{case['wall_ratio']['median']:.3f} ({case['wall_ratio']['q1']:.3f} to {case['wall_ratio']['q3']:.3f})",
            case["added_cpu_ms_per_site_and_round"],
        ]
        for case in figures["cases"]
    ]
    return table(
        ["case", "CPU seconds, ratio (quartiles)", "wall, ratio (quartiles)", "added ms a site and round"], rows
    )


def scaling(figures: Figures) -> str:
    """Time, memory and disk by the number of sites."""
    rows = [
        [
            f"{row['method']}, {row['backbone']}",
            f"{row['sites']:,}",
            row["seconds_per_round"],
            row["ms_per_site_and_round"],
            row["peak_mib"],
            f"{row['folder_mib']} MiB in {row['files']:,} files" if "files" in row else "",
        ]
        for row in figures["points"]
    ]
    head = ["method, network", "sites", "s a round", "ms a site at work", "peak memory, MiB", "run folder"]
    return table(head, rows)


def ray_nodes(figures: Figures) -> str:
    """Rounds on a cluster of node processes and in one process."""
    rows = [
        [name, figures[key]["round_seconds"], figures[key]["whole_seconds"]]
        for key, name in (("in_process", "one process"), ("ray", f"Ray, {figures['nodes']} node processes"))
    ]
    same = "The weights were the same, bit for bit." if figures["same_weights"] else "The weights differed."
    text = table([f"FedAvg, ResNet-18, {figures['sites']} sites", "s a round", "s in all"], rows)
    return f"{text}\n\n{same} An actor worked on each of {figures['ray']['busy_nodes']} nodes."


def encoder(figures: Figures) -> str:
    """Features on one core."""
    return table(["EfficientNet-Lite0", "images a second of one core"], [["224 px", figures["images_per_second"]]])


def steps(figures: Figures) -> str:
    """Milliseconds of a training step by way, and how many times faster than the plain loop the best way is."""
    rows = []
    for row in (one for one in figures["rows"] if "milliseconds" in one):
        found = row["milliseconds"]
        recorded = found.get("graph, fused optimiser", found.get("graph"))
        best = min(found.values())
        name = f"{row['backbone']}, {row['size']} px, batches of {row['batch']}"
        cells = [found["eager"], recorded, found.get("stacked, graph", "")]
        rows.append([name, row["networks"], *cells, f"{found['eager'] / best:.1f}"])
    head = ["network", "networks", "plain loop, ms", "recorded, one by one", "recorded, stacked", "times as fast"]
    check = next((one for one in figures["rows"] if "check" in one), None)
    if check is None:
        return table(head, rows)
    apart = f"Weights of a stacked run lie {check['stacked']:.1e} (relative) from those of sites one by one."
    return f"{table(head, rows)}\n\n{apart}"


def epochs(figures: Figures) -> str:
    """Milliseconds of a step by what is recorded, and seconds of the recordings."""
    ways = {"passes": "passes recorded, ms a step", "steps": "steps recorded", "epochs": "whole epochs recorded"}
    ways = {way: head for way, head in ways.items() if way in figures["rows"][0]["milliseconds of a step"]}
    rows = []
    for row in figures["rows"]:
        name = f"{row['backbone']}, {row['size']} px, batches of {row['batch']}"
        taken = [f"{row['milliseconds of a step'][way]:.3f}" for way in ways]
        rows.append(
            [name, row["steps"], *taken, ", ".join(f"{one:.3f}" for one in row["seconds of a recording"].values())]
        )
    return table(["network", "steps of an epoch", *ways.values(), "s of each recording"], rows)


def dp_gradients(figures: Figures) -> str:
    """Private sums beside a loop over images, for every backbone."""
    worst: dict[str, dict[str, float]] = {}
    for row in figures["checks"]:
        worst.setdefault(row["backbone"], {})[row["precision"]] = max(row["errors"].values())
    rows = [
        [name, *(f"{found[kind]:.1e}" if kind in found else "" for kind in ("fp32", "bf16"))]
        for name, found in worst.items()
    ]
    return table(["backbone", "largest relative error, fp32", "bf16"], rows)


def dp_steps(figures: Figures) -> str:
    """What a private step costs beside the plain one, both recorded."""
    rows = []
    for row in figures["steps"]:
        found = row["milliseconds"]
        plain, private = found["plain in a graph"], found["ghost in a graph"]
        name = f"{row['backbone']}, {row['size']} px, batches of {row['batch']}"
        rows.append([name, plain, private, f"{private / plain:.2f}", f"{found['ghost'] / found['plain']:.2f}"])
    return table(["network", "plain step, ms", "private step, ms", "ratio", "ratio, not recorded"], rows)


def vqvae2(figures: Figures) -> str:
    before = dict(figures.get("before", []))
    rows = [[name, f"{value:,}", f"{before[name]:,}" if name in before else ""] for name, value in figures["rows"]]
    return table(["generator", "images a second", "the code before"], rows)


def stylegan2(figures: Figures) -> str:
    rows = [[case, f"{found['images per second']:.0f}"] for case, found in figures["cases"].items()]
    return table(["StyleGAN2, all regularisers and ADA", "images a second"], rows)


def stylegan2_check(figures: Figures) -> str:
    """How far steps with our kernels lie from steps of plain layers, in fp32."""
    rows = [
        [size.split(",")[0], what, f"{apart:.1e}"]
        for size, found in figures["cases"].items()
        for what, apart in found.items()
    ]
    return table(["images", "what", "relative difference"], rows)


def gan_steps(figures: Figures) -> str:
    """Steps of small GANs, recorded and not."""
    rows = []
    for row in figures["rows"]:
        found = row["steps a second"]
        recorded, plain = found["recorded"], found["kernel by kernel"]
        rows.append([f"{row['generator']}, {row['size']} px", plain, recorded, f"{recorded / plain:.1f}"])
    return table(["generator", "steps a second", "recorded as a CUDA graph", "times as fast"], rows)


def gan_stacks(figures: Figures) -> str:
    """Steps of several sites' GANs: one after the other, and as one stack."""
    rows = []
    for row in figures["rows"]:
        found = row["steps a second"]
        alone, stacked = found["one after the other"], found["stacked"]
        name = f"{row['generator']}, {row['size']} px"
        rows.append([name, row["members"], alone, stacked, f"{stacked / alone:.1f}"])
    head = ["generator", "sites", "steps of all a second, each recorded", "as one stack, recorded", "times as fast"]
    return table(head, rows)


def feder_stacked(figures: Figures) -> str:
    """Whole runs of FedER, both ways."""
    what = f"FedER, {figures['sites']} sites, {figures['size']} px, {figures['generator steps']} steps of each DCGAN, "
    what += f"{figures['rounds']} rounds"
    medians = [f"{statistics.median(seconds):.1f}" for seconds in figures["seconds"].values()]
    head = ["whole run", "one after the other, s", "stacked, s", "times as fast"]
    return table(head, [[what, *medians, figures["times as fast"]]])


def attacks(figures: Figures) -> str:
    """Many targets of gradient inversion at once."""
    rows = [
        [
            row["case"],
            row["targets"],
            row["steps"],
            row["seconds_at_once"],
            row["seconds_one_by_one_scaled_to_all"],
            row["ratio"],
        ]
        for row in figures["rows"]
    ]
    head = ["attack", "targets", "steps", "all at once, s", "one by one, s", "times as fast"]
    return table(head, rows)


def one_pass(figures: Figures) -> str:
    """Scoring one model at many sites."""
    rows = [
        [figures["sites"], name, figures[f"site by site{key}, ms"], figures[f"in one pass{key}, ms"]]
        for name, key in (("recorded", ""), ("not recorded", ", not recorded"))
        if f"in one pass{key}, ms" in figures
    ]
    return table(["sites", "passes", "scored one by one, ms", "in one pass, ms"], rows)


def compiled(figures: Figures) -> str:
    """A step as it is and compiled; on a GPU both are recorded."""
    rows = []
    for row in figures["rows"]:
        name = f"{row['backbone']}, {row['size']} px, batches of {row['batch']}"
        taken = [*row["milliseconds of a step"].values(), row["times as fast"]]
        seconds = [row["seconds of compilation"], row["seconds from the cache"]]
        pays = "never" if row["steps to pay"] is None else f"{row['steps to pay']:,}"
        rows.append([name, *taken, *seconds, pays, f"{row['relative difference of gradients']:.0e}"])
    first = "as it is, CPU ms a step" if figures["device"] == "cpu" else "recorded, ms a step"
    second = "CPU s" if figures["device"] == "cpu" else "s"
    head = ["network", first, "compiled", "times as fast", f"{second} of compilation", f"{second} from the cache"]
    return table([*head, "steps to pay", "gradients differ by"], rows)


def peers(figures: Figures) -> str:
    """The same job by other programs, as ratios to the bare loop."""
    names = {"bare": "bare loop", "polyclinic": "Polyclinic", "pfl": "pfl-research", "fedlab": "FedLab"}
    names |= {"flower": "Flower, simulation", "nvflare": "NVFlare, simulator"}
    if figures.get("device") == "cuda":
        return peers_on_gpu(figures, names)
    rows = [
        [
            names.get(row["program"], row["program"]),
            row["cpu seconds a round"],
            row["cpu, ratio to the bare loop"],
            "" if row["cpu, ratio to polyclinic"] is None else row["cpu, ratio to polyclinic"],
            row["cpu seconds with one round, start-up included"],
            row["turns"],
        ]
        for row in figures["rows"]
    ]
    head = ["program", "CPU s a round", "to the bare loop", "to Polyclinic", "CPU s, start and one round", "turns"]
    return table(head, rows)


def peers_on_gpu(figures: Figures, names: Mapping[str, str]) -> str:
    """Wall time: a GPU's work takes no CPU seconds."""
    rows = [
        [
            names.get(row["program"], row["program"]),
            row["wall seconds a round"],
            row["wall, ratio to the bare loop"],
            row["wall, ratio to polyclinic"],
            row["turns"],
        ]
        for row in figures["rows"]
    ]
    return table(["program", "s a round", "to the bare loop", "to Polyclinic", "turns"], rows)


#: file in `figures` -> heading and what its table shows
SECTIONS: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "gpu_round": ("A round on a GPU beside a bare loop", gpu_round),
    "gpu_round_tuned": ("The same beside a loop that is recorded as a CUDA graph, too", gpu_round),
    "steps": ("Steps on a GPU: plain, recorded, stacked", steps),
    "steps_stacked": ("Stacked networks on a GPU", steps),
    "epochs": ("Local epochs on a GPU: what a CUDA graph holds", epochs),
    "dp_gradients": ("Private gradients on a GPU beside a loop over images", dp_gradients),
    "dp_gradients_again": (
        "The same since products are of numbers in bf16: three backbones, and VQ-VAE-2",
        dp_gradients,
    ),
    "dp_steps": ("Private steps on a GPU", dp_steps),
    "vqvae2": ("VQ-VAE-2 on a GPU, 256 px, batches of 32", vqvae2),
    "stylegan2": ("StyleGAN2 on a GPU, 256 px, batches of 32", stylegan2),
    "stylegan2_check": ("StyleGAN2's kernels against plain layers: whole steps on a GPU", stylegan2_check),
    "gan_steps": ("Small GANs on a GPU, as FedER's sites train them", gan_steps),
    "gan_stacks": ("Small GANs of several sites on a GPU, one after the other and stacked", gan_stacks),
    "feder_stacked": ("FedER end to end on a GPU, one site after the other and stacked", feder_stacked),
    "attacks": ("Gradient inversion of many targets on a GPU", attacks),
    "one_pass": ("One model scored at many simulated sites, on a GPU", one_pass),
    "gpu_round_bytes": ("The same with parcels as bytes, before optimisers were fused", gpu_round),
    "overhead": ("A round on a CPU beside a bare loop", overhead),
    "compiled": ("torch.compile on a CPU", compiled),
    "compiled_gpu": ("torch.compile on a GPU, both ways recorded", compiled),
    "peers": ("The same job by other programs, on a CPU", peers),
    "peers_two_sites": ("The same with two sites, for simulators that start a process for each", peers),
    "peers_gpu": ("The same job by another program, on a GPU", peers),
    "scaling": ("Many sites", scaling),
    "plan": ("Features of an encoder on a CPU", encoder),
    "ray_nodes": ("Ray with several node processes", ray_nodes),
}


def glance() -> list[performance_glance.Row]:
    files = {name: KEPT / f"{name}.json" for name in SECTIONS}
    return performance_glance.rows(
        {name: json.loads(file.read_text("utf-8"))["figures"] for name, file in files.items()}
    )


def page() -> str:
    first, rest = (KEPT / "introduction.md").read_text(encoding="utf-8").split("\n## ", 1)
    parts = [first, performance_glance.section(glance(), PICTURE.relative_to(PAGE.parent).as_posix()), "## " + rest]
    for name, (heading, show) in SECTIONS.items():
        file = KEPT / f"{name}.json"
        if file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            told = f"`{kept['command']}`, {kept['date']}, commit {kept['commit']}, on {kept['machine']}."
            where = textwrap.fill(told, LONGEST_LINE, break_long_words=False, break_on_hyphens=False)
            note = "\n" + textwrap.fill(kept["note"], LONGEST_LINE) + "\n" if "note" in kept else ""
            parts.append(f"## {heading}\n\n{where}\n\n{show(kept['figures'])}\n{note}")
    return "\n".join(parts)


def keep(file: Path, options: argparse.Namespace) -> None:
    """Put the figures of a benchmark where the page is written from."""
    figures = json.loads(file.read_text(encoding="utf-8"))
    kept = {
        "command": options.command or f"python benchmarks/{figures['benchmark']}.py",
        "machine": options.machine,
        "date": figures.get("date", datetime.now(UTC).strftime("%Y-%m-%d")),
        "commit": options.commit,
        "figures": figures,
    }
    KEPT.mkdir(exist_ok=True)
    target = KEPT / f"{options.name or figures['benchmark']}.json"
    target.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="figures that a benchmark wrote with --json")
    parser.add_argument("--name", help="another name to keep them under than the benchmark's")
    parser.add_argument("--command", help="the command that measured them")
    parser.add_argument("--machine", default="unknown", help="in words")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    if options.keep:
        keep(options.keep, options)
    if options.check:
        raise SystemExit(0 if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE}: not what the figures say")
    PAGE.write_text(page(), encoding="utf-8")
    performance_glance.draw(glance(), PICTURE)


if __name__ == "__main__":
    main()
