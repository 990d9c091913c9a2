"""The coordinator's check of replies, with the numbers at which rules begin; heads of ledgers; what privacy covers."""

import json
from types import SimpleNamespace

import pytest
import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.layers.replies import Coverage, ReplyCheck, _check_targets
from polyclinic.federation.ledger.keys import Head, SeedKeys, is_countersigned, sign_line
from polyclinic.federation.ledger.kinds import KINDS, OF_NO_IMAGE, ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.ledger.verify import RECEIVED_FILE, Heads, read_received
from polyclinic.federation.operation import operation
from polyclinic.tasks.classification import Classification
from polyclinic.tasks.regression import Regression
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


SAID = {"s/train/samples": 30.0, "t/train/samples": 1e6}


def federation(privacy=None):
    return SimpleNamespace(trainer=SimpleNamespace(task=Classification(), target=TARGET, privacy=privacy))


def check(*parcels, operation="train", checker=None, site="s", to="coordinator", privacy=None, **call):
    checker = checker or ReplyCheck(Method())
    asked = Call(site, operation, 1, call.pop("sent", {}), call, to)
    checker.check(federation(privacy), asked, Reply(site, parcels))
    return checker


def weights(*values, **metadata):
    return Parcel("weights", {"w": torch.tensor(values or [1.0])}, metadata)


@pytest.mark.parametrize(("kind", "most", "words"), [
    ("weights", 100 + 2**14, "weights: 16485 numbers, where at most 16484 can be"),
    ("gradients", 100 + 2**14, "gradients: 16485 numbers, where at most 16484 can be"),
    ("labels", 10 * 30 * 64, "labels: 19201 numbers, where at most 19200 can be"),
    ("codes", 10 * 30 * 64, "codes: 19201 numbers, where at most 19200 can be"),
    ("synthetic-images", 8 * 10 * 30 * 64, "synthetic-images: 153601 numbers, where at most 153600 can be"),
    ("shares", 3 * 114 * 64, "shares: 21889 numbers, where at most 21888 can be"),
    ("tissue", 3 * 2**14, r"at most 49152 of tissue; .* write @operation\(..., most=\{'tissue': 49153"),
])  # fmt: skip
def test_a_site_that_sends_more_numbers_than_a_kind_needs_is_refused(kind, most, words, monkeypatch):
    """Of a model of 100 numbers, a site of 30 images of 8 x 8, and 191 sites; 'tissue' is a plug-in's kind."""
    monkeypatch.setitem(KINDS.added, "tissue", (object, "a plug-in"))
    trainer = SimpleNamespace(task=Classification(), target=TARGET, privacy=None, model=torch.nn.Linear(100, 1, False))
    seen = SimpleNamespace(trainer=trainer, sites=range(191), backbones={}, image_shape=(3, 8, 8))
    declared = operation(kind)(lambda site: None).operation
    checker = ReplyCheck(SimpleNamespace(operation_named=lambda name: declared, check_reply=lambda *_: None), SAID)
    for numbers in (most, most + 1):
        call, reply = Call("s", "give", 1), Reply("s", (Parcel(kind, {"x": torch.zeros(numbers, dtype=torch.uint8)}),))
        if numbers == most:
            checker.check(seen, call, reply)
            continue
        with pytest.raises(ParcelRejected, match=words):
            checker.check(seen, call, reply)


def test_metrics_and_images_of_a_reply_are_few_and_one_number():
    check(weights(), Parcel("statistics", {"s": torch.ones(3 * 2**14)}))
    with pytest.raises(ParcelRejected, match="49153 numbers, and 'train' declares at most 49152 of statistics"):
        check(weights(), Parcel("statistics", {"s": torch.ones(3 * 2**14 + 1)}))
    checker = check(weights(samples=5, steps=1))
    check(weights(samples=5, steps=2), checker=checker)
    check(weights(samples=6), checker=checker, site="another")
    check(weights(samples=7), checker=checker, operation="unknown")
    with pytest.raises(ParcelRejected, match="weights: samples = 6, and the site said 5 before"):
        check(weights(samples=6), checker=checker)
    again = ReplyCheck(Method(), checker.said)
    with pytest.raises(ParcelRejected, match="the site said 5 before"):
        check(weights(samples=6), checker=again)
    checker = ReplyCheck(Method(), {"s/train/samples": 1.0, "s/other/samples": 0.0, "t/train/samples": 1e6})
    evaluate(scores(2000), checker=checker)
    again = ReplyCheck(Method(), {"s/train/samples": 1.0, "s/evaluate": 1e6})
    with pytest.raises(ParcelRejected, match="scores of 2002 images, and the site trains on 1"):
        evaluate(scores(2002), checker=again)
    evaluate(scores(2002))  # nothing is known of the site


