"""Parcels between sites: nobody but the two reads them; what was tampered with, misdirected or forged is refused."""

from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from plain_study import host_spec, plain_study

from polyclinic.engines.worker_process import reason_of
from polyclinic.federation.call import Call, Expected, Failure, Reply
from polyclinic.federation.collaborators import FederationSpec
from polyclinic.federation.federation import Federation
from polyclinic.federation.host import SiteHost
from polyclinic.federation.layers.call_checks import ExpectedForm
from polyclinic.federation.ledger.keys import OVERHEAD, SeedKeys, public_key
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.policy import Incoming, Policy

SITES = ("a", "b", "c")
SECRET = torch.arange(64, dtype=torch.float32) * 1.25 + 3
SPENT = {"epsilon": 1.0, "delta": 1e-5, "steps": 3, "covers": ["weights"], "does_not_cover": []}


class Courier:
    """A method that hands a model on."""

    rounds = 100
    name = "courier"

    @operation("weights", "synthetic-images", partner="sites")
    def hand_over(self, site):
        note = {"note": f"from {site.name} in confidence"}
        return Parcel("weights", {"w": SECRET}, note, SPENT), Parcel("synthetic-images", {"x": SECRET + 1}, note)

    @operation(partner="sites")
    def take(self, site, weights, synthetic_images=None):
        site.state.put("taken", weights)


class Wire:
    """An engine over one host that keeps every byte the coordinator gets to see, and may meddle with it."""

    simulation = True

    def __init__(self, host, meddle):
        self.host, self.meddle, self.seen = host, meddle, []

    def call(self, calls):
        return [self._answer(call) for call in calls]

    def _answer(self, call):
        call = self.meddle(Call.from_bytes(call.to_bytes()))
        self.seen.append(call.to_bytes())
        try:
            reply = self.host.handle(call)
        except Exception as error:
            return Failure(call.site, call.operation, reason_of(error))
        self.seen.append(reply.to_bytes())
        return Reply.from_bytes(reply.to_bytes())

    def checkpoint(self):
        return self.host.checkpoint()

    def prune(self, positions):
        pass

    def restore(self, positions):
        self.host.restore(positions)


@pytest.fixture
def make(tmp_path):
    def build(meddle=lambda call: call):
        # there is no network to try weights on
        policy = Policy(kinds=tuple(KINDS), incoming=Incoming(on=False), shares="equal")
        expected = {"weights": Expected.like("weights", {"w": SECRET})}
        none = {"initial": {}, "trainer": None}
        spec = FederationSpec(study=plain_study(), sites=SITES, folder=tmp_path, expected=expected, **none)
        federation = Federation(
            spec, Wire(SiteHost(host_spec(tmp_path, Courier(), policy=policy, expected=expected)), meddle)
        )
        federation.round = 3
        return federation

    return build


def taken_by(federation, site):
    return federation.engine.host.sites.get(site).state.group("taken")


def test_nothing_that_passes_the_coordinator_can_be_read_but_kind_size_and_privacy(make, tmp_path):
    federation = make()
    federation.forward("a", "hand_over", "b", "take")
    federation.save()
    seen = b"".join(federation.engine.seen)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "checkpoint").iterdir())
    inside = Parcel("weights", {"w": SECRET})
    for secret in (SECRET.numpy().tobytes(), (SECRET + 1).numpy().tobytes(), b"in confidence"):
        assert secret not in seen + kept
    assert SECRET[:4].numpy().tobytes() not in seen  # nor a part of it
    assert inside.encoded[-256:] in Reply("a", (inside,)).to_bytes()  # an open parcel would have been found this way
    for site in SITES:
        private = SeedKeys(0).own(site).private_bytes_raw()
        assert private not in seen + kept


