"""The worth of sites from open sums: exact, and the same as heads fitted for each coalition."""

import pytest

from polyclinic.runner.worth import worth


def test_values_from_sums_add_up_to_what_all_sites_reach(study_of, cache):
    found = worth(study_of({"name": "analytic", "numbers": 6}), cache=cache)
    assert len(found["sites"]) == 3
    assert sum(one["shapley"] for one in found["sites"].values()) == pytest.approx(found["all"] - found["none"])
    assert found["none"] < found["all"] < 0
    assert "exact" in found["how"]
