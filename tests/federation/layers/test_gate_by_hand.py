"""What the gate sets aside before work, which refusals tell of images, and how a line is written, case by case."""

import math

import numpy as np
import pytest
import torch

from polyclinic.federation.call import GateRefused, GateRefusedData, Suspended
from polyclinic.federation.layers.gate import Gate, RawImages, check_finite
from polyclinic.federation.layers.suspension import FOLDER, Suspension, Suspensions
from polyclinic.federation.ledger.budget import EPSILON_LOCK, Budget, Reservations, Reserved
from polyclinic.federation.ledger.digest_threads import PAYS_FROM
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.files import lock

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 1, 8, 8), dtype=np.uint8)
MODEL = 500  # bytes of the model
RECORD = {"epsilon": 1.0, "delta": 1e-5, "steps": 3}


@pytest.fixture
def make(tmp_path):
    def build(run="mine", shared=True, repeats=False, **policy):
        (tmp_path / "runs").mkdir(exist_ok=True)
        rules = Policy(**{"kinds": tuple(KINDS), **policy})
        ledger = Ledger(tmp_path / "runs" / run / "ledger" / "north.jsonl")
        if repeats:
            written(ledger)
            ledger.expect_repeats_after(0)
        runs = tmp_path / "runs" if shared else None
        budget = Budget(rules, ledger.path, runs) if rules.is_limited else None
        return Gate("north", rules, ledger, RawImages(IMAGES), budget)

    return build


def written(ledger, digest="d", bytes=1):
    ledger.append(round=1, operation="train", kind="weights", bytes=bytes, digest=digest, to="coordinator")


def release(gate, *parcels, to="coordinator", **how):
    return gate.release(parcels, round=1, operation="train", to=to, **how)


def refusal(gate, *parcels, **how) -> GateRefused:
    with pytest.raises(GateRefused) as refused:
        release(gate, *parcels, **how)
    return refused.value


@pytest.mark.parametrize(("kinds", "private", "repeats", "aside", "alone"), [
    (["weights"], False, False, Reserved(MODEL, 0), False),
    (["weights"], True, False, Reserved(MODEL, 0), True),
    (["weights"], True, True, Reserved(0, 0), False),
    (["gradients", "statistics"], True, False, Reserved(MODEL, 0), True),
    (["weights", "metrics"], True, False, Reserved(0, 1), True),
    (["latents"], True, False, Reserved(0, 0), True),
    (["latents"], False, False, Reserved(0, 0), False),
    (["metrics"], True, False, Reserved(0, 1), False),
    (["keys"], True, False, Reserved(0, 0), False),
    (["metrics", "shares", "keys"], True, False, Reserved(0, 1), False),
    ([], True, False, Reserved(0, 0), False),
])  # fmt: skip
def test_what_an_operation_sets_aside(make, tmp_path, kinds, private, repeats, aside, alone):
    """The bytes of a model, a parcel of scores, and where images are looked at in private, all epsilon that is left."""
    gate = make(repeats=repeats, max_bytes=10**6, max_epsilon=9.0, max_scores=9)
    with gate.reserved(1, "train", kinds, MODEL, private=private):
        assert Reservations(tmp_path / "runs", "another").of_others() == aside
        assert _is_held(tmp_path / "runs" / EPSILON_LOCK) is alone
    assert Reservations(tmp_path / "runs", "another").of_others() == Reserved()


def _is_held(path):
    try:
        with lock(path, wait=0):
            return False
    except TimeoutError:
        return True


def begun(gate, kinds):
    with gate.reserved(1, "train", kinds, MODEL, private=False):
        return True


def test_work_whose_answer_may_not_leave_is_not_begun(make):
    gate = make(kinds=("weights",), deployed=True)
    assert begun(gate, ["weights", "latents"])  # some of it may
    assert begun(gate, [])
    with pytest.raises(GateRefused, match=r"^site 'north' kept back latents of 'train': .* \(it allows weights\)"):
        begun(gate, ["latents", "codes"])
    with pytest.raises(GateRefused, match=r"^site 'north' kept back real-images of 'train': real images never leave"):
        begun(gate, ["real-images", "masks"])


