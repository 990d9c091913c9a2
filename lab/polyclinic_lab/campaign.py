"""Check many claims: their runs one after another or several at a time, each study once, until the time is over.

    python -m polyclinic_lab.campaign --out runs/claims [--scale quick] [--claims a,b] [--workers 2] [--seconds 3600]

`polyclinic reproduce` checks one claim in one command. This script runs the same studies into one folder of shared
runs, forks a process for each (so that PyTorch is imported once), and then has `reproduce` judge every claim whose runs
are all there. It goes on where it stopped. Of runs that share generators one trains them, and the others wait. On a GPU
start NVIDIA's MPS before (`nvidia-cuda-mps-control -d`), as processes take turns there without it. `--quick` checks one
claim of our own that takes seconds.

`--two-cores FILE` also writes how long each claim takes on two cores, from the CPU seconds of its runs: give it on a
machine without a GPU, or hide the GPU (CUDA_VISIBLE_DEVICES=), with OMP_NUM_THREADS=1. Every run then has a cache of
its own, so that no claim gets a generator or images for nothing. `--claims a:3,b` runs three seeds of a.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.files import digest_of, read_json
from polyclinic.json_types import JsonObject
from polyclinic.runner.compare.compare import Entry
from polyclinic.study import Study
from polyclinic_lab.claim import CLAIMS, Claim, find_claim
from polyclinic_lab.judge import plan, reproduce
from polyclinic_lab.measures import measure
from polyclinic_lab.origin import cpu_seconds, note_origin
from polyclinic_lab.two_cores import add, measured

#: what of a run folder is kept beside it with `--keep`: enough to judge the claim again
KEPT = ("*.json", "history.jsonl", "study.toml", "ledger/*.jsonl", "sites/*/replay.png", "*.png", "measured")
QUICK = "ours-one-site"
#: sites that train their generators at once, in the run that does so for all others
SITES_AT_ONCE = 4


@dataclass
class Task:
    """One run, and the claims that measure it."""

    entry: Entry
    readers: list[tuple[Claim, str]] = field(default_factory=list)
    first: Task | None = None  #: the run that trains this one's generators, too
    over: bool = False

    @property
    def ready(self) -> bool:
        return self.first is None or self.first.over or self.first.finished

    @property
    def name(self) -> str:
        return self.entry.folder.name

    @property
    def finished(self) -> bool:
        return (self.entry.folder / "measured").exists()

    def perform(self, options: argparse.Namespace) -> None:
        make_and_measure(self, options)


@dataclass
class Judgement:
    """The verdict of `reproduce` on a claim, when all its runs are there."""

    claim: Claim
    tasks: list[Task]
    folder: Path
    seeds: int | None

    @property
    def name(self) -> str:
        return self.claim.name

    @property
    def ready(self) -> bool:
        return all(task.finished for task in self.tasks)

    @property
    def finished(self) -> bool:
        return (self.folder / "claim.json").exists()

    @property
    def verdict(self) -> str:
        return str(read_json(self.folder / "claim.json")["verdict"]) if self.finished else "not run"

    def perform(self, options: argparse.Namespace) -> None:
        runs = options.out / "runs"
        reproduce(self.claim, self.folder, scale=options.scale, seeds=self.seeds, runs=runs, jobs=1)
        if options.keep:
            keep(self.folder, options.keep / options.scale / self.name)


def main() -> None:
    options = parse()
    jobs = plan_jobs(chosen(options), options)
    failed = work_through([job for job in jobs if not job.finished], options, time.monotonic() + options.seconds)
    tasks = [job for job in jobs if isinstance(job, Task)]
    verdicts = {job.name: job.verdict for job in jobs if isinstance(job, Judgement)}
    finished = sum(task.finished for task in tasks)
    told = {"benchmark": "claims", "quick": options.quick, "runs": len(tasks), "finished": finished}
    text = json.dumps(told | {"failed": failed, "verdicts": verdicts})
    if options.two_cores:
        add(times_of(options), options.two_cores)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/claims"))
    parser.add_argument("--scale", choices=("quick", "full"), default="quick")
    parser.add_argument("--claims", default="", help="names, commas between; all if not given")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--keep", type=Path, help="a folder for what is needed to judge the claims again")
    parser.add_argument("--runs-only", action="store_true", help="make the runs, and judge no claim")
    parser.add_argument("--two-cores", type=Path, help="a file for the minutes on two cores, from CPU seconds")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.claims = QUICK if options.quick else options.claims
    return options


def chosen(options: argparse.Namespace) -> list[tuple[Claim, int | None]]:
    """The claims, each with its number of seeds."""
    names = [name.partition(":") for name in options.claims.split(",") if name] or [(name, "", "") for name in CLAIMS]
    return [(find_claim(name), int(seeds) if seeds else options.seeds) for name, _, seeds in names]


def times_of(options: argparse.Namespace) -> dict[str, JsonObject]:
    """Minutes on two cores of the claims of which some seed has all its runs."""
    found = {}
    for claim, seeds in chosen(options):
        planned = plan(claim, options.out, options.scale, seeds, phantom=False, runs=options.out / "runs")
        found[claim.name] = measured(claim, planned, options.out / options.scale / claim.name)
    return {name: one for name, one in found.items() if one is not None}


def plan_jobs(claims: list[tuple[Claim, int | None]], options: argparse.Namespace) -> list[Task | Judgement]:
    """Every study once, with all that will be measured of it, and after its runs the judgement of each claim."""
    tasks: dict[Path, Task] = {}
    trainers: dict[str, Task] = {}
    jobs: list[Task | Judgement] = []
    for claim, seeds in claims:
        mine = []
        planned = plan(claim, options.out, options.scale, seeds, phantom=False, runs=options.out / "runs")
        arms = [(entry, label) for label, arm in planned.items() for entry in arm]
        for entry, label in sorted(arms, key=lambda one: one[0].seed):  # what is cut off has all arms of some seeds
            task = tasks.setdefault(entry.folder, Task(entry))
            if shared := generators_of(entry.study):
                task.first = None if trainers.setdefault(shared, task) is task else trainers[shared]
            task.readers.append((claim, label))
            mine.append(task)
        jobs += [task for task in mine if task not in jobs]
        if not options.runs_only:
            jobs.append(Judgement(claim, mine, options.out / options.scale / claim.name, seeds))
    return jobs


def generators_of(study: Study) -> str:
    """What a run's generators depend on, where runs share them in the cache; empty where they do not."""
    if not getattr(study.method, "reuse_generators", False) or not study.method.needs_generator():
        return ""
    tables = study.as_tables()
    return digest_of({name: tables.get(name) for name in ("data", "sites", "generator", "tuning", "seed")})


