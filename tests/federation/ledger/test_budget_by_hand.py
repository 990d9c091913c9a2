"""What is counted against a site's budget, number by number: this run, other runs, and what others have set aside."""

import contextlib
import math
import shutil

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.ledger.budget import (
    EPSILON_LOCK,
    FOLDER,
    Budget,
    EpsilonLimit,
    OverBudget,
    OverBytes,
    Price,
    Reservations,
    Reserved,
    Spent,
    price_at,
    size_tells_something,
    tells_something,
)
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken
from polyclinic.federation.ledger.parcel import Parcel, shortened
from polyclinic.federation.policy import Policy
from polyclinic.files import lock
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon, group_epsilon

#: every image takes part in every step, so that epsilon is known at once
MECHANISM = {"noise": 20.0, "sampling_rate": 1.0, "steps": 50}


def record(epsilon, steps=10, **more):
    return {"epsilon": epsilon, "delta": 1e-5, "steps": steps, **more}


def counted(delta=1e-5, accountant="prv", **more):
    return {**record(1.0), "delta": delta, "accountant": accountant, "mechanisms": [MECHANISM], **more}


class Runs:
    """The runs of a site: 'mine' is this one."""

    def __init__(self, folder):
        self.folder, self.anchors = folder / "runs", folder / "anchors"
        self.folder.mkdir()

    def path(self, run="mine"):
        return self.folder / run / "ledger" / "north.jsonl"

    def write(self, run, bytes=0, kind="weights", privacy=None, number=1):
        ledger = Ledger(self.path(run))
        ledger.append(
            round=number, operation="train", kind=kind, bytes=bytes, digest="d", to="coordinator", privacy=privacy
        )
        return ledger

    def budget(self, shared=True, **policy):
        rules = Policy(kinds=tuple(KINDS), **policy)
        return Budget(rules, self.path(), self.folder if shared else None, None, self.anchors)

    @contextlib.contextmanager
    def at_work(self, wanted, run="busy"):
        with Reservations(self.folder, run).hold(wanted):
            yield


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def is_free(path):
    try:
        with lock(path, wait=0):
            return True
    except TimeoutError:
        return False


def test_lines_and_records_by_hand():
    spent = Spent()
    assert (spent.bytes, spent.scores, spent.epsilon, spent.steps, spent.trained) == (0, 0, 0.0, 0, None)
    spent.add("weights", 5, None, 9.0)  # without a record nothing is known to be spent
    spent.add("metrics", 3, None, 9.0)
    spent.add("metrics", 2, record(1.0, steps=4, trained=7), 1.5)
    assert (spent.bytes, spent.scores, spent.epsilon, spent.steps, spent.trained) == (10, 2, 1.5, 4, 7)
    assert Price()(record(3.0)) == 3.0
    assert Price()(record(None)) == math.inf
    with pytest.raises(OverBudget, match="accepts the accountants rdp, not 'prv'"):
        Price(accountants=("rdp",))(counted())
    with pytest.raises(OverBudget, match=r"its images name no patients; set `patient` in site\.toml"):
        Price(images=None)(counted())


@pytest.mark.parametrize(("records", "epsilon"), [
    # an older version wrote neither `trained` nor `after`
    ([(1.0, 10, {}), (2.0, 20, {})], 2.0),
    ([(1.0, 10, {}), (2.0, 20, {"trained": 1})], 2.0),
    ([(1.0, 10, {"trained": 0}), (2.0, 10, {})], 2.0),
    ([(1.0, 10, {"trained": 1}), (2.0, 20, {})], 3.0),
    ([(1.0, 10, {"trained": 1}), (2.0, 20, {"trained": 2, "after": 1})], 2.0),
    ([(1.0, 10, {"trained": 1}), (2.0, 20, {"trained": 2, "after": 0})], 3.0),
    ([(1.0, 10, {"trained": 1}), (2.0, 9, {"trained": 2, "after": 1})], 3.0),
    ([(2.0, 10, {"trained": 1}), (1.0, 10, {"trained": 1})], 2.0),
    ([(2.0, 10, {"trained": 1}), (0.25, 9, {"trained": 2})], 2.25),
    ([(1.0, 9, {"trained": 1}), (2.0, 8, {"trained": 1}), (4.0, 7, {"trained": 1})], 7.0),
])  # fmt: skip
def test_a_record_that_does_not_follow_the_one_before_it_adds_to_it(records, epsilon):
    spent = Spent()
    for price, steps, named in records:
        spent.add("weights", 1, record(price, steps, **named), price)
    assert spent.epsilon == epsilon