def test_a_budget_that_is_overdrawn_stops_what_releases_something_new(make):
    """The site's people may lower it in the middle of a run."""
    written(make().ledger, bytes=50)
    gate = make(max_bytes=40)
    assert begun(gate, [])
    with pytest.raises(GateRefused, match="more bytes would have left"):
        begun(gate, ["latents"])
    gate.ledger.expect_repeats_after(0)
    assert begun(gate, ["latents"])


@pytest.mark.parametrize(
    ("metadata", "repeats", "tells"),
    [({"samples": 4}, False, False), ({"loss": 0.5}, False, True), ({"samples": 4}, True, True)],
)
def test_a_refusal_for_bytes_that_depends_on_images_is_said_to(make, metadata, repeats, tells):
    gate = make(repeats=repeats, max_bytes=10)
    refused = refusal(gate, Parcel("weights", {"w": torch.ones(9)}, metadata))
    assert type(refused) is (GateRefusedData if tells else GateRefused)
    assert str(refused).startswith("site 'north' kept back what 'train' made: more bytes")


def test_real_images_never_leave_a_deployed_site(make):
    real = Parcel("real-images", {"images": torch.from_numpy(IMAGES)})
    assert "whatever its policy lists" in str(refusal(make(deployed=True), real))
    assert release(make(), real)


@pytest.mark.parametrize(("cohort", "leaves"), [(None, True), (3, True), (4, True), (2, False), (0, False)])
def test_a_cohort_is_large_enough_or_not_known(make, cohort, leaves):
    gate = make(min_cohort=3)
    parcel = Parcel("weights", {"w": torch.ones(1)})
    if leaves:
        assert release(gate, parcel, cohort=cohort)
    else:
        assert "fewer patients are behind it than the 3" in str(refusal(gate, parcel, cohort=cohort))


@pytest.mark.parametrize(
    ("deployed", "to", "salted"),
    [(True, "south", True), (True, "coordinator", False), (False, "south", False), (False, "coordinator", False)],
)
def test_a_line_about_a_secret_between_deployed_sites_is_salted(make, deployed, to, salted):
    gate = make(deployed=deployed)
    release(gate, Parcel("weights", {"w": torch.ones(1)}, privacy=RECORD), Parcel("codes", {}), to=to)
    first, second = verify(gate.ledger.path)
    assert ("salt" in first, "salt" in second) == (salted, salted)
    assert (first["privacy"], second["privacy"]) == (RECORD, None)


@pytest.mark.parametrize(("kind", "written_down"), [("masked", True), ("shares", True), ("weights", False)])
def test_a_line_names_the_secure_sum_that_its_parcel_belongs_to(make, kind, written_down):
    gate = make()
    release(gate, Parcel(kind, {"w": torch.ones(1)}, {"sum": {"id": "x", "sites": 3}}))
    [line] = verify(gate.ledger.path)
    assert line.get("sum") == ({"id": "x", "sites": 3} if written_down else None)


LARGE = PAYS_FROM // 4


@pytest.mark.parametrize(("numbers", "policy", "how", "soon"), [
    (LARGE, {}, {"by_reference": True}, True),
    (LARGE - 1, {}, {"by_reference": True}, False),
    (LARGE, {}, {}, False),
    (LARGE, {}, {"by_reference": True, "seal": lambda parcel: parcel}, False),
    (LARGE, {"max_bytes": 10**9}, {"by_reference": True}, False),
])  # fmt: skip
def test_the_line_of_a_large_parcel_waits_only_in_a_simulation_without_limits(make, numbers, policy, how, soon):
    gate = make(**policy)
    small, large = Parcel("codes", {}), Parcel("weights", {"w": torch.zeros(numbers)}, privacy=RECORD)
    release(gate, small, large, **how)
    assert bool(gate.ledger.due) is soon
    gate.ledger.settle()
    told = [(line["kind"], line["bytes"], line["digest"], line["privacy"]) for line in verify(gate.ledger.path)]
    assert told == [("codes", small.size, small.digest, None), ("weights", large.size, large.digest, RECORD)]