def test_accounts_see_kind_size_and_privacy(make, tmp_path):
    federation = make()
    federation.forward("a", "hand_over", "b", "take")
    plain = {parcel.kind: parcel for parcel in Courier().hand_over(federation.engine.host.sites.get("a"))}
    counted = federation.communication.rows()
    for kind in plain:
        (sent,) = (row[4] for row in counted if row[:4] == ["a", "sent", kind, "hand_over"])
        (received,) = (row[4] for row in counted if row[:4] == ["b", "received", kind, "take"])
        assert sent == received
        assert len(plain[kind].encoded) + OVERHEAD < sent < len(plain[kind].encoded) + 600
    lines = [line for line in verify(tmp_path / "ledger" / "a.jsonl") if line["operation"] == "hand_over"]
    assert [(line["kind"], line["to"], line["digest"]) for line in lines] == [
        (kind, "b", parcel.digest) for kind, parcel in plain.items()
    ]
    assert lines[0]["privacy"] == SPENT
    assert federation.coverage.records["a"]["epsilon"] == 1.0
    assert "synthetic-images" in federation.coverage.uncovered


def meddling(change):
    """Change the first parcel that reaches `take`."""

    def meddle(call):
        if call.operation != "take":
            return call
        (name, parcel), *rest = call.parcels.items()
        return replace(call, parcels={name: change(parcel), **dict(rest)})

    return meddle


def box(change):
    return lambda parcel: Parcel(SEALED, {"box": change(parcel.tensors["box"].clone())}, parcel.metadata)


def flipped(numbers):
    numbers[len(numbers) // 2] ^= 1
    return numbers


def named(site):
    return lambda parcel: Parcel(SEALED, dict(parcel.tensors), {**parcel.metadata, "from": site})


@pytest.mark.parametrize(("change", "reason"), [
    (box(flipped), "the sealed weights of site 'a' do not open: it was changed on its way"),
    (box(lambda sent: sent[:20]), "do not open"),
    (box(lambda sent: sent[:0]), "do not open"),
    (box(torch.Tensor.float), "what came sealed from site 'a' is no box"),
    (box(lambda sent: sent[: len(sent) // 4 * 4].reshape(-1, 4)), "what came sealed from site 'a' is no box"),
    (named("c"), "the sealed weights of site 'c' do not open"),
    (named("z"), "the sealed weights of site 'z' do not open"),
    (
        lambda _: Parcel("weights", {"w": SECRET * 0}),
        "'take' takes what another site sealed, and weights came open",
    ),
])  # fmt: skip
def test_a_parcel_that_was_tampered_with_is_refused(make, change, reason):
    federation = make(meddling(change))
    failure = federation.forward("a", "hand_over", "b", "take")
    assert isinstance(failure, Failure)
    assert (failure.site, failure.operation) == ("a", "hand_over")  # nobody else should have made it
    assert failure.reason.startswith("site 'b' refused it: ")
    assert reason in failure.reason
    assert not taken_by(federation, "b")


def test_what_is_inside_is_checked_like_any_parcel(make):
    federation = make()
    host = federation.engine.host
    host.layers[ExpectedForm].spec = replace(
        host.spec, expected={"weights": Expected.like("weights", {"w": SECRET[:3]})}
    )
    failure = federation.forward("a", "hand_over", "b", "take")
    assert "tensor 'w' is torch.float32 (64,), expected torch.float32 (3,)" in failure.reason


def test_a_swapped_key_is_refused(make, tmp_path):
    """A coordinator that gives 'a' its own key in the name of 'b' could read what is for 'b'."""
    mine = X25519PrivateKey.generate()
    false = torch.tensor(list(public_key(mine)), dtype=torch.uint8)

    def swap(call):
        if call.operation != "take_keys" or call.site != "a":
            return call
        keys = {**call.parcels["keys"].tensors, "b": false}
        return replace(call, parcels={"keys": Parcel("keys", keys)})

    federation = make(swap)
    assert not federation.forward("a", "hand_over", "b", "take")
    assert [line["operation"] for line in verify(tmp_path / "ledger" / "a.jsonl")] == ["give_key"]


def test_a_resumed_run_has_its_keys_and_repeats_no_line(make, tmp_path):
    federation = make()
    federation.forward("a", "hand_over", "b", "take")
    federation.save()
    federation.forward("b", "hand_over", "c", "take")
    before = {path.name: path.read_bytes() for path in (tmp_path / "ledger").iterdir()}

    again = make()
    assert again.resume()
    again.round = 3
    assert again._keyed == list(SITES)
    assert again.forward("b", "hand_over", "c", "take")
    assert {path.name: path.read_bytes() for path in (tmp_path / "ledger").iterdir()} == before
