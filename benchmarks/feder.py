"""Tables 2 to 7 and Fig. 2 of FedER, on natural sites: every method with the same steps and the same search.

Each method's learning rate is the best of a few by validation images of seed 0; then it runs with as many seeds as
asked for. A first model counts as a round, so FedER has one round less than the others. Every run is a study of its
own in a folder below --out, and a benchmark that was interrupted goes on where it stopped. What is finished is written
into --json as it comes.

POLYCLINIC_DATA (or --data) names the folder with fed_isic5_64_jpeg.npz, pneumoniamnist.npz, tb_cxr_64.npz and
covid_cxr_64.npz; without it, skin phantoms whose sites' cameras differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from feder_data import SITES, prepared
from feder_generators import train_ahead
from feder_workers import run_all
from matplotlib.figure import Figure

from polyclinic.runner.compare import Entry
from polyclinic.study import parse_study

RATES = (1e-4, 3e-4, 1e-3)
#: what is searched; the others take the rate of the method they are a variant of
SEARCHED = ("standalone", "centralized", "fedavg", "fedprox", "fedbn", "feder")
BUFFERS = (0, 128, 256, 1024, 2048)
NODES = [2, 4, 8, 16]
#: what the figures depend on besides the data, for the record
ASKED = (
    *("rounds", "local_steps", "seeds", "rates", "size", "most", "backbone", "norm", "decay_every", "select"),
    *("evaluate_every", "generator", "generator_set", "generator_steps", "tuning_steps"),
)
#: a row of the tables: the method it runs, its settings, and whose learning rate it takes
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (name, {}, name) for name in SEARCHED},
    "centralized, synthetic": ("centralized", {"images": "synthetic"}, "centralized"),
    "centralized, both": ("centralized", {"images": "both"}, "centralized"),
    "feder-a": ("feder-a", {}, "feder"),
    "feder-b": ("feder-b", {}, "feder"),
    "feder, asynchronous": ("feder", {"mode": "asynchronous"}, "feder"),
    "feder, two networks": ("feder", {}, "feder"),
    **{f"feder, buffer {size}": ("feder", {"buffer": size}, "feder") for size in BUFFERS},
}


class Plan:
    """The studies of one task: real images by source, or phantoms."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.quick = options, options.quick
        self.out = Path(options.out)
        self.base = self.images() | {
            "model": {"backbone": options.backbone, "norm": options.norm},
            "evaluation": {"every": options.evaluate_every, "select": options.select},
            "engine": {
                "device": options.device,
                "precision": options.precision,
                "graphs": True,
                "workers": 1,
                "checkpoint_every": 0,
            },
            "optimizer": {
                "name": "adam",
                "batch_size": 32,
                "decay_every": options.decay_every,
                "augment": self.augmentation,
            },
        }

    @property
    def first_site(self) -> str:
        return SITES[self.options.task][0] if self.options.data else "site-1"

    @property
    def augmentation(self) -> list[str]:
        return ["flip"] if self.options.task == "chest" else ["flip", "turn"]

    def images(self) -> dict[str, Any]:
        if self.options.data:
            options = self.options
            return prepared(options.task, Path(options.data), options.size, options.most, self.out / "images")
        samples = 120 if self.quick else 900
        data = {"source": "skin-phantom", "size": self.options.size, "samples": samples, "acquisition": 0.7}
        return {"data": data | {"test": 0.25}, "sites": {"partition": "iid", "count": 3}}

    @property
    def generator(self) -> dict[str, Any]:
        if self.quick:
            return {
                "generator": {"name": "dcgan", "width": 4, "latent": 8, "batch_size": 8},
                "tuning": {"most_steps": 4, "most_tuning_steps": 4, "check_every": 2, "patience": 2, "measured": 20},
            }
        options = self.options
        steps, table = options.generator_steps, {"name": options.generator, **json.loads(options.generator_set)}
        if not options.tuning_steps:
            return {"generator": {**table, "steps": steps}, "tuning": {"on": False}}
        phases = {
            "most_steps": steps,
            "most_tuning_steps": options.tuning_steps,
            "check_every": options.check_every,
            "patience": max(1, steps // 2),
            "measured": options.measured,
        }
        return {"generator": table, "tuning": phases}

    def entry(self, row: str, seed: int, lr: float, **changes: Any) -> Entry:
        """One run: a row of the tables with a seed. Its folder is named by all three, so that no run is run twice."""
        name, settings, _ = ROWS[row]
        rounds = self.options.rounds - (1 if name.startswith("feder") else 0)
        method = {"name": name, "rounds": rounds, **self.steps_of(name), **settings}
        tables = {**self.base, "seed": seed, **changes}
        if row == "feder, asynchronous":  # one site takes twice as long as the others
            method["turn_takes"] = {self.first_site: 2.0}
        if row == "feder, two networks":
            tables["model"] = {**self.base["model"], "backbones": {self.first_site: self.options.other_backbone}}
        if name.startswith("feder") or "images" in settings:
            method["reuse_generators"] = True
            tables |= self.generator
            if self.quick and name.startswith("feder"):
                method.setdefault("buffer", 16)
        tables["optimizer"] = {**self.base["optimizer"], "lr": lr}
        nodes = tables["sites"].get("count", "")
        label = f"{row.replace(', ', '-').replace(' ', '')}{nodes}-lr{lr:g}"
        return Entry(label, seed, parse_study({**tables, "method": method}), self.out / f"{label}-seed{seed}")

    def steps_of(self, method: str) -> dict[str, int]:
        """As many steps at each site in a round as asked for; as many in all, where images are in one place."""
        each = self.options.local_steps
        if not each:
            return {}
        return {"steps": each * self.options.sites} if method == "centralized" else {"local_steps": each}

    def generators(self, seed: int, **changes: Any) -> Entry:
        """A run that trains the generators of a seed, which others take from the cache."""
        study = self.entry("feder", seed, RATES[0], **changes).study
        ahead = study.with_settings({"method.rounds": 1, "evaluation.every": 0})
        label = f"generators{study.as_tables()['sites'].get('count', '')}"
        return Entry(label, seed, ahead, self.out / f"{label}-seed{seed}")


def searched(plan: Plan, rows: list[str], **changes: Any) -> dict[str, float]:
    """The best learning rate of each method by validation images; all methods try the same ones, with seed 0."""
    rates = RATES[1:2] if plan.quick else plan.options.rates
    planned = {(row, lr): plan.entry(row, 0, lr, **changes) for row in rows for lr in rates}
    ahead = [plan.generators(0, **changes)] if needs_training(plan, rows) else []
    go(plan, ahead + list(planned.values()))
    best = {}
    for row in rows:
        scores = {lr: validation_score(planned[row, lr]) for lr in rates}
        best[row] = max(scores, key=lambda lr: scores[lr])
    print(f"{time.monotonic() - plan.options.started:.0f} s: learning rates: {best}", flush=True)
    return best


def needs_training(plan: Plan, rows: Any) -> bool:
    """Whether a run ahead must train generators, for runs side by side not to wait for each other."""
    used = any(ROWS[row][0].startswith("feder") or "images" in ROWS[row][1] for row in rows)
    return used and plan.options.jobs > 1 and not plan.options.trained


def validation_score(entry: Entry) -> float:
    """The accuracy on validation images of the round that was released."""
    if entry.result is None:
        return float("-inf")
    lines = [json.loads(line) for line in (entry.folder / "history.jsonl").read_text().splitlines()]
    scores = [line["validation"]["pooled"]["accuracy"] for line in lines if line["validation"]]
    return max(scores) if entry.study.evaluation.select == "best" else scores[-1]


def wanted(plan: Plan, rows: Any) -> list[str]:
    """Those of `rows` that were asked for, or whose learning rate one of them takes."""
    chosen = plan.options.rows
    needed = set(ROWS) if chosen is None else set(chosen) | {ROWS[row][2] for row in chosen}
    return [row for row in rows if row in needed]


def go(plan: Plan, entries: list[Entry], report: Callable[[], None] | None = None) -> None:
    """Run what is not finished, telling of each run that is; at the deadline give up with what there is."""
    options = plan.options
    left = options.seconds - (time.monotonic() - options.started) if options.seconds else None

    def finished(entry: Entry, words: str) -> None:
        print(f"{time.monotonic() - options.started:.0f} s: {entry.folder.name} {words}", flush=True)
        if report is not None:
            report()

    if not run_all(entries, options.jobs, left, finished):
        print("time is up: what is finished is reported", flush=True)


# --- figures ------------------------------------------------------------------------------------------


def figures(entries: list[Entry]) -> dict[str, Any]:
    """Of the runs of one row with several seeds: accuracies in percent, mean and standard deviation over seeds."""
    results = [entry.result for entry in entries if entry.result is not None]
    if not results:
        return {"n": 0}
    found: dict[str, Any] = {"n": len(results)}
    found["node performance"] = mean_and_deviation([100 * one["metrics"]["mean"]["accuracy"] for one in results])
    found["on all sites' images"] = mean_and_deviation([100 * one["metrics"]["test"]["accuracy"] for one in results])
    sites = list(results[0]["metrics"]["per_site"])
    found["sites"] = {
        site: mean_and_deviation([100 * one["metrics"]["per_site"][site]["accuracy"] for one in results])
        for site in sites
    }
    if "convergence" in results[0]["metrics"]:
        found["node convergence"] = {site: converged(results, site) for site in sites}
        stds = [of_site["std"] for of_site in found["node convergence"].values()]
        found["convergence std"] = statistics.fmean(stds)
    if "ensemble" in results[0]["metrics"]:
        found["ensemble"] = mean_and_deviation(
            [100 * one["metrics"]["ensemble"]["test"]["accuracy"] for one in results]
        )
    found["AUC"] = areas(results)
    found["bytes a node sends in a round"] = sent_per_round(results[0])
    return found


def areas(results: list[dict]) -> dict[str, Any]:
    """Areas under ROC curves in percent, which do not mind a threshold that another site has shifted."""
    found: dict[str, Any] = {
        "node performance": mean_and_deviation([100 * one["metrics"]["mean"]["auc"] for one in results])
    }
    of_runs = [areas_of_sites(one["metrics"].get("convergence", {})) for one in results]
    if all(of_runs):
        found["each model at each site"] = mean_and_deviation(
            [100 * statistics.fmean(s["mean"] for s in run) for run in of_runs]
        )
        found["convergence std"] = 100 * statistics.fmean(s["std"] for run in of_runs for s in run)
    return found


def areas_of_sites(convergence: dict[str, dict]) -> list[dict[str, float]]:
    """Mean and standard deviation over the nodes' models; a site with images of one class only has no such area."""
    return [site["auc"] for site in convergence.values() if "auc" in site]


def converged(results: list[dict], site: str) -> dict[str, float]:
    """Table 3: mean and standard deviation over the nodes' models on one site's images, averaged over seeds."""
    of_site = [one["metrics"]["convergence"][site]["accuracy"] for one in results]
    return {name: 100 * statistics.fmean(one[name] for one in of_site) for name in ("mean", "std")}


def mean_and_deviation(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def sent_per_round(result: dict[str, Any]) -> float:
    """Models and buffers that a node sends in a round, in bytes; what is sent once, before, is spread over them."""
    kinds = ("weights", "synthetic-images", "real-images", "gradients")
    sites = result["data"]["counts"]
    if "handed_over_per_round" in result:
        return statistics.fmean(sum(of_node.values()) for of_node in result["handed_over_per_round"].values())
    both = sum(size for kind, size in result["communication"]["by_kind"].items() if kind in kinds)
    share = result["communication"]["sent_bytes"] / max(1, result["communication"]["total_bytes"])
    return both * share / len(sites) / result["rounds"]


def table(rows: dict[str, Any]) -> None:
    print(f"{'':26} node perf.     all sites'     ensemble       conv. std   sent/round    AUC: node perf.   conv. std")
    for name, row in rows.items():
        if row["n"] == 0:
            print(f"{name:26} no finished run")
            continue
        values = [row["node performance"], row["on all sites' images"], row.get("ensemble")]
        cells = [f"{v['mean']:5.1f} ± {v['std']:4.1f}" if v else " " * 12 for v in values]
        std = f"{row['convergence std']:5.2f}" if "convergence std" in row else "     "
        area = f"{row['AUC']['node performance']['mean']:5.1f}   {row['AUC'].get('convergence std', float('nan')):5.2f}"
        print(f"{name:26} {'   '.join(cells)}   {std}   {row['bytes a node sends in a round'] / 1e6:8.2f} MB   {area}")


# --- Fig. 2 -------------------------------------------------------------------------------------------


def scalability(plan: Plan, found: dict[str, Any]) -> None:
    """2 to 16 equal nodes on the images of one source (its own split each time), FedER beside the paper's others."""
    rows = [
        row for row in ("fedavg", "fedprox", "fedbn", "feder") if plan.options.rows is None or row in plan.options.rows
    ]
    rates = found["learning rates"] = searched(plan, rows, **equal_nodes(plan, plan.options.nodes[0]))
    planned: dict[tuple[int, str], list[Entry]] = {
        (nodes, row): [
            plan.entry(row, seed, rates[row], **equal_nodes(plan, nodes)) for seed in range(plan.options.seeds)
        ]
        for nodes in (plan.options.nodes[:1] if plan.quick else plan.options.nodes)
        for row in rows
    }

    def report() -> None:
        found["nodes"] = {}
        for (nodes, row), entries in planned.items():
            found["nodes"].setdefault(str(nodes), {})[row] = figures(entries)
        write(plan, found)

    go(plan, by_seed(plan, planned), report)
    report()
    for nodes, of_nodes in found["nodes"].items():
        print(f"{nodes} equal nodes")
        table(of_nodes)
    if plan.options.plot:
        draw_scalability(found["nodes"], rows, Path(plan.options.plot))


def draw_scalability(nodes: dict[str, dict[str, Any]], rows: list[str], file: Path) -> None:
    """Fig. 2: accuracy over the number of nodes, a line a method, bars one standard deviation over seeds."""
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        points = [
            (int(count), of_nodes[row]["node performance"]) for count, of_nodes in nodes.items() if of_nodes[row]["n"]
        ]
        counts, scores = [count for count, _ in points], [score for _, score in points]
        axes.errorbar(counts, [s["mean"] for s in scores], [s["std"] for s in scores], marker="o", capsize=3, label=row)
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(count) for count in nodes], labels=list(nodes))
    axes.set_xlabel("equal sites")
    axes.set_ylabel("accuracy, %")
    axes.legend()
    figure.savefig(file, dpi=150)


