"""Gradient inversion end to end: what comes back, what it is allowed to know, and that targets do not mix."""

import dataclasses
import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import one_hot

from polyclinic.attacks import scoring
from polyclinic.attacks.gradient_inversion.networks import LeNet, with_random_weights
from polyclinic.attacks.gradient_inversion.objective import LocalTraining, cross_entropy
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.attacks.gradient_inversion.solver import Knowledge, Reconstruction, _better, draw
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.randomness import torch_rng


def knowledge(model: nn.Module, **more) -> Knowledge:
    return Knowledge(model, (1, 16, 16), classes=5, **more)


def errors(found: Reconstruction, truth: Tensor) -> Tensor:
    return scoring.score(found.images, truth, found.start).mse


def test_dlg_finds_images_and_labels(one_image_each):
    model, images, labels, parcels = one_image_each
    found = GradientInversion(start="normal", lr=1.0, iterations=100).run(parcels, knowledge(model))
    good = errors(found, images) < 1e-4
    assert int(good.sum()) >= 4  # which ones is a matter of last bits, and differs between processors
    assert torch.equal(found.labels[good], labels[good])
    assert found.images.shape == images.shape
    assert bool(found.converged[good].all())


def papers_loop(model: nn.Module, parcel: Parcel, start: Tensor, label: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """DLG as the papers' codes have it: autograd with create_graph, torch.optim.LBFGS, one target."""
    image, logits = start.clone().requires_grad_(), label.clone().requires_grad_()
    target = [parcel.tensors[name] for name, _ in model.named_parameters()]
    optimizer = torch.optim.LBFGS([image, logits], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(image), logits.softmax(-1))
        simulated = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        distance = sum((s - t).square().sum() for s, t in zip(simulated, target, strict=True))
        distance.backward()
        return distance

    for _ in range(steps):
        optimizer.step(closure)
    return image.detach(), logits.detach().argmax(-1)


def test_first_steps_are_those_of_the_papers_loop(lenet, smooth_images, sent):
    model = lenet.double()
    images = smooth_images(3)[:, None].double()
    parcels = sent(model, images, torch.tensor([[0], [3], [4]]))
    attack = GradientInversion(lr=1.0, iterations=1, returns="last", precision="fp64")
    found = attack.run(parcels, knowledge(model))
    for row, parcel in enumerate(parcels):
        rng = torch_rng(0, "gradient inversion", parcel.digest, 0)
        start, label = (draw("transformed-gaussian", 1, shape, rng).double() for shape in ((1, 16, 16), (5,)))
        assert torch.equal(start, found.start[row])
        image, _ = papers_loop(model, parcel, start, label, 1)
        torch.testing.assert_close(found.images[row], image, rtol=0, atol=1e-8)


def test_what_is_not_declared_is_not_used_and_a_prior_to_start_from_is(one_image_each):
    """An attack that reads labels off the gradients gives the same when it is handed wrong labels and start images."""
    model, _, _, parcels = one_image_each
    attack = GradientInversion(label="sign", lr=1.0, iterations=2)
    plain = attack.run(parcels[:2], knowledge(model))
    more = knowledge(
        model, labels=torch.zeros(2, 1), start_images=torch.ones(2, 1, 1, 16, 16), training=LocalTraining(0.1)
    )
    assert torch.equal(attack.run(parcels[:2], more).images, plain.images)
    model, images, _, parcels = one_image_each
    given = (images[:2] + 0.05).clamp(0, 1)
    attack = GradientInversion(start="given", label="sign", lr=1.0, iterations=1)
    found = attack.run(parcels[:2], knowledge(model, start_images=given))
    assert torch.equal(found.start, given)


def test_many_at_once_is_one_by_one(one_image_each):
    model, _, _, parcels = one_image_each
    attack = GradientInversion(lr=0.1, iterations=2, precision="fp64")
    together = attack.run(parcels[:3], knowledge(model))
    grouped = attack.model_copy(update={"at_once": 2}).run(parcels[:3], knowledge(model))
    for row in range(3):
        alone = attack.run(parcels[row : row + 1], knowledge(model))
        torch.testing.assert_close(together.images[row], alone.images[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(together.labels[row], alone.labels[0])
    torch.testing.assert_close(grouped.images, together.images, rtol=0, atol=1e-6)


def test_a_hopeless_parcel_leaves_its_neighbours_bit_identical(one_image_each):
    model, _, _, parcels = one_image_each
    broken = Parcel("gradients", {name: tensor * 1e30 for name, tensor in parcels[1].tensors.items()})
    attack = GradientInversion(lr=0.1, iterations=3)
    calm = attack.run(parcels[:4], knowledge(model))
    found = attack.run([parcels[0], broken, *parcels[2:4]], knowledge(model))
    assert found.diverged.tolist() == [False, True, False, False]
    others = [0, 2, 3]
    assert torch.equal(found.images[others], calm.images[others])
    assert torch.equal(found.loss[others], calm.loss[others])


@pytest.mark.parametrize(
    ("momentum", "decay", "batch_size", "steps"),
    [pytest.param(0.0, 0.5, None, 3, marks=pytest.mark.slow), (0.9, 0.0, 1, 2)],
)
def test_weights_after_several_local_steps(lenet, smooth_images, momentum, decay, batch_size, steps):
    """A FedAvg update over steps of torch's SGD: on both images each time, or on one and then on the other."""
    images, labels = smooth_images(2), torch.tensor([2, 4])
    site = with_random_weights(LeNet(1, 5, 16), torch_rng(0, "unused"))
    site.load_state_dict(lenet.state_dict())
    optimizer = torch.optim.SGD(site.parameters(), lr=0.01, momentum=momentum, weight_decay=decay)
    for step in range(steps):
        rows = slice(None) if batch_size is None else slice(step, step + 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(site(images[rows]), labels[rows]).backward()
        optimizer.step()
    parcel = Parcel("weights", {name: tensor.detach().clone() for name, tensor in site.state_dict().items()})
    training = LocalTraining(0.01, steps, batch_size=batch_size, momentum=momentum, weight_decay=decay)
    known = knowledge(lenet, batch_size=2, training=training, labels=labels[None])
    attack = GradientInversion(kind="weights", label="known", lr=0.5, iterations=40, precision="fp64")
    found = attack.run([parcel], known)
    assert bool((errors(found, images[None]) < 1e-3).all())


def test_a_loss_of_its_own(smooth_images):
    """Regression: the value is searched for together with the image, or known."""
    model = with_random_weights(LeNet(1, 1, 16), torch_rng("regression"))
    image, value = smooth_images(1), torch.tensor([0.7])

    def squared_error(outputs: Tensor, values: Tensor) -> Tensor:
        return (outputs[:, 0] - values).square().mean()

    gradients = torch.autograd.grad(squared_error(model(image), value), list(model.parameters()))
    parcel = Parcel("gradients", dict(zip(dict(model.named_parameters()), gradients, strict=True)))
    known = Knowledge(model, (1, 16, 16), loss=squared_error, labels=value[None])
    found = GradientInversion(label="known", lr=0.5, iterations=30).run([parcel], known)
    assert float(errors(found, image[None])) < 1e-3
    assert found.labels.tolist() == [[pytest.approx(0.7)]]
    joint = GradientInversion(lr=0.5, iterations=1).run([parcel], known)
    assert joint.labels.shape == (1, 1)
    assert joint.labels.item() != pytest.approx(0.7, abs=1e-6)


def test_targets_that_leave_the_batch_take_nobody_elses_labels_along(one_image_each):
    """Known labels, groups smaller than the number of parcels, and half of a group gone before the rest."""
    model, _, labels, parcels = one_image_each
    gone = [Parcel("gradients", {name: tensor * torch.inf for name, tensor in p.tensors.items()}) for p in parcels[:2]]
    attack = GradientInversion(label="known", lr=0.1, iterations=2, at_once=3, precision="fp64")
    several = [*gone, *parcels[2:6]]
    found = attack.run(several, knowledge(model, labels=labels[:6]))
    assert found.diverged.tolist() == [True, True, False, False, False, False]
    assert found.labels.tolist() == labels[:6].tolist()
    for row in range(2, 6):
        alone = attack.run(several[row : row + 1], knowledge(model, labels=labels[row : row + 1]))
        torch.testing.assert_close(found.images[row], alone.images[0], rtol=0, atol=1e-4)


def test_the_loss_is_that_of_the_image_that_is_returned(one_image_each):
    """Also of the last point, which no iteration looks at any more."""
    model, _, labels, parcels = one_image_each
    for returns in ("last", "best"):
        attack = GradientInversion(
            label="known", optimizer="adam", lr=0.05, iterations=4, returns=returns, total_variation=2.0
        )
        found = attack.run(parcels[:1], knowledge(model, labels=labels[:1]))
        loss = cross_entropy(model(found.images[0]), one_hot(labels[0], 5).float())
        simulated = torch.autograd.grad(loss, list(model.parameters()))
        pairs = zip(simulated, model.named_parameters(), strict=True)
        distance = sum((s - parcels[0].tensors[name]).square().sum() for s, (name, _) in pairs)
        roughness = sum(found.images.diff(dim=dim).abs().mean() for dim in (-1, -2))
        assert float(found.loss[0]) == pytest.approx(float(distance + 2.0 * roughness), rel=1e-4)


def test_settings_reach_the_optimiser():
    chosen = {"lr": 0.3, "iterations": 40, "decay": 0.5, "decay_at": (0.5, 0.75), "weight_decay": 0.01}
    adam = GradientInversion(optimizer="adam", signed=True, box=True, **chosen).optimizer_at(torch.zeros(2, 7), 5)
    assert (float(adam.lr), adam.steps, adam.decay) == (pytest.approx(0.3), 40, 0.5)
    assert adam.milestones.tolist() == [20, 30]
    assert (adam.signed, adam.box, adam.decoupled, adam.weight_decay) == (True, (5, 0.0, 1.0), False, 0.01)
    adamw = GradientInversion(optimizer="adamw").optimizer_at(torch.zeros(2, 7), 5)
    assert (float(adamw.lr), adamw.signed, adamw.box, adamw.decoupled) == (pytest.approx(1e-3), False, None, True)
    lbfgs = GradientInversion(iterations=7).optimizer_at(torch.zeros(2, 7), 5)
    assert (lbfgs.lr.tolist(), lbfgs.limit, lbfgs.memory.history) == ([pytest.approx(0.1)] * 2, 7 * 20, 100)


def test_each_parcel_with_a_network_of_its_own(smooth_images, sent):
    """All at once against one after the other; labels are counted with each parcel's own network."""
    models = [with_random_weights(LeNet(1, 5, 16), torch_rng("own", i)) for i in range(3)]
    images, labels = smooth_images(6).unflatten(0, (3, 2)), torch.tensor([[0, 1], [2, 2], [3, 4]])
    parcels = [sent(m, images[i : i + 1], labels[i : i + 1])[0] for i, m in enumerate(models)]
    attack = GradientInversion(label="counts", optimizer="adam", lr=0.1, iterations=5, precision="fp64")
    together = attack.run(parcels, knowledge(models, batch_size=2))
    for i, model in enumerate(models):
        alone = attack.run(parcels[i : i + 1], knowledge(model, batch_size=2))
        torch.testing.assert_close(together.images[i : i + 1], alone.images, rtol=1e-6, atol=1e-8)
        assert together.labels[i].tolist() == alone.labels[0].tolist() == labels[i].tolist()


def test_trajectory_with_adam(one_image_each):
    """At each kept step: the same as a search that ends there; the distance is the loss without roughness."""
    model, _, _, parcels = one_image_each
    settings = {"optimizer": "adam", "lr": 0.1, "returns": "last", "total_variation": 0.1, "label": "sign"}
    found = GradientInversion(**settings, iterations=6, trajectory=(0, 2, 6)).run(parcels[:2], knowledge(model))
    kept = found.trajectory
    assert kept is not None
    assert kept.steps == (0, 2, 6)
    assert torch.equal(kept.images[:, 0], found.start)
    short = GradientInversion(**settings, iterations=2).run(parcels[:2], knowledge(model))
    torch.testing.assert_close(kept.images[:, 1], short.images)
    torch.testing.assert_close(kept.loss[:, 1], short.loss)
    assert torch.equal(kept.images[:, 2], found.images)
    assert torch.equal(kept.loss[:, 2], found.loss)
    images = kept.images[:, 2]
    rough = (images.diff(dim=-1).abs().flatten(1).mean(1) + images.diff(dim=-2).abs().flatten(1).mean(1)) * 0.1
    torch.testing.assert_close(kept.distance[:, 2], kept.loss[:, 2] - rough)


@pytest.mark.parametrize(("settings", "known", "says"), [
    ({"label": "known"}, {}, "Knowledge.labels"),
    ({"label": "known"}, {"labels": torch.zeros(3)}, r"Knowledge\.labels is for .*; give \[1, 1, \.\.\.\]"),
    ({"start": "given"}, {}, "Knowledge.start_images"),
    ({"start": "given"}, {"start_images": torch.zeros(2, 1, 1, 16, 16)}, r"start_images is for .*; give \[1, 1"),
    ({"kind": "weights"}, {}, "Knowledge.training"), ({"label": "sign"}, {"batch_size": 2}, "counts"),
    ({}, {"classes": None}, "Knowledge.classes"), ({"label": "counts"}, {"loss": cross_entropy}, "reads classes"),
    ({"kind": "weights"}, {"training": LocalTraining(0.1)}, "parcels of kind 'gradients'"),
    ({}, {"model": nn.Linear(2, 2)}, "no parameter of the network"), ({}, {"model": LeNet(3, 5, 16)}, "other shapes"),
    ({}, {"model": [LeNet(1, 5, 16)] * 2}, "2 networks, and there are 1 parcels"), ({}, {"model": []}, "empty list"),
])  # fmt: skip
def test_bad_knowledge_is_named(one_image_each, settings, known, says):
    model, _, _, parcels = one_image_each
    given = dataclasses.replace(knowledge(model), **known)
    with pytest.raises(BadInput, match=says):
        GradientInversion(**settings).run(parcels[:1], given)


@pytest.mark.parametrize(("settings", "says"), [
    *((one, "'gaussian' needs variance") for one in ({"distance": "gaussian"}, {"variance": 3.0})),
    *(({name: True}, "go with adam or adamw") for name in ("box", "signed")),
    ({"distance": "cosine", "kernel": "whole-gradient"}, "kernel goes with"),
    ({"distance": "gaussian", "variance": 8, "variance_factor": 2}, "variance_factor goes with"),
    *(({"trajectory": steps}, "trajectory") for steps in ((3, 2), (-1, 2), (2, 2), (0, 101))),
])  # fmt: skip
def test_contradictions_are_refused(settings, says):
    with pytest.raises(ValidationError, match=says):
        GradientInversion(**settings)


@pytest.mark.parametrize("scheme", ["uniform", "transformed-gaussian"])
def test_starts_fill_the_range_of_images_by_image_or_by_channel(scheme):
    by_image, by_channel = (
        draw(scheme, 2, (3, 4, 4), torch_rng("scaling"), scaling) for scaling in ("image", "channel")
    )
    for found, dims in ((by_image, (1, 2, 3)), (by_channel, (2, 3))):
        assert bool((found.amin(dims) == 0).all())
        assert bool((found.amax(dims) == 1).all())
    assert not bool((by_image.amax((2, 3)) == 1).all())
    for a, b in zip(by_image.flatten(0, 1), by_channel.flatten(0, 1), strict=True):  # the same draws, stretched
        torch.testing.assert_close((a - a.min()) / (a.max() - a.min()), b)


def test_starts_are_distributed_as_they_are_called():
    assert draw("normal", 3, (1, 50, 50), torch_rng("start")).std().item() == pytest.approx(1, abs=0.05)
    bell, flat = (draw(scheme, 1, (50, 50), torch_rng(1)) for scheme in ("transformed-gaussian", "uniform"))
    assert bell.std() < 0.2 < flat.std()


def test_restarts_keep_the_lowest_loss_and_its_trajectory_and_lose_what_diverged(one_image_each):
    model, _, _, parcels = one_image_each
    attack = GradientInversion(lr=1.0, iterations=1, returns="last", trajectory=(0, 1))
    once, thrice = (attack.model_copy(update={"restarts": n}).run(parcels[:3], knowledge(model)) for n in (1, 3))
    assert bool((thrice.loss <= once.loss).all())
    assert bool((thrice.loss < once.loss).any())
    assert bool((thrice.evaluations > once.evaluations).all())
    assert torch.equal(thrice.trajectory.images[:, 0], thrice.start)
    assert torch.equal(thrice.trajectory.images[:, 1], thrice.images)

    def result(loss: float, image: float) -> dict[str, Tensor]:
        return {"loss": torch.tensor([loss]), "images": torch.tensor([[image]]), "evaluations": torch.tensor([1])}

    for first, second in ((math.nan, 3.0), (3.0, math.nan), (4.0, 3.0)):
        best = _better(result(first, first), result(second, second))
        assert best["images"].tolist() == [[3.0]]
        assert best["evaluations"].tolist() == [2]