@pytest.mark.parametrize(("parcels", "words"), [
    ((), "no parcel of kind 'weights' came for 'train'"),
    ((Parcel("statistics", {}),), "no parcel of kind 'weights' came for 'train'"),
    ((weights(), Parcel("metrics", {})), "a parcel of kind 'metrics' came, which 'train' does not release"),
    ((weights(), weights()), "two parcels of kind 'weights' came for 'train'"),
])  # fmt: skip
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


@pytest.mark.parametrize(("metadata", "right"), [
    *(({"samples": 1}, True), ({"samples": 10**8}, True), ({"samples": 10**8 + 1}, False)),
    *(({"samples": 0}, False), ({"samples": -1}, False), ({"samples": True}, False), ({"samples": "3"}, False)),
    *(({"steps": 0}, True), ({"steps": 10**6}, True), ({"steps": 10**6 + 1}, False), ({"steps": -1}, False)),
    *(({"expected": 0.0}, True), ({"expected": 1e8}, True), ({"expected": 1e8 + 1}, False)),
    *(({"expected": -0.5}, False), ({"loss": -3.0}, True), ({"loss": None}, False), ({"loss": True}, False)),
])  # fmt: skip
def test_numbers_that_a_coordinator_counts_with(metadata, right):
    if right:
        check(weights(**metadata))
        return
    with pytest.raises(ParcelRejected, match=r"weights: (samples|steps|expected|loss) = .* is no"):
        check(weights(**metadata))


@pytest.mark.parametrize(("before", "norm", "right"), [
    ([3.0, 4.0, 0.0, 0.0], 5_199.0, True),
    ([3.0, 4.0, 0.0, 0.0], 5_201.0, False),
    ([0.0] * 4, 199.0, True),  # a bias begins at zero: each of 4 numbers may come to 0.1, times 1000
    ([0.0] * 4, 201.0, False),
])  # fmt: skip
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


def test_records_cover_and_scores_are_of_the_same_images():
    """What a deployed site tells of 80 images, ten of each class: such replies look odd and are honest."""
    task, target, labels = Classification(), Target(tuple("abcdefgh")), torch.arange(8).repeat_interleave(10)
    asker = SimpleNamespace(trainer=SimpleNamespace(task=task, target=target, privacy=None))
    checker, drawn = ReplyCheck(Method()), torch.Generator().manual_seed(0)
    for predicted in (torch.zeros(80, dtype=torch.long), torch.randint(8, (80,), generator=drawn), labels):
        sums = task.sums(torch.nn.functional.one_hot(predicted, 8).double() * 4, labels, None, target)
        reply = Reply("s", (Parcel("metrics", task.coarse(sums, 10, target)),))
        checker.check(asker, Call("s", "evaluate", 1), reply)
    later = {**RECORD, "epsilon": 2, "covers": ["generator", "weights"], "does_not_cover": []}
    coverage = noted(*(Parcel("weights", TENSORS, privacy=one) for one in (RECORD, later)))
    joined = {"covers": ["weights", "generator"], "does_not_cover": ["labels"]}
    assert coverage.plain() == {"records": {"a": {**later, **joined}}, "uncovered": []}
    assert Coverage(coverage.plain()).plain() == coverage.plain()
    trainer = SimpleNamespace(task=Regression(), target=Target(label_range=(0.0, 200.0)))
    _check_targets(SimpleNamespace(trainer=trainer), Parcel("labels", {"t": torch.tensor([30.5, 120.0])}))


KEYS = SeedKeys(3)
PARCEL = Parcel("weights", {"w": torch.ones(2)})


def head(lines, digest="d", site="a"):
    return Head(lines, digest, sign_line(KEYS.signing_key(site), digest))


def receive(heads, found, site="a", parcels=(PARCEL,), round=1):
    heads.receive(Call(site, "train", round), Reply(site, tuple(parcels), found))


def test_a_deployed_head_is_counter_signed_and_written_down(tmp_path):
    heads = Heads(tmp_path, KEYS)
    assert heads.known == {}
    receive(heads, head(1), parcels=(PARCEL, Parcel("metrics", {})))
    anchor = heads.known["a"]
    assert anchor.head == head(1)
    assert is_countersigned(KEYS.verifying_keys("coordinator"), tmp_path.name, "a", anchor)
    [line] = read_received(tmp_path)
    assert (line["site"], line["round"], line["operation"], line["to"]) == ("a", 1, "train", "coordinator")
    assert line["parcels"][0] == {"kind": "weights", "bytes": PARCEL.size, "digest": PARCEL.digest}
    assert line["head"] == list(anchor)
    assert heads.summary()["a"].keys() == {"lines", "digest", "signature", "countersignature"}


