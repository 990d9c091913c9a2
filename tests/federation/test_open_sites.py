"""Sites that are opened, and calls to them."""

import contextlib
import copy
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_study import host_spec, kit_of, plain_study

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Failure, MissingParcel, Reply, base_of, pack
from polyclinic.federation.collaborators import FederationSpec
from polyclinic.federation.federation import Federation
from polyclinic.federation.host import OpenSites, SiteHost
from polyclinic.federation.ledger.keys import Anchor, Head
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import Site, SitePosition, SiteState, version_of
from polyclinic.methods.shared import aggregation


def sites_in(folder, privacy=None, **changes):
    given = {"trainer": SimpleNamespace(privacy=privacy), "policy": Policy(), **changes}
    found = host_spec(folder / "runs" / "study", SimpleNamespace(rounds=3, name="none"), **given)
    return OpenSites(found, deployed=found.policy.deployed)


def deployed(**settings):
    return Policy(deployed=True, **settings)


def test_a_deployed_site_has_a_secret_and_what_its_policy_says_and_a_simulated_one_none(tmp_path):
    policy = deployed(min_cohort=7, few_images="refuse")
    site = sites_in(tmp_path, policy=policy).get("a")
    assert (site.own_draws, site.min_cohort) == (True, 7)
    assert len(bytes.fromhex(site.secret)) == 32
    assert site.secret == (tmp_path / "runs" / "study" / "sites" / "a" / "noise.key").read_text()
    assert sites_in(tmp_path, policy=policy).get("a").secret == site.secret  # a resumed run draws the same again
    other = sites_in(tmp_path / "other", policy=deployed(draws="study")).get("a")
    assert not other.own_draws
    assert other.secret != site.secret
    site = sites_in(tmp_path / "simulated", policy=Policy(few_images="allow")).get("a")
    assert (site.secret, site.own_draws, site.min_cohort) == ("", False, 0)
    assert not (site.folder / "noise.key").exists()
    plain = Site("a", plain_study(), None, None, SiteState(), tmp_path)
    assert (plain.min_cohort, plain.policy.few_images, plain.round) == (0, "allow", 0)


@pytest.mark.parametrize(
    ("target", "policy", "found"), [(None, deployed(), None), (3.0, deployed(), 3.0), (3.0, Policy(), None)]
)
def test_the_epsilon_that_was_approved_with_the_study_holds_at_a_deployed_site(tmp_path, target, policy, found):
    sites = sites_in(tmp_path, SimpleNamespace(target_epsilon=target), policy=policy)
    sites.get("a")
    held = sites.gates["a"].target
    assert (held.epsilon if held else None) == found


def test_a_site_that_goes_on_from_before_its_ledger_is_put_back(tmp_path):
    sites = sites_in(tmp_path)
    sites.get("a")
    assert sites.put_back == set()
    for number in (1, 2):
        sites.ledgers["a"].append(round=number, operation="x", kind="metrics", bytes=1, digest="d", to="coordinator")
    for lines, put_back in ((2, set()), (1, {"a"})):
        again = sites_in(tmp_path)
        again.restore({"a": SitePosition(0, lines)})
        again.get("a")
        assert again.put_back == put_back


def test_a_host_of_one_site_serves_no_other(tmp_path):
    sites = sites_in(tmp_path, kit=kit_of(tmp_path))
    sites.refuse_other_names(["a"])
    sites_in(tmp_path).refuse_other_names(["a", "b"])
    for names in (["b"], ["a", "b"]):
        with pytest.raises(ParcelRejected, match="this host serves site 'a' only"):
            sites.refuse_other_names(names)


def states(folder):
    return sorted(version_of(path) for path in (folder / "runs" / "study" / "sites" / "a").glob("state-*"))


@pytest.mark.parametrize(("only", "durable", "left"), [
    (None, 0, [1, 2, 3]),
    (None, 2, [2, 3]),
    (None, 9, []),
    ("a", 0, [1, 2, 3]),
    ("a", 2, [2, 3]),
    ("a", 3, [3]),
    ("a", 4, [1, 2, 3]),  # a deployed site does not stand so far: a coordinator that lies
])  # fmt: skip
def test_states_that_a_checkpoint_does_not_need_are_deleted(tmp_path, only, durable, left):
    sites = sites_in(tmp_path, kit=kit_of(tmp_path) if only else None)
    site = sites.get("a")
    for number in (1, 2, 3):
        site.state["x"] = torch.tensor(number)
        assert sites.save("a") == SitePosition(number, 0)
    sites.drop_old_versions({"a": SitePosition(durable, 0)})
    assert states(tmp_path) == left


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (1.0, 0), (0, True), ("1", 0), (0, None)])
def test_a_position_is_two_whole_numbers(position):
    SitePosition(0, 0).check()
    SitePosition(7, 9).check()
    with pytest.raises(ParcelRejected, match="two whole numbers"):
        SitePosition(*position).check()


