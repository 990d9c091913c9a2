"""The coordinator's check of replies, rule by rule, with the numbers at which each begins."""

from types import SimpleNamespace

import pytest
import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.layers.replies import ReplyCheck
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import operation
from polyclinic.tasks.classification import Classification
from polyclinic.tasks.task import Target

TARGET = Target(("a", "b"))


class Method:
    @operation("weights", "statistics")
    def train(self, site): ...

    @operation("latents", "metrics", partner="sites")
    def hand_on(self, site): ...

    @operation("metrics")
    def evaluate(self, site): ...

    @operation("labels", "masks")
    def label(self, site): ...

    complaint = ""

    def operation_named(self, name):
        return getattr(getattr(type(self), name, None), "operation", None)

    def check_reply(self, federation, call, reply):
        if self.complaint:
            raise WorkFailed(self.complaint)


def federation(privacy=None):
    return SimpleNamespace(trainer=SimpleNamespace(task=Classification(), target=TARGET, privacy=privacy))


def check(*parcels, operation="train", checker=None, site="s", to="coordinator", privacy=None, **call):
    checker = checker or ReplyCheck(Method())
    asked = Call(site, operation, 1, call.pop("sent", {}), call, to)
    checker.check(federation(privacy), asked, Reply(site, parcels))
    return checker


def weights(*values, **metadata):
    return Parcel("weights", {"w": torch.tensor(values or [1.0])}, metadata)


def test_metrics_and_statistics_have_few_numbers():
    check(weights(), Parcel("statistics", {"s": torch.ones(3 * 2**14)}))
    with pytest.raises(ParcelRejected, match="49153 numbers, and 'train' declares at most 49152 of statistics"):
        check(weights(), Parcel("statistics", {"s": torch.ones(3 * 2**14 + 1)}))


@pytest.mark.parametrize(
    ("parcels", "words"),
    [
        ((), "no parcel of kind 'weights' came for 'train'"),
        ((Parcel("statistics", {}),), "no parcel of kind 'weights' came for 'train'"),
        ((weights(), Parcel("metrics", {})), "a parcel of kind 'metrics' came, which 'train' does not release"),
        ((weights(), weights()), "two parcels of kind 'weights' came for 'train'"),
    ],
)
def test_a_reply_has_the_kinds_that_its_operation_releases(parcels, words):
    check(weights())
    check(weights(), Parcel("statistics", {}))
    with pytest.raises(ParcelRejected, match=words):
        check(*parcels)


def test_what_goes_to_another_site_may_be_left_out_and_is_sealed():
    said = {"kind": "latents", "from": "s", "operation": "hand_on"}
    sealed = Parcel(SEALED, {"box": torch.zeros(64, dtype=torch.uint8)}, said)
    check(operation="hand_on", to="t")
    check(operation="evaluate")
    assert sealed.content == "latents"
    check(sealed, operation="hand_on", to="t")
    with pytest.raises(ParcelRejected, match="a sealed parcel came, and nothing was to be sealed"):
        check(sealed, operation="hand_on")
    with pytest.raises(ParcelRejected, match="'hand_on' hands on what is sealed, and latents came open"):
        check(Parcel("latents", {"z": torch.zeros(3)}), operation="hand_on", to="t")
    for name in ("from", "operation"):
        with pytest.raises(ParcelRejected, match="does not say that this site sealed it for this"):
            check(Parcel(SEALED, dict(sealed.tensors), {**said, name: "t"}), operation="hand_on", to="t")


def test_what_a_method_would_stop_for_is_the_failure_of_one_site_as_are_false_labels():
    checker = ReplyCheck(Method())
    checker._method.complaint = "its codes are of another book"
    for one, error in ((checker.check, ParcelRejected), (checker.check_sum, WorkFailed)):
        with pytest.raises(error, match="its codes are of another book"):
            one(federation(), Call("s", "train", 1), Reply("s", (weights(),)))
    ReplyCheck(None).check_sum(federation(), Call("s", "train", 1), Reply("s", (weights(),)))
    wrong = Parcel("labels", {"t": torch.tensor([2])})
    with pytest.raises(ParcelRejected, match="names other classes than 0 to 1"):
        check(wrong, operation="label")
    with pytest.raises(ParcelRejected, match="masks: tensor 't' has values from 0 to 2; masks have 0 and 1"):
        check(Parcel("masks", {"t": torch.tensor([0, 2])}), operation="label")
    check(wrong, checker=ReplyCheck(None), operation="label")


@pytest.mark.parametrize(
    ("metadata", "right"),
    [
        *(({"samples": 1}, True), ({"samples": 10**8}, True), ({"samples": 10**8 + 1}, False)),
        *(({"samples": 0}, False), ({"samples": -1}, False), ({"samples": True}, False), ({"samples": "3"}, False)),
        *(({"steps": 0}, True), ({"steps": 10**6}, True), ({"steps": 10**6 + 1}, False), ({"steps": -1}, False)),
        *(({"expected": 0.0}, True), ({"expected": 1e8}, True), ({"expected": 1e8 + 1}, False)),
        *(({"expected": -0.5}, False), ({"loss": -3.0}, True), ({"loss": None}, False), ({"loss": True}, False)),
    ],
)
def test_numbers_that_a_coordinator_counts_with(metadata, right):
    if right:
        check(weights(**metadata))
        return
    with pytest.raises(ParcelRejected, match=r"weights: (samples|steps|expected|loss) = .* is no"):
        check(weights(**metadata))


