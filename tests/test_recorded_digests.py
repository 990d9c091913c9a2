"""No bit of a result changes unnoticed: digests of short runs are those in `recorded_digests.json`."""

import json

import pytest
import recorded_digests
from recorded_digests import GROUPS, METHODS, ONE_ROUND, RECORDED, REPLAYING, run_program

from polyclinic import methods

KNOWN = json.loads(RECORDED.read_text(encoding="utf-8"))
AGAIN = "`python tests/recorded_digests.py --write` records them again"


@pytest.fixture(scope="module", autouse=True)
def _same_libraries():
    for name, version in recorded_digests.versions().items():
        if KNOWN[name] != version:
            pytest.skip(f"digests were recorded with {name} {KNOWN[name]}, and here is {version}; {AGAIN}")


@pytest.fixture(scope="module")
def computed():
    """The digests of all groups, from one process."""
    return run_program(*GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_digests_are_those_recorded(computed, group):
    found, known = computed[group], KNOWN["digests"][group]
    assert list(found) == list(known), AGAIN
    differ = [name for name in found if found[name] != known[name]]
    assert not differ, f"results differ from those recorded; if they should, {AGAIN}"


def test_every_method_is_recorded():
    assert {method["name"] for method, _ in (METHODS | REPLAYING | ONE_ROUND).values()} == set(methods.METHODS)