def equal_nodes(plan: Plan, nodes: int) -> dict[str, Any]:
    data = dict(plan.base["data"])
    if plan.options.data:
        data |= {"keep": {"site": [plan.options.source]}, "site": ""}
    return {"data": data, "sites": {"partition": "iid", "count": nodes}}


# --- all of it ----------------------------------------------------------------------------------------


def tables(plan: Plan, found: dict[str, Any]) -> None:
    """Every row of Tables 2 to 7 that was asked for."""
    rates = found["learning rates"] = searched(plan, wanted(plan, SEARCHED))
    planned = {
        row: [plan.entry(row, seed, rates[ROWS[row][2]]) for seed in range(plan.options.seeds)]
        for row in wanted(plan, ROWS)
    }

    def report() -> None:
        found["rows"] = {row: figures(entries) for row, entries in planned.items()}
        write(plan, found)

    go(plan, by_seed(plan, planned), report)
    report()
    table(found["rows"])


def by_seed(plan: Plan, planned: Mapping[Any, list[Entry]]) -> list[Entry]:
    """First everything with the first seed: if time runs out, every row has something.

    Runs side by side find the generators of their seed trained: one of those before trained them.
    """
    order: list[Entry] = []
    for seed, of_seed in enumerate(zip(*planned.values(), strict=True), start=1):
        if seed < plan.options.seeds and not plan.options.scalability and needs_training(plan, planned):
            order.append(plan.generators(seed))
        order += of_seed
    return order


