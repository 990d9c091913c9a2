"""Models of single sites, by hand: the ensemble of all, what an optimiser keeps, the worth of a site, shared images."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import analytic, feder
from polyclinic.methods.feder import FedER
from polyclinic.methods.shared import one_round, pooling
from polyclinic.methods.shared.one_round import OneRound, moments
from polyclinic.training.optimizer import optimizer_tensors, restore_optimizer

# --- the ensemble of all sites' models ----------------------------------------------------------------


def federation_of(sums, simulation=True):
    """Each site answers with these sums, or with nothing; what is asked is noted."""
    asked = []

    def ask_all(operation, *, counted, **parcels):
        asked.append((operation, counted, {name: parcel.tensors for name, parcel in parcels.items()}))
        metrics = {site: (Parcel("metrics", {"right": torch.tensor(n)}),) if n else () for site, n in sums.items()}
        return [Reply(site, parcels) for site, parcels in metrics.items()]

    task = SimpleNamespace(
        add=lambda a, b: {name: a[name] + b[name] for name in a},
        finish=lambda found: {name: float(value) for name, value in found.items()},
    )
    engine = SimpleNamespace(simulation=simulation)
    return SimpleNamespace(engine=engine, ask_all=ask_all, trainer=SimpleNamespace(task=task)), asked


def test_the_ensemble_is_scored_at_every_site_that_has_test_images():
    federation, asked = federation_of({"a": 3.0, "b": 4.0, "c": 0.0})
    found = FedER().more_metrics(federation, {"a": {"w": torch.ones(1)}, "b": {"w": torch.zeros(1)}})
    assert found == {
        "ensemble": {"test": {"right": 7.0}, "per_site": {"a": {"right": 3.0}, "b": {"right": 4.0}}},
    }
    [(operation, counted, models)] = asked
    assert (operation, counted) == ("evaluate_together", False)
    assert {name: float(tensors["w"]) for name, tensors in models.items()} == {"model_0": 1.0, "model_1": 0.0}


def test_there_is_no_ensemble_without_test_images_or_between_institutions():
    federation, asked = federation_of({"a": 0.0})
    assert FedER().more_metrics(federation, {}) == {}
    assert len(asked) == 1
    federation, asked = federation_of({"a": 3.0}, simulation=False)
    assert FedER().more_metrics(federation, {}) == {}
    assert asked == []


def test_a_site_without_test_images_scores_nothing(monkeypatch):
    monkeypatch.setattr(feder, "together", lambda site, part, models: {"right": torch.tensor(float(len(part)))})
    site = SimpleNamespace(data=SimpleNamespace(test=[], validation=[1, 2], train=[1]))
    method = FedER()
    assert method.evaluate_together(site) is None
    assert float(method.evaluate_together(site, "train").tensors["right"]) == 1.0
    assert float(method.evaluate_together(site, "validation").tensors["right"]) == 2.0


@pytest.mark.parametrize(
    ("label_range", "cases", "wanted"),
    [((0.0, 9.0), None, [[2.0], [4.0]]), (None, np.array([5, 6]), [[0.4], [0.7]])],
)
def test_the_mean_of_models_is_that_of_values_or_of_chances(label_range, cases, wanted):
    """Two models that say 1 and 3, then 3 and 5; or chances of 0.2 and 0.6, then 0.6 and 0.8."""
    outputs = {"values": ([[1.0], [3.0]], [[3.0], [5.0]]), "chances": ([[0.2], [0.6]], [[0.6], [0.8]])}
    said = [torch.tensor(one) for one in outputs["values" if label_range else "chances"]]
    said = said if label_range else [torch.logit(one) for one in said]
    noted = {}

    def sums(observed, targets, own_cases, target):
        noted.update(observed=observed, targets=targets, cases=own_cases)
        return {}

    def trainer_for(number):
        model = SimpleNamespace(eval=lambda: None)
        rows = iter(said[number])
        return SimpleNamespace(
            load=lambda weights: model, forward=lambda images: next(rows)[None], in_order=lambda part: batches
        )

    batches = [(None, torch.tensor([7])), (None, torch.tensor([8]))]
    task = SimpleNamespace(observe=lambda mean, targets, target: mean, sums=sums)
    target = SimpleNamespace(label_range=label_range)
    trainer = SimpleNamespace(task=task, target=target, in_order=lambda part: batches)
    site = SimpleNamespace(trainer=trainer, trainer_for=trainer_for)
    feder.together(site, SimpleNamespace(cases=cases), [0, 1])
    found = noted["observed"] if label_range else noted["observed"].sigmoid()
    assert found.tolist() == [pytest.approx(row) for row in wanted]
    assert noted["targets"].tolist() == [7, 8]
    assert (noted["cases"] if cases is None else noted["cases"].tolist()) == (None if cases is None else [5, 6])


# --- what an optimiser keeps --------------------------------------------------------------------------


def test_the_state_of_an_optimiser_comes_back_under_its_names():
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.tensor([1.0, -1.0])
    optimizer.step()
    kept = optimizer_tensors(optimizer)
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {"0/momentum_buffer": [1.0, -1.0]}
    other = SGD([weight], lr=0.5, momentum=0.9)
    restore_optimizer(other, {**kept, "0/an/other": torch.tensor([3.0, 4.0])})
    assert other.state[weight]["momentum_buffer"].tolist() == [1.0, -1.0]
    assert other.state[weight]["an/other"].tolist() == [3.0, 4.0]
    assert other.param_groups[0]["lr"] == 0.5
    restore_optimizer(other, {})
    assert other.state[weight]["momentum_buffer"].tolist() == [1.0, -1.0]


# --- the worth of a site ------------------------------------------------------------------------------

HELD_OUT = torch.tensor([[0.5, 1.0], [2.0, -1.0], [0.25, 0.0], [1.0, 3.0]])
GOALS = torch.tensor([[0.5, -0.5], [1.0, 0.0], [0.0, 0.25], [-1.0, 0.5]])
HEAD = torch.tensor([[0.5, 1.0], [-0.25, 0.5], [0.125, 2.0]]).double()


def test_the_value_of_sites_is_minus_the_mean_squared_error_by_hand():
    held_out = moments(HELD_OUT.numpy(), GOALS)
    solved = []

    def solve(sums):
        solved.append(sums.count)
        return HEAD

    train = {
        name: moments(np.ones((count, 2), np.float32), torch.zeros(count, 2)) for name, count in (("a", 2), ("b", 3))
    }
    said = torch.cat([torch.ones(4, 1), HELD_OUT], 1).double() @ HEAD
    error = float((said - GOALS).square().sum()) / 4
    value = analytic.squared_error_value
    assert value(train, held_out, solve, frozenset("ab")) == pytest.approx(-error, rel=1e-6)
    assert value(train, held_out, solve, frozenset("b")) == pytest.approx(-error, rel=1e-6)
    assert solved == [5, 3]
    nothing = float(GOALS.square().sum()) / 4  # zero is said
    assert value(train, held_out, solve, frozenset()) == pytest.approx(-nothing, rel=1e-6)
    assert solved == [5, 3]


def test_worth_wants_validation_images():
    sums = {"a": moments(HELD_OUT.numpy(), GOALS)}
    none = moments(HELD_OUT[:0].numpy(), GOALS[:0])
    with pytest.raises(BadInput, match=r"^data\.validation: no site has validation images to score"):
        analytic.worth_from_sums(sums, {"a": none}, lambda own: HEAD)
    found = analytic.worth_from_sums(sums, {"a": none, "b": sums["a"]}, lambda own: HEAD)
    assert found["how"] == "exact, from the sites' sums; all 2 coalitions"
    assert found["sites"]["a"]["shapley"] == pytest.approx(found["all"] - found["none"])


@pytest.mark.parametrize(("sites", "words"), [(3, "all 8 coalitions"), (10, "all 1,024 coalitions")])
def test_all_coalitions_of_up_to_ten_sites_are_looked_at(sites, words):
    assert analytic._coalitions(sites) == words
    assert analytic._coalitions(11) == "200 random orders of the sites"


@pytest.mark.parametrize(("count", "orders", "asked"), [(10, None, None), (11, None, 200), (3, 7, 7)])
def test_shares_are_sampled_above_ten_sites_or_where_orders_are_given(monkeypatch, count, orders, asked):
    drawn = []

    def sampled(names, game, number, rng):
        drawn.append(number)
        return {name: SimpleNamespace(value=1.0, low=0.5, high=1.5) for name in names}

    monkeypatch.setattr(analytic, "sampled_shares", sampled)
    names = [f"s{number}" for number in range(count)]
    found = analytic.shares_of(names, lambda some: float(len(some)), "value", "how", orders)
    row = {"leave_one_out": 1.0, "shapley": 1.0} | ({} if asked is None else {"low": 0.5, "high": 1.5})
    assert found["sites"] == {name: pytest.approx(row) for name in names}
    assert (found["all"], found["none"]) == (count, 0)
    assert drawn == ([] if asked is None else [asked])


# --- sums of one round --------------------------------------------------------------------------------


def test_the_counts_of_classes_are_read_from_the_sums_of_targets():
    """A target is 1 for its class: site a has 12 and 9 images of two classes, site b 10 and 11."""
    warned = []

    def sent(first, second):
        goals = torch.tensor([[1.0, 0.0]] * first + [[0.0, 1.0]] * second)
        features = np.linspace(-1, 1, 2 * len(goals), dtype=np.float32).reshape(-1, 2)
        return (Parcel("statistics", moments(features, goals).tensors()),)

    model = SimpleNamespace(encoder_class=SimpleNamespace(width=2), outputs=2)
    trainer = SimpleNamespace(model=model, task=SimpleNamespace(like="classification"))
    federation = SimpleNamespace(
        trainer=trainer,
        ask_all=lambda operation: [Reply("a", sent(12, 9)), Reply("b", sent(10, 11))],
        sums=SimpleNamespace(settings=SimpleNamespace(sum="float")),
        warn=warned.append,
    )
    method = SimpleNamespace(width=lambda own: 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_round, "Encoded", SimpleNamespace)
        found = OneRound.collect_each(method, federation)
        assert {site: sums.count for site, sums in found.items()} == {"a": 21, "b": 21}
        assert [words.split(":")[0] for words in warned] == ["site 'a'"]
        trainer.task.like = "regression"
        OneRound.collect_each(method, federation)
        assert len(warned) == 1


def encoder_of(width, outputs):
    model = SimpleNamespace(encoder_class=SimpleNamespace(width=width), outputs=outputs)
    return SimpleNamespace(trainer=SimpleNamespace(model=model))


@pytest.mark.parametrize(("numbers", "width"), [(None, 8), (3, 3), (8, 8), (20, 8)])
def test_sums_are_about_all_features_or_so_many_numbers(monkeypatch, numbers, width):
    monkeypatch.setattr(one_round, "Encoded", SimpleNamespace)
    assert OneRound.width(SimpleNamespace(numbers=numbers), encoder_of(8, 2)) == width
    assert one_round.head_shape(encoder_of(8, 2)) == (8, 2)


def test_a_head_on_projected_numbers_is_one_on_features(monkeypatch):
    """Offset first; a slope of a number is one of every feature, with its sign."""
    monkeypatch.setattr(one_round, "Encoded", SimpleNamespace)
    head = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).double()
    found = OneRound.linear_head(SimpleNamespace(numbers=None), encoder_of(2, 2), head)
    assert found["fc.bias"].tolist() == [1.0, 2.0]
    assert found["fc.weight"].tolist() == [[3.0, 5.0], [4.0, 6.0]]
    signs = one_round.projection(4, 2)
    found = OneRound.linear_head(SimpleNamespace(numbers=2), encoder_of(4, 2), head)
    features = torch.tensor([[0.5, -1.0, 2.0, 0.25]]).double()
    wanted = features @ signs @ head[1:] + head[0]
    said = features @ found["fc.weight"].double().T + found["fc.bias"]
    assert torch.allclose(said, wanted)


@pytest.mark.parametrize(("width", "outputs", "right"), [(2, 3, True), (3, 3, False), (2, 2, False)])
def test_sums_that_come_are_of_the_studys_numbers_and_outputs(monkeypatch, width, outputs, right):
    monkeypatch.setattr(one_round, "Encoded", SimpleNamespace)
    federation = encoder_of(width, outputs)
    federation.sums, federation.chosen = SimpleNamespace(covered=()), ["a"]
    sums = moments(HELD_OUT.numpy(), torch.cat([GOALS, GOALS[:, :1]], 1))
    reply = Reply("a", (Parcel("statistics", sums.tensors(), {"samples": 4}),))
    method = SimpleNamespace(width=lambda own: width)
    for operation in ("give_sums", "give_held_out_sums"):
        call = SimpleNamespace(operation=operation)
        if right:
            OneRound.check_reply(method, federation, call, reply)
        else:
            with pytest.raises(WorkFailed, match="site 'a' sent sums of another form"):
                OneRound.check_reply(method, federation, call, reply)
    OneRound.check_reply(method, federation, SimpleNamespace(operation="evaluate"), Reply("a", ()))


def test_a_projection_of_many_rows_is_that_of_each(monkeypatch):
    rows = np.linspace(-1, 1, 21, dtype=np.float32).reshape(7, 3)
    signs = torch.tensor([[0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]]).double()
    whole = one_round.project(rows, signs)
    monkeypatch.setattr(one_round, "PIECE", 2)
    np.testing.assert_array_equal(one_round.project(rows, signs), whole)


# --- shared images ------------------------------------------------------------------------------------


def part(*labels, masks=False):
    images = np.stack([np.full((1, 2, 2), label, np.uint8) for label in labels])
    return ImageSet(images, np.array(labels), masks=images[:, 0].copy() if masks else None)


@pytest.mark.parametrize("masks", [False, True])
def test_shared_images_are_parcels_and_become_images_again(masks):
    replies = [
        Reply(site, (*pooling.release(own), Parcel("metrics", {"loss": torch.tensor(1.0)})))
        for site, own in (("a", part(1, 2, masks=masks)), ("b", part(3, masks=masks)))
    ]
    kinds = ["real-images", "labels", *(["masks"] if masks else []), "metrics"]
    assert [parcel.kind for parcel in replies[0].parcels] == kinds
    pooled = pooling.pool(replies)
    assert pooled["labels"].tolist() == [1, 2, 3]
    assert pooling.pool(replies[:1])["labels"].tolist() == [1, 2]
    assert list(pooling.parcels_of(pooled)) == ["real_images", "labels", *(["masks"] if masks else [])]
    found = pooling.pooled_images(pooled)
    assert (found.labels.tolist(), found.images[:, 0, 0, 0].tolist()) == ([1, 2, 3], [1, 2, 3])
    assert (found.masks is not None) is masks
    some = pooling.release(part(4, 5, 6), np.array([2, 0]))
    assert some[1].tensors["labels"].tolist() == [6, 4]


def test_the_union_of_two_parts_has_the_masks_of_both():
    both = pooling.union(part(1, masks=True), part(2, 3, masks=True))
    assert both.masks[:, 0, 0].tolist() == [1, 2, 3]
