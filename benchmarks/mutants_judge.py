"""Whether tests notice a mutant: those that run its line, the quickest first, each portion in a forked child."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutants_children import forked
from mutants_lines import Lines
from mutants_places import Place

#: processor seconds of the tests that one child is given: the first few tests notice most mutants
PORTIONS = (3.0, 12.0, 60.0, 300.0)
#: a mutant whose tests take so many times as long, and so many seconds more, does not end: its tests notice
ENDLESS = (5.0, 15.0)
#: reads the defaults and bounds of all settings, which are there when a module is imported
SETTINGS = "tests/test_recorded_settings.py"

Run = Callable[[Sequence[str], Path, Place | None], None]


@dataclass
class Judge:
    """Judges mutants with one way to run tests in a child: `run(tests, told, place)`."""

    run: Run
    lines: Lines
    folder: Path
    longest: float
    until: float
    #: whether a mutant can be made at all
    holds: Callable[[Place], bool] = lambda place: True
    #: files and folders of tests that judge in the second tier: those that live after all others
    also: tuple[str, ...] = ()

    def judge(self, place: Place) -> dict[str, Any]:
        if not self.holds(place):
            return {**place.told(), "killed": None, "by": "its function is not in memory", "tier": 0}
        tests = self._tests(place)
        tiers = ([one for one in tests if one.startswith(self.also) is above] for above in (False, True))
        verdict: dict[str, Any] = {"killed": False, "by": "no test runs it", "tier": 0}
        for tier, some in enumerate(tiers, 1):
            if some and verdict["killed"] is False:
                killed, by = self._noticed(place, some)
                verdict = {"killed": killed, "by": by, "tier": tier}
        return {**place.told(), **verdict}

    def _tests(self, place: Place) -> list[str]:
        tests = self.lines.of(place.file, place.lines)
        if place.function:
            return tests
        tests = tests or self.lines.of(place.file, ())
        reading = [*self.lines.reading(place.module), *(one for one in self.lines.rows if one.startswith(SETTINGS))]
        return self.lines.quickest(list(dict.fromkeys([*tests, *reading])))

    def _noticed(self, place: Place, tests: Sequence[str]) -> tuple[bool | None, str]:
        """Whether a test fails that does not without the change, and which; None if they did not end in time."""
        passed = 0
        for portion in _portions(self.lines, tests, self.longest):
            while portion:
                if time.monotonic() > self.until:
                    return None, "no time"
                failed = self._failed(portion, place)
                if failed and time.monotonic() > self.until:
                    return None, "no time"
                if not failed:
                    break
                if not self._failed(portion[: portion.index(failed) + 1] if failed in portion else portion, None):
                    return True, failed
                portion = [test for test in portion if test != failed] if failed in portion else []
            passed += len(portion)
        if not passed:  # on a busy machine they may not end in time, with the change and without it
            return None, "its tests do not pass without it"
        return False, f"{passed} of {len(tests)} tests that run it passed"

    def _failed(self, tests: Sequence[str], place: Place | None) -> str:
        """The test that fails, or a word on how they end; "" where all pass."""
        limit = min(ENDLESS[0] * self.lines.seconds(tests) + ENDLESS[1], self.until + 5 - time.monotonic())
        outcome = forked(self.folder, lambda told: self.run(tests, told, place), limit)
        failed = [row["test"] for row in outcome.rows if not row["passed"]]
        if failed:
            return failed[0]
        if not outcome.ended:
            return "the tests do not end"
        # fewer rows than tests: the process died, or a file cannot be imported
        return "" if len(outcome.rows) >= len(tests) else "the tests cannot run"


def _portions(lines: Lines, tests: Sequence[str], longest: float) -> Iterator[list[str]]:
    """The quickest tests first, in growing portions, those of a file together; `longest` seconds in all."""
    rest, spent = list(tests), 0.0
    for size in PORTIONS:
        portion: list[str] = []
        while rest and spent < longest and (not portion or lines.seconds([*portion, rest[0]]) <= size):
            portion.append(rest.pop(0))
            if len(portion) >= 400:
                break
        spent += lines.seconds(portion)
        if portion:
            yield sorted(portion, key=lambda test: test.split("::")[0])
