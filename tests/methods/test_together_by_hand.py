"""What sites do together or with two models, by hand: steps of a stack, own models, optimisers, sheets of images."""

from types import SimpleNamespace

import pytest
import torch
from test_feder_buffers import MASKS, site_with

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import evaluate_only
from polyclinic.methods.ditto import Ditto
from polyclinic.methods.evaluate_only import EvaluateOnly
from polyclinic.methods.fedrep import FedRep
from polyclinic.methods.shared import local_training, synthetic_buffer, training_gans
from polyclinic.methods.shared.felicia_images import shared_images
from polyclinic.methods.shared.local_training import FitSpec
from polyclinic.methods.shared.optimizer_state import start_optimizer
from polyclinic.tasks import Target

# --- a stack ----------------------------------------------------------------------------------------


class Stack:
    """A stacked trainer that says what it was given."""

    def __init__(self, members):
        self.members, self.given = members, {}
        self.model = SimpleNamespace(load=lambda starts: self.given.update(starts=starts), parameters={})

    def train(self, batches, steps, optimizer, *, correct, device):
        self.given |= {"steps": steps, "correct": correct, "device": device, "round": optimizer}
        return [float(place) for place in range(self.members)], [{"w": place} for place in range(self.members)]


@pytest.fixture
def stacks(monkeypatch):
    made = []

    def stacked_trainer(trainer, members, losses):
        made.append(Stack(members))
        return made[-1]

    monkeypatch.setattr(local_training.stacking, "is_worthwhile", lambda members: True)
    monkeypatch.setattr(local_training.stacking, "stacked_trainer", stacked_trainer)
    monkeypatch.setattr(local_training.stacking, "stacked_batches", lambda members: None)
    return made


def site_of(images, rows, stay=False):
    optimizer = SimpleNamespace(make=lambda parameters, number: number)
    trainer = SimpleNamespace(steps_in=lambda part: len(part) // 4, optimizer=optimizer, weights_stay=stay)
    return SimpleNamespace(trainer=trainer, data=SimpleNamespace(train=range(images)), rows=rows, round=5)


def test_each_site_of_a_stack_takes_its_own_steps(stacks, monkeypatch):
    """Two sites with batches of one size, and one with another, which is a stack of its own."""
    monkeypatch.setattr(
        local_training,
        "_member",
        lambda site, plan: SimpleNamespace(trainer=site.trainer, part=plan.part or site.data.train, rows=site.rows),
    )
    sites = [site_of(20, 8), site_of(40, 4), site_of(12, 8, stay=True)]
    plans = {20: FitSpec(steps=9), 40: FitSpec(part=range(24)), 12: FitSpec()}
    found = local_training.fit_together(
        sites,
        [{"start": place} for place in range(3)],
        lambda site: plans[len(site.data.train)],
        correct_for=lambda places, stacked: (list(places), stacked),
    )
    assert [told for _, told in found] == [
        {"samples": 20, "steps": 9, "loss": 0.0},
        {"samples": 24, "steps": 6, "loss": 0.0},
        {"samples": 12, "steps": 3, "loss": 1.0},
    ]
    assert [weights["w"] for weights, _ in found] == [0, 0, 1]
    first, second = (stack.given for stack in stacks)
    assert first["starts"] == [{"start": 0}, {"start": 2}]
    assert (first["correct"], second["correct"]) == (([0, 2], True), ([1], True))
    assert first["round"] == second["round"] == 5
    assert first["device"] == second["device"] == "cpu", "the first site of a stack says where weights stay"


def test_a_stack_that_does_not_pay_is_not_built(stacks, monkeypatch):
    monkeypatch.setattr(local_training.stacking, "is_worthwhile", lambda members: False)
    stack = local_training._Stack([site_of(8, 8)], [{}], [FitSpec()], [None])
    assert stack.train(None, None, [0]) is None
    assert stacks == []


def test_a_stack_that_fails_says_so_and_leaves_the_sites_to_themselves(stacks, monkeypatch):
    def fail(self, *given, **more):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Stack, "train", fail)
    member = SimpleNamespace(trainer=site_of(8, 8).trainer, part=range(8))
    stack = local_training._Stack([site_of(8, 8)], [{}], [FitSpec()], [member])
    with pytest.warns(UserWarning, match=r"engine\.stacked: sites train one after the other, more slowly: no memory"):
        assert stack.train(None, None, [0]) is None


