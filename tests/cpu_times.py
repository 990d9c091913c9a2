"""`pytest --cpu-times=FILE` writes the CPU seconds of each test as JSON, the dearest files and tests first.

User and system time, of set-up and tear-down too, and of child processes that were waited for. What a shared fixture
costs is counted to the test that asks for it first. Seconds of the clock say more about the machine than about a test.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

_NAME = "cpu_seconds"
_spent: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="write the CPU seconds of files and tests to FILE, as JSON")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """What was spent since the last report of this process: each of set-up, call and tear-down has one."""
    before = item.session.stash.get(_BEFORE, _START)
    now = item.session.stash[_BEFORE] = _cpu_seconds()
    item.user_properties[:] = [one for one in item.user_properties if one[0] != _NAME]
    item.user_properties.append((_NAME, now - before))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Also in the process that only collects what the workers of pytest-xdist report."""
    _spent[report.nodeid] += dict(report.user_properties).get(_NAME, 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    target = session.config.getoption("--cpu-times")
    if target and not hasattr(session.config, "workerinput"):
        Path(target).write_text(json.dumps(_summary(_spent), indent=1) + "\n", encoding="utf-8")


def _summary(spent: Counter[str]) -> dict[str, object]:
    files: Counter[str] = Counter()
    for test, seconds in spent.items():
        files[test.partition("::")[0]] += seconds
    tables = {"files": files, "tests": spent}
    rows = {name: {key: round(value, 2) for key, value in table.most_common()} for name, table in tables.items()}
    return {"total": round(sum(spent.values()), 1), **rows}


def _cpu_seconds() -> float:
    return sum(os.times()[:4])


_BEFORE = pytest.StashKey[float]()
_START = _cpu_seconds()  # imports of the tests themselves are counted to the first test