def test_the_first_reason_of_a_suspension_is_kept_until_a_person_releases_it(tmp_path):
    suspensions = Suspensions(tmp_path)
    suspensions.refuse_while_any()
    suspensions.suspend("study-b", "the first reason")
    suspensions.suspend("study-b", "another reason")
    suspensions.suspend("study-a", "a third one")
    assert [(one.study, one.reason) for one in suspensions.all()] == [
        ("study-a", "a third one"),
        ("study-b", "the first reason"),
    ]
    assert all(isinstance(one, Suspension) and len(one.since) == 19 for one in suspensions.all())
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700
    with pytest.raises(Suspended, match=r"^study 'study-a' is suspended since .*: a third one$"):
        suspensions.refuse_while_any()
    assert suspensions.release("study-a")
    assert not suspensions.release("study-a")
    assert suspensions.release("study-b")
    suspensions.refuse_while_any()


@pytest.mark.parametrize(("shape", "fits"), [
    *(((8, 8), True), ((64,), True), ((5, 64), True), ((2, 3, 8, 8), True), ((3, 2, 32), True)),
    *(((63,), False), ((128,), False), ((8, 16), False), ((64, 2), False), ((), False), ((0, 64), True)),
])  # fmt: skip
def test_tensors_whose_last_axes_make_up_an_image(shape, fits):
    known, count = RawImages(IMAGES), math.prod(shape)
    tensor = torch.from_numpy(np.resize(IMAGES[0], count)).reshape(shape)
    for _ in range(2):  # the second time as the first
        assert known.found_in(tensor) is (fits and count > 0)
    assert not known.found_in(tensor.to(torch.complex64))


def weights(value=1.0, size=10, privacy=None):
    return Parcel("weights", {"w": torch.full((size,), value)}, {"samples": 4}, privacy)


def record(epsilon, steps, trained=0, after=0):
    named = {"trained": trained, "after": after}
    return {"epsilon": epsilon, "delta": 1e-5, "steps": steps, "covers": ["w"], "does_not_cover": [], **named}


def refused_in_words(gate, *parcels) -> str:
    lines = gate.ledger.position.lines
    found = str(refusal(gate, *parcels))
    assert gate.ledger.position.lines == lines
    return found


SIZE = len(weights().encoded)


def test_parcels_of_an_operation_leave_together_and_may_be_repeated_once(make):
    gate = make(max_bytes=SIZE)
    assert "kept back what 'train' made" in refused_in_words(gate, weights(1.0), weights(2.0))
    release(gate, weights(1.0))


def test_a_resumed_run_may_send_the_same_again(make):
    """It is on record, and nothing new leaves."""
    release(make(max_bytes=SIZE), weights(1.0))
    again = make(max_bytes=SIZE)
    again.ledger.expect_repeats_after(0)
    release(again, weights(1.0))
    assert again.ledger.position.lines == 1
    assert "bytes would have left" in refused_in_words(again, weights(1.0))  # a second time is new


def test_what_is_not_covered_or_not_finite_does_not_leave(make):
    gate = make(max_epsilon=3.0)
    assert "differential privacy does not cover this" in refused_in_words(gate, weights(1.0))
    assert "differential privacy does not cover this" in refused_in_words(gate, Parcel("metrics", {}, {"loss": 0.3}))
    release(gate, Parcel("statistics", {}, {"samples": 4}))  # sizes count as public
    assert "epsilon inf" in refused_in_words(gate, weights(privacy={**record(0.0, 1), "epsilon": None}))
    for dtype, large in ((torch.float32, 3e38), (torch.float16, 6e4), (torch.float64, 1e308), (torch.complex64, 3e38)):
        check_finite(Parcel("weights", {"w": torch.full((9,), large, dtype=dtype)}))
    check_finite(Parcel("weights", {"w": torch.tensor([-3e38, 3e38]), "n": torch.arange(3), "none": torch.ones(0)}))