def test_bytes_of_this_run_of_others_and_of_work_that_is_being_done_add_up(runs):
    runs.write("mine", bytes=5)
    runs.write("old", bytes=10)
    parcel = Parcel("weights", {"w": torch.ones(3)})
    with runs.at_work(Reserved(3, 0)):
        runs.budget(max_bytes=20).check_bytes(2)
        with pytest.raises(OverBytes, match="than the 20 that its policy allows"):
            runs.budget(max_bytes=20).check_bytes(3)
        runs.budget(max_bytes=18 + parcel.size).check([parcel])
        with pytest.raises(OverBytes):
            runs.budget(max_bytes=17 + parcel.size).check([parcel])
        runs.budget(max_scores=0).check_bytes(10**9)  # no limit of bytes
        runs.budget(max_scores=0).check([parcel])
    runs.budget(max_bytes=20).check_bytes(5)
    runs.budget(shared=False, max_bytes=20).check_bytes(15)


def test_scores_of_this_run_of_others_and_of_work_that_is_being_done_add_up(runs):
    runs.write("mine", kind="metrics")
    runs.write("old", kind="metrics")
    runs.write("old", kind="metrics", number=2)
    runs.write("old", kind="weights", number=3)
    scores, weights = Parcel("metrics", {}, {"loss": 0.5}), Parcel("weights", {})
    with runs.at_work(Reserved(0, 4)):
        for ask in (lambda budget: budget.check_scores(1), lambda budget: budget.check([scores])):
            ask(runs.budget(max_scores=8))
            with pytest.raises(OverBudget, match=r"^8 scores would have left this site, and its policy allows 7"):
                ask(runs.budget(max_scores=7))
        runs.budget(max_scores=9).check_scores(2)
        with pytest.raises(OverBudget, match=r"^9 scores would have left"):
            runs.budget(max_scores=8).check_scores(2)
        runs.budget(max_scores=7).check([weights])
        runs.budget(max_bytes=10**9).check_scores(10**9)  # no limit of scores


def test_work_that_ends_while_others_look_has_nothing_set_aside(runs):
    with runs.at_work(Reserved(3, 0)):
        (runs.folder.parent / FOLDER / "busy.json").unlink()
        (runs.folder.parent / FOLDER / "busy.json").symlink_to("gone")  # listed, and not there when it is read
        assert Reservations(runs.folder, "mine").of_others() == Reserved()
        runs.budget(max_bytes=3).check_bytes(3)


def test_epsilon_of_this_run_and_of_others_adds_up(runs):
    runs.write("mine", privacy=record(1.0, steps=5))
    runs.write("old", privacy=record(2.0))
    parcel = Parcel("weights", {"w": torch.ones(1)}, privacy=record(1.5, steps=6))  # 0.5 more in this run
    runs.budget(max_epsilon=3.5).check([parcel])
    with pytest.raises(OverBudget, match=r"^epsilon 3\.5 would be spent, and the site's policy allows 3\.4$"):
        runs.budget(max_epsilon=3.4).check([parcel])
    budget = runs.budget(max_epsilon=3.4)
    budget.spend("weights", 1, record(1.4, steps=6))
    with pytest.raises(OverBudget, match=r"^epsilon 3\.45 would be spent"):
        budget.check([Parcel("weights", {"w": torch.ones(1)}, privacy=record(1.45, steps=7))])


