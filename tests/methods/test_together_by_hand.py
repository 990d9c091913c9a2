"""What sites do together or with two models, by hand: steps of a stack, own models, optimisers, sheets of images."""

from types import SimpleNamespace

import pytest
import torch
from test_feder_buffers import MASKS, site_with

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.ditto import Ditto
from polyclinic.methods.fedrep import FedRep
from polyclinic.methods.shared import site_generator, training_gans
from polyclinic.methods.shared.felicia import shared_images
from polyclinic.questions import evaluate
from polyclinic.questions.evaluate import EvaluateOnly
from polyclinic.tasks import Target
from polyclinic.training.optimizer import start_optimizer
from polyclinic.training.plans import Fitted

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


def test_the_own_model_of_ditto_is_held_near_the_common_one(monkeypatch):
    monkeypatch.setattr(Ditto, "steps_at", lambda self, own: 2)
    monkeypatch.setattr("polyclinic.methods.ditto.private.record_of", lambda *_: None)
    for own, start in [(personal_site("a"), "first of a"), (personal_site("b", local={"w": "own of b"}), "own of b")]:
        common = {"w": torch.tensor(2.0)}
        work = Ditto(strength=0.5).train(own, common)
        assert next(work).start is common
        second = work.send(Fitted({"w": torch.tensor(3.0)}, {"samples": 4}, {}))
        assert second.start == {"w": start}
        assert second.spec.optimizer_group == "own optimizer"
        ones, correction = {"w": torch.ones(()), "other": torch.ones(())}, second.spec.correction
        now = {"w": torch.tensor(6.0), "other": torch.tensor(6.0)}
        found, _ = correction.change(ones, now, correction.given, {})
        assert {name: float(one) for name, one in found.items()} == {"w": 1 + 0.5 * (6 - 2), "other": 1}
        with pytest.raises(StopIteration) as stopped:
            work.send(Fitted({"w": "trained"}, {}, {}))
        assert float(stopped.value.value.tensors["w"]) == 3
        assert own.state["local"] == {"w": "trained"}


@pytest.mark.parametrize("epochs", [0, 3])
def test_the_head_of_fedrep_is_trained_first_and_the_rest_after_it(monkeypatch, epochs):
    monkeypatch.setattr(FedRep, "steps_at", lambda self, own: 2)
    monkeypatch.setattr(FedRep, "head_names", lambda self, model: frozenset({"head"}))
    own = personal_site("a", local={"head": torch.tensor(7.0)})
    own.trainer.initial_local, own.trainer.steps_in, own.data = {}, lambda part: 5, SimpleNamespace(train=None)
    work, ones = FedRep(head_epochs=epochs).train(own, {"front": torch.tensor(1.0)}), {"front": 1, "head": 1}
    plan = next(work)
    assert {name: float(one) for name, one in plan.start.items()} == {"front": 1, "head": 7}
    if epochs:
        assert (plan.spec.steps, plan.spec.purpose) == (15, "head batches")
        assert set(plan.spec.correction.change(ones, {}, {}, {})[0]) == {"head"}
        plan = work.send(Fitted({"front": torch.tensor(1.0), "head": torch.tensor(8.0)}, {}, {}))
        assert float(plan.start["head"]) == 8
    assert set(plan.spec.correction.change(ones, {}, {}, {})[0]) == {"front"}


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
    monkeypatch.setattr(evaluate, "second_model", lambda file, first: (file, first))
    monkeypatch.setattr(evaluate, "joined", lambda replies, classes: (replies, classes))
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

    monkeypatch.setattr(site_generator, "contact_sheet", contact_sheet)
    return found


def test_real_images_of_the_same_labels_stand_above_synthetic_ones(sheet, tmp_path):
    site = site_with(labels=torch.arange(40) // 20, folder=tmp_path)
    labels = torch.tensor([1, 0, 1])
    buffer = {"images": torch.full((3, 1, 28, 28), 7, dtype=torch.uint8), "labels": labels}
    site_generator._draw_sheet(site, buffer)
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
    site_generator._draw_sheet(site, buffer)
    rows = sheet["rows"]
    assert {name: len(row) for name, row in rows.items()} == dict.fromkeys(rows, 12)
    assert rows["synthetic mask"].shape == (12, 1, 28, 28)
    assert rows["synthetic mask"].amax((1, 2, 3)).tolist() == [0, 255] + [0] * 10
    even = list(range(0, 24, 2))  # images of label 0
    assert rows["real mask"][:, 0, 0, 0].tolist() == [255 if place % 3 == 0 else 0 for place in even]
    assert sheet["title"].startswith("west: 12 of 15 synthetic images")


def test_no_more_real_images_are_shown_than_there_are(sheet, tmp_path):
    site = site_with(images=torch.zeros(2, 1, 28, 28).byte(), labels=torch.tensor([0, 1]), folder=tmp_path)
    site_generator._draw_sheet(site, {"images": torch.zeros(5, 1, 28, 28).byte(), "labels": torch.zeros(5)})
    assert len(sheet["rows"]["real"]) == 2


def test_an_empty_buffer_has_no_sheet_and_values_lie_in_their_range(sheet, tmp_path):
    site = site_with(folder=tmp_path)
    model = SimpleNamespace(sample=lambda labels, rng: torch.zeros(len(labels), 1, 28, 28, dtype=torch.uint8))
    site_generator.draw_buffer(site, model, 0)
    assert not sheet
    site_generator.draw_buffer(site, model, 1)
    assert sheet["title"].startswith("west: 1 of 1")
    target = Target((), label_range=(20.0, 30.0))
    ages = site_generator.uniform_labels(200, None, target, torch.Generator().manual_seed(0))
    drawn = torch.rand(200, generator=torch.Generator().manual_seed(0))
    assert ages.tolist() == pytest.approx((20 + 10 * drawn).tolist())
    nothing = site_generator.uniform_labels(3, None, Target(()), torch.Generator().manual_seed(0))
    assert nothing.tolist() == [0, 0, 0]
