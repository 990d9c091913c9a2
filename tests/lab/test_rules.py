"""Rules: which side the interval lies on decides; few data never decide."""

from __future__ import annotations

import pytest
from scipy import stats

from polyclinic.errors import BadInput
from polyclinic_lab.rules import interval, mixed_interval, parse_rule, parse_sentence

CLEAR = {("a", "mae"): (1.0, 1.1, 0.9), ("b", "mae"): (2.0, 2.1, 1.9)}
LOWER = "mae of a is lower than that of b"


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (LOWER, "yes"),
        ("mae of b is lower than that of a", "no"),
        ("mae of a is lower than that of b by at least 0.5", "yes"),
        ("mae of a is lower than that of b by at least 1.5", "no"),
        ("mae of b is lower than that of a plus 1.5", "yes"),
        ("mae of b is lower than that of a plus 0.5", "no"),
        ("mae of b is lower than 3 times that of a", "yes"),
        ("mae of b is lower than 1.5 times that of a", "no"),
        ("mae of a is at most 1.5", "yes"),
        ("mae of a is at most 0.5", "no"),
        ("mae of a is at most 1", "undecided"),
        ("mae of a is at least 0.5", "yes"),
        ("mae of a is at least 1.5", "no"),
        ("mae of a is lower than that of c", "undecided"),  # which has no runs
    ],
)
def test_a_sentence_is_judged_by_the_interval_of_its_differences(words: str, word: str) -> None:
    assert parse_sentence(words).judge(CLEAR).word == word


def test_the_interval_is_student_s() -> None:
    """Differences -1.0, -1.2, -0.8 of three seeds: mean -1, deviation 0.2, t = 4.303 for two degrees of freedom."""
    table = {("a", "x"): (1.0, 1.0, 1.0), ("b", "x"): (2.0, 2.2, 1.8)}
    half = 4.302653 * 0.2 / 3**0.5
    assert interval([-1.0, -1.2, -0.8]) == pytest.approx((-1 - half, -1 + half), rel=1e-5)
    why = parse_sentence("x of a is lower than that of b").judge(table).why
    assert why.endswith("difference -1, 95 % interval -1.5 to -0.503")


def test_scatter_and_one_seed_do_not_decide() -> None:
    sentence = parse_sentence("auc of a is lower than that of b")
    assert sentence.judge({("a", "auc"): (0.7, 0.9, 0.8), ("b", "auc"): (0.8, 0.7, 0.9)}).word == "undecided"
    assert sentence.judge({("a", "auc"): (0.7,), ("b", "auc"): (0.9,)}).word == "undecided"
    assert sentence.judge({("a", "auc"): (0.7, 0.7, 0.7), ("b", "auc"): (0.9, 0.9)}).word == "undecided"


def test_one_pair_of_an_exact_metric_decides() -> None:
    table = {("a", "MB"): [3.0], ("b", "MB"): [2.0]}
    for factor, word in (("1.6", "yes"), ("1.4", "no")):
        sentence = parse_sentence(f"MB of a is lower than {factor} times that of b", exact=["MB"])
        assert sentence.judge(table).word == word


def test_one_value_of_an_exact_metric_decides() -> None:
    table = {("all", "models"): (1.0,)}
    for words, word in (("at most 1", "yes"), ("at most 0", "no"), ("at least 2", "no"), ("at least 1", "yes")):
        sentence = parse_sentence(f"models of all is {words}", exact=["models"])
        assert sentence.judge(table).word == word
        assert sentence.judge({}).word == "undecided"
        assert parse_sentence(sentence.words).judge(table).word == "undecided"


def test_one_sentence_that_does_not_hold_decides_for_all() -> None:
    wrong, unknown = "mae of b is lower than that of a", "mae of a is lower than that of c"
    assert parse_rule([LOWER, wrong, unknown]).judge(CLEAR).word == "no"
    assert parse_rule([LOWER, unknown]).judge(CLEAR).word == "undecided"
    assert parse_rule([LOWER]).judge(CLEAR).word == "yes"
    assert parse_rule([LOWER, wrong]).words == f"{LOWER}; and {wrong}"


def test_a_rule_with_a_condition_says_nothing_without_it() -> None:
    assert parse_rule([LOWER], "mae of b is at most 3").judge(CLEAR) == parse_rule([LOWER]).judge(CLEAR)
    for condition in ("mae of b is at most 1", "mae of b is at most 2", "mae of c is at most 1"):  # no, open, no data
        found = parse_rule([LOWER], condition).judge(CLEAR)
        assert found.word == "undecided"
        assert "condition does not hold" in found.why


def test_metrics_and_arms_may_have_commas_numbers_and_of() -> None:
    found = parse_sentence("accuracy of horse, augmented of local GAN is lower than that of fedavg, 6 sites plus 0.03")
    assert (found.metric, found.label) == ("accuracy of horse, augmented", "local GAN")
    assert (found.other, found.limit) == ("fedavg, 6 sites", 0.03)


def test_another_sentence_is_refused() -> None:
    with pytest.raises(BadInput, match="is lower than that of ARM"):
        parse_sentence("mae of a beats that of b")


def test_images_in_seeds_are_blocks() -> None:
    """Two seeds of three images, differences 1, 2, 3 and 2, 3, 4.

    Means 2 and 3: variance .5 between them, of which images explain 1/3: 1/6 is left. So the variance of the mean is
    1/12 (one degree of freedom) + 1/6 (four): 1/4, with (1/4)² / (1/144 + 1/144) = 4.5 degrees.
    """
    low, high = mixed_interval([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    half = stats.t.ppf(0.975, 4.5) * 0.5
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half))
    alone = mixed_interval([[1.0, 2.0, 3.0]])
    assert alone == pytest.approx(interval([1.0, 2.0, 3.0]))
    table = {("a", "x"): [[1.0, 2.0], [1.0, 2.0]], ("b", "x"): [[3.0, 4.1], [2.9, 4.0]]}
    assert parse_sentence("x of a is lower than that of b").judge(table).word == "yes"
    assert parse_sentence("x of b is lower than that of a").judge(table).word == "no"
    assert parse_sentence("x of b is at least 2.5").judge({("b", "x"): [[3.0, 3.1], [2.9, 3.0]]}).word == "yes"


def test_an_open_sentence_says_how_many_seeds_would_decide() -> None:
    """Differences -1, -2, 0: mean -1, deviation 1. t of n - 1 degrees over the root of n is below 1 first at n = 7."""
    table = {("a", "x"): (1.0, 1.0, 1.0), ("b", "x"): (2.0, 3.0, 1.0)}
    assert stats.t.ppf(0.975, 5) / 6**0.5 > 1 > stats.t.ppf(0.975, 6) / 7**0.5
    why = parse_sentence("x of a is lower than that of b").judge(table).why
    assert why.endswith("about 7 seeds would decide")
    rule = parse_rule(["x of a is lower than that of b"], unit="images")
    assert rule.judge(table).why.endswith("about 7 images would decide")
    table = {("a", "x"): (1.0, 3.0), ("b", "x"): (2.0, 2.0)}
    assert parse_sentence("x of a is lower than that of b").judge(table).why.endswith("more than 999 seeds are needed")
