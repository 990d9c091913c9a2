"""Mutants: small changes of the core rooms, and whether the tests notice.

    python benchmarks/mutants.py [--quick] [--minutes N] [--workers N] [--seed S] [--rooms a,b] [--each N]
                                 [--again FILE] [--also] [--longest SECONDS] [--lines FILE] [--json FILE]

Each mutant negates a comparison, changes a number, swaps + and -, and and or, or drops a guard. All places of a room
are as likely. First the tests run once as they are, to learn which lines each one runs (kept in `--lines`). A mutant is
judged by the quick tests that run its line, the quickest first, until one fails that passes without the change; where
no test runs the line, it lives. Those that live are listed with their line; some change nothing that a result depends
on, and somebody must look. `--again FILE` judges the ones that lived in an earlier campaign. `--also` judges those that
live once more, by tests that take longer: the recorded digests, and tests of rooms above (`tier` 2 of a row).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants_children import ROOT, Outcome, Server, forked, run_imported, serve, warm
from mutants_judge import Judge, Run
from mutants_lines import Lines, read_kept, write_kept
from mutants_places import Place, draw, found_again
from parallel import in_parallel

ROOMS = ("federation", "methods", "privacy", "attacks", "generators", "tasks", "data")
#: tests of other rooms that take long, start processes of their own, which see no mutant, or look at pages
LEFT_OUT = (
    *("audits", "runner", "engines", "study", "deployment", "encoders"),
    *("browser", "claims", "report", "plugins", "cli", "test_docs", "test_contributing", "test_without_posix"),
    *("test_without_torch", "test_fault_campaign", "test_fuzz_campaign", "test_examples", "test_tutorial", "test_lock"),
    *("test_recorded_digests", "test_publishing", "test_dependencies", "test_sbom", "test_repository", "test_layers"),
    *("test_reference_pages", "test_benchmarks", "test_extras", "test_schemas", "test_public_api", "test_ray"),
)
#: of these, what judges in the second tier (`--also`): it runs in one process, and a mutant is seen there
ALSO = ("tests/runner", "tests/study", "tests/cli/test_data_cli.py", "benchmarks/mutants_digests.py")
#: seconds that all tests of one file may take while they are watched
LONGEST_FILE = 120.0


def test_files() -> list[str]:
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    paths = [path.relative_to(ROOT) for path in found]
    return [str(path) for path in paths if path.parts[1] not in LEFT_OUT and path.stem not in LEFT_OUT]


def watch(server: Server, workers: int, folder: Path, until: float, kept: Path | None) -> list[dict[str, Any]]:
    """The lines of all collected tests; those of files that are as they were are known from `kept`."""
    known = [row for row in read_kept(kept, ROOT) if row["file"] != ALSO[-1]]  # digests are of this machine
    of_file: dict[str, list[str]] = {}
    for test in server.items:
        of_file.setdefault(test.split("::")[0], []).append(test)
    # those that take longest were collected first; tests of many short ones judge more mutants
    missing = [file for file in reversed(of_file) if file not in {row["file"] for row in known}]

    def work(number: int, tell: Callable[[Any], None]) -> None:
        for file in _claimed(missing, folder, "file"):
            left = until - time.monotonic()
            if left > 0:
                outcome = _watched(server, of_file[file], folder, min(LONGEST_FILE, left))
                for row in outcome.rows:
                    tell({"file": file, **row})

    told, _ = in_parallel(work, workers, folder, until)
    if kept:
        write_kept(kept, [*known, *told], ROOT)
    return [*known, *told]


def _watched(server: Server, tests: Sequence[str], folder: Path, limit: float) -> Outcome:
    return forked(folder, lambda told: server.run(tests, told, watch=True), limit)


def _claimed(things: Sequence[Any], folder: Path, name: str) -> Iterator[Any]:
    """Each thing for the worker that asks first."""
    for number, thing in enumerate(things):
        try:
            os.close(os.open(folder / f"{name}-{number}.claim", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        yield thing


def judged(judge: Judge, places: Sequence[Place], workers: int, note: Callable[[list[Any]], None]) -> None:
    """Judge mutants in several processes; `note` gets what is known, every 20 seconds and at the end."""

    def work(number: int, tell: Callable[[Any], None]) -> None:
        for place in _claimed(places, judge.folder, "mutant"):
            if time.monotonic() < judge.until:
                tell(judge.judge(place))

    told, crashed = in_parallel(work, workers, judge.folder, judge.until, note)
    note(told + [{"crashed": word} for word in crashed])


def counted(found: Sequence[dict[str, Any]], chosen: argparse.Namespace) -> dict[str, Any]:
    """Killed and tried in each room, and those that live or were not judged."""
    rows = [one for one in found if "where" in one]
    counts = {}
    for room in dict.fromkeys(one["room"] for one in rows):
        results = [one["killed"] for one in rows if one["room"] == room and one["killed"] is not None]
        if results:
            counts[room] = {"tried": len(results), "killed": sum(results)}
        above = [one for one in rows if one["room"] == room and one["killed"] and one["tier"] == 2]
        if above:
            counts[room]["killed_by_tier_2"] = len(above)
    groups = {"alive": False, "not_judged": None, "killed": True}
    listed = {name: [one for one in rows if one["killed"] is value] for name, value in groups.items()}
    return {"seed": chosen.seed, "rooms": counts, "crashed": [one for one in found if "where" not in one], **listed}


def _chosen() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two mutants")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--each", type=int, default=1000, help="mutants of each room, at most")
    parser.add_argument("--again", type=Path, help="judge those that live in this file")
    parser.add_argument("--also", action="store_true", help="judge those that live by tests that take longer, too")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds of tests for one mutant")
    parser.add_argument("--lines", type=Path, help="which lines each test runs: read, and written (.jsonl.gz)")
    parser.add_argument("--tests", help="test files and folders, with commas (all, unless given)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _drawn(chosen: argparse.Namespace) -> list[Place]:
    """The mutants to judge, in turn from each room."""
    if chosen.again:
        before = json.loads(chosen.again.read_text(encoding="utf-8"))
        parts = before if isinstance(before, list) else [before]
        lived = [one for part in parts for one in (*part["alive"], *part["not_judged"])]
        return found_again([one for one in lived if not one.get("word", "").startswith(("harmless", "gpu"))])
    rooms = [draw(room, chosen.seed, chosen.each) for room in chosen.rooms.split(",")]
    longest = max(len(places) for places in rooms)
    turns = [places[turn] for turn in range(longest) for places in rooms if turn < len(places)]
    return turns[:2] if chosen.quick else turns


@dataclass(frozen=True)
class Campaign:
    """What was asked, the mutants, and a folder in which two processes leave what they found."""

    chosen: argparse.Namespace
    places: Sequence[Place]
    folder: Path
    started: float

    @property
    def lines(self) -> Path:
        return self.folder / "lines.jsonl.gz"

    @property
    def until(self) -> float:
        return self.started + 60 * self.chosen.minutes

    @property
    def importing(self) -> int:
        """Workers for mutants that run at import: about a quarter of all places."""
        return max(1, self.chosen.workers // 4)

    def judge_functions(self) -> None:
        """Collect and watch the tests, then judge the mutants of functions."""
        files = self.chosen.tests.split(",") if self.chosen.tests else test_files()
        serve([*files, *(ALSO if self.chosen.also else ())], self._with_server)

    def _with_server(self, server: Server) -> None:
        half = self.started + 36 * self.chosen.minutes  # tests that are not watched by then judge nothing
        rows = watch(server, self.chosen.workers, self.folder, half, self.chosen.lines)
        write_kept(self.lines, rows, ROOT)  # the other process begins
        print(f"{time.monotonic() - self.started:.0f} s: {len(rows)} tests are watched", flush=True)
        workers = max(1, self.chosen.workers - self.importing)
        self._judge("functions", lambda tests, told, place: server.run(tests, told, place=place), workers, server.holds)

    def judge_imports(self) -> None:
        """Wait for the lines of the tests, then judge the mutants that run at import."""
        while not self.lines.exists():
            if time.monotonic() > self.until:
                return
            time.sleep(0.2)
        self._judge("imports", run_imported, self.importing)

    def _judge(self, name: str, run: Run, workers: int, holds: Callable[[Place], bool] = lambda place: True) -> None:
        folder = self.folder / name
        folder.mkdir()
        judge = Judge(run, Lines(read_kept(self.lines, ROOT)), folder, self.chosen.longest, self.until, holds, ALSO)
        places = [place for place in self.places if bool(place.function) == (name == "functions")]
        judged(judge, places, workers, _noting(self.folder / f"{name}.json"))

    def result(self) -> dict[str, Any]:
        """What is known until now."""
        files = [self.folder / f"{name}.json" for name in ("functions", "imports")]
        found = [one for file in files if file.exists() for one in json.loads(file.read_text(encoding="utf-8"))]
        result = counted(found, self.chosen)
        if self.chosen.json:
            self.chosen.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return result


def _noting(file: Path) -> Callable[[list[Any]], None]:
    def note(found: list[Any]) -> None:
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(file)

    return note


def _begun(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    chosen, started = _chosen(), time.monotonic()
    os.chdir(ROOT)
    places = _drawn(chosen)
    warm()
    with tempfile.TemporaryDirectory() as name:
        os.environ["MUTANTS_DIGESTS"] = name
        campaign = Campaign(chosen, places, Path(name), started)
        children = [_begun(campaign.judge_functions), _begun(campaign.judge_imports)]
        while children:
            children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
            campaign.result()
            time.sleep(2)
        result = campaign.result()
    print(json.dumps({name: len(value) if isinstance(value, list) else value for name, value in result.items()}))


if __name__ == "__main__":
    main()
