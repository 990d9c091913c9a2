"""The host of a site, its policy and its operations."""

import contextlib
from types import SimpleNamespace
from typing import ClassVar

import pydantic
import pytest
import torch
from plain_study import host_spec, kit_of, plain_study, plain_trainer
from torch import nn

from polyclinic.federation.call import (
    Call,
    DataDependentRefusal,
    GateRefused,
    GateRefusedData,
    Suspended,
    may_depend_on_images,
)
from polyclinic.federation.host import SiteHost
from polyclinic.federation.layers.gate import model_bytes
from polyclinic.federation.ledger.keys import Anchor, SeedKeys, sign_anchor
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import AnchorFile, LedgerBroken
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation, signature_of
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import Federated

NUMBERS = torch.linspace(0, 1, 2048)
HOSPITAL = Policy(deployed=True, shares="equal", incoming={"on": False})


class Play:
    """A plan that tells how many sites did it at once. `method.stacks` says whether they may."""

    divides = True

    @classmethod
    def may_group(cls, method, trainer, sites, *, noted):
        return method.stacks and sites > 1 and not noted

    @classmethod
    def carry_out(cls, plans):
        return [torch.tensor([float(len(plans))]) for _ in plans]


class Sing(Play):
    """One whose sites cannot be divided."""

    divides = False

    @classmethod
    def may_group(cls, method, trainer, sites, *, noted):
        return True


class Band:
    """A method whose operations tell how many sites did them at once."""

    name, rounds, weighting = "band", 3, "uniform"
    traits = SimpleNamespace(gradual=True)

    def __init__(self, stacks=True):
        self.stacks = stacks

    @operation("statistics", plan=Play)
    def play(self, site):
        return Parcel("statistics", {"there": (yield Play())})

    @operation("statistics", plan=Sing)
    def sing(self, site):
        return Parcel("statistics", {"there": (yield Sing())})

    @operation("statistics")
    def hum(self, site):
        return [Parcel("statistics", {"there": torch.ones(1)})]

    @operation()
    def listen(self, site):
        """Releases nothing."""

    SUMMED: ClassVar = {"train": "mean"}

    @operation("weights")
    def train(self, site, weights):
        return Parcel("weights", {name: one + 1 for name, one in weights.items()}, {"samples": 4})

    @operation(partner="sites")
    def take(self, site, latents): ...

    @operation("metrics", splits=("test",))
    def score(self, site, weights):
        return Parcel("metrics", {"auc": torch.ones(1)})


def make(folder, method=None, trainer=None, **changes):
    tables = {name: changes.pop(name) for name in ("defence", "poisoning", "wire", "federation") if name in changes}
    given = {"trainer": trainer or plain_trainer(), "policy": Policy(shares="equal", incoming={"on": False}), **changes}
    return SiteHost(host_spec(folder, study=plain_study(method or Band(), **tables), **given))


@pytest.mark.parametrize("private", [True, False])
def test_a_deployed_site_with_privacy_notes_what_its_noise_depends_on(tmp_path, private):
    privacy = SimpleNamespace(on=(), cover="updates", target_epsilon=None) if private else None
    host = make(tmp_path, trainer=Watched(privacy), policy=HOSPITAL)
    host.handle(Call("a", "hum", 1))
    assert ("trail" in host.sites.get("a").state) is private


@pytest.mark.parametrize(("changes", "grouped"), [
    ({}, {"play": True, "sing": True, "hum": False}),
    ({"method": Band(stacks=False)}, {"play": False, "sing": True, "hum": False}),
    ({"policy": Policy(shares="random")}, {"play": False, "sing": True, "hum": False}),
    ({"policy": Policy(shares="equal", min_cohort=1)}, {"play": False, "sing": True, "hum": False}),
    ({"trainers": {"a": None}}, {"play": False, "sing": False, "hum": False}),
    ({"archive": "one"}, {"play": False, "sing": True, "hum": False}),
])  # fmt: skip
def test_operations_that_may_work_at_several_sites_at_once(tmp_path, changes, grouped):
    host = make(tmp_path, **changes)
    assert {name: host.is_grouped(name, 2) for name in grouped} == grouped
    assert not host.is_grouped("play", 1)
    assert [host.can_divide(name) for name in grouped] == [True, False, False]


