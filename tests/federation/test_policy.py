"""What a site's people may write into their policy, to the first number that is refused."""

import pydantic
import pytest

from polyclinic.federation.policy import Policy


@pytest.mark.parametrize(
    ("name", "least", "refused"),
    [
        ("max_bytes", 0, -1),  # 0: nothing leaves
        ("max_scores", 0, -1),
        ("min_cohort", 0, -1),
        ("liars", 0, -1),
        ("min_sites", 3, 2),  # of two sites each knows the other's part of a sum
        ("max_epsilon", 1e-9, 0),
        ("max_delta", 1e-300, 0),
        ("max_delta", 0.999, 1),
        ("accountants", ("prv",), ()),
        ("kinds", (), ("no kind",)),
    ],
)
def test_the_last_value_that_a_policy_takes(name, least, refused):
    assert getattr(Policy(**{name: least}), name) == least
    with pytest.raises(pydantic.ValidationError, match=name):
        Policy(**{name: refused})


@pytest.mark.parametrize(("images", "delta"), [(0, 0.5), (1, 0.5), (2, 0.5), (3, 1 / 3), (1000, 0.001)])
def test_the_delta_of_a_site(images, delta):
    assert Policy().delta_for(images) == delta
    assert Policy(max_delta=1e-7).delta_for(images) == 1e-7