def test_a_site_says_one_number_of_images_of_an_operation():
    checker = check(weights(samples=5, steps=1))
    check(weights(samples=5, steps=2), checker=checker)
    check(weights(samples=6), checker=checker, site="another")
    check(weights(samples=7), checker=checker, operation="unknown")
    with pytest.raises(ParcelRejected, match="weights: samples = 6, and the site said 5 before"):
        check(weights(samples=6), checker=checker)
    again = ReplyCheck(Method(), checker.said)
    with pytest.raises(ParcelRejected, match="the site said 5 before"):
        check(weights(samples=6), checker=again)


@pytest.mark.parametrize(
    ("before", "norm", "right"),
    [
        ([3.0, 4.0, 0.0, 0.0], 5_199.0, True),
        ([3.0, 4.0, 0.0, 0.0], 5_201.0, False),
        ([0.0] * 4, 199.0, True),  # a bias begins at zero: each of 4 numbers may come to 0.1, times 1000
        ([0.0] * 4, 201.0, False),
    ],
)
def test_weights_may_be_a_thousand_times_what_was_sent(before, norm, right):
    """1000 times the norm of 5, and 0.1 for each number: 1000 (5 + 0.1 sqrt 4) = 5200."""
    came, sent = weights(norm, 0.0, 0.0, 0.0), {"weights": weights(*before)}
    statistics = Parcel("statistics", {"w": torch.tensor([1e9])})
    check(came)
    check(weights(), statistics, sent={"statistics": Parcel("statistics", {"w": torch.tensor([1.0])})})
    if right:
        check(came, sent=sent)
        return
    with pytest.raises(ParcelRejected, match=r"of tensor 'w' is .*, more than 1000 times what the site was sent"):
        check(came, sent=sent)
    with pytest.raises(ParcelRejected, match="the norm of tensor 'w'"):
        ReplyCheck(None).check_sum(federation(), Call("s", "train", 1, sent), Reply("s", (came,)))


def scores(images):
    """Sums of scores of so many images, half of each class."""
    labels = torch.arange(images) % 2
    logits = torch.nn.functional.one_hot(labels, 2).double()
    return Parcel("metrics", Classification().sums(logits, labels, None, TARGET))


def evaluate(*parcels, **more):
    return check(*parcels, operation="evaluate", **more)


@pytest.mark.parametrize(("images", "right"), [(5, True), (4, False), (20, True), (21, False), (10, True)])
def test_scores_are_of_about_as_many_images_as_before(images, right):
    checker = evaluate(scores(10))
    evaluate(scores(100), checker=checker, split="test")
    if right:
        evaluate(scores(images), checker=checker)
        return
    with pytest.raises(ParcelRejected, match=f"scores of {images} images, and they were of 10 before"):
        evaluate(scores(images), checker=checker)


def test_scores_are_of_no_more_than_a_thousand_times_the_images_that_a_site_trains_on():
    checker = ReplyCheck(Method(), {"s/train/samples": 1.0, "s/other/samples": 0.0, "t/train/samples": 1e6})
    evaluate(scores(2000), checker=checker)
    again = ReplyCheck(Method(), {"s/train/samples": 1.0, "s/evaluate": 1e6})
    with pytest.raises(ParcelRejected, match="scores of 2002 images, and the site trains on 1"):
        evaluate(scores(2002), checker=again)
    evaluate(scores(2002))  # nothing is known of the site


@pytest.mark.parametrize(("noise", "right"), [(None, False), (1.0, True)])
def test_a_site_that_sent_scores_sends_them_again_unless_they_are_noised(noise, right):
    for privacy in (SimpleNamespace(score_noise=noise), *([] if right else [None])):
        checker = evaluate(scores(4), privacy=privacy)
        evaluate(checker=checker, privacy=privacy, split="test")
        if right:
            evaluate(checker=checker, privacy=privacy)
            continue
        with pytest.raises(ParcelRejected, match="no scores came, and they did before"):
            evaluate(checker=checker, privacy=privacy)


@pytest.mark.parametrize(("began", "right"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_site_begins_to_score_when_most_others_do(began, right):
    """Of four sites, `began` sent scores at once: the last one may begin later, unless most of the others did then."""
    checker = ReplyCheck(Method())
    for number, site in enumerate("tuv"):
        evaluate(*([scores(4)] if number < began else []), checker=checker, site=site)
    evaluate(checker=checker)
    if right:
        evaluate(scores(4), checker=checker)
    else:
        with pytest.raises(ParcelRejected, match="scores came, and none did before, when most other sites sent some"):
            evaluate(scores(4), checker=checker)
    evaluate(scores(4), checker=checker)  # refused once, at most


def test_coarse_scores_of_other_models_are_of_the_same_images():
    """What a deployed site tells of 80 images, ten of each class: such replies look odd and are honest."""
    task, target, labels = Classification(), Target(tuple("abcdefgh")), torch.arange(8).repeat_interleave(10)
    asker = SimpleNamespace(trainer=SimpleNamespace(task=task, target=target, privacy=None))
    checker, drawn = ReplyCheck(Method()), torch.Generator().manual_seed(0)
    for predicted in (torch.zeros(80, dtype=torch.long), torch.randint(8, (80,), generator=drawn), labels):
        sums = task.sums(torch.nn.functional.one_hot(predicted, 8).double() * 4, labels, None, target)
        reply = Reply("s", (Parcel("metrics", task.coarse(sums, 10, target)),))
        checker.check(asker, Call("s", "evaluate", 1), reply)
