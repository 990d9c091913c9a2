"""Which settings of training give a good first model, from 300 to several thousand images: chosen on validation images.

FedAvg over four hospitals alike, for each data set, number of training images and recipe. The table gives each recipe's
error on validation images as a share of what the defaults of the first version have (below 1 is better), as a geometric
mean over sets and sizes. With `--test` each model is scored on test images as well; nothing is chosen by that.

    POLYCLINIC_DATA=... python benchmarks/recipes.py --jobs 12 --json recipes.json
    python benchmarks/recipes.py --quick          phantoms, a minute on a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

Tables = dict[str, dict[str, Any]]

TODAY = "today"
#: what `optimizer` was by default when the first table was measured
OLD_DEFAULTS = {"name": "sgd", "lr": 0.01, "momentum": 0.9, "decay_every": 35, "batch_size": 32, "augment": []}
ADAM = {"name": "adam", "lr": 0.001, "decay_every": 0}
COSINE = {**ADAM, "schedule": "cosine", "warmup": 2}
MILD = ["flip", "brightness", "contrast"]
ALL = ["flip", "crop", "rotate", "brightness", "contrast"]
RECIPES: dict[str, Tables] = {
    TODAY: {"optimizer": OLD_DEFAULTS},
    "sgd 0.05, cosine": {"optimizer": {"lr": 0.05, "schedule": "cosine", "warmup": 2}},
    "adam": {"optimizer": ADAM},
    "adam, cosine": {"optimizer": COSINE},
    "adam 0.003, cosine": {"optimizer": {**COSINE, "lr": 0.003}},
    "adam 0.002, cosine": {"optimizer": {**COSINE, "lr": 0.002}},
    "adam 0.003, cosine, flip": {"optimizer": {**COSINE, "lr": 0.003, "augment": ["flip"]}},
    "adam 0.003, cosine, batch 16": {"optimizer": {**COSINE, "lr": 0.003, "batch_size": 16}},
    "adam 0.003, cosine, 2 passes": {"optimizer": {**COSINE, "lr": 0.003}, "method": {"local_epochs": 2}},
    "adam 0.003, cosine, 4 passes": {"optimizer": {**COSINE, "lr": 0.003}, "method": {"local_epochs": 4}},
    "adam, cosine, 2 passes": {"optimizer": COSINE, "method": {"local_epochs": 2}},
    "adam, cosine, flip": {"optimizer": {**COSINE, "augment": ["flip"]}},
    "adam, cosine, mild": {"optimizer": {**COSINE, "augment": MILD}},
    "adam, cosine, all": {"optimizer": {**COSINE, "augment": ALL}},
    "adam 0.003, cosine, mild": {"optimizer": {**COSINE, "lr": 0.003, "augment": MILD}},
    "adam 0.003, cosine, all": {"optimizer": {**COSINE, "lr": 0.003, "augment": ALL}},
    "adam, cosine, mild, batch 16": {"optimizer": {**COSINE, "augment": MILD, "batch_size": 16}},
    "adam 0.003, cosine, mild, batch 16": {"optimizer": {**COSINE, "lr": 0.003, "augment": MILD, "batch_size": 16}},
    "adam 0.003, cosine, all, batch 16": {"optimizer": {**COSINE, "lr": 0.003, "augment": ALL, "batch_size": 16}},
    "adam 0.003, cosine, all, batch 8": {"optimizer": {**COSINE, "lr": 0.003, "augment": ALL, "batch_size": 8}},
    "adam 0.003, cosine, mild, mixup, batch 16": {
        "optimizer": {**COSINE, "lr": 0.003, "augment": [*MILD, "mixup"], "batch_size": 16}
    },
    "adam 0.003, cosine, mild, 2 passes": {
        "optimizer": {**COSINE, "lr": 0.003, "augment": MILD, "batch_size": 16},
        "method": {"local_epochs": 2},
    },
}
NPZ = {"source": "npz", "size": 64}
SKIN = {"path": "$POLYCLINIC_DATA/fed_isic5_64_jpeg.npz", "group": "lesion", "split": "", "masks": "", "site": ""}
#: data set: its table [data], its task, images in all, and the metric that counts
SETS: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "bone age": (
        {
            **NPZ,
            "path": "$POLYCLINIC_DATA/boneage_rsna_male_64.npz",
            "labels": "boneage_months",
            "label_range": [0, 228],
        },
        "regression",
        6833,
        "mae",
    ),
    "skin": ({**NPZ, **SKIN}, "classification", 10834, "balanced_accuracy"),
    "pneumonia": (
        {"source": "npz", "path": "$POLYCLINIC_DATA/pneumoniamnist.npz", "size": 28},
        "classification",
        5856,
        "balanced_accuracy",
    ),
}
QUICK_SETS: dict[str, tuple[dict[str, Any], str, int, str]] = {
    "hands": ({"source": "hand-phantom", "size": 28, "samples": 400}, "regression", 400, "mae"),
    "eyes": (
        {"source": "fundus-phantom", "size": 28, "samples": 400},
        "classification",
        400,
        "balanced_accuracy",
    ),
}


@dataclass(frozen=True)
class Trial:
    """One run: a recipe on some training images of a data set."""

    data: str
    images: int
    recipe: str
    backbone: str
    seed: int
    rounds: int
    test: bool
    device: str
    quick: bool

    def study(self) -> Any:
        from polyclinic.study import parse_study

        source, task, total, metric = (QUICK_SETS if self.quick else SETS)[self.data]
        changes = RECIPES[self.recipe]
        held_out = {} if self.data == "pneumonia" else {"validation": max(0.05, 0.8 - self.images / total), "test": 0.2}
        return parse_study(
            {
                "seed": self.seed,
                "data": {**source, **held_out},
                "sites": {"partition": "iid", "count": 4},
                "task": {"name": task},
                "model": {"backbone": self.backbone},
                "optimizer": changes.get("optimizer", {}),
                "method": {"name": "fedavg", "rounds": self.rounds, **changes.get("method", {})},
                "evaluation": {"metric": metric, "final": "test" if self.test else "none"},
                "engine": {"device": self.device, "workers": 1, "checkpoint_every": 0},
            }
        )

    def error(self, metrics: dict[str, float]) -> float:
        """Smaller is better: the mean absolute error, or the share of wrong answers, classes alike."""
        metric = (QUICK_SETS if self.quick else SETS)[self.data][3]
        return metrics[metric] if metric == "mae" else 1 - metrics[metric]


def carry_out(trial: Trial, folder: str) -> dict[str, Any]:
    from polyclinic.runner.run import run

    started = time.perf_counter()
    result = run(trial.study(), Path(tempfile.mkdtemp(dir=folder)) / "run")
    lines = (result.folder / "history.jsonl").read_text().splitlines()
    chosen = json.loads(lines[result["selected"]["round"] - 1])["validation"]["pooled"]
    images = sum(one["train"] for one in result["data"]["counts"].values())
    return {
        **asdict(trial),
        "training_images": images,
        "error": trial.error(chosen),
        "metrics": chosen,
        **({"test_error": trial.error(result.metrics["test"])} if trial.test else {}),
        "seconds": round(time.perf_counter() - started, 1),
    }


def plan(arguments: argparse.Namespace) -> list[Trial]:
    """All trials, those of the first seed first."""
    sets = QUICK_SETS if arguments.quick else SETS
    names = [TODAY, *(name for name in arguments.recipes if name != TODAY)]
    return [
        Trial(data, min(size, _most(data, sets)), recipe, backbone, seed, arguments.rounds, *_how(arguments))
        for seed in range(arguments.seeds)
        for backbone in arguments.backbones
        for size in arguments.sizes
        for recipe in names
        for data in sets
        if data in arguments.sets
        # its three parts are fixed, so that there is one size only
        and (data != "pneumonia" or size == max(arguments.sizes))
    ]


def _most(data: str, sets: dict[str, tuple[dict[str, Any], str, int, str]]) -> int:
    return int(0.7 * sets[data][2])


def _how(arguments: argparse.Namespace) -> tuple[bool, str, bool]:
    return arguments.test, arguments.device, arguments.quick


def run_trials(trials: list[Trial], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as they come, until the time is over."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("POLYCLINIC_CACHE", f"{folder}/cache")
        pool = ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn"))
        waiting: list[Future] = [pool.submit(carry_out, trial, folder) for trial in trials]
        try:
            for future in as_completed(waiting, timeout=arguments.seconds):
                if future.exception() is None:
                    yield future.result()
                else:
                    print(f"failed: {future.exception()}", flush=True)
        except TimeoutError:
            print(f"stopped after {time.monotonic() - began:.0f} s", flush=True)
        finally:
            for process in list((pool._processes or {}).values()) if any(not one.done() for one in waiting) else []:
                process.kill()
            pool.shutdown(wait=False, cancel_futures=True)


def summarise(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of each recipe: its error by set and size, and the geometric mean of its shares of the first defaults' error."""
    errors: dict[tuple, list[float]] = {}
    tested: dict[tuple, list[float]] = {}
    for row in rows:
        key = (row["backbone"], row["recipe"], row["data"], row["images"])
        errors.setdefault(key, []).append(row["error"])
        tested.setdefault(key, []).extend([row["test_error"]] if "test_error" in row else [])
    means = {key: statistics.mean(values) for key, values in errors.items()}
    found: dict[str, Any] = {}
    for (backbone, recipe, data, images), error in means.items():
        base = means.get((backbone, TODAY, data, images))
        of_recipe = found.setdefault(f"{backbone}: {recipe}", {"errors": {}, "shares": []})
        runs = len(errors[backbone, recipe, data, images])
        of_recipe["errors"][f"{data}, {images}"] = {"mean": round(error, 4), "runs": runs}
        if tests := tested[backbone, recipe, data, images]:
            of_recipe["errors"][f"{data}, {images}"]["test"] = round(statistics.mean(tests), 4)
        if base:
            of_recipe["shares"].append(error / base)
    for of_recipe in found.values():
        shares = of_recipe.pop("shares")
        logs = [math.log(max(one, 1e-6)) for one in shares]
        of_recipe["share_of_today"] = round(math.exp(statistics.mean(logs)), 3) if logs else None
        of_recipe["compared"] = len(shares)
    return dict(sorted(found.items(), key=lambda item: item[1]["share_of_today"] or math.inf))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="phantoms, few rounds, three recipes")
    parser.add_argument("--json", type=Path, help="a file for the figures; written after every run")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[300, 1500, 10000])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--backbones", nargs="+", default=["small-cnn"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=None, help="stop after so many seconds, with what there is")
    parser.add_argument("--test", action="store_true", help="score on test images as well")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.rounds, arguments.sets = [100], 2, list(QUICK_SETS)
        arguments.recipes = ["adam, cosine", "adam 0.003, cosine, mild, mixup, batch 16"]
    rows: list[dict[str, Any]] = []
    for row in run_trials(plan(arguments), arguments):
        rows.append(row)
        print(json.dumps({key: row[key] for key in ("data", "images", "recipe", "error", "seconds")}), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps({"summary": summarise(rows), "rows": rows}, indent=1))
    print(json.dumps(summarise(rows)))


if __name__ == "__main__":
    main()