@pytest.mark.parametrize(("found", "fits"), [
    ((3, "d"), True),
    ((4, "e"), True),
    ((99, "e"), True),
    ((3, "other"), False),
    ((2, "d"), False),
    ((1, "other"), False),
])  # fmt: skip
def test_a_ledger_grows_and_stays_the_same_one(tmp_path, found, fits):
    heads = Heads(tmp_path, KEYS)
    receive(heads, head(3))
    if fits:
        receive(heads, head(*found))
        assert heads.known["a"].lines == found[0]
        return
    with pytest.raises(ParcelRejected, match=f"its ledger had 3 lines, and is another one now, of {found[0]} lines"):
        receive(heads, head(*found))
    assert heads.known["a"].head == head(3)


def test_an_answer_has_a_head_that_its_site_signed(tmp_path):
    """Nothing left a new site, and nothing is missing; a deployed site that sends something has written it down."""
    simulated, deployed = Heads(tmp_path), Heads(tmp_path, KEYS)
    receive(simulated, None)
    receive(deployed, None, parcels=())
    assert simulated.plain() == deployed.plain() == {}
    with pytest.raises(ParcelRejected, match="without the head"):
        receive(deployed, None)
    for heads, known in ((simulated, Head(1, "x")), (deployed, head(1))):
        receive(heads, known)
        with pytest.raises(ParcelRejected, match="without the head"):
            receive(heads, None, parcels=())
    with pytest.raises(ParcelRejected, match="not signed with the key that the kits have for it"):
        receive(Heads(tmp_path, KEYS), head(1, site="b"))


def test_heads_that_are_still_to_come_are_taken_when_they_are_asked_for(tmp_path):
    heads, asked = Heads(tmp_path), []

    def soon(found):
        return lambda: asked.append(found) or found

    heads.receive(Call("a", "train", 1), Reply("a", (), head_soon=soon(Head(1, "x"))))
    heads.receive(Call("b", "train", 1), Reply("b", (), head_soon=soon(None)))
    assert asked == []
    assert heads.plain() == {"a": (1, "x", "", "")}
    assert asked == [Head(1, "x"), None]
    heads.receive(Call("a", "train", 2), Reply("a", (), head_soon=soon(Head(2, "y"))))
    with pytest.raises(ParcelRejected, match="had 2 lines"):
        receive(heads, Head(1, "x"))


def test_a_resumed_run_knows_what_came_after_its_checkpoint(tmp_path):
    heads = Heads(tmp_path, KEYS)
    receive(heads, head(1))
    kept = json.loads(json.dumps(heads.plain()))
    receive(heads, head(2, "e"), round=2)
    receive(heads, head(5, "f", "b"), "b", round=2)
    resumed = Heads(tmp_path, KEYS)
    resumed.restore(kept)
    assert {site: anchor.lines for site, anchor in resumed.plain().items()} == {"a": 2, "b": 5}
    later = {"a": [7, "later", "", ""], "b": [5, "the same length", "", ""]}
    resumed.restore(later)
    assert {site: anchor.digest for site, anchor in resumed.plain().items()} == {"a": "later", "b": "the same length"}
    simulated = Heads(tmp_path)
    simulated.restore(kept)
    assert {site: anchor.lines for site, anchor in simulated.plain().items()} == {"a": 1}


@pytest.mark.parametrize(("before", "after"), [("", ""), ("{}\n", "{}\n"), ('{"si', '{"si\n')])
def test_a_line_that_a_killed_process_left_unfinished_is_ended(tmp_path, before, after):
    file = tmp_path / RECEIVED_FILE
    if before:
        file.write_text(before)
    Heads(tmp_path)  # a simulation leaves the file alone
    assert (file.read_text() if file.exists() else "") == before
    Heads(tmp_path, KEYS)
    assert (file.read_text() if file.exists() else "") == after


RECORD = {"epsilon": 1.0, "delta": 1e-5, "steps": 3, "covers": ["weights"], "does_not_cover": ["labels"]}
TENSORS = {"w": torch.ones(1)}


def noted(*parcels):
    coverage = Coverage()
    for parcel in parcels:
        coverage.note("a", parcel)
    return coverage


@pytest.mark.parametrize(("parcel", "uncovered"), [
    (Parcel("weights", TENSORS), True),
    (Parcel("weights", TENSORS, {"samples": 3}), True),
    (Parcel("metrics", {}, {"loss": 0.5}), True),
    (Parcel("metrics", {}, {"samples": 3, "steps": 9}), False),  # sizes count as public
    (Parcel("metrics", {}), False),
    (Parcel(min(OF_NO_IMAGE), TENSORS, {"anything": 1}), False),
])  # fmt: skip
def test_what_tells_something_of_images_without_a_record_is_uncovered(parcel, uncovered):
    assert noted(parcel).uncovered == ({parcel.kind} if uncovered else set())


@pytest.mark.parametrize("name", RECORD)
@pytest.mark.parametrize("value", [None, "a word"])
def test_a_record_that_is_none_covers_nothing(name, value):
    coverage = noted(Parcel("weights", TENSORS, privacy={**RECORD, name: value}))
    assert (coverage.records, coverage.uncovered) == ({}, {"weights"})
