"""Plans by hand: what carries them out alone, and the corrections of a stack."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.operation import carry_out
from polyclinic.training import plans
from polyclinic.training.gpu.stacking import StackedCorrector
from polyclinic.training.plans import Correction


class Asked:
    """A plan that notes with which others it was carried out."""

    groups: list = []  # noqa: RUF012

    def __init__(self, value):
        self.value = value

    @classmethod
    def carry_out(cls, plans):
        cls.groups.append([plan.value for plan in plans])
        return [10 * plan.value for plan in plans]


class Other(Asked):
    groups: list = []  # noqa: RUF012


def test_site_halves_wait_for_each_other_at_plans_of_one_kind():
    def half(values, kind=Asked):
        total = 0
        for value in values:
            total += yield kind(value)
        return total

    Asked.groups, Other.groups = [], []
    assert carry_out([half([1, 2]), half([]), half([3]), half([4], Other)]) == [30, 0, 30, 40]
    assert Asked.groups == [[1, 3], [2]]
    assert Other.groups == [[4]]


def add(gradients, weights, given, state):
    """Adds `given`; the state counts steps. The gradient of `left` is taken away."""
    changed = {name: one + given["more"][name] for name, one in gradients.items() if name != "left"}
    return changed, {"steps": state["steps"] + 1}


def correction(more):
    return Correction(add, {"more": {"w": more}}, {"steps": torch.zeros(())})


def test_a_correction_of_one_network_changes_its_gradients():
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(2)) for name in ("w", "left", "frozen")})
    model["w"].grad, model["left"].grad = torch.ones(2), torch.ones(2)
    correct = plans._Corrector(correction(torch.tensor([1.0, 2.0])), torch.device("cpu"))
    correct(model)
    assert model["w"].grad.tolist() == [2, 3]
    assert model["left"].grad is None
    assert model["frozen"].grad is None
    assert float(correct.state["steps"]) == 1


@pytest.mark.parametrize("same", [False, True])
def test_corrections_of_a_stack_are_those_of_each_network(same):
    """A network that is through no longer changes its state; tensors that all sites share are not copied."""
    shared = torch.tensor([1.0, 2.0])
    given = [shared, shared if same else torch.tensor([5.0, 6.0])]
    correct = StackedCorrector([correction(one) for one in given], [1, 3], torch.device("cpu"))
    for _ in range(3):
        parameters = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in ("w", "left")}
        for one in parameters.values():
            one.grad = torch.ones(2, 2)
        correct(SimpleNamespace(parameters=parameters))
    assert parameters["w"].grad.tolist() == [[2, 3], [2, 3] if same else [6, 7]]
    assert parameters["left"].grad is None
    assert [float(correct.state_of(place)["steps"]) for place in range(2)] == [1, 3]
    assert correct.given["more"]["w"].dim() == (1 if same else 2)
