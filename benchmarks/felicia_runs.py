"""FELICIA's experiments as studies: each row of a table is one `polyclinic.run` of a study in `examples/`.

A job names a study and what a figure of the paper varies: the seed, lambda, and for digits alpha. Jobs run in processes
side by side. Rows come from the run's `result.json`; coverage of digits, which needs the test images of both sites, is
measured on what the sites' generators of the finished run make.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import shutil
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import polyclinic
from polyclinic.data.partitions.clusters import fit_clusters, small_pixels
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.federation.state import SitePosition, read_state
from polyclinic.generators.gan.settings import GAN
from polyclinic.metrics.distribution import precision_recall
from polyclinic.metrics.principal_components import principal_components
from polyclinic.randomness import numpy_rng, torch_rng
from polyclinic.tasks import Target

EXAMPLES = Path(__file__).parents[1] / "examples"
SAMPLED = 2000  # images of each generator, as in Fig. 5
TRAINING_SETS = ("real", "synthetic", "augmented", "synthetic-all", "augmented-all")


@dataclass(frozen=True)
class Experiment:
    """A study in `examples/` and its settings; `lambdas`, `alphas` and `methods` are what a figure varies.

    A method other than FELICIA trains no generator: it gets none of the study's settings for one.
    """

    study: str
    lambdas: tuple[float, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    alphas: tuple[float, ...] = (0.0,)
    seeds: int = 3
    methods: tuple[str, ...] = ("felicia",)


#: fours and nines, all there are; coverage is that of fours, as in the paper
FOURS = {"data.keep": {"labels": [4, 9]}, "data.per_class": None, "method.rounds": 2}
#: sites hand each other synthetic images at the end, so that networks also learn from those of all sites
SHARED = {"method.share_images": True}
EXPERIMENTS = {
    "clusters": Experiment(
        "digits", (0.0,), {"data.per_class": None, "method.rounds": 3}, methods=("standalone", "centralized")
    ),
    "digits": Experiment("digits", (0.0, 3.0), {**FOURS, "method.steps": 1250, "method.frozen": 600}, (0, 10, 50)),
    "digit-bias": Experiment("digit_bias", (0.0, 3.0), {"method.rounds": 2, "method.steps": 2500, **SHARED}),
    "bias": Experiment("bias", (0.0, 3.0), {"method.rounds": 2, "method.steps": 2500, **SHARED}),
    "skin": Experiment(
        "skin", (0.0, 3.0), {"method.rounds": 4, "method.steps": 1000, "method.weigh_every": 1, **SHARED}
    ),
}
#: minutes on a CPU: one seed, small networks, few steps
QUICK: dict[str, dict[str, Any]] = {
    "clusters": {"data.per_class": 60, "method.rounds": 1},
    "digits": {
        **{"method.rounds": 1, "method.steps": 20, "method.frozen": 5},
        **{"generator.width": 4, "method.learner_steps": 2},
    },
    "digit-bias": {"method.rounds": 1, "method.steps": 20, "generator.width": 4, "method.learner_steps": 20},
    "bias": {"method.rounds": 1, "method.steps": 20, "generator.width": 4, "method.learner_steps": 20},
    "skin": {"method.rounds": 2, "method.steps": 10, "generator.width": 4, "data.size": 32, "method.learner_steps": 20},
}


@dataclass(frozen=True)
class Job:
    """One run: `key` says what is varied, and names its folder."""

    experiment: str
    key: dict[str, Any]
    tables: dict[str, Any]  #: the study
    folder: Path

    @cached_property
    def study(self) -> polyclinic.Study:
        from polyclinic.study.tables import parse_study

        return parse_study(self.tables)


def plan(
    names: list[str],
    data: Path,
    out: Path,
    settings: dict[str, Any],
    varied: dict[str, list[Any] | None] | None = None,
    *,
    quick: bool,
) -> Iterator[Job]:
    """The runs of some experiments; `settings` hold for all of them.

    `varied` may give other `lambdas`, `alphas` or `seeds` than the experiments' own.
    """
    asked = {name: values for name, values in (varied or {}).items() if values is not None}
    for name in names:
        one = EXPERIMENTS[name]
        tables = tomllib.loads((EXAMPLES / f"felicia_{one.study}.toml").read_text(encoding="utf-8"))
        path = data / Path(tables["data"].pop("path", f"{one.study}.npz")).name
        changes = {"data.path": str(path), **one.settings, **(QUICK[name] if quick else {}), **settings}
        seeds = asked.get("seeds", range(1 if quick else one.seeds))
        alphas = asked.get("alphas", one.alphas[:1] if quick else one.alphas) if one.study == "digits" else one.alphas
        lambdas = asked.get("lambdas", one.lambdas)
        for seed, alpha, weight, method in itertools.product(seeds, alphas, lambdas, one.methods):
            key = {"seed": seed, "alpha": alpha, "lambda": weight}
            own = {"seed": seed, "data.seed": seed, "method.weight": weight}
            own |= {"sites.mixing": alpha} if one.study == "digits" else {}
            folder = out / name / "-".join(f"{n}{v:g}" for n, v in key.items())
            study = changed(tables, {**changes, **own})
            if method != "felicia":
                key, folder = {"seed": seed, "method": method}, folder.with_name(f"seed{seed}-{method}")
                study = {**study, "method": {"name": method, "rounds": study["method"]["rounds"]}}
                del study["generator"]
            yield Job(name, key, study, folder)


def changed(tables: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Plain tables with settings (`table.name`) changed; None takes one out."""
    found = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for name, value in changes.items():
        table, _, field = name.rpartition(".")
        into = found.setdefault(table, {}) if table else found
        if value is None:
            into.pop(field, None)
        else:
            into[field] = value
    return found


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE as a study's file would have it; what is no TOML is a word, and NAME= takes the setting out."""
    name, _, value = text.partition("=")
    if not value:
        return name, None
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def run_all(jobs: list[Job], processes: int, file: Path) -> list[dict[str, Any]]:
    """The rows of all jobs, in the order of the jobs; longest studies first, so that no process is left alone.

    `file` gets the rows whenever a job is done: what was measured is not lost with what was not.
    """
    rows: dict[int, list[dict[str, Any]]] = {}
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        order = sorted(range(len(jobs)), key=lambda k: -_cost(jobs[k]))
        running = {pool.submit(run_job, jobs[k]): k for k in order}
        for done in as_completed(running):
            k = running[done]
            rows[k] = done.result()
            told = f"{len(rows)} of {len(jobs)}: {jobs[k].folder.parent.name} {jobs[k].key}"
            _write(rows, file)
            spent = time.perf_counter() - started
            print(f"{told}, {rows[k][0]['seconds']:.0f} s, {spent:.0f} s in all", file=sys.stderr, flush=True)
    return _write(rows, file)


