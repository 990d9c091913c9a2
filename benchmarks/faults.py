"""The fault campaign: kills, power cuts, damaged files, a full disk, lying sites.

    python benchmarks/faults.py [--quick] [--minutes N] [--seed S] [--only KIND,...] [--json FILE]

Each trial runs or resumes a small study with one fault. It fails if it ends in a traceback, hangs, or ends well with
another result than without the fault; a command that says in a sentence what is wrong has not failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faults_ledger
import torch
from faults_children import METHODS, Trial, in_child, signature, tables_of, totals
from faults_damage import commands, damaged_finished, damaged_interrupted, read_finished, write_pictures
from faults_lies import told_lie
from faults_storage import (
    full_disk,
    killed_anywhere,
    killed_at_change,
    record,
    resumed,
    resumed_images,
)

from polyclinic.runner.run import run
from polyclinic.study import Study

KINDS = ("kills", "power", "damage", "disk", "lies")


class Campaign:
    """Studies with their undisturbed runs, and a place for trials."""

    def __init__(self, place: Path, seed: int, methods: tuple[str, ...], *, timed: bool = True) -> None:
        """`timed`: kills also at moments, which no clock hits twice alike."""
        self.place, self.methods = place, methods
        # each kind draws by itself: how long a kill takes changes no other trial
        self.draws = {kind: random.Random(f"{seed} {kind}") for kind in KINDS}
        self.expected: dict[str, str] = {}
        self.count, self.timed = 0, timed
        for method in methods:
            study = Study(**tables_of(method))
            self.study(method).write_text(study.to_toml())
            run(study, self.finished(method))
            self.expected[method] = signature(self.finished(method))
        write_pictures(place / "pictures")

    def study(self, method: str) -> Path:
        return self.place / f"{method}.toml"

    def finished(self, method: str) -> Path:
        return self.place / "finished" / method

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
                    killed_at_change(study, folder, number)
                    what = f"{method}: killed at change {number}"
                else:
                    seconds = draw.uniform(0.0, 0.5)
                    killed_anywhere(study, folder, seconds)
                    what = f"{method}: killed after {seconds:.3f} s"
                if folder.exists():
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
        pictures, out, folder = self.place / "pictures", self.place / "out", self.place / "read"
        for name in commands(folder, pictures, out):
            shutil.copytree(self.finished(method), folder)
            before, expected = read_finished(name, folder, pictures, out)
            for _ in range(count // 6 if before.code == 0 else 0):
                shutil.rmtree(folder)
                shutil.copytree(self.finished(method), folder)
                yield damaged_finished(name, folder, pictures, out, expected, self.draws["damage"])
            shutil.rmtree(folder)

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
            for method in self.methods:
                folder = self.fresh()
                yield told_lie(self.study(method), folder, self.finished(method), self.draws["lies"])
                shutil.rmtree(folder, ignore_errors=True)


def carry_out(campaign: Campaign, kinds: tuple[str, ...], going_on: Callable[[list[Trial]], bool]) -> list[Trial]:
    """Trials of the kinds in turn, until the time or their number is at an end."""
    sources = [getattr(campaign, kind)() for kind in kinds]
    trials: list[Trial] = []
    while going_on(trials):
        for source in sources:
            trials.append(next(source))
            if trials[-1].problem:
                print(f"{trials[-1].kind}: {trials[-1].what}: {trials[-1].problem}: {trials[-1].detail}", flush=True)
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few trials of each kind")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of faults, separated by commas")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    started, kinds = time.monotonic(), tuple(chosen.only.split(","))
    methods = ("fedavg", "scaffold") if chosen.quick else tuple(METHODS)

    def going_on(trials: list[Trial]) -> bool:
        if chosen.quick:
            return len(trials) < 5 * len(kinds)
        return time.monotonic() - started < 60 * chosen.minutes

    with tempfile.TemporaryDirectory() as place:
        os.environ["POLYCLINIC_CACHE"] = f"{place}/cache"
        campaign = Campaign(Path(place), chosen.seed, methods, timed=not chosen.quick)
        in_child(lambda: 0)
        trials = carry_out(campaign, kinds, going_on)
    found = {"seed": chosen.seed, "seconds": round(time.monotonic() - started), **totals(trials)}
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found | {"failures": len(found["failures"])}))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
