"""What a policy takes, the delta of a site, where the draws of an operation lie and what it takes: by hand."""

import pydantic
import pytest

from polyclinic.federation.operation import operation, signature_of
from polyclinic.federation.policy import Policy


@pytest.mark.parametrize(("name", "least", "refused"), [
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
])  # fmt: skip
def test_the_last_value_that_a_policy_takes(name, least, refused):
    assert getattr(Policy(**{name: least}), name) == least
    with pytest.raises(pydantic.ValidationError, match=name):
        Policy(**{name: refused})


@pytest.mark.parametrize(("images", "delta"), [(0, 0.5), (1, 0.5), (2, 0.5), (3, 1 / 3), (1000, 0.001)])
def test_the_delta_of_a_site(images, delta):
    assert Policy().delta_for(images) == delta
    assert Policy(max_delta=1e-7).delta_for(images) == 1e-7


@pytest.fixture
def declared():
    class Declared:
        @operation("weights")
        def train(self, site, weights, steps=3):
            """Its draws have its own name."""

        @operation("metrics", address="before", takes={"front": "weights"}, splits=("test",))
        def renamed(self, site, front):
            """Its draws stay where they were."""

    return Declared


def test_where_the_draws_of_an_operation_lie_and_what_it_takes(declared):
    assert declared.train.operation.address == "train"
    assert declared.renamed.operation.address == "before"
    assert dict(declared.train.operation.takes) == {}
    assert declared.train.operation.kind_of("synthetic_images") == "synthetic-images"
    assert dict(declared.renamed.operation.takes) == {"front": "weights"}
    assert declared.renamed.operation.kind_of("front") == "weights"
    assert declared.renamed.operation.kind_of("weights") == "weights"
    assert list(signature_of(declared().train).parameters) == ["site", "weights", "steps"]
    assert list(signature_of(declared.train).parameters) == ["self", "site", "weights", "steps"]
    assert signature_of(declared().train).parameters["steps"].default == 3
    assert signature_of(declared().train) is signature_of(declared().train)
