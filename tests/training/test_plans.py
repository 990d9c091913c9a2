"""Plans by hand: what carries them out alone, and the corrections of a stack."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.federation.operation import carry_out
from polyclinic.training import plans
from polyclinic.training.gpu import stacking
from polyclinic.training.gpu.stacking import StackedCorrector
from polyclinic.training.plans import Correction, Fit, FitSpec


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


class Stack:
    """A stacked trainer that says what it was given."""

    def __init__(self, members):
        self.members, self.given = members, {}
        self.model = SimpleNamespace(load=lambda starts: self.given.update(starts=starts), parameters={})

    def train(self, batches, steps, optimizer, *, correct, device):
        self.given |= {"steps": steps, "device": device, "round": optimizer}
        return [float(place) for place in range(self.members)], [{"w": place} for place in range(self.members)]


@pytest.fixture
def stacks(monkeypatch):
    made = []

    def stacked_trainer(trainer, members, reference):
        made.append(Stack(members))
        return made[-1]

    monkeypatch.setattr(stacking, "can_stack", lambda trainer, sites: True)
    monkeypatch.setattr(stacking, "is_worthwhile", lambda members: True)
    monkeypatch.setattr(stacking, "stacked_trainer", stacked_trainer)
    monkeypatch.setattr(stacking, "stacked_batches", lambda members: None)
    monkeypatch.setattr(Fit, "member", lambda plan: SimpleNamespace(rows=plan.site.rows))
    monkeypatch.setattr(Fit, "alone", lambda plan: f"alone {plan.start}")
    return made


PLAIN = FitSpec()


def plan(images, rows, spec=PLAIN, start=None, **more):
    optimizer = SimpleNamespace(make=lambda parameters, number: number)
    trainer = SimpleNamespace(steps_in=lambda part: len(part) // 4, optimizer=optimizer, weights_stay=False)
    own = {"data": SimpleNamespace(train=range(images)), "rows": rows, "round": 5, "unknown_classes": (), **more}
    return Fit(SimpleNamespace(trainer=trainer, **own), start, spec)


def test_each_site_of_a_stack_takes_its_own_steps(stacks):
    """Two sites with batches of one size, and one with another, which is a stack of its own."""
    asked = [
        plan(20, 8, FitSpec(steps=9), start=0),
        plan(40, 4, FitSpec(part=range(24)), start=1),
        plan(12, 8, start=2),
    ]
    found = Fit.carry_out(asked)
    assert [one.metadata for one in found] == [
        {"samples": 20, "steps": 9, "loss": 0.0},
        {"samples": 24, "steps": 6, "loss": 0.0},
        {"samples": 12, "steps": 3, "loss": 1.0},
    ]
    assert [one.weights["w"] for one in found] == [0, 0, 1]
    first, second = (stack.given for stack in stacks)
    assert (first["starts"], first["steps"]) == ([0, 2], [9, 3])
    assert (second["starts"], second["steps"]) == ([1], [6])
    assert first["round"] == second["round"] == 5
    assert first["device"] == "cpu"


@pytest.mark.parametrize(
    "special",
    [
        {"spec": FitSpec(class_weights=torch.ones(2))},
        {"spec": FitSpec(correction=Correction(add))},  # it would change the gradients of both
        {"spec": FitSpec(reference=plans.Reference("cut", [], torch.nn.Identity()))},
        {"unknown_classes": (1,)},
        {"worthwhile": False},
    ],
)
def test_sites_with_a_loss_of_their_own_are_not_stacked(stacks, special, monkeypatch):
    if not special.pop("worthwhile", True):
        monkeypatch.setattr(stacking, "is_worthwhile", lambda members: False)
    assert Fit.carry_out([plan(8, 8, start=0), plan(8, 8, start=1, **special)]) == ["alone 0", "alone 1"]
    assert stacks == []