def work_through(waiting: list[Task | Judgement], options: argparse.Namespace, end: float) -> list[str]:
    """Do the jobs in their order; the names of those that failed. What runs at the end of the time is killed."""
    running: dict[int, Task | Judgement] = {}
    failed = []
    while time.monotonic() < end:
        ready = [job for job in waiting if job.ready][: options.workers - len(running)]
        if not ready and not running:
            break
        for job in ready:
            waiting.remove(job)
            running[start(job, options)] = job
        ended, status = os.waitpid(-1, os.WNOHANG)
        if not ended:
            time.sleep(0.05)
            continue
        job = running.pop(ended)
        if isinstance(job, Task):
            job.over = True
        failed += [job.name] if status else []
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return failed


def start(job: Task | Judgement, options: argparse.Namespace) -> int:
    """Do a job in a child; its process."""
    child = os.fork()
    if child:
        return child
    begin = time.monotonic()
    try:
        job.perform(options)
    except BaseException:  # a child must end here, whatever happened
        print(f"{job.name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    print(f"{time.monotonic() - begin:7.1f} s  {job.name}", flush=True)
    os._exit(0)


def make_and_measure(task: Task, options: argparse.Namespace) -> None:
    """The run of a study, and what the claims read from it, which is kept in the run folder."""
    from polyclinic.runner.run.run import run

    study, folder = task.entry.study, task.entry.folder
    if options.two_cores:
        os.environ["POLYCLINIC_CACHE"] = str(options.out / "caches" / folder.name)
    if task.entry.result is None:
        begun, before = (folder / "study.toml").exists(), cpu_seconds()
        if study.engine.workers == "auto":  # runs side by side fill the cores already; others wait for generators
            workers = SITES_AT_ONCE if generators_of(study) and not task.first else 1
            study = study.model_copy(update={"engine": study.engine.model_copy(update={"workers": workers})})
        run(study, folder, resume=begun)
        note_origin(folder, None if begun else cpu_seconds() - before)
    for claim, label in task.readers:
        measure(claim.measure, {label: [folder]}, options.scale)
    (folder / "measured").touch()
    if options.keep:
        keep(folder, options.keep / "runs" / folder.name)


def keep(run: Path, place: Path) -> None:
    for file in found(run):
        target = place / file.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def found(run: Path) -> Iterator[Path]:
    for pattern in KEPT:
        yield from run.glob(pattern)


if __name__ == "__main__":
    main()
