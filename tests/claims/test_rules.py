"""Rules: which side the interval lies on decides; few data never decide."""

from __future__ import annotations

import pytest

from polyclinic.claims.rules import AllOf, AtLeast, AtMost, Lower, Provided, falling, higher

CLEAR = {("a", "mae"): (1.0, 1.1, 0.9), ("b", "mae"): (2.0, 2.1, 1.9)}


def test_a_clear_difference_decides_both_ways() -> None:
    assert Lower("a", "b", "mae").judge(CLEAR).holds == "yes"
    assert Lower("b", "a", "mae").judge(CLEAR).holds == "no"
    assert higher("b", "a", "mae").judge(CLEAR).holds == "yes"


def test_a_margin_that_is_not_reached_is_no() -> None:
    assert Lower("a", "b", "mae", by=0.5).judge(CLEAR).holds == "yes"
    assert Lower("a", "b", "mae", by=1.5).judge(CLEAR).holds == "no"


def test_a_factor_allows_for_a_little_more() -> None:
    assert Lower("b", "a", "mae", factor=3).judge(CLEAR).holds == "yes"
    assert Lower("b", "a", "mae", factor=1.5).judge(CLEAR).holds == "no"


def test_scatter_does_not_decide() -> None:
    table = {("a", "auc"): (0.7, 0.9, 0.8), ("b", "auc"): (0.8, 0.7, 0.9)}
    assert Lower("a", "b", "auc").judge(table).holds == "not enough data"


@pytest.mark.parametrize("values", [(), (1.0,)])
def test_one_seed_does_not_decide(values: tuple[float, ...]) -> None:
    table = {("a", "mae"): values, ("b", "mae"): tuple(value + 1 for value in values)}
    assert Lower("a", "b", "mae").judge(table).holds == "not enough data"


def test_values_without_a_pair_do_not_decide() -> None:
    table = {("a", "mae"): (1.0, 1.1, 0.9), ("b", "mae"): (2.0, 2.1)}
    assert Lower("a", "b", "mae").judge(table).holds == "not enough data"


def test_one_exact_value_decides() -> None:
    table = {("all", "models"): (1.0,)}
    assert AtMost("all", "models", 1, exact=True).judge(table).holds == "yes"
    assert AtMost("all", "models", 0, exact=True).judge(table).holds == "no"
    assert AtLeast("all", "models", 2, exact=True).judge(table).holds == "no"
    assert AtMost("all", "models", 1, exact=True).judge({}).holds == "not enough data"


def test_one_part_that_does_not_hold_decides_for_all() -> None:
    parts = (Lower("a", "b", "mae"), Lower("b", "a", "mae"), Lower("a", "c", "mae"))
    assert AllOf(parts).judge(CLEAR).holds == "no"
    assert AllOf((parts[0], parts[2])).judge(CLEAR).holds == "not enough data"
    assert AllOf(parts[:1]).judge(CLEAR).holds == "yes"


def test_a_series_falls_only_if_each_step_falls() -> None:
    table = {("1", "x"): (3.0, 3.1), ("2", "x"): (2.0, 2.1), ("3", "x"): (2.5, 2.6)}
    assert falling(("1", "2"), "x").judge(table).holds == "yes"
    assert falling(("1", "2", "3"), "x").judge(table).holds == "no"


def test_a_rule_with_a_condition_says_nothing_without_it() -> None:
    rule = Lower("a", "b", "mae")
    assert Provided(AtMost("b", "mae", 3), rule).judge(CLEAR) == rule.judge(CLEAR)
    for met in (AtMost("b", "mae", 1), AtMost("b", "mae", 2.0), AtMost("c", "mae", 1)):  # no, open, no data
        found = Provided(met, rule).judge(CLEAR)
        assert found.holds == "not enough data"
        assert "condition does not hold" in found.why


def test_a_margin_has_words() -> None:
    assert Lower("a", "b", "mae", by=0.5).words.endswith("that of b by at least 0.5")
    assert Lower("a", "b", "mae", by=-0.5).words.endswith("that of b plus 0.5")
    assert Lower("a", "b", "mae").words.endswith("that of b")
