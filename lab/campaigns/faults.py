"""The fault campaign: kills, power cuts, damaged files, a full disk, lying sites.

    python lab/campaigns/faults.py [--quick] [--minutes N] [--workers N] [--trials kills=500,...] [--seed S]
                                [--only KIND,...] [--json FILE] [--rows FILE]

Each trial runs or resumes a small study with one fault. It fails if it ends in a traceback, hangs, or ends well with
another result than without the fault; a command that says in a sentence what is wrong has not failed.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults_ledger
import torch
from faults_children import LYING, METHODS, Trial, in_child, signature, tables_of, totals
from faults_damage import commands, damaged_finished, damaged_interrupted, read_finished, write_pictures
from faults_kits import damaged_kit
from faults_lies import told_lie
from faults_storage import (
    full_disk,
    killed_anywhere,
    killed_at_change,
    record,
    resumed,
    resumed_images,
)
from parallel import in_parallel

from polyclinic.runner.run.run import run
from polyclinic.study import Study

KINDS = ("kills", "power", "damage", "disk", "lies")


class Campaign:
    """Studies with their undisturbed runs, and a place for trials."""

    def __init__(
        self, place: Path, seed: int, methods: tuple[str, ...], lying: tuple[str, ...] = (), *, timed: bool = True
    ) -> None:
        """`lying`: further methods whose sites lie. `timed`: kills also at moments, which no clock hits twice alike."""
        self.base = self.place = place
        self.methods, self.timed = methods, timed
        self.lying = (*methods, *lying)
        self.expected: dict[str, str] = {}
        self._begin(seed)
        for method in self.lying:
            study = Study(**tables_of(method))
            self.study(method).write_text(study.to_toml())
            run(study, self.finished(method))
            self.expected[method] = signature(self.finished(method))
        write_pictures(place / "pictures")

    def _begin(self, seed: int | str) -> None:
        self.count = 0
        # each kind draws by itself: how long a kill takes changes no other trial
        self.draws = {kind: random.Random(f"{seed} {kind}") for kind in (*KINDS, "kits")}

    def of_worker(self, number: int, seed: int) -> None:
        """From now on, in this process: other draws, and trials in a folder of their own."""
        self.place = self.base / f"worker-{number}"
        self.place.mkdir()
        self._begin(f"{seed} of worker {number}")

    def study(self, method: str) -> Path:
        return self.base / f"{method}.toml"

    def finished(self, method: str) -> Path:
        return self.base / "finished" / method

    def fresh(self) -> Path:
        self.count += 1
        return self.place / f"trial-{self.count}"

    def recorded(self, method: str, share: float, draw: random.Random) -> Path:
        """Copies of a run at a share of its changes."""
        folder, images = self.fresh(), self.fresh()
        outcome = record(["run", str(self.study(method)), "--quiet", "--out", str(folder)], folder, images, draw, share)
        assert outcome.code == 0, outcome.printed
        assert signature(folder) == self.expected[method]
        shutil.rmtree(folder)
        return images

    # --- kinds of faults: each yields trials without end ------------------------------------------

    def kills(self) -> Iterator[Trial]:
        """`kill -9` before a change of a file, or at any moment; resumed."""
        draw = self.draws["kills"]
        while True:
            for method in self.methods:
                folder, study = self.fresh(), self.study(method)
                if not self.timed or draw.random() < 0.5:
                    number = draw.randint(1, 160)
                    killed = killed_at_change(study, folder, number)
                    what = f"{method}: killed at change {number}"
                else:
                    seconds = draw.uniform(0.0, 0.5)
                    killed = killed_anywhere(study, folder, seconds)
                    what = f"{method}: killed after {seconds:.3f} s"
                if killed and folder.exists():
                    yield resumed(folder, self.expected[method], "kills", what, study)
                shutil.rmtree(folder, ignore_errors=True)

    def power(self) -> Iterator[Trial]:
        """A loss of power at changes of files; resumed. And the ledger of a deployed site."""
        while True:
            for method in self.methods:
                images = self.recorded(method, 0.3, self.draws["power"])
                yield from resumed_images(images, self.expected[method], "cut", "power cuts", self.study(method))
                shutil.rmtree(images)
                yield from faults_ledger.cut_ledger(self.fresh(), self.draws["power"])

    def damage(self) -> Iterator[Trial]:
        """One damaged file of an interrupted run, resumed; or of a finished one, read by a command."""
        while True:
            for method in self.methods:
                images = self.recorded(method, 0.2, self.draws["damage"])
                for image in sorted(images.glob("*-killed")):
                    if (image / "study.toml").exists():
                        yield damaged_interrupted(image, self.expected[method], self.draws["damage"])
                    shutil.rmtree(image)
                shutil.rmtree(images)
                yield from self._damage_finished(method, 12)

    def _damage_finished(self, method: str, count: int) -> Iterator[Trial]:
        pictures, out, folder = self.base / "pictures", self.place / "out", self.place / "read"
        for name in commands(folder, pictures, out):
            shutil.copytree(self.finished(method), folder)
            before, expected = read_finished(name, folder, pictures, out)
            for _ in range(count // 6 if before.code == 0 else 0):
                shutil.rmtree(folder)
                shutil.copytree(self.finished(method), folder)
                yield damaged_finished(name, folder, pictures, out, expected, self.draws["damage"])
            shutil.rmtree(folder)

    def kits(self) -> Iterator[Trial]:
        """One damaged file of a deployed site's kit; only if asked for, as NVFlare takes a minute to make one."""
        while True:
            yield damaged_kit(self.place, self.study(self.methods[0]), self.draws["kits"])

    def disk(self) -> Iterator[Trial]:
        """A full disk, then room again."""
        while True:
            for method in self.methods:
                folder = self.fresh()
                yield from full_disk(self.study(method), folder, self.expected[method], self.draws["disk"])
                shutil.rmtree(folder, ignore_errors=True)

    def lies(self) -> Iterator[Trial]:
        """One lie of one site."""
        while True:
            for method in self.lying:
                folder = self.fresh()
                yield from told_lie(self.study(method), folder, self.finished(method), self.draws["lies"])
                shutil.rmtree(folder, ignore_errors=True)


