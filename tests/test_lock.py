"""The lock files: every package that the README's commands need is there once, in the version of constraints.txt."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def locked(name):
    """Package -> version and hashes."""
    entries = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    found = {}
    for entry in entries:
        line, *hashes = re.split(r"\s+--hash=", entry)
        one = Requirement(line)
        assert one.name not in found, f"{one.name} is there twice"
        [pin] = one.specifier
        assert pin.operator == "=="
        found[one.name] = (pin.version, hashes)
    return found


@pytest.fixture
def lock(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    sys.modules.pop("lock", None)
    import lock

    return lock


@pytest.mark.parametrize(("name", "least"), [("", 100), ("-cpu", 1), ("-cuda", 15)])
def test_each_package_has_hashes(name, least):
    found = locked(f"requirements{name}.lock")
    assert len(found) >= least
    for package, (_, hashes) in found.items():
        assert hashes, package
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), package
        assert len(set(hashes)) == len(hashes), package


def test_the_lock_has_all_that_is_needed_in_the_versions_of_the_constraints(lock):
    found, pinned = locked("requirements.lock"), lock.pinned()
    assert {name: version for name, (version, _) in found.items() if name in pinned} == {
        name: version for name, version in pinned.items() if name in found
    }
    assert set(lock.needed()) - set(found) <= {"pywin32", "torch"}, "run benchmarks/lock.py again"
    assert locked("requirements-cuda.lock")["torch"][0] == pinned["torch"]
    assert locked("requirements-cpu.lock")["torch"][0] == f"{pinned['torch']}+cpu"


def test_what_cuda_needs_is_not_installed_with_a_torch_for_processors():
    cuda = locked("requirements-cuda.lock")
    assert not (set(locked("requirements.lock")) | set(locked("requirements-cpu.lock"))) & (set(cuda) - {"torch"})
    assert all(name.startswith(("cuda", "nvidia", "triton", "torch")) for name in cuda)


def test_a_marker_of_another_system_is_kept(lock):
    [line] = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line.startswith("colorama==")]
    assert 'sys_platform == "win32"' in line
