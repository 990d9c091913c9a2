"""What a site checks of a call before it opens an image, by hand: arguments, rounds, how often, with which weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from polyclinic.federation.call import Call, GateRefused
from polyclinic.federation.layers import call_checks
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Transaction, operation


class Method:
    @operation("weights")
    def train(self, site, weights, control=None, steps=1): ...

    @operation("weights", takes={"weights": "front", "control": "gradients"})
    def front(self, site, weights, control=None): ...

    @operation("metrics")
    def evaluate(self, site, split="validation"): ...

    @operation("real-images", partner="simulator")
    def pool(self, site): ...

    @operation("latents", partner="sites")
    def hand_on(self, site): ...

    @operation("weights")
    def begin(self, site, weights=None): ...


def check(name, deployed=True, to="coordinator", parcels=None, **arguments):
    work = getattr(Method(), name)
    call = Call("a", name, 1, parcels or {}, arguments, to)
    layer = call_checks.TakenByHospital if deployed else call_checks.TakenCall
    layer(SimpleNamespace(spec=None, sites=None)).arriving(Transaction(call, work, work.operation))


def test_receivers_kinds_and_courses_by_hand():
    check("hand_on", to="b")
    check("evaluate")
    with pytest.raises(ParcelRejected, match="releases to another site only"):
        check("hand_on", deployed=False)
    with pytest.raises(ParcelRejected, match="releases to the coordinator"):
        check("evaluate", to="b")
    for split in ("validation", "test"):
        check("evaluate", split=split)
    check("evaluate", deployed=False, split="train")
    with pytest.raises(GateRefused, match="scores of training images never leave"):
        check("evaluate", split="train")
    with pytest.raises(ParcelRejected, match="there is no split 'tests'; use train, validation, test"):
        check("evaluate", split="tests")
    check("train", parcels={"weights": Parcel("weights", {})})  # it scores nothing, and takes training images
    check_came([], name="control", operation="front", kind="gradients")
    with pytest.raises(ParcelRejected, match="'front' takes gradients as 'control', and weights came in their place"):
        check_came([], name="control", operation="front")
    with pytest.raises(ParcelRejected, match="'train' takes weights as 'weights', and gradients came"):
        check_came([], kind="gradients")
    check_came(["whatever"], name="statistics", kind="statistics")  # names are those of weights alone
    # A site that is chosen for every second round may leave out half of them, and half as many again by chance.
    assert call_checks.Course(10).left_out == call_checks.LEFT_OUT == 3
    assert call_checks.Course(10, 0.5).left_out == 3 + 8
    assert call_checks.Course(8, 0.25).left_out == 3 + 9
    assert [call_checks.Course(2).may_end_in(round) for round in (1, 2)] == [False, True]
    assert [call_checks.Course(2, ends_early=True).may_end_in(round) for round in (1, 2)] == [True, True]


def trainer(*sizes, local=()):
    model = nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))
    return SimpleNamespace(model=model, local_names=frozenset(local), split=lambda whole: (whole[:1], whole[1:]))


def check_came(tensors, name="weights", operation="train", own=None, others=(), kind="weights"):
    site = SimpleNamespace(trainer=own or trainer(1, 2, 3, 4, 5), trainers=others)
    work = getattr(Method(), operation)
    transaction = Transaction(Call("a", operation, 1), work, work.operation)
    transaction.site, transaction.received = site, {name: Parcel(kind, dict.fromkeys(tensors, torch.ones(1)))}
    call_checks.OwnArguments(SimpleNamespace(spec=None, sites=None)).arriving(transaction)


NAMES = [f"{number}.weight" for number in range(5)]


def test_weights_name_all_that_is_shared_of_a_network_or_its_front():
    check_came(NAMES)
    for names in (NAMES[1:], [*NAMES, "more"], []):
        with pytest.raises(ParcelRejected, match="the names are not those that the method shares"):
            check_came(names)
    with pytest.raises(ParcelRejected, match=r"left out: 0\.weight, 1\.weight, 2\.weight$"):
        check_came(NAMES[4:])
    with pytest.raises(ParcelRejected, match=r"left out: nothing$"):
        check_came([*NAMES, "more"])
    own = trainer(1, 2, 3, local=NAMES[:1])
    check_came(NAMES[:3], own=own)
    check_came(NAMES[1:3], own=own)
    with pytest.raises(ParcelRejected, match=r"left out: 1\.weight$"):
        check_came(NAMES[2:3], own=own)
    check_came(NAMES[:3], own=trainer(1, 2, 3, local=NAMES[:3]))  # all of it: then nothing is left out
    check_came(NAMES[:1], operation="front")
    check_came(NAMES, operation="front")
    with pytest.raises(ParcelRejected, match=r"left out: nothing$"):
        check_came(NAMES[:2], operation="front")


def declared(*releases, **how):
    return operation(*releases, **how)(lambda self, site: None).operation


TRAIN, EVALUATE, KEYS = declared("weights"), declared("metrics"), declared("keys")
WHOLE = call_checks.Course(10)


def weights(value=1.0):
    return {"weights": Parcel("weights", {"w": torch.tensor([value])})}


def call(round=1, name="train", value=None, to="coordinator"):
    return Call("north", name, round, {} if value is None else weights(value), to=to)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "north.jsonl")


@pytest.fixture
def answered(tmp_path):
    return call_checks.AnsweredCalls(tmp_path / "answered.json")


@pytest.fixture
def scored(tmp_path):
    return call_checks.ScoredWeights(tmp_path / "scored.json")


def release(ledger, round=1, name="train", kind="weights", digest="d", to="coordinator"):
    ledger.append(round=round, operation=name, kind=kind, bytes=1, digest=digest, to=to)


@pytest.mark.parametrize("round", [-1, 4, 1.0, True, "1", None])
def test_a_round_that_the_study_does_not_have_is_refused(round):
    layer = call_checks.RoundOfStudy(
        SimpleNamespace(spec=SimpleNamespace(method=SimpleNamespace(rounds=3)), sites=None)
    )
    for right in range(4):
        layer.arriving(SimpleNamespace(call=call(right)))
    with pytest.raises(ParcelRejected, match=f"the study has rounds 0 to 3, and round {round!r} came"):
        layer.arriving(SimpleNamespace(call=call(round)))


def test_a_round_does_not_come_after_a_later_one(ledger):
    call_checks.check_order(call(0), TRAIN, ledger)
    release(ledger, round=3)
    for operation_, round in ((TRAIN, 3), (TRAIN, 4), (EVALUATE, 3), (KEYS, 2), (declared(), 2)):
        call_checks.check_order(call(round), operation_, ledger)
    for operation_ in (TRAIN, EVALUATE, declared("keys", "weights")):
        with pytest.raises(ParcelRejected, match=r"^'train' came for round 2, and round 3 has begun$"):
            call_checks.check_order(call(2), operation_, ledger)


def test_a_run_is_over_when_a_model_was_scored_twice_in_a_round(answered):
    for asked in "ab":
        answered.note(call(1, "train"), asked)
        answered.note(call(4, "evaluate"), asked)
    answered.note(call(2, "evaluate"), "a")
    assert [answered.ended_before(round) for round in (1, 3, 4, 5, 6)] == [False, False, False, True, True]
    answered.note(call(2, "evaluate"), "b")
    assert [answered.ended_before(round) for round in (2, 3)] == [False, True]


def ask(ledger, answered, one=None, declared=TRAIN, asked="new", course=WHOLE, put_back=False):
    transaction = SimpleNamespace(call=one or call(), declared=declared, asked=asked)
    call_checks.check_once(transaction, ledger, answered, course, put_back=put_back)


def test_training_is_answered_once_a_round_and_twice_more_after_interruptions(ledger, answered):
    ask(ledger, answered)
    release(ledger)
    ask(ledger, answered, call(2))
    ask(ledger, answered, call(name="other"))
    ask(ledger, answered, declared=declared("weights", repeats=True))
    sentence = "^'train' has released what it made in round 1 already$"
    for receiver in ("coordinator", "south"):  # whoever receives it
        with pytest.raises(GateRefused, match=sentence):
            ask(ledger, answered, call(to=receiver))
    for number in range(2):
        ask(ledger, answered, put_back=True)
        release(ledger, digest=str(number))
    with pytest.raises(GateRefused, match=sentence):
        ask(ledger, answered, put_back=True)


def test_after_a_run_that_was_over_or_put_back_too_often_nothing_is_answered(ledger, answered):
    for number in range(call_checks.ALL_REPEATS):
        answered.note(call(1), str(number))
    answered.note(call(2), "a")  # 11 repeats until now
    ask(ledger, answered, call(2), put_back=True)
    answered.note(call(2), "b")
    sentence = f"^the run was put back too often: {call_checks.ALL_REPEATS} calls were answered once more with others$"
    with pytest.raises(GateRefused, match=sentence):
        ask(ledger, answered, call(2), put_back=True)
    ask(ledger, answered, call(2))  # no interruption
    ask(ledger, answered, call(3), put_back=True)  # the first of its kind


def test_after_a_run_that_ends_early_was_over_nothing_is_answered(ledger, answered):
    for asked in "ab":
        answered.note(call(1, "evaluate"), asked)
    early = call_checks.Course(10, ends_early=True)
    ask(ledger, answered, call(1), course=early)
    with pytest.raises(GateRefused, match=r"^the run was over before round 2: its finished model was scored$"):
        ask(ledger, answered, call(2), course=early)
    ask(ledger, answered, call(2), course=early, put_back=True)
    ask(ledger, answered, call(2))


@pytest.mark.parametrize(("round", "most"), [(1, 3), (10, 4)])
def test_scores_of_a_round_that_is_begun_again(ledger, answered, round, most):
    """Three different calls, and one more in the last round, in which test images are scored, too."""
    one = call(round, "evaluate")
    for number in range(most):
        ask(ledger, answered, one, EVALUATE, put_back=True)
        answered.note(one, str(number))
    with pytest.raises(GateRefused, match=f"^'evaluate' has released its scores of round {round} already$"):
        ask(ledger, answered, one, EVALUATE, put_back=True)
    ask(ledger, answered, one, EVALUATE)  # a rule of its own: what left is compared then
    ask(ledger, answered, one, KEYS, put_back=True)
    ask(ledger, answered, one, declared("metrics", "weights"), put_back=True)


def test_a_round_begins_with_weights_that_were_scored_in_the_round_before(scored):
    scored.check(call(2, value=5.0))  # nothing was scored
    scored.note(call(1, "evaluate"))  # a call without weights
    scored.note(call(1, "evaluate", value=1.0))
    scored.note(call(1, "evaluate", value=1.0))
    scored.note(call(1, "evaluate", value=2.0))
    for value in (1.0, 2.0, None):
        scored.check(call(2, value=value))
    for round in (0, 1, 3):
        scored.check(call(round, value=5.0))
    sentence = "^the weights that came for 'train' in round 2 are not those that were scored in round 1$"
    with pytest.raises(ParcelRejected, match=sentence):
        scored.check(call(2, value=5.0))
    assert len(call_checks.ScoredWeights(scored.path).read()["1"]) == 2


@pytest.mark.parametrize(("begun", "rounds_scored", "round", "left_out"), [
    ([1, 2, 3], [1, 2, 3], 4, 0),
    ([1, 3, 5, 7], [1, 3, 5, 7], 9, 4),
    ([1, 3, 5, 7], [1, 3, 5, 7], 8, 3),
    ([1, 3, 5, 7], [1, 3, 5, 7], 7, 3),
    ([1, 3, 5], [1, 3, 5, 7], 7, 3),
    ([1], [1, 2, 3, 4, 5, 6], 6, 4),
    ([], [1, 4, 6, 8], 10, 4),
])  # fmt: skip
def test_rounds_that_were_left_out_after_scores(scored, begun, rounds_scored, round, left_out):
    for number in begun:
        scored.begin(call(number))
        scored.begin(call(number))
    for number in rounds_scored:
        scored.note(call(number, "evaluate", value=1.0))
    if left_out <= call_checks.LEFT_OUT:
        scored.check_left_out(call(round), WHOLE)
    else:
        with pytest.raises(GateRefused, match=f"^the rounds after {left_out} scored ones were left out, and 3 may be$"):
            scored.check_left_out(call(round), WHOLE)
    scored.check_left_out(call(round), call_checks.Course(10, 0.9))  # 3 + 2 may be
    assert call_checks.ScoredWeights(scored.path).read().get("begun", []) == [str(number) for number in begun]


def scores(*values):
    return [Parcel("metrics", {}, {"loss": value}) for value in values]


@pytest.mark.parametrize(("round", "course", "put_back", "allowed"), [
    *((1, WHOLE, False, 1), (10, WHOLE, False, 2), (1, call_checks.Course(10, ends_early=True), False, 2)),
    *((1, WHOLE, True, 3), (10, WHOLE, True, 4)),
])  # fmt: skip
def test_scores_leave_so_often_in_a_round(ledger, round, course, put_back, allowed):
    one = call(round, "evaluate")
    call_checks.check_scores(one, scores(*range(allowed)), ledger, course, put_back=put_back)
    with pytest.raises(GateRefused, match="has released its scores"):  # before the first line, too
        call_checks.check_scores(one, scores(*range(allowed + 1)), ledger, course, put_back=put_back)
    release(ledger, round=round, name="train")
    release(ledger, round=round, name="other", kind="metrics")
    release(ledger, round=round + 1, name="evaluate", kind="metrics")
    for number in range(allowed):
        call_checks.check_scores(one, scores(0.5), ledger, course, put_back=put_back)
        call_checks.check_scores(one, scores(*range(allowed - number)), ledger, course, put_back=put_back)
        with pytest.raises(GateRefused, match=f"^'evaluate' has released its scores of round {round} already$"):
            call_checks.check_scores(one, scores(*range(allowed - number + 1)), ledger, course, put_back=put_back)
        release(ledger, round=round, name="evaluate", kind="metrics", digest=str(number))
    with pytest.raises(GateRefused, match="has released its scores"):
        call_checks.check_scores(one, scores(0.5), ledger, course, put_back=put_back)
    call_checks.check_scores(one, [Parcel("statistics", {})], ledger, course, put_back=put_back)