# --- own models beside a common one -----------------------------------------------------------------


class State(dict):
    def group(self, name):
        return self.get(name, {})

    def put(self, name, tensors):
        self[name] = dict(tensors)


def personal_site(name, **groups):
    trainer = SimpleNamespace(
        device=torch.device("cpu"),
        model=None,
        initial_local={"w": f"first of {name}"},
        local_names=("head",),
        privacy=None,
    )
    return SimpleNamespace(name=name, trainer=trainer, state=State(groups))


def corrected(correct, **values):
    """Gradients of ones after a correction; None where a parameter is left as it is."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.tensor(value)) for name, value in values.items()})
    for one in model.values():
        one.grad = torch.ones(())
    correct(model)
    return {name: None if one.grad is None else float(one.grad) for name, one in model.items()}


def test_own_models_of_ditto_are_trained_together_near_the_common_one(monkeypatch):
    calls = []

    def fit_together(sites, starts, how, *, correct_for=None):
        calls.append((list(starts), correct_for))
        return [({"w": f"{len(calls)} of {site.name}"}, {}) for site in sites]

    monkeypatch.setattr(local_training, "fit_together", fit_together)
    monkeypatch.setattr("polyclinic.methods.shared.personal.Parcel", lambda kind, tensors, *more: tensors["w"])
    monkeypatch.setattr("polyclinic.methods.shared.personal.private.record_of", lambda *_: None)
    sites = [personal_site("a"), personal_site("b", local={"w": "own of b"})]
    common = [{"w": torch.tensor(2.0)}] * 2
    assert Ditto(strength=0.5).train_together(sites, common) == ["1 of a", "1 of b"]
    assert calls[0] == (common, None)
    assert calls[1][0] == [{"w": "first of a"}, {"w": "own of b"}]
    assert corrected(calls[1][1](), w=6.0, other=6.0) == {"w": 1 + 0.5 * (6 - 2), "other": 1}
    assert [site.state["local"]["w"] for site in sites] == ["2 of a", "2 of b"]


def test_one_site_may_be_together_with_nobody(monkeypatch):
    monkeypatch.setattr(local_training, "fit_together", lambda sites, starts, how, **_: [({"w": 1.0}, {})])
    monkeypatch.setattr(local_training, "release", lambda site, *one: one)
    monkeypatch.setattr(local_training, "assemble", lambda site, own: own)
    monkeypatch.setattr(FedRep, "head_names", lambda self, model: frozenset())
    monkeypatch.setattr(Ditto, "train_common_together", lambda self, sites, weights: ["common"])
    weights = [{"w": torch.tensor(2.0)}]
    assert Ditto().train_together([personal_site("a")], weights) == ["common"]
    assert FedRep(head_epochs=0).train_together([personal_site("a")], weights) == [({"w": 1.0}, {})]


@pytest.mark.parametrize("epochs", [0, 3])
def test_heads_of_fedrep_are_trained_first_and_the_rest_after_them(monkeypatch, epochs):
    calls = []

    def fit_together(sites, starts, how, *, correct_for):
        calls.append((list(starts), how, corrected(correct_for(), front=1.0, head=1.0)))
        return [({"front": len(calls), "head": site.name}, {}) for site in sites]

    monkeypatch.setattr(local_training, "fit_together", fit_together)
    monkeypatch.setattr(local_training, "assemble", lambda site, own: {"front": own, "head": None})
    monkeypatch.setattr(local_training, "release", lambda site, trained, told: (site.name, trained))
    monkeypatch.setattr(FedRep, "head_names", lambda self, model: frozenset({"head"}))
    sites, method = [personal_site("a"), personal_site("b")], FedRep(head_epochs=epochs)
    found = method.train_together(sites, ["x", "y"])
    *heads, rest = calls
    assembled = [{"front": "x", "head": None}, {"front": "y", "head": None}]
    assert len(heads) == (1 if epochs else 0)
    for starts, how, gradients in heads:
        assert starts == assembled
        assert how == method.head_spec
        assert gradients == {"front": None, "head": 1}
    trained = [{"front": 1, "head": "a"}, {"front": 1, "head": "b"}] if epochs else assembled
    assert rest == (trained, method.fit_spec, {"front": 1, "head": None})
    last = len(calls)
    assert found == [("a", {"front": last, "head": "a"}), ("b", {"front": last, "head": "b"})]


# --- optimisers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "privacy", "group", "own"),
    [
        (False, None, "optimizer", True),
        (True, None, "optimizer", False),
        (False, "private", "optimizer", False),
        (False, None, "head optimizer", False),
    ],
)
def test_an_optimiser_is_kept_for_the_trainers_own_network_only(other, privacy, group, own):
    """Under privacy, for another network or beside another optimiser there is one of its own."""
    model = torch.nn.Linear(1, 1)
    trainer = SimpleNamespace(
        model=torch.nn.Linear(1, 1) if other else model,
        privacy=privacy,
        parameters=lambda: ["of the trainer"],
        kept="kept",
        optimizer=SimpleNamespace(make=lambda parameters, *more: (list(parameters), *more), keep_state=False),
    )
    parameters, number, kept = start_optimizer(SimpleNamespace(trainer=trainer, round=4), model, group)
    assert number == 4
    assert kept == ("kept" if own else None)
    assert len(parameters) == (1 if own else 2)


# --- models that were brought -----------------------------------------------------------------------


@pytest.mark.parametrize("against", [None, "second.safetensors"])
def test_two_models_are_asked_about_where_a_second_one_was_brought(monkeypatch, against):
    asked, told, scored = [], {}, []
    monkeypatch.setattr(evaluate_only, "second_model", lambda file, first: (file, first))
    monkeypatch.setattr(evaluate_only, "joined", lambda replies, classes: (replies, classes))
    federation = SimpleNamespace(
        initial_weights=lambda: "first",
        state=lambda **given: SimpleNamespace(**given),
        rounds=lambda count, state: range(1, count + 1),
        ask_all=lambda operation, **given: asked.append((operation, given)) or ["reply"],
        trainer=SimpleNamespace(target=SimpleNamespace(classes=("x", "y"))),
        report=told.__setitem__,
        evaluate=scored.append,
    )
    assert EvaluateOnly(by=("sex",), against=against).run(federation) == "first"
    more = {} if against is None else {"against": (against, "first")}
    assert asked == [("give_intervals", {"weights": "first", "by": ["sex"], **more})]
    assert told == {"safe_statistics": (["reply"], ("x", "y"))}
    assert scored == ["first"]


# --- images -----------------------------------------------------------------------------------------


def test_an_image_without_a_label_is_not_shared():
    reply = Reply("north", (Parcel("synthetic-images", {"images": torch.zeros(1, 1, 2, 2, dtype=torch.uint8)}),))
    with pytest.raises(WorkFailed, match="site 'north': it shares no uint8 images with a label each"):
        shared_images(reply)


def test_gans_of_a_stack_have_images_of_one_shape(monkeypatch):
    monkeypatch.setattr(training_gans, "batch_rows", lambda site: 8)
    images = torch.zeros(5, 3, 16, 24)
    site = SimpleNamespace(data=SimpleNamespace(train=SimpleNamespace(images=images)), state={})
    assert training_gans._shape(site) == ((3, 16, 24), 8, 0)


@pytest.fixture
def sheet(monkeypatch, tmp_path):
    """What a contact sheet shows."""
    found = {}

    def contact_sheet(rows, file, words, title):
        found.update(rows=rows, file=file, words=words, title=title)

    monkeypatch.setattr(synthetic_buffer, "contact_sheet", contact_sheet)
    return found


def test_real_images_of_the_same_labels_stand_above_synthetic_ones(sheet, tmp_path):
    site = site_with(labels=torch.arange(40) // 20, folder=tmp_path)
    labels = torch.tensor([1, 0, 1])
    buffer = {"images": torch.full((3, 1, 28, 28), 7, dtype=torch.uint8), "labels": labels}
    synthetic_buffer._draw_sheet(site, buffer)
    real = torch.from_numpy(site.data.train.images)
    # the first image of class 1, the second of class 0, the third of class 1: none is shown twice
    assert torch.equal(sheet["rows"]["real"], real[[20, 1, 22]])
    assert torch.equal(sheet["rows"]["synthetic"], buffer["images"])
    assert set(sheet["rows"]) == {"real", "synthetic"}
    assert sheet["title"].startswith("west: 3 of 3 synthetic images")
    assert sheet["file"] == tmp_path / "synthetic.png"


def test_masks_are_shown_white_on_black_for_twelve_images(sheet, tmp_path):
    site = site_with(masks=MASKS.byte(), folder=tmp_path)
    made = torch.zeros(15, 28, 28, dtype=torch.uint8)
    made[1] = 1
    buffer = {"images": torch.zeros(15, 1, 28, 28, dtype=torch.uint8), "labels": torch.zeros(15), "masks": made}
    synthetic_buffer._draw_sheet(site, buffer)
    rows = sheet["rows"]
    assert {name: len(row) for name, row in rows.items()} == dict.fromkeys(rows, 12)
    assert rows["synthetic mask"].shape == (12, 1, 28, 28)
    assert rows["synthetic mask"].amax((1, 2, 3)).tolist() == [0, 255] + [0] * 10
    even = list(range(0, 24, 2))  # images of label 0
    assert rows["real mask"][:, 0, 0, 0].tolist() == [255 if place % 3 == 0 else 0 for place in even]
    assert sheet["title"].startswith("west: 12 of 15 synthetic images")


def test_no_more_real_images_are_shown_than_there_are(sheet, tmp_path):
    site = site_with(images=torch.zeros(2, 1, 28, 28).byte(), labels=torch.tensor([0, 1]), folder=tmp_path)
    synthetic_buffer._draw_sheet(site, {"images": torch.zeros(5, 1, 28, 28).byte(), "labels": torch.zeros(5)})
    assert len(sheet["rows"]["real"]) == 2


def test_an_empty_buffer_has_no_sheet_and_values_lie_in_their_range(sheet, tmp_path):
    site = site_with(folder=tmp_path)
    model = SimpleNamespace(sample=lambda labels, rng: torch.zeros(len(labels), 1, 28, 28, dtype=torch.uint8))
    synthetic_buffer.draw_buffer(site, model, 0)
    assert not sheet
    synthetic_buffer.draw_buffer(site, model, 1)
    assert sheet["title"].startswith("west: 1 of 1")
    target = Target((), label_range=(20.0, 30.0))
    ages = synthetic_buffer.uniform_labels(200, None, target, torch.Generator().manual_seed(0))
    drawn = torch.rand(200, generator=torch.Generator().manual_seed(0))
    assert ages.tolist() == pytest.approx((20 + 10 * drawn).tolist())
    nothing = synthetic_buffer.uniform_labels(3, None, Target(()), torch.Generator().manual_seed(0))
    assert nothing.tolist() == [0, 0, 0]
