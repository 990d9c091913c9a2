"""The limits of what is believed in a reply, and of sums over features: at the limit it passes, beyond it does not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.wire import shrink
from polyclinic.methods import METHODS
from polyclinic.methods.shared import aggregation, one_round, reply_checks
from polyclinic.methods.shared.one_round import MOST_IMAGES, RESOLUTION


def reply(kind, *more, **tensors):
    return Reply("north", (Parcel(kind, tensors), *more))


def labels(count=2, **changes):
    return Parcel("labels", {"targets": torch.zeros(count, dtype=torch.int64), **changes})


def test_norms_and_images_of_a_reply_by_hand():
    call = SimpleNamespace(parcels={"weights": Parcel("weights", {"w": torch.tensor([3.0, 4.0])})})
    size = 5 + 0.1 * 2**0.5
    check = reply_checks.check_step
    check(call, reply("gradients", w=torch.tensor([99.9 * size, 0.0]) / 0.5), 0.5)
    with pytest.raises(ParcelRejected, match=r"move tensor 'w' by .*, more than 100 times its size \(5\.14\)"):
        check(call, reply("gradients", w=torch.tensor([100.1 * size, 0.0]) / 0.5), 0.5)
    front = SimpleNamespace(state_dict=lambda: {"w": 0})
    trainer = SimpleNamespace(split=lambda model: (front, None), model=None)
    first = {"w": torch.tensor([3.0, 4.0])}
    federation = SimpleNamespace(trainer=trainer, initial_weights=lambda: first)
    most = 1000 * (5 + 0.1 * 2**0.5)
    reply_checks.check_front_weights(federation, reply("weights", w=torch.tensor([0.0, 0.999 * most])))
    with pytest.raises(ParcelRejected, match="the norm of tensor 'w' is beyond all that training does"):
        reply_checks.check_front_weights(federation, reply("weights", w=torch.tensor([0.0, 1.001 * most])))
    with pytest.raises(ParcelRejected, match=r"they differ in \['v', 'w'\]"):
        reply_checks.check_front_weights(federation, reply("weights", v=torch.ones(2)))
    many = {name: torch.ones(1) for name in "abcd"}
    with pytest.raises(ParcelRejected, match=r"they differ in \['a', 'b', 'c'\]$"):
        reply_checks.check_front_weights(federation, reply("weights", **many))
    first["w"] = torch.tensor([1, 1])
    reply_checks.check_front_weights(federation, reply("weights", w=torch.tensor([2**40, 0])))  # a counter
    aggregation.check_samples(Reply("north", (Parcel("weights", {}, {"samples": 3}),)))
    with pytest.raises(ParcelRejected, match="does not say of how many images it is"):
        aggregation.check_samples(reply("weights"))
    trainer = SimpleNamespace(state=lambda: {"a": 0, "b": 0}, local_names={"b"})
    federation = SimpleNamespace(trainer=trainer)
    aggregation.check_shared_weights(federation, reply("weights", a=torch.ones(1)))
    with pytest.raises(ParcelRejected, match=r"they differ in \['b'\]"):
        aggregation.check_shared_weights(federation, reply("weights", a=torch.ones(1), b=torch.ones(1)))
    trainer.local_names = {"a", "b"}
    aggregation.check_shared_weights(federation, reply("weights", a=torch.ones(1), b=torch.ones(1)))


def test_activations_have_the_shape_of_the_cut_and_pass_gradients():
    seen = []
    front = torch.nn.Flatten()
    front.register_forward_hook(lambda layer, given, made: seen.append((tuple(given[0].shape), layer.training)))
    trainer = SimpleNamespace(split=lambda model: (front, None), model=None, kept={}, device="cpu")
    federation = SimpleNamespace(trainer=trainer, image_shape=(1, 2, 3))
    front.train()
    check = reply_checks.check_rows
    check(federation, reply("activations", labels(), x=torch.zeros(2, 6)), "activations", "x")
    assert front.training
    assert trainer.kept == {"shape at the cut": (6,)}
    assert seen == [((1, 1, 2, 3), False)]
    for wrong in (torch.zeros(3, 6), torch.zeros(2, 5), torch.zeros(2, 6, 1)):
        with pytest.raises(ParcelRejected, match=r"activations: 'x' is .*, expected \(2, 6\)"):
            check(federation, reply("activations", labels(), x=wrong), "activations", "x")
    with pytest.raises(ParcelRejected, match="activations: 'x' is missing"):
        check(federation, reply("activations", labels(), y=torch.zeros(2, 6)), "activations", "x")
    rows = torch.zeros(2, 6)
    for parcels in (
        (),
        (labels(0),),
        (labels(), labels()),
        (labels(targets=torch.tensor(1)),),
        (Parcel("labels", {}),),
    ):
        with pytest.raises(ParcelRejected, match="one tensor 'targets' must come"):
            check(federation, reply("activations", *parcels, x=rows), "activations", "x")
    masks = Parcel("masks", {"targets": torch.zeros(2, 4, 4)})
    check(federation, reply("activations", masks, x=rows), "activations", "x")
    trainer = SimpleNamespace(split=lambda model: (torch.nn.Flatten(), None), model=None, kept={}, device="cpu")
    federation = SimpleNamespace(trainer=trainer, image_shape=(1, 2, 3))
    call, method = SimpleNamespace(operation="forward"), METHODS["splitnn"](rounds=1)
    whole = reply("activations", labels(), activations=torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(ParcelRejected, match="activations: they are no floating-point numbers"):
        method.check_reply(federation, call, whole)
    method.check_reply(federation, call, reply("activations", labels(), activations=torch.zeros(2, 6)))


def federation_of(covers=False, chosen=("a", "b", "c")):
    covered = ("give_sums",) if covers else ()
    return SimpleNamespace(sums=SimpleNamespace(covered=covered), chosen=list(chosen), warned=[])


def warned(said, summed="float"):
    return SimpleNamespace(warn=said.append, sums=SimpleNamespace(settings=SimpleNamespace(sum=summed)))


def test_shares_projections_and_targets_by_hand():
    assert one_round.most_images(federation_of(), "give_sums") == MOST_IMAGES // 3
    assert one_round.most_images(federation_of(covers=True), "give_sums") == MOST_IMAGES
    assert one_round.most_images(federation_of(chosen=()), "give_sums") == MOST_IMAGES
    parcel = Parcel("statistics", {}, {"samples": 5})
    one_round.check_samples(federation_of(), "give_sums", parcel, 5)
    one_round.check_samples(federation_of(covers=True), "give_sums", parcel, 6)
    with pytest.raises(ParcelRejected, match="samples = 5, and the sums are of 6 images"):
        one_round.check_samples(federation_of(), "give_sums", parcel, 6)
    assert one_round.projection(64, None) is None
    assert one_round.projection(64, 64) is None
    signs = one_round.projection(64, 20)
    assert signs.shape == (64, 20)
    assert set(signs.unique().tolist()) == {-1 / 8, 1 / 8}  # the root of 64
    assert abs(float(signs.mean())) < 0.02
    assert float(one_round.projection(600, 2).abs().max()) == 1 / 32  # near 24.5
    rows = np.array([[1.0, 0.3 * RESOLUTION], [2.0, -1.0]], np.float32)
    found = one_round.project(rows, torch.tensor([[0.5, -0.5], [0.5, 0.5]]).double())
    np.testing.assert_array_equal(found, [[0.5, -0.5], [0.5, -1.5]])
    assert one_round.project(rows[:0], signs[:2]).shape == (0, 20)

    def site(task, target, values):
        trainer = SimpleNamespace(task=SimpleNamespace(like=task), target=target)
        return SimpleNamespace(trainer=trainer, data=SimpleNamespace(train=SimpleNamespace(labels=np.array(values))))

    classes = SimpleNamespace(classes=("a", "b", "c"))
    assert one_round.scaled_targets(site("classification", classes, [2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]
    ages = SimpleNamespace(classes=(), label_range=(0.0, 100.0), centre=0.0, scale=1.0)
    assert one_round.scaled_targets(site("regression", ages, [0.0, 75.0])).tolist() == [[-1], [0.5]]


@pytest.mark.parametrize(("counts", "who"), [
    ({"a": 9}, None),
    ({"a": 8}, "site 'a'"),
    ({"a": 8, "b": 9, "c": 1}, "sites 'a', 'c'"),
    (dict.fromkeys("abcd", 1), "sites 'a', 'b', 'c', ..."),
])  # fmt: skip
def test_sites_with_no_more_images_than_numbers_are_named(counts, who):
    said = []
    one_round.warn_of_small_sites(warned(said), counts, 8)
    assert [words.split(":")[0] for words in said] == ([who] if who else [])
    one_round.warn_of_small_sites(warned(said, "secure"), counts, 8)
    assert len(said) == (2 if who else 0)
    assert all("'a'" not in words for words in said[1:]), "a sum says nobody's name"


def test_sites_with_a_class_of_few_images_are_named():
    said, counts = [], {"a": [10, 0], "b": [40, 1], "c": [0, 9.0], "d": [10, 10]}
    each = {site: torch.tensor(numbers) for site, numbers in counts.items()}
    one_round.warn_of_small_classes(warned(said), each)
    assert [words.split(":")[0] for words in said] == ["sites 'b', 'c'"]
    one_round.warn_of_small_classes(warned(said), {"a": each["a"]})
    assert len(said) == 1
    assert "set federation.sum = 'secure'" in said[0]
    one_round.warn_of_small_classes(warned(said, "secure"), each)
    assert "set federation.sum" not in said[1], "that cure is taken already"


class Trainer:
    """One layer that doubles its images; with it, trial images up to 1 give latents up to 2."""

    device = torch.device("cpu")

    def __init__(self):
        self.model = nn.Conv2d(1, 1, 1, bias=False)
        self.kept, self.loaded = {}, 0

    def load(self, weights):
        self.loaded += 1
        self.model.load_state_dict(weights)
        return self.model

    def split(self, model):
        return model, None

    def forward(self, images, model):
        return model(images)


@pytest.fixture
def with_encoder():
    return SimpleNamespace(trainer=Trainer(), image_shape=(1, 8, 8))


DOUBLES = {"weight": torch.full((1, 1, 1, 1), 2.0)}
#: twenty times the largest of the trial images, and one
BOUND = 41.0


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
def test_latents_within_the_encoders_range_pass_and_larger_ones_do_not(with_encoder, precision, sign):
    latents = torch.zeros(4, 1, 8, 8)
    latents[2, 0, 3, 3] = sign * (BOUND - 0.5)
    reply_checks.check_latents(with_encoder, DOUBLES, shrink(latents, precision))
    latents[2, 0, 3, 3] = sign * (BOUND + 0.5)
    with pytest.raises(ParcelRejected, match=r"numbers up to 41\.5, and the encoder gives no more than 41"):
        reply_checks.check_latents(with_encoder, DOUBLES, shrink(latents, precision))


def test_the_range_of_an_encoder_is_worked_out_once_and_leaves_it_as_it_was(with_encoder):
    for encoder in (DOUBLES, DOUBLES, {"weight": torch.full((1, 1, 1, 1), 4.0)}):
        reply_checks.check_latents(with_encoder, encoder, shrink(torch.ones(2, 1, 8, 8), "fp32"))
    assert with_encoder.trainer.loaded == 2
    sent = {**shrink(torch.ones(2, 1, 8, 8), "fp32"), "flipped_latents": torch.full((2, 1, 8, 8), 99.0)}
    with pytest.raises(ParcelRejected, match="flipped_latents"):
        reply_checks.check_latents(with_encoder, DOUBLES, sent)
    for training in (True, False):
        with_encoder.trainer.kept.clear()
        with_encoder.trainer.model.train(training)
        reply_checks.check_latents(with_encoder, DOUBLES, shrink(torch.ones(2, 1, 8, 8), "fp32"))
        assert with_encoder.trainer.model.training is training
