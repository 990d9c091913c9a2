"""The order of the checks of a call and of an answer is the recorded one, and each of them can refuse."""

import json

import pytest
from recorded_checks import (
    RECORDED,
    REPLIES,
    SIMULATED_ONLY,
    STUDIES,
    checks_of_coordinator,
    checks_of_sites,
    checks_with_a_kit,
    once,
)

FOUND = json.loads(RECORDED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [*STUDIES, *SIMULATED_ONLY])
def test_simulated_sites_check_in_the_recorded_order(tmp_path, name):
    assert checks_of_sites(name, tmp_path / "run", deployed=False) == FOUND["simulated"][name]


@pytest.mark.parametrize("name", STUDIES)
def test_deployed_sites_check_in_the_recorded_order(tmp_path, name):
    assert checks_of_sites(name, tmp_path / "run", deployed=True) == FOUND["deployed"][name]


def test_every_check_of_a_site_with_a_kit_refuses_and_undoes_what_was_done(tmp_path):
    """Nothing after a refusal looks at the answer, the site's state is as before, and what nobody foresaw suspends the
    study once the work has begun."""
    assert checks_with_a_kit(tmp_path) == FOUND["with a kit"]


@pytest.mark.parametrize("name", REPLIES)
def test_the_coordinator_checks_in_the_recorded_order(tmp_path, name):
    assert checks_of_coordinator(name, tmp_path / "run") == FOUND["coordinator"][name]


@pytest.mark.parametrize(("order", "short"), [("abab", "ab"), ("abcabcd", "abcd"), ("aab", "ab"), ("abca", "abca")])
def test_what_is_done_for_each_parcel_counts_once(order, short):
    assert once(list(order)) == list(short)