def test_the_trainer_of_weights_is_that_whose_network_they_fit():
    def trainer(*shapes):
        tensors = {f"w{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
        return SimpleNamespace(model=SimpleNamespace(state_dict=lambda: tensors))

    own, other, third = trainer((2,), (3,)), trainer((2,), (4,)), trainer((2,))
    site = Site("a", plain_study(), None, own, SiteState(), None, trainers=(own, other, third))
    for one in (own, other, third):
        assert site.trainer_for(one.model.state_dict()) is one
    assert site.trainer_for({"w0": torch.zeros(9), "w1": torch.zeros(3)}) is own
    assert site.trainer_for({}) is own


SITES = tuple(f"s{k}" for k in range(12))


class Counting:
    """An engine that answers when it is asked to, and knows how many of its replies are still in memory."""

    simulation = True

    def __init__(self, failing=()):
        self.failing = failing
        self.asked: list[str] = []
        self.replies: list[weakref.ref[Reply]] = []
        self.most = 0

    def call(self, calls):
        for call in calls:
            self.asked.append(call.site)
            yield self.answer(call)

    def answer(self, call):
        if call.site in self.failing:
            return Failure(call.site, call.operation, "on fire")
        number = float(SITES.index(call.site))
        weights = Parcel("weights", {"w": torch.full((3,), number)}, {"samples": int(number) + 1})
        reply = Reply(call.site, (weights, Parcel("statistics", {"n": torch.tensor(int(number))})))
        self.replies.append(weakref.ref(reply))
        self.most = max(self.most, sum(one() is not None for one in self.replies))
        return reply


@pytest.fixture
def federation_with(tmp_path):
    def make(engine, **settings):
        spec = FederationSpec(
            study=plain_study(**settings), sites=SITES, folder=tmp_path, initial={}, expected={}, trainer=None
        )
        return Federation(spec, engine)

    return make


def test_an_average_holds_one_reply_while_the_next_is_made(federation_with):
    engine = Counting()
    mean = aggregation.average(federation_with(engine).ask_each("train"))
    by_hand = sum(k * (k + 1) for k in range(12)) / sum(k + 1 for k in range(12))
    assert mean["w"].tolist() == [np.float32(by_hand)] * 3
    assert engine.most == 2
    assert len(federation_with(engine).ask_all("train")) == 12
    assert engine.most == 12


@pytest.mark.parametrize("faults", [{"on_failure": "stop"}, {"quorum": 0.9}])
def test_all_sites_are_heard_before_the_round_stops(federation_with, faults):
    engine = Counting(failing=("s0", "s7"))
    federation = federation_with(engine, **faults)
    heard = []
    with pytest.raises(WorkFailed, match="site 's7' failed"):
        heard.extend(reply.site for reply in federation.ask_each("train"))
    assert heard == [site for site in SITES if site not in ("s0", "s7")]
    assert [failure["site"] for failure in federation.failures] == ["s0", "s7"]


class Hoarder:
    """A method whose sites keep a kilobyte each, and count."""

    rounds = 100
    name = "hoarder"

    @operation()
    def keep(self, site):
        site.state["count"] = site.state.get("count", torch.zeros(1)) + 1
        site.state.put("pile", {"numbers": torch.zeros(255)})


def host_in(folder, kilobytes):
    host = SiteHost(host_spec(folder, Hoarder()))
    host.sites.RESIDENT_BYTES = kilobytes * 1024
    return host


@pytest.mark.parametrize("kilobytes", [0, 3, 1000])
def test_states_in_memory_are_bounded_by_their_size(tmp_path, kilobytes):
    host = host_in(tmp_path, kilobytes)
    for _ in range(2):
        for site in SITES:
            host.handle(Call(site, "keep", 1))
            # the site at work may be above the bound: it is sent to disk when the next one is
            assert sum(one.state.bytes for one in host.resident()) <= (kilobytes + 1) * 1024
    assert len(host.resident()) == {0: 1, 3: 3, 1000: 12}[kilobytes]
    host.restore(host.checkpoint())
    for site in SITES:
        host.handle(Call(site, "keep", 2))
        assert float(host.resident()[-1].state["count"]) == 3


def test_only_the_sites_used_last_keep_a_cache(tmp_path):
    host = host_in(tmp_path, kilobytes=1000)
    for site in SITES:
        host.handle(Call(site, "keep", 1))
        host.resident()[-1].cache["images"] = torch.zeros(1)
    host.handle(Call(SITES[0], "keep", 1))
    assert [site.name for site in host.resident() if site.cache] == list(SITES[-host.sites.CACHED :])
    host = host_in(tmp_path, kilobytes=1000)
    group, other = SITES[:-1], SITES[-1]
    for name in group:
        host.sites.get(name, group)
    for site in host.resident():
        site.cache["images"] = torch.zeros(1)
    host.sites.get(other)
    assert [site.name for site in host.resident() if site.cache] == list(group[-host.sites.CACHED :])
    host.sites.get(other)
    assert len(host.sites._caching) == host.sites.CACHED + 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
def test_open_files_do_not_grow_with_the_number_of_sites(tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((1, 1, 8, 8), dtype=np.uint8))

    def mapped(name):
        mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
        parts = (ImageSet(mapped, np.zeros(1, dtype=np.int64)) for _ in range(3))
        return SiteData(name, *parts)

    host = host_in(tmp_path, kilobytes=1000)
    host.sites.spec = replace(host.spec, open_data=mapped)
    host.sites.FILES = 30
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(3 * 10):
        host.handle(Call(f"s{number}", "keep", 1))
    assert [site.name for site in host.resident()] == [f"s{number}" for number in range(20, 30)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= host.sites.FILES + 3


PARCEL = Parcel("weights", {"w": torch.ones(2)}, {"samples": 3})
CALL = Call("a", "train", 1, {"weights": PARCEL}, {"split": "test"})
HEADER = {"site": "a", "operation": "train", "round": 1, "arguments": {}, "to": "coordinator", "parcels": []}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", HEADER)
def test_a_call_with_a_name_missing_or_of_another_type_is_rejected(name):
    assert Call.from_bytes(pack(HEADER, [])).site == "a"
    for changed in ({k: v for k, v in HEADER.items() if k != name}, HEADER | {name: None}, HEADER | {name: 1.5}):
        with pytest.raises(ParcelRejected, match="is no call"):
            Call.from_bytes(pack(changed, []))
    with pytest.raises(ParcelRejected):
        Call.from_bytes(pack(HEADER | {"another": 1}, []))
    with pytest.raises(ParcelRejected):
        Call.from_bytes(pack(HEADER | {"parcels": ["weights", "weights"]}, [PARCEL.encoded, PARCEL.encoded]))


@given(st.binary(max_size=200))
def test_junk_is_rejected(data):
    for kind in (Call, Reply):
        with pytest.raises(ParcelRejected):
            kind.from_bytes(data)


@given(
    st.dictionaries(st.sampled_from([*HEADER, "anchor", "head"]), JSON), st.lists(st.binary(max_size=20), max_size=2)
)
def test_any_header_gives_a_message_or_is_rejected(header, blobs):
    for kind in (Call, Reply):
        with contextlib.suppress(ParcelRejected):
            kind.from_bytes(pack(header, blobs))


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_gives_a_message_or_is_rejected(place, change):
    for message in (CALL, Reply("a", (PARCEL,))):
        data = bytearray(message.to_bytes())
        data[place % len(data)] ^= change
        with contextlib.suppress(ParcelRejected):
            type(message).from_bytes(bytes(data))


def test_messages_keep_heads_and_replies_give_tensors_by_kind():
    anchor, head = Anchor(2, "d", "s", "c"), Head(3, "e", "t")
    assert Call.from_bytes(Call("a", "train", 1, anchor=anchor).to_bytes()).anchor == anchor
    assert Call.from_bytes(CALL.to_bytes()).anchor is None
    assert Reply.from_bytes(Reply("a", (), head).to_bytes()).head == head
    assert Reply.from_bytes(Reply("a", ()).to_bytes()).head is None
    with pytest.raises(ParcelRejected, match="no readable header: not the head of a ledger"):
        Call.from_bytes(pack(HEADER | {"anchor": [0, "d", "s", "c"]}, []))
    with pytest.raises(ParcelRejected, match="its header names no site"):
        Reply.from_bytes(pack({"head": None}, []))
    other = Parcel("weights", {"v": torch.ones(1)})
    statistics = Parcel("statistics", {"s": torch.ones(1)})
    assert base_of({"statistics": statistics, "weights": PARCEL}) is PARCEL.tensors
    assert base_of({"weights": PARCEL, "front": other}) == base_of({"statistics": statistics}) == base_of({}) == {}
    reply = Reply("a", (PARCEL, Parcel("synthetic-images", {"x": torch.zeros(1)}, {"steps": 2})))
    assert reply.synthetic_images["x"].tolist() == [0]
    assert reply.metadata == {"samples": 3, "steps": 2}
    assert copy.copy(reply).weights["w"].tolist() == [1, 1]  # a copy is asked for names while it is still empty
    with pytest.raises(MissingParcel, match="site 'a' released no parcel of kind 'latents'"):
        reply.latents  # noqa: B018


@pytest.mark.parametrize("names", [[], ["weights", "more"], [3], ["weights", "weights"]])
def test_a_call_names_each_of_its_parcels_once(names):
    with pytest.raises(ParcelRejected, match="its parcels are not those that its header names"):
        Call.from_bytes(pack(HEADER | {"parcels": names}, [PARCEL.encoded]))
