"""What lies in memory does not grow with the number of sites: replies are taken one by one, states go to disk."""

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plain_study import plain_study

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.collaborators import FederationSpec
from polyclinic.federation.federation import Federation
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import HostSpec
from polyclinic.methods.shared import aggregation

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
    images = np.zeros((1, 1, 8, 8), dtype=np.uint8)
    part = ImageSet(images, np.zeros(1, dtype=np.int64))
    spec = HostSpec(
        study=plain_study(Hoarder()),
        trainer=None,
        folder=folder,
        open_data=lambda name: SiteData(name, part, part, part),
        policy=Policy(shares="equal"),
        expected={},
    )
    host = SiteHost(spec)
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
        parts = (
            ImageSet(np.load(tmp_path / "images.npy", mmap_mode="r"), np.zeros(1, dtype=np.int64)) for _ in range(3)
        )
        return SiteData(name, *parts)

    host = host_in(tmp_path, kilobytes=1000)
    host.sites.spec = replace(host.spec, open_data=mapped)
    host.sites.FILES = 30
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(3 * 10):
        host.handle(Call(f"s{number}", "keep", 1))
    assert [site.name for site in host.resident()] == [f"s{number}" for number in range(20, 30)]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= host.sites.FILES + 3
