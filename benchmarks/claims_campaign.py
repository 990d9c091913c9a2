"""Check many claims: their runs one after another or several at a time, each study once, until the time is over.

    python benchmarks/claims_campaign.py --out runs/claims [--scale quick] [--claims a,b] [--workers 2] [--seconds 3600]

`polyclinic reproduce` checks one claim in one command. This script runs the same studies into one folder of shared
runs, forks a process for each (so that PyTorch is imported once), and then has `reproduce` judge every claim whose runs
are all there. It goes on where it stopped. `--quick` checks one claim of our own that takes seconds.
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

from polyclinic.claims.catalogue import CLAIMS, find_claim
from polyclinic.claims.claim import Claim, Scale
from polyclinic.claims.reproduce import note_origin, plan, reproduce
from polyclinic.runner.compare import Entry

#: what of a run folder is kept beside it with `--keep`: enough to judge the claim again
KEPT = ("*.json", "history.jsonl", "study.toml", "ledger/*.jsonl", "sites/*/replay.png")
QUICK = "ours-one-site"


@dataclass
class Task:
    """One run, and the claims that measure it."""

    entry: Entry
    readers: list[tuple[Claim, str]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return (self.entry.folder / "measured").exists()


def main() -> None:
    options = parse()
    claims = chosen(options)
    tasks = plan_tasks(claims, options.out, options.scale, options.seeds)
    end = time.monotonic() + options.seconds
    failed = work_through(list(tasks.values()), options, end)
    judged = {claim.name: judge(claim, tasks, options) for claim in claims}
    finished = sum(task.finished for task in tasks.values())
    told = {"benchmark": "claims_campaign", "quick": options.quick, "runs": len(tasks), "finished": finished}
    text = json.dumps(told | {"failed": failed, "holds": judged})
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
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.claims = QUICK if options.quick else options.claims
    return options


def chosen(options: argparse.Namespace) -> list[Claim]:
    names = [name for name in options.claims.split(",") if name]
    return [find_claim(name) for name in names] or list(CLAIMS.values())


def plan_tasks(claims: list[Claim], out: Path, scale: Scale, seeds: int | None) -> dict[Path, Task]:
    """Every study once, with all that will be measured of it."""
    tasks: dict[Path, Task] = {}
    for claim in claims:
        for label, arm in plan(claim, out, scale, seeds, phantom=False, runs=out / "runs").items():
            for entry in arm:
                tasks.setdefault(entry.folder, Task(entry)).readers.append((claim, label))
    return tasks


def work_through(tasks: list[Task], options: argparse.Namespace, end: float) -> list[str]:
    """Run what is not finished; the folders of those that failed. What runs at the end of the time is killed."""
    waiting = [task for task in tasks if not task.finished]
    running: dict[int, Task] = {}
    failed = []
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < options.workers:
            task = waiting.pop(0)
            running[start(task, options)] = task
        ended, status = os.waitpid(-1, os.WNOHANG)
        if not ended:
            time.sleep(0.05)
            continue
        task = running.pop(ended)
        if status:
            failed.append(task.entry.folder.name)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return failed


def start(task: Task, options: argparse.Namespace) -> int:
    """Run a task in a child; its process."""
    child = os.fork()
    if child:
        return child
    try:
        perform(task, options)
    except BaseException:  # a child must end here, whatever happened
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def perform(task: Task, options: argparse.Namespace) -> None:
    from polyclinic.runner.run import run

    begin, folder = time.monotonic(), task.entry.folder
    study = task.entry.study
    if task.entry.result is None:
        if study.engine.workers == "auto":  # runs side by side fill the cores already
            study = study.model_copy(update={"engine": study.engine.model_copy(update={"workers": 1})})
        run(study, folder, resume=(folder / "study.toml").exists())
        note_origin(folder)
    for claim, label in task.readers:
        claim.measure({label: [folder]}, options.scale)
    (folder / "measured").touch()
    names = ", ".join(sorted({claim.name for claim, _ in task.readers}))
    print(f"{time.monotonic() - begin:7.1f} s  {folder.name}  {names}", flush=True)
    if options.keep:
        keep(folder, options.keep / "runs" / folder.name)
        if task.entry.seed:  # the first seed's folder is looked at; weights of the others only fill the disk
            shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def keep(run: Path, place: Path) -> None:
    for file in found(run):
        target = place / file.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (place / "measured").touch()


def found(run: Path) -> Iterator[Path]:
    for pattern in KEPT:
        yield from run.glob(pattern)


def judge(claim: Claim, tasks: dict[Path, Task], options: argparse.Namespace) -> str:
    """What `reproduce` says of a claim whose runs are all there."""
    out = options.out / options.scale / claim.name
    runs = options.out / "runs"
    mine = [task for task in tasks.values() if any(reader is claim for reader, _ in task.readers)]
    if not all(task.finished for task in mine) or (not mine and claim.arms):
        return "not run"
    try:
        told = reproduce(claim, out, scale=options.scale, seeds=options.seeds, runs=runs, jobs=1)
    except Exception as error:  # the others are judged all the same
        return f"failed: {error}"
    if options.keep:
        keep(out, options.keep / options.scale / claim.name)
        for picture in out.glob("*.png"):
            shutil.copyfile(picture, options.keep / options.scale / claim.name / picture.name)
    return str(told["holds"])


if __name__ == "__main__":
    main()