def _write(rows: dict[int, list[dict[str, Any]]], file: Path) -> list[dict[str, Any]]:
    found = [row for k in sorted(rows) for row in rows[k]]
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _cost(job: Job) -> float:
    method, size = job.tables["method"], job.tables["data"]["size"]
    return method["rounds"] * method.get("steps", 1000) * size**2 * (3 if method.get("weight") else 1)


def run_job(job: Job) -> list[dict[str, Any]]:
    """Run the study, or take what a run before has left; a row for each site and training set."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    if job.folder.exists() and not (job.folder / "result.json").exists():
        shutil.rmtree(job.folder)
    result = polyclinic.run(job.study, job.folder, resume=job.folder.exists())
    if result["failures"]:
        raise polyclinic.WorkFailed(f"{job.folder}: {result['failures'][0]}")
    common = {"experiment": job.experiment, **job.key, "seconds": result["timing"]["seconds"]}
    if job.experiment == "clusters":
        return [{**common, **row} for row in cluster_rows(result)]
    method = job.study.method
    common |= {"steps": method.rounds * method.steps}
    common |= {"images": common["steps"] * job.study.generator.batch_size}
    rows = coverage_rows(job) if job.experiment == "digits" else utility_rows(result)
    return [{**common, **row} for row in rows]


# --- what a run has found ---------------------------------------------------------------------------------


def cluster_rows(result: polyclinic.Result) -> Iterator[dict[str, Any]]:
    """Accuracy of all held-out digits after training on one site's cluster, or on all images."""
    counts = {site: own["test"] for site, own in result["data"]["counts"].items()}
    if result["method"] == "centralized":
        yield {"trained on": "all images", "accuracy": result.metrics["test"]["accuracy"]}
        return
    for number, (_, scores) in enumerate(sorted(result.metrics["across_sites"].items()), 1):
        accuracy = np.average([scores[site]["accuracy"] for site in counts], weights=list(counts.values()))
        yield {"trained on": f"cluster {number}", "accuracy": float(accuracy)}