def train(host, values=NUMBERS):
    return host.handle(Call("a", "train", 1, {"weights": Parcel("weights", {"w": values})}))


class Watched(SimpleNamespace):
    """A trainer that tells what a host asked of it."""

    def __init__(self, privacy=None):
        super().__init__(privacy=privacy, device=torch.device("cpu"), local_names=frozenset(), model=nn.Linear(1, 1))
        self.asked = []

    @contextlib.contextmanager
    def note_batches(self):
        self.asked.append("batches")
        yield [torch.tensor([0, 1, 2])]

    @contextlib.contextmanager
    def random_shares(self, rng):
        self.asked.append("shares")
        yield


class Kept:
    """An archive that remembers what it is given."""

    def __init__(self):
        self.given = []

    def begins(self, site, call, received):
        self.given.append(received)

    def released(self, site, call, kept, used, address, left, asked):
        self.given.append((kept, used, address, left))


@pytest.mark.parametrize("wire", ["exact", "fp16", "delta", "integer"])
def test_an_archive_keeps_what_an_attacker_gets_and_how_it_left(tmp_path, wire):
    """The rounded numbers where the wire rounds; else those of the work, and beside them differences or sums."""
    archive, added = Kept(), {"federation": Federated(sum="integer")} if wire == "integer" else {"wire": wire}
    [left] = train(make(tmp_path, trainer=Watched(), archive=archive, **added)).parcels
    came, ((kept,), used, address, told) = archive.given
    assert torch.equal(came["weights"].tensors["w"], NUMBERS)
    assert ([batch.tolist() for batch in used], address) == ([[0, 1, 2]], "train")
    assert torch.equal(kept.tensors["w"], NUMBERS + 1) is (wire != "fp16")
    assert (told is None) is (wire in ("exact", "fp16"))
    if told:
        assert told[0].digest == left.digest


def test_sums_and_bytes_of_what_is_shared(tmp_path):
    with pytest.raises(GateRefused, match="holds NaN or infinity"):
        train(make(tmp_path, federation=Federated(sum="integer")), NUMBERS * torch.nan)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    shared = SimpleNamespace(model=model, local_names=frozenset({"1.running_mean", "1.num_batches_tracked"}))
    assert model_bytes(shared) == 4 * (6 + 2 + 2 + 2 + 2)
    shared.local_names = frozenset()
    assert model_bytes(shared) == 4 * (6 + 2 + 2 + 2 + 2 + 2) + 8


def test_a_head_that_comes_with_a_call_is_kept_if_both_have_signed_it(tmp_path):
    """The keys of a simulation stand for those of two kits."""
    keys = SeedKeys(0)
    host = make(tmp_path / "study", policy=HOSPITAL, kit=kit_of(tmp_path, keys=keys))
    reply = host.handle(Call("a", "hum", 1))
    head = host.sites.ledgers["a"].head
    assert reply.head == head
    signed = sign_anchor(keys.signing_key("coordinator"), "study", "a", head)

    def send(anchor):
        return host.handle(Call("a", "listen", 1, anchor=anchor))

    with pytest.raises(ParcelRejected, match="is not signed by this site"):
        send(signed._replace(signature="00" * 64))
    for other in (
        signed._replace(countersignature="00" * 64),
        sign_anchor(keys.signing_key("coordinator"), "another run", "a", head),
        sign_anchor(keys.signing_key("b"), "study", "a", head),
    ):
        with pytest.raises(ParcelRejected, match="is not signed by the coordinator's key"):
            send(other)
    assert AnchorFile(tmp_path / "anchors" / "study.json").countersigned is None
    send(signed)
    assert AnchorFile(tmp_path / "anchors" / "study.json").countersigned == signed
    plain = make(tmp_path / "plain")
    plain.handle(Call("a", "listen", 1, anchor=Anchor(9, "anything")))  # a simulated site keeps none


class Stopped:
    def __init__(self):
        self.noted = []

    def suspend(self, run, reason):
        self.noted.append((run, reason))

    def refuse_while_any(self):
        if self.noted:
            raise Suspended("a person must look first")