def test_ledgers_of_other_runs_are_read_again_when_they_have_changed(runs):
    runs.write("old", bytes=10)
    budget = runs.budget(max_bytes=20)
    budget.check_bytes(10)
    runs.write("old", bytes=4)
    runs.write("new", bytes=1)
    budget.check_bytes(5)
    with pytest.raises(OverBytes):
        budget.check_bytes(6)


def anchored(runs, run, lines=2):
    for number in range(lines):
        ledger = runs.write(run, bytes=1, number=number)
    AnchorFile(runs.anchors / f"{run}.json").keep(head=ledger.head)


def test_a_ledger_of_another_run_that_is_gone_or_cut_short_stops_the_site(runs):
    anchored(runs, "old")
    anchored(runs, "other")
    budget = runs.budget(max_bytes=20)
    budget.check_bytes(16)
    with pytest.raises(OverBytes):
        budget.check_bytes(17)
    whole = runs.path("old").read_bytes()
    runs.path("old").write_bytes(whole.splitlines(keepends=True)[0])
    for known in (budget, runs.budget(max_bytes=20)):
        with pytest.raises(
            LedgerBroken, match=r"north\.jsonl, line 2: is missing; the anchor .*old\.json says 2 lines"
        ):
            known.check_bytes(0)
    shutil.rmtree(runs.folder / "old")
    for known in (budget, runs.budget(max_bytes=20)):
        with pytest.raises(LedgerBroken, match=r"old.ledger, line 1: is missing, the ledger is empty or gone"):
            known.check_bytes(0)


@pytest.mark.parametrize(
    ("policy", "private", "alone"),
    [({"max_epsilon": 9.0}, True, True), ({"max_epsilon": 9.0}, False, False), ({"max_bytes": 9}, True, False)],
)
def test_private_work_is_alone_where_epsilon_is_limited(runs, policy, private, alone):
    others = Reservations(runs.folder, "another")
    with runs.budget(**policy).reserved(Reserved(4, 2), private=private):
        assert is_free(runs.folder / EPSILON_LOCK) is not alone
        assert others.of_others() == Reserved(4, 2)
        assert Reservations(runs.folder, "mine").of_others() == Reserved()  # its own do not count
    assert others.of_others() == Reserved()
    assert is_free(runs.folder / EPSILON_LOCK)
    assert (runs.folder.parent / FOLDER).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("wanted", "sentence"), [
    (Reserved(11, 0), "more bytes would have left this site than the 10"),
    (Reserved(0, 3), "3 scores would have left this site"),
])  # fmt: skip
def test_work_that_the_budget_does_not_cover_is_not_begun(runs, wanted, sentence):
    budget = runs.budget(max_bytes=10, max_scores=2)
    with pytest.raises(OverBudget, match=sentence), budget.reserved(wanted, private=False):
        pytest.fail("it was begun")
    with budget.reserved(Reserved(10, 2), private=False):
        pass


def test_private_work_is_not_begun_once_other_runs_have_spent_epsilon(runs):
    runs.write("old", privacy=record(1.25))
    runs.write("older", privacy=record(0.75))
    runs.write("mine", privacy=record(50.0))  # what it has spent may leave again
    sentence = r"^epsilon 2 is spent by other runs, and the site's policy allows 2$"
    with pytest.raises(OverBudget, match=sentence), runs.budget(max_epsilon=2.0).reserved(Reserved(), private=True):
        pytest.fail("it was begun")
    for budget, private in (
        (runs.budget(max_epsilon=2.01), True),
        (runs.budget(max_epsilon=2.0), False),
        (runs.budget(max_bytes=10), True),
    ):
        with budget.reserved(Reserved(), private=private):
            pass


@pytest.mark.parametrize(("parcel", "content", "size"), [
    (Parcel("weights", {}), False, False),
    (Parcel("weights", {}, {"samples": 3, "steps": 9}), False, False),
    (Parcel("weights", {"w": torch.ones(1)}), True, False),
    (Parcel("weights", {}, {"loss": 0.5}), True, True),
    (Parcel("weights", {"w": torch.ones(1)}, {"samples": 3, "loss": 0.5}), True, True),
    (Parcel("keys", {"a": torch.ones(1)}), False, False),
    (shortened(Parcel("weights", {"w": torch.ones(40, 40)}), "int8"), True, True),
    (Parcel("shares", {}, {"sum": "x"}), False, True),
    (Parcel("synthetic-images", {"x": torch.zeros(1, 1, 2, 2)}, compressed=("x",)), True, True),
])  # fmt: skip
def test_what_the_content_and_the_size_of_a_parcel_tell(parcel, content, size):
    assert (tells_something(parcel), size_tells_something(parcel)) == (content, size)