def only_generators(plan: Plan) -> None:
    """Train those of all seeds, side by side."""
    options = plan.options

    def tell(words: str) -> None:
        print(f"{time.monotonic() - options.started:.0f} s: {words}", flush=True)

    places = [equal_nodes(plan, nodes) for nodes in options.nodes] if options.scalability else [{}]
    studies = [plan.generators(seed, **place).study for seed in range(options.seeds) for place in places]
    train_ahead(studies, plan.out / "generators", options.generators_at_once, options.seconds or None, tell)


def write(plan: Plan, found: dict[str, Any]) -> None:
    if plan.options.json:
        Path(plan.options.json).write_text(json.dumps(found, indent=1))


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as scratch:
        options.out = options.out or scratch
        plan = Plan(options)
        if options.generators_at_once:
            return only_generators(plan)
        asked = {name: getattr(options, name) for name in ASKED}
        data = f"{options.task} by source" if options.data else "skin phantoms"
        found: dict[str, Any] = {"benchmark": "feder", "quick": options.quick, "data": data, "options": asked}
        (scalability if options.scalability else tables)(plan, found)
        write(plan, found)
    print(json.dumps(found))


def _options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few steps on phantoms: does it run?")
    parser.add_argument("--json", help="write the figures into this file")
    parser.add_argument("--data", default=os.environ.get("POLYCLINIC_DATA"), help="folder of the real images")
    parser.add_argument("--task", choices=("skin", "chest"), default="skin")
    parser.add_argument("--source", default="vidir_modern", help="whose images Fig. 2 spreads over equal nodes")
    parser.add_argument("--rows", type=lambda text: text.split(";"), help="only these rows, separated by ;")
    parser.add_argument("--scalability", action="store_true", help="Fig. 2 instead of the tables")
    parser.add_argument("--plot", help="draw Fig. 2 into this file")
    parser.add_argument(
        "--other-backbone", default="resnet34", help="of the first site in the row 'feder, two networks'"
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="of Fig. 2")
    parser.add_argument("--out", help="folder of the runs, to go on later; by default they are thrown away")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--local-steps", type=int, default=0, help="steps of a site in a round; 0: one pass")
    parser.add_argument("--decay-every", type=int, default=0, help="rounds after which learning rates fall to a tenth")
    parser.add_argument("--select", choices=("best", "last"), default="best", help="the round whose models count")
    parser.add_argument("--evaluate-every", type=int, default=1, help="rounds between two looks at validation images")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--backbone", default="small-cnn")
    parser.add_argument("--norm", choices=("batch", "group"), default="batch")
    parser.add_argument("--generator-steps", type=int, default=1000, help="at most, in the first phase")
    parser.add_argument("--generator", choices=("dcgan", "stylegan2"), default="dcgan")
    parser.add_argument("--generator-set", default="{}", help="settings of the generator, as JSON")
    parser.add_argument(
        "--tuning-steps", type=int, default=100, help="at most, in the second phase; 0: plain training, no phases"
    )
    parser.add_argument("--most", type=int, default=700, help="images of a class that a site has at most")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates that are tried")
    parser.add_argument("--check-every", type=int, default=100, help="steps between two measurements of it")
    parser.add_argument("--measured", type=int, default=128, help="images for it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument(
        "--generators-at-once", type=int, default=0, help="only train the generators of all seeds, so many at a time"
    )
    parser.add_argument("--trained", action="store_true", help="generators lie in the cache: nothing is trained ahead")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long, and report what is finished")
    options = parser.parse_args(arguments)
    options.started = time.monotonic()
    options.sites = len(SITES[options.task]) if options.data else 3
    if options.quick:
        options.seeds, options.rounds, options.data = 1, 2, None
        options.size, options.backbone, options.other_backbone = 28, "lenet5", "small-cnn"
        if options.scalability:  # FedBN needs batch norm
            options.backbone = "small-cnn"
    return options


if __name__ == "__main__":
    main()