def utility_rows(result: polyclinic.Result) -> Iterator[dict[str, Any]]:
    """The first site's networks, one for each training set, on the test images of all sites; and its curve of AUC."""
    site, table = next(iter(result.metrics["diets"].items()))
    for name in [one for one in TRAINING_SETS if one in table]:
        scores = table[name]["test"]
        groups = {f"accuracy of {group}": one["accuracy"] for group, one in table[name]["subgroups"].items()}
        curve = {str(row["round"]): row["sites"][site].get(f"test_{name}") for row in result["worth"]}
        yield {
            **{"site": site, "trained on": name, "released": table["released"] == name},
            **{"auc": scores["auc"], "accuracy": scores["accuracy"], **groups, "curve": curve},
        }


def coverage_rows(job: Job) -> Iterator[dict[str, Any]]:
    """How each site's generator covers the held-out fours of both sites, and those of the cluster that it lacks."""
    parts = prepare(job.study.data, job.study.sites)
    held = {name: open_site(parts.folder, name) for name in parts.names}
    images = {
        split: torch.from_numpy(np.concatenate([fours(getattr(one, split)) for one in held.values()]))
        for split in ("train", "test")
    }
    components = principal_components(images["train"][:SAMPLED])
    clusters = fit_clusters(small_pixels(images["train"][:SAMPLED].numpy()), 2, numpy_rng(job.key["seed"], "view"))
    test = components.project(images["test"])
    cluster = clusters.nearest(images["test"].numpy(), np.arange(len(test)))
    for name in parts.names:
        made = components.project(sample(job, name, tuple(parts.info["classes"])))
        own = fours(held[name].train)
        own = clusters.nearest(own, np.arange(len(own)))
        lacking = 1 - round(float(own.mean()))  # the cluster that the site has less of
        row = {"site": name, **precision_recall(test, made)}
        np.save(job.folder / f"{name}-plane.npy", made[:, :2].numpy())
        yield {**row, "coverage of the other cluster": precision_recall(test[cluster == lacking], made)["coverage"]}
    np.savez(job.folder / "real-plane.npz", points=test[:, :2].numpy(), cluster=cluster)


def fours(part: ImageSet) -> np.ndarray:
    """The images of the first class, uint8 [N, C, H, W]."""
    return np.asarray(part.images)[np.asarray(part.labels) == 0]


def sample(job: Job, site: str, classes: tuple[str, ...]) -> torch.Tensor:
    """Images of the generator that a site of a finished run has, uint8."""
    manifest = json.loads((job.folder / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
    state = read_state(job.folder, site, SitePosition(*manifest["sites"][site])).group("gan")
    settings = job.study.generator
    assert isinstance(settings, GAN)
    size = job.study.data.size
    model = settings.build(channels=1, size=size, target=Target(classes=classes), seed=job.study.seed)
    model.load(state)
    return model.sample(torch.zeros(SAMPLED, dtype=torch.long), torch_rng(job.study.seed, site, "coverage"))
