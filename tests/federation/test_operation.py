"""What a method declares of an operation, and what a call of it takes."""

import pytest

from polyclinic.federation.operation import operation, signature_of


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


def test_an_operation_has_its_own_name_as_address_unless_another_is_given(declared):
    assert declared.train.operation.address == "train"
    assert declared.renamed.operation.address == "before"


def test_an_operation_takes_what_its_arguments_are_named_like_unless_it_says_otherwise(declared):
    assert dict(declared.train.operation.takes) == {}
    assert declared.train.operation.kind_of("synthetic_images") == "synthetic-images"
    assert dict(declared.renamed.operation.takes) == {"front": "weights"}
    assert declared.renamed.operation.kind_of("front") == "weights"
    assert declared.renamed.operation.kind_of("weights") == "weights"


def test_a_bound_operation_takes_all_but_itself(declared):
    assert list(signature_of(declared().train).parameters) == ["site", "weights", "steps"]
    assert list(signature_of(declared.train).parameters) == ["self", "site", "weights", "steps"]
    assert signature_of(declared().train).parameters["steps"].default == 3
    assert signature_of(declared().train) is signature_of(declared().train)