@pytest.mark.parametrize(("delta", "of_record", "counted_at"), [(1e-6, 1e-5, 1e-6), (1e-4, 1e-5, 1e-5)])
def test_epsilon_is_counted_at_the_smaller_delta(delta, of_record, counted_at):
    expected = composed_epsilon([Mechanism(**MECHANISM)], counted_at, "prv")
    assert Price(delta)(counted(of_record)) == expected
    assert Price()(counted(counted_at)) == expected  # a site without a delta of its own takes that of the record


@pytest.mark.parametrize(
    ("images", "unit", "counts_for"),
    [(1, None, 1), (3, None, 3), (3, "image", 3), (3, "patient", 1), (None, "patient", 1)],
)
def test_epsilon_of_a_patient_is_that_of_all_images(images, unit, counts_for):
    told = counted() if unit is None else counted(unit=unit)
    assert Price(1e-5, images=images)(told) == group_epsilon([Mechanism(**MECHANISM)], 1e-5, counts_for, "prv")


@pytest.mark.parametrize(("cases", "unit", "images"), [
    *(([1, 1, 2, 1], "patient", 3), ([1, 2, 3, 4], "patient", 1), (None, "patient", None)),
    *(([1, 1, 2, 1], "image", 1), (None, "image", 1), ([], "patient", 1)),
])  # fmt: skip
def test_the_price_of_a_site(cases, unit, images):
    count = 4 if cases is None else len(cases)
    known = None if cases is None else np.array(cases, np.int64)
    train = ImageSet(np.zeros((count, 1, 2, 2), np.uint8), np.zeros(count), cases=known)
    price = price_at(Policy(unit=unit, accountants=("prv",)), train)
    assert price == Price(1 / max(count, 2), ("prv",), images)


def test_the_target_of_a_study_is_counted_from_the_ledger_of_its_run(tmp_path):
    """For one image, by whichever accountant the study has."""
    ledger = Ledger(tmp_path / "north.jsonl")
    for told in (record(1.0, steps=5), None):
        ledger.append(round=1, operation="a", kind="codes", bytes=1, digest="d", to="coordinator", privacy=told)
    target = EpsilonLimit(2.0, ledger.path, Price(1e-5, accountants=("rdp",), images=None))
    target.check([Parcel("weights", {"w": torch.ones(1)}), Parcel("weights", {}, privacy=record(2.0, steps=6))])
    for rounding, fits in ((1e-7, True), (1e-5, False)):  # a sum of floats may differ by so much
        close = EpsilonLimit(3.0 * (1 - rounding), tmp_path / "none.jsonl", Price())
        with contextlib.nullcontext() if fits else pytest.raises(OverBudget, match=r"privacy\.target_epsilon"):
            close.check([Parcel("weights", {}, privacy=record(3.0))])
    put_back = Parcel("weights", {}, privacy=record(1.1, steps=4))
    sentence = r"^this run would have spent epsilon 2\.1, and its study sets privacy\.target_epsilon = 2$"
    with pytest.raises(OverBudget, match=sentence):
        target.check([put_back])
    told = counted()
    price = composed_epsilon([Mechanism(**MECHANISM)], 1e-5, "prv")
    fresh = EpsilonLimit(price, tmp_path / "none.jsonl", Price(1e-5, accountants=("rdp",), images=3))
    fresh.check([Parcel("weights", {}, privacy=told)])
    fresh.spend(told)
    fresh.spend(None)
    with pytest.raises(OverBudget):
        fresh.check([Parcel("weights", {}, privacy=record(0.1, steps=1))])
