"""The fuzz campaign: inputs that hypothesis draws, for everything that reads what others wrote.

    python benchmarks/fuzz.py [--quick] [--minutes N] [--seed S] [--only TARGET,...] [--json FILE]

Each target reads a valid input that was changed: bytes flipped, cut, repeated, replaced, or values of other types in
its tables. It fails on any exception but the project's own refusals, and where one input takes above five seconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import torch
from fuzz_targets import REFUSALS, Target, targets_in
from hypothesis import strategies as st

#: seconds of processor time that one input may take
LONGEST = 5.0
#: how many inputs hypothesis draws at a time
BATCH = 400

odd_values = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=4).map(str)),
    st.sampled_from([10**400, -1, 0, 1e308, "../x", "/", "\x00", "nan", [], {}, [[]], {"": 0}, "x" * 300]),
)
edits = st.lists(
    st.tuples(st.integers(0, 6), st.floats(0, 1, exclude_max=True), st.integers(0, 255), st.binary(max_size=8)),
    min_size=1,
    max_size=4,
)


def edit_bytes(content: bytes, drawn: list[tuple[int, float, int, bytes]]) -> bytes:
    """The content with a few bytes flipped, cut, repeated, put in or taken out."""
    found = bytearray(content)
    for kind, where, number, put in drawn:
        place = int(where * len(found))
        if kind == 0 and found:
            found[place] = number
        elif kind == 1 and found:
            found[place] ^= 1 << number % 8
        elif kind == 2:
            del found[place:]
        elif kind == 3:
            del found[place : place + number]
        elif kind == 4:
            found[place:place] = put
        elif kind == 5:
            found[place:place] = found[place : place + number]
        else:
            found[place : place + len(put)] = put
    return bytes(found)


def edit_tables(tables: dict[str, Any], drawn: list[tuple[float, Any, bool]]) -> dict[str, Any]:
    """The tables with a few values of other types, taken out, or under other names."""
    found = copy.deepcopy(tables)
    for where, value, renamed in drawn:
        places = list(_places(found))
        holder, name = places[int(where * len(places))]
        if renamed:
            holder[str(value)[:20]] = holder[name]
        elif value is None:
            del holder[name]
        else:
            holder[name] = value
        if not found:
            break
    return found


def _places(table: dict[str, Any]) -> Any:
    for name, value in table.items():
        yield table, name
        if isinstance(value, dict):
            yield from _places(value)


class Campaign:
    """Counts inputs by target, and keeps one of each kind of failure."""

    def __init__(self, seed: int) -> None:
        self.seed, self.batches = seed, Counter[str]()
        self.inputs, self.accepted = Counter[str](), Counter[str]()
        self.failures: dict[str, dict[str, str]] = {}

    def batch(self, target: Target, count: int) -> None:
        self.batches[target.name] += 1
        strategy = self._strategy(target)

        @hypothesis.seed(self.seed * 1_000_003 + self.batches[target.name])
        @hypothesis.settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategy)
        def attempt(changed: Any) -> None:
            self.attempt(target, changed)

        attempt()

    def _strategy(self, target: Target) -> Any:
        if isinstance(target.sample, dict):
            changes = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), odd_values, st.booleans()), max_size=4)
            return changes.map(lambda drawn: edit_tables(target.sample, drawn))
        samples = target.sample if isinstance(target.sample, list) else [target.sample]
        return st.tuples(st.sampled_from(samples), edits).map(lambda drawn: edit_bytes(*drawn))

    def attempt(self, target: Target, changed: Any) -> None:
        self.inputs[target.name] += 1
        started, problem = time.process_time(), ""
        try:
            target.read(changed)
            self.accepted[target.name] += 1
        except REFUSALS:
            pass
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
        if time.process_time() - started > LONGEST:
            problem = "took above five seconds"
        if problem:
            self.failures.setdefault(
                f"{target.name}: {problem}", {"input": repr(changed)[:400], "traceback": traceback.format_exc()[-900:]}
            )

    def found(self) -> dict[str, Any]:
        names = sorted(self.inputs)
        inputs = {name: {"tried": self.inputs[name], "accepted": self.accepted[name]} for name in names}
        return {"tried": sum(self.inputs.values()), "targets": inputs, "failures": self.failures}


def carry_out(campaign: Campaign, targets: list[Target], count: int, going_on: Callable[[], bool]) -> None:
    """Batches of every target in turn; a target whose inputs take long gets smaller ones."""
    while True:
        for target in targets:
            campaign.batch(target, max(1, count // target.slowness))
        if not going_on():
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="some thousand inputs")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="targets, separated by commas")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of decoders, about broken files
    logging.disable()
    started, campaign = time.monotonic(), Campaign(chosen.seed)
    with tempfile.TemporaryDirectory() as place:
        names = chosen.only.split(",") if chosen.only else []
        targets = [target for target in targets_in(Path(place)) if not names or target.name in names]
        count = 200 if chosen.quick else BATCH
        minutes = 0.0 if chosen.quick else chosen.minutes
        carry_out(campaign, targets, count, lambda: time.monotonic() - started < 60 * minutes)
    found = {"seed": chosen.seed, "seconds": round(time.monotonic() - started), **campaign.found()}
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    for failure, details in campaign.failures.items():
        print(failure, details["input"][:200], details["traceback"][-300:], sep="\n  ")
    print(json.dumps(found | {"failures": len(campaign.failures)}))
    sys.exit(bool(campaign.failures))


if __name__ == "__main__":
    main()
