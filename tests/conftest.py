"""Studies small enough for a test: a hundred little phantoms, a few sites, a few rounds, one process.

Phantoms are drawn once per session, into a cache of the session's own.
"""

import functools
import json
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import typer.main
import typer.testing
from json_schemas import assert_valid

from polyclinic import plugins
from polyclinic.runner.run.result import Result
from polyclinic.runner.run.run import run
from polyclinic.study import Study

# How long an example takes says something about the machine, not about the code. The examples are the same each time:
# one that was never tried before must not fail a change that has nothing to do with it
# (`make check-all` tries more of them: --hypothesis-profile=thorough)
for profile, examples in (("quick", 20), ("thorough", 100)):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("quick")
TINY: dict[str, dict[str, Any]] = {
    "data": {"source": "fundus-phantom", "samples": 96, "size": 28},
    "sites": {"partition": "iid", "count": 3},
    "model": {"backbone": "lenet5"},
    "optimizer": {"batch_size": 8, "lr": 0.05},
    # "best" may release the model of round 1, and a test of rounds 2 and 3 could then not fail
    "evaluation": {"select": "last"},
    "engine": {"workers": 1, "device": "cpu", "durable": False},  # no test loses power
}
MakeStudy = Callable[..., Study]
#: the files `test_*.py` that take longest; when they come last, one worker of pytest-xdist waits for the other
LONGEST = """
recorded_digests replay_methods gradient_inversion audit without_posix stacking felicia resume checks honest_incoming
report_pages epsilon ray methods fuzz_campaign workers fault_campaign baselines feder equivalences backbones replies
audit_outside what_attacks_get reproduce imported copies local_work plugin_packages plugins
tune examples
""".split()  # noqa: SIM905


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest; all else stays in its order."""
    unstable = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if unstable:  # two workers of pytest-xdist would collect different tests, and none would run
        raise pytest.UsageError(f"{unstable[0]}: its name holds an address; give the parameters `ids`")
    place = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine(tmp_path_factory: pytest.TempPathFactory):
    """A cache of the session's own, one thread, as a site has by default, and no waiting for a disk."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYCLINIC_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(os, "fsync", lambda file: None)  # no test loses power, and waiting for a disk adds up
        patch.setattr(np.memmap, "flush", lambda array: None)
        # typer builds all commands anew for each command line, which adds up, too
        commands = functools.cache(typer.main.get_command)
        patch.setattr(typer.main, "get_command", commands)
        patch.setattr(typer.testing, "_get_command", commands)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_plugins():
    """What a test plugs in, or restricts, is gone after it."""
    yield
    plugins.forget()


def make_study(method: str, settings: dict[str, Any] | None = None, **method_settings: Any) -> Study:
    tables = {name: dict(table) for name, table in TINY.items()}
    tables["method"] = {"name": method, "rounds": 3, **method_settings}
    for path, value in (settings or {}).items():
        table, _, setting = path.partition(".")
        if setting:
            tables.setdefault(table, {})[setting] = value
        else:
            tables[table] = value
    return Study(**tables)


@pytest.fixture(scope="session")
def tiny() -> MakeStudy:
    """`tiny("fedavg", {"sites.count": 2}, rounds=2)`: a study with settings of tables, then of the method."""
    return make_study


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Study], Result]:
    """The result of a study run here in one go; run once however often it is asked for. Not to be changed."""
    done: dict[str, Result] = {}

    def result_of(study: Study) -> Result:
        key = json.dumps(study.as_tables(), sort_keys=True)
        if key not in done:
            done[key] = run(study, tmp_path_factory.mktemp("undisturbed") / study.method.name)
            assert_valid(done[key].folder)
        return done[key]

    return result_of