def test_a_failure_that_may_depend_on_images_stops_the_study_as_does_one_that_is_not_approved(tmp_path):
    class Fails(Band):
        @operation("statistics")
        def hum(self, site):
            raise ZeroDivisionError("no patient has this")

    stopped = Stopped()
    host = make(tmp_path / "study", method=Fails(), policy=HOSPITAL, kit=kit_of(tmp_path, stopped))
    with pytest.raises(ParcelRejected):
        host.handle(Call("a", "take", 1, {"latents": Parcel("latents", {})}))
    assert stopped.noted == []
    with pytest.raises(ZeroDivisionError):
        host.handle(Call("a", "hum", 1))
    assert stopped.noted == [("study", "ZeroDivisionError: no patient has this")]
    with pytest.raises(Suspended, match="must look first"):
        host.handle(Call("a", "listen", 1))

    def refuse():
        raise Suspended("not approved")

    with pytest.raises(Suspended, match="not approved"):
        make(tmp_path, policy=HOSPITAL, kit=kit_of(tmp_path, require_approval=refuse)).handle(Call("a", "listen", 1))
    with pytest.raises(Suspended, match="not approved"):
        make(tmp_path, kit=kit_of(tmp_path, require_approval=refuse)).drop_old_versions({})


@pytest.mark.parametrize(("error", "before", "working"), [
    (DataDependentRefusal("x"), True, True),
    (GateRefusedData("x"), True, True),
    (ValueError("x"), False, True),
    (LedgerBroken("x"), False, True),
    (GateRefused("x"), False, False),
    (ParcelRejected("x"), False, False),
    (Suspended("x"), False, False),
    (OSError("x"), False, False),
    (MemoryError("x"), False, False),
    (torch.OutOfMemoryError("x"), False, False),
])  # fmt: skip
def test_failures_that_tell_something_of_images(error, before, working):
    assert may_depend_on_images(error, working=False) is before
    assert may_depend_on_images(error, working=True) is working


@pytest.mark.parametrize(("name", "least", "refused"), [
    ("max_bytes", 0, -1),  # 0: nothing leaves
    ("max_scores", 0, -1),
    ("min_cohort", 0, -1),
    ("liars", 0, -1),
    ("min_sites", 3, 2),  # of two sites each knows the other's part of a sum
    ("max_epsilon", 1e-9, 0),
    ("max_delta", 1e-300, 0),
    ("max_delta", 0.999, 1),
    ("accountants", ("prv",), ()),
    ("kinds", (), ("no kind",)),
])  # fmt: skip
def test_the_last_value_that_a_policy_takes(name, least, refused):
    assert getattr(Policy(**{name: least}), name) == least
    with pytest.raises(pydantic.ValidationError, match=name):
        Policy(**{name: refused})


@pytest.mark.parametrize(("images", "delta"), [(0, 0.5), (1, 0.5), (2, 0.5), (3, 1 / 3), (1000, 0.001)])
def test_the_delta_of_a_site(images, delta):
    assert Policy().delta_for(images) == delta
    assert Policy(max_delta=1e-7).delta_for(images) == 1e-7


@pytest.fixture
def declared():
    class Declared:
        @operation("weights")
        def train(self, site, weights, steps=3):
            """Its draws have its own name."""

        @operation("metrics", address="before", takes={"front": "weights"}, splits=("test",))
        def renamed(self, site, front):
            """Its draws stay where they were."""

    return Declared


def test_where_the_draws_of_an_operation_lie_and_what_it_takes(declared):
    assert declared.train.operation.address == "train"
    assert declared.renamed.operation.address == "before"
    assert dict(declared.train.operation.takes) == {}
    assert declared.train.operation.kind_of("synthetic_images") == "synthetic-images"
    assert dict(declared.renamed.operation.takes) == {"front": "weights"}
    assert declared.renamed.operation.kind_of("front") == "weights"
    assert declared.renamed.operation.kind_of("weights") == "weights"
    assert list(signature_of(declared().train).parameters) == ["site", "weights", "steps"]
    assert list(signature_of(declared.train).parameters) == ["self", "site", "weights", "steps"]
    assert signature_of(declared().train).parameters["steps"].default == 3
    assert signature_of(declared().train) is signature_of(declared().train)
