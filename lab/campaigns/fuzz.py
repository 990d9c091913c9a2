"""The fuzz campaign: changed inputs for everything that reads what others wrote.

    python lab/campaigns/fuzz.py [--quick] [--minutes N] [--inputs N] [--workers N] [--seed S] [--only TARGET,...]
                              [--draws plain|hypothesis] [--json FILE]

Each target reads a valid input that was changed: bytes flipped, cut, repeated, replaced, or values of other types in
its tables and headers. It fails on any exception but the project's own refusals, where one input takes above five
seconds, and where a decoder crashes. Plain draws are ten times as fast as those of hypothesis; the quick version does
some of both.
"""

import argparse
import json
import logging
import mmap
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import torch
from fuzz_edits import ODD, draw_edits, draw_table_edits, edit_bytes, edit_inside, edit_tables
from fuzz_targets import REFUSALS, Target, targets_in
from hypothesis import strategies as st
from parallel import in_parallel

#: seconds of processor time that one input may take
LONGEST = 5.0
#: how many inputs of a target are drawn at a time
BATCH = 400
#: bytes of the last input that are kept outside the process, for when it crashes
KEPT = 1 << 20

odd_values = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4).map(str)),
    st.sampled_from(ODD),
)
edits = st.lists(
    st.tuples(st.integers(0, 6), st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)
table_edits = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), odd_values, st.booleans()), max_size=4)


class TookTooLong(Exception):  # noqa: N818
    """One input takes more processor time than any should."""


class Campaign:
    """Counts inputs by target, and keeps one of each kind of failure."""

    def __init__(self, seed: int, last: mmap.mmap | None = None) -> None:
        self.seed, self.batches, self.last = seed, Counter[str](), last
        self.inputs, self.accepted = Counter[str](), Counter[str]()
        self.failures: dict[str, dict[str, str]] = {}
        signal.signal(signal.SIGVTALRM, _too_long)

    def plain_batch(self, target: Target, count: int) -> None:
        self.batches[target.name] += 1
        draw = random.Random(f"{self.seed} {target.name} {self.batches[target.name]}")
        for _ in range(count):
            self.attempt(target, _drawn(target, draw))

    def hypothesis_batch(self, target: Target, count: int) -> None:
        self.batches[target.name] += 1

        @hypothesis.seed(self.seed * 1_000_003 + self.batches[target.name])
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(_strategy(target))
        def attempt(changed: Any) -> None:
            self.attempt(target, changed)

        attempt()

    def attempt(self, target: Target, changed: Any) -> None:
        self.inputs[target.name] += 1
        self._keep_last(target, changed)
        signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
        try:
            target.read(changed)
            self.accepted[target.name] += 1
        except REFUSALS:
            pass
        except (Exception, TookTooLong) as error:
            self._note(target, changed, error)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _note(self, target: Target, changed: Any, error: Exception) -> None:
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "polyclinic" in frame.filename]
        place = (ours or traceback.extract_tb(error.__traceback__))[-1]
        problem = f"{target.name}: {type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
        details = {"input": repr(changed)[:2000], "traceback": traceback.format_exc()[-900:]}
        self.failures.setdefault(problem, details)

    def _keep_last(self, target: Target, changed: Any) -> None:
        if self.last is not None:
            kept = changed if isinstance(changed, bytes) else repr(changed).encode(errors="backslashreplace")
            text = target.name.encode() + b": " + kept[: KEPT // 2]
            self.last[: len(text) + 1] = text + b"\0"

    def found(self) -> dict[str, Any]:
        return {"inputs": dict(self.inputs), "accepted": dict(self.accepted), "failures": self.failures}


def _too_long(number: int, frame: Any) -> None:
    raise TookTooLong(f"above {LONGEST} seconds")


def _drawn(target: Target, draw: random.Random) -> Any:
    """One changed input: values or bytes, whichever the target has."""
    if isinstance(target.sample, dict):
        return edit_tables(target.sample, draw_table_edits(draw))
    if target.structured and draw.random() < 0.6:
        return edit_inside(target.sample, draw, target.repair)
    return edit_bytes(target.sample, draw_edits(draw))


def _strategy(target: Target) -> Any:
    if isinstance(target.sample, dict):
        return table_edits.map(lambda drawn: edit_tables(target.sample, drawn))
    return edits.map(lambda drawn: edit_bytes(target.sample, drawn))


def merged(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Findings of all batches of all workers together."""
    inputs, accepted, failures = Counter[str](), Counter[str](), {}
    for one in found:
        inputs.update(one["inputs"])
        accepted.update(one["accepted"])
        failures = {**one["failures"], **failures}
    targets = {name: {"tried": inputs[name], "accepted": accepted[name]} for name in sorted(inputs)}
    return {"tried": sum(inputs.values()), "targets": targets, "failures": failures}


def _campaign(chosen: argparse.Namespace, place: Path, started: float, note: Callable[[list[Any]], None]) -> dict:
    """The campaign on several cores; what it found."""
    until = started + 60 * chosen.minutes
    wanted = -(-chosen.inputs // chosen.workers) if chosen.inputs else 0

    def work(number: int, tell: Callable[[Any], None]) -> None:
        with (place / f"worker-{number}.last").open("w+b") as file:
            file.truncate(KEPT)
            last = mmap.mmap(file.fileno(), KEPT)
            targets, told = _targets(place / str(number), chosen.only), 0
            while time.monotonic() < until and (not wanted or told < wanted):
                for target in targets:
                    part = Campaign(chosen.seed * 1_000_003 + number * 10_007 + told, last)
                    batch = part.plain_batch if chosen.draws == "plain" else part.hypothesis_batch
                    batch(target, max(1, BATCH // target.slowness))
                    told += sum(part.inputs.values())
                    tell(part.found())

    told, crashed = in_parallel(work, chosen.workers, place, until, note)
    found = merged(told)
    found["failures"] |= {f"crash: {words[:60]}": {"input": words, "traceback": ""} for words in crashed}
    return found


def _targets(place: Path, only: str) -> list[Target]:
    place.mkdir(exist_ok=True)
    return [target for target in targets_in(place) if not only or target.name in only.split(",")]


def _quick(seed: int, place: Path, only: str) -> dict[str, Any]:
    """Some thousand inputs of both ways to draw, in this process."""
    targets, campaign = _targets(place, only), Campaign(seed)
    for target in targets:
        campaign.hypothesis_batch(target, max(1, 100 // target.slowness))
        campaign.plain_batch(target, max(1, 400 // target.slowness))
    return merged([campaign.found()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="some thousand inputs")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--inputs", type=int, default=0, help="stop after so many, if the time is not over before")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets, separated by commas")
    parser.add_argument("--draws", choices=("plain", "hypothesis"), default="plain")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of decoders, about broken files
    logging.disable()
    started = time.monotonic()

    def write(found: dict[str, Any]) -> dict[str, Any]:
        found = {"seed": chosen.seed, "seconds": round(time.monotonic() - started), **found}
        if chosen.json:
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")
        return found

    with tempfile.TemporaryDirectory() as place:
        if chosen.quick:
            found = write(_quick(chosen.seed, Path(place), chosen.only))
        else:
            note: Callable[[list[Any]], None] = lambda told: write(merged(told)) and None  # noqa: E731
            found = write(_campaign(chosen, Path(place), started, note))
    for failure, details in found["failures"].items():
        print(failure, details["input"][:200], details["traceback"][-300:], sep="\n  ")
    print(json.dumps(found | {"failures": len(found["failures"])}))
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
