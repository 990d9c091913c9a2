"""Each recorded digest as a test of its own, in the process of the mutant: `mutants.py --also`.

`tests/test_recorded_digests.py` computes the digests in a process of its own, which sees no mutant, and they hold for
one version of torch. Here a digest must be what it was on the same machine without the mutant: the first computation,
while the tests are watched, keeps it in the folder that `MUTANTS_DIGESTS` names.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import recorded_digests

RUNS = recorded_digests.METHODS | recorded_digests.ONE_ROUND | recorded_digests.REPLAYING
PIECES: dict[str, Callable[[], dict[str, str]]] = {
    **{"phantoms": recorded_digests.phantoms, "partitions": recorded_digests.partitions},
    **{"generators": recorded_digests.generators, "attacks": recorded_digests.attacks},
}


def assert_as_before(name: str, found: dict[str, str]) -> None:
    kept = Path(os.environ["MUTANTS_DIGESTS"]) / hashlib.sha256(name.encode()).hexdigest()
    if not kept.exists():
        kept.write_text(str(found), encoding="utf-8")
    assert kept.read_text(encoding="utf-8") == str(found)


@pytest.mark.parametrize("name", RUNS)
def test_run(name: str) -> None:
    assert_as_before(name, recorded_digests.digests_of_runs({name: RUNS[name]}))


@pytest.mark.parametrize("name", PIECES)
def test_piece(name: str) -> None:
    assert_as_before(name, PIECES[name]())