def carry_out(
    campaign: Campaign, kinds: tuple[str, ...], going_on: Callable[[], bool], wanted: Counter[str] | None = None
) -> Iterator[Trial]:
    """Trials of the kinds in turn, until the time is at an end, or there are as many of each kind as wanted."""
    sources = {kind: getattr(campaign, kind)() for kind in kinds}
    done, shares = Counter[str](), wanted or Counter(dict.fromkeys(kinds, 1))
    while going_on() and (left := [kind for kind in kinds if not wanted or done[kind] < wanted[kind]]):
        kind = min(left, key=lambda one: done[one] / shares[one])  # all kinds come to their numbers together
        trial = next(sources[kind])
        done[kind] += 1
        yield trial
        if trial.problem:
            print(f"{trial.kind}: {trial.what}: {trial.problem}: {trial.detail}", flush=True)


def _of_each(text: str, workers: int) -> Counter[str] | None:
    """Numbers of trials of each kind of one worker."""
    pairs = [part.split("=") for part in text.split(",") if part]
    return Counter({kind: -(-int(count) // workers) for kind, count in pairs}) or None


def _campaign(chosen: argparse.Namespace, place: Path, started: float, note: Callable[[list[Any]], None]) -> dict:
    """The campaign on one or several cores; what it found."""
    kinds, until = tuple(chosen.only.split(",")), started + 60 * chosen.minutes
    methods = tuple(METHODS) if {*kinds} & {*KINDS} else ("fedavg",)  # kits want one study
    campaign = Campaign(place, chosen.seed, methods, tuple(LYING) if "lies" in kinds else ())
    wanted = _of_each(chosen.trials, chosen.workers)

    def work(number: int, tell: Callable[[Any], None]) -> None:
        campaign.of_worker(number, chosen.seed)
        for trial in carry_out(campaign, kinds, lambda: time.monotonic() < until, wanted):
            tell(vars(trial))

    told, crashed = in_parallel(work, chosen.workers, place, until, note)
    note(told)
    found = totals([Trial(**one) for one in told])
    found["failures"] += [{"kind": "campaign", "what": words, "problem": "crash", "detail": ""} for words in crashed]
    return found


def _quick(seed: int, place: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    """A few trials of each kind, in this process."""
    campaign = Campaign(place, seed, ("fedavg", "scaffold"), timed=False)
    return totals(list(carry_out(campaign, kinds, lambda: True, Counter(dict.fromkeys(kinds, 5)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few trials of each kind")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--trials", default="", help="stop after so many: kills=500,power=500,damage=2000,lies=200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of faults, separated by commas")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=Path, help="every trial, a line of JSON each; written every 20 seconds")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process that has looked at a GPU cannot be forked
    started = time.monotonic()

    def write(found: dict[str, Any]) -> dict[str, Any]:
        found = {"seed": chosen.seed, "seconds": round(time.monotonic() - started), **found}
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
        return found

    def note(told: list[Any]) -> None:
        write(totals([Trial(**one) for one in told]))
        if chosen.rows:
            chosen.rows.write_text("".join(json.dumps(one) + "\n" for one in told))

    with tempfile.TemporaryDirectory() as place:
        os.environ["POLYCLINIC_CACHE"] = f"{place}/cache"
        in_child(lambda: 0)
        with contextlib.suppress(ImportError):  # or each report would import it
            importlib.import_module("matplotlib.pyplot")
        if chosen.quick:
            found = write(_quick(chosen.seed, Path(place), tuple(chosen.only.split(","))))
        else:
            found = write(_campaign(chosen, Path(place), started, note))
    print(json.dumps(found | {"failures": len(found["failures"])}))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
