"""A site's state survives eviction, restart and its own failures; a host runs what a method declares, no more."""

import math

import pytest
import torch
from plain_study import host_spec, plain_trainer

from polyclinic.errors import Damaged
from polyclinic.federation.call import Call, Expected, GateRefused
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.kinds import KINDS, ParcelRejected
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import SitePosition, SiteState, state_path


class Count:
    """A plan that is answered with the number of sites that handed one in."""

    divides = True

    def __init__(self, spoil):
        self.spoil = spoil

    @classmethod
    def may_group(cls, method, trainer, sites, *, noted):
        return True

    @classmethod
    def carry_out(cls, plans):
        if any(plan.spoil == "all" for plan in plans):
            raise RuntimeError("the scanner is on fire")
        return [len(plans)] * len(plans)


class Clerk:
    """A method whose operations do small things that show."""

    name = "clerk"
    rounds = 3

    @operation("statistics")
    def count(self, site, step=1):
        """Add to the site's sum."""
        site.state["sum"] = site.state.get("sum", torch.zeros(1)) + step
        return Parcel("statistics", {"sum": site.state["sum"]})

    @operation("statistics", "metrics")
    def count_and_fail(self, site, how):
        site.memory["half"] = "made"
        first = self.count(site)
        if how == "raise":
            raise RuntimeError("the scanner is on fire")
        return first, Parcel("metrics", {"loss": torch.tensor(math.nan)})

    @operation()
    def keep_open(self, site):
        site.memory["open"] = object()

    @operation()
    def close(self, site):
        site.memory.clear()

    @operation("metrics")
    def draw(self, site):
        return Parcel("metrics", {"global": torch.rand(3), "own": torch.rand(3, generator=site.rng("x"))})

    @operation("metrics")
    def other_kind(self, site):
        return Parcel("latents", {})

    @operation("latents")
    def leak(self, site, split):
        return Parcel("latents", {"z": torch.tensor(getattr(site.data, split).images[2:3]) / 255})

    @operation("statistics", plan=Count, address="an old name")
    def count_together(self, site, step, spoil=None):
        """Add a step of its own to the site's sum; what a site releases tells how many were there."""
        there = yield Count(spoil)
        site.state["sum"] = site.state.get("sum", torch.zeros(1)) + step
        there = torch.tensor([math.nan if spoil else float(there)])
        return Parcel("statistics", {"sum": site.state["sum"], "there": there})

    @operation("metrics", address="draw")
    def draw_under_an_old_name(self, site):
        return self.draw(site)

    @operation("weights")
    def echo(self, site, weights):
        return Parcel("weights", weights)

    def undeclared(self, site):
        return None


TRAINER = plain_trainer()


@pytest.fixture
def make_host(tmp_path):
    def make(resident=8, kinds=tuple(KINDS)):
        expected = {"weights": Expected.like("weights", {"w": torch.zeros(2)}, partial=True)}
        given = {"trainer": TRAINER, "policy": Policy(kinds=kinds, scores="fine"), "expected": expected}
        host = SiteHost(host_spec(tmp_path, Clerk(), **given))
        host.sites.RESIDENT = resident
        return host

    return make


def do(host, site, operation, round=1, **arguments):
    return host.handle(Call(site, operation, round, arguments=arguments))


def sum_of(host, site):
    return float(do(host, site, "count", step=0).statistics["sum"])


def group(host, steps, **more):
    """Ask the sites a, b, ... for one step each."""
    calls = [Call(name, "count_together", 1, arguments={"step": step} | more.get(name, {})) for name, step in steps]
    return host.handle_group(calls)


def test_sites_asked_together_release_each_through_its_own_gate(make_host, tmp_path):
    host = make_host(resident=1)  # sites that work together stay open together
    replies = group(host, [("a", 1), ("b", 5)])
    assert [(reply.site, float(reply.statistics["sum"])) for reply in replies] == [("a", 1.0), ("b", 5.0)]
    assert [float(reply.statistics["there"]) for reply in replies] == [2.0, 2.0]
    for reply in replies:
        [line] = verify(tmp_path / "ledger" / f"{reply.site}.jsonl")
        assert (line["operation"], line["digest"]) == ("count_together", reply.parcels[0].digest)
    assert float(do(host, "a", "count_together", step=2).statistics["there"]) == 1.0
    assert (sum_of(host, "a"), sum_of(host, "b")) == (3.0, 5.0)


def test_what_fails_at_one_site_or_for_all_leaves_the_others_as_they_were(make_host):
    host = make_host()
    refused, reply = group(host, [("a", 1), ("b", 5)], a={"spoil": "mine"})
    assert isinstance(refused, GateRefused)
    assert float(reply.statistics["sum"]) == 5.0
    assert (sum_of(host, "a"), sum_of(host, "b")) == (0.0, 5.0)
    host = make_host()
    group(host, [("a", 1), ("b", 5)])
    failed = group(host, [("a", 1), ("b", 5)], a={"spoil": "all"}, b={"spoil": "all"})
    assert [str(error) for error in failed] == ["the scanner is on fire"] * 2
    assert (sum_of(host, "a"), sum_of(host, "b")) == (1.0, 5.0)


def test_a_state_knows_its_groups_and_every_change():
    ways = {
        "assign": lambda s: s.__setitem__("a", torch.ones(1)),
        "delete": lambda s: s.__delitem__("a"),
        "update": lambda s: s.update(b=torch.ones(1)),
        "pop": lambda s: s.pop("a"),
        "clear": lambda s: s.clear(),
        "setdefault": lambda s: s.setdefault("b", torch.ones(1)),
        "put": lambda s: s.put("group", {"b": torch.ones(1)}),
    }
    for name, change in ways.items():
        state = SiteState({"a": torch.zeros(1)})
        assert not state.changed
        change(state)
        assert state.changed, name
    with pytest.raises(TypeError, match=r"site\.state\['a'\] is float, and must be a tensor"):
        state["a"] = 1.5
    state = SiteState({"local": torch.ones(1), "locals/x": torch.ones(1)})
    state.put("local", {"a": torch.ones(1), "b/c": torch.ones(2)})
    state.put("local", {"b/c": torch.zeros(2)})
    assert {n: t.tolist() for n, t in state.group("local").items()} == {"b/c": [0, 0]}
    assert sorted(state) == ["local", "local/b/c", "locals/x"]
    assert state.group("none") == {}


@pytest.mark.parametrize("resident", [1, 2, 8])
def test_state_is_the_same_however_few_sites_stay_in_memory(make_host, resident):
    host = make_host(resident)
    sites = [f"s{k}" for k in range(5)]
    for step in range(3):
        for k, site in enumerate(sites):
            do(host, site, "count", step=k + step)
        assert len(host.resident()) <= resident
    assert [sum_of(host, site) for site in sites] == [3 * k + 3 for k in range(5)]


@pytest.mark.parametrize("resident", [1, 2])
def test_a_site_in_the_middle_of_something_stays_in_memory(make_host, resident):
    host = make_host(resident)
    for site in ("a", "b", "c"):
        do(host, site, "keep_open")
    for site in ("a", "b", "c", "d"):
        do(host, site, "count")  # with every other site busy, the new one must still get its turn
    assert {"a", "b", "c"} <= {site.name for site in host.resident()}
    for site in ("a", "b", "c", "d"):
        do(host, site, "close")
        do(host, site, "count")
    assert len(host.resident()) <= resident
    assert [sum_of(host, site) for site in ("a", "b", "c", "d")] == [2, 2, 2, 2]


def test_restore_goes_back_to_a_checkpoint_and_a_state_that_is_gone_is_an_error(make_host, tmp_path):
    host = make_host(1)
    for site in ("a", "b"):
        do(host, site, "count")
    positions = host.checkpoint()
    assert positions == {"a": SitePosition(1, 1), "b": SitePosition(1, 1)}
    for site in ("a", "b", "c", "a", "b"):
        do(host, site, "count")
    host.restore(positions)
    assert [sum_of(host, site) for site in ("a", "b", "c")] == [1, 1, 0]
    other = make_host()
    other.restore(positions)
    assert [sum_of(other, site) for site in ("a", "b")] == [1, 1]
    host = make_host()
    do(host, "a", "count")
    positions = host.checkpoint()
    state_path(tmp_path, "a", 1).unlink()
    host.restore(positions)
    with pytest.raises(Damaged):
        do(host, "a", "count")


@pytest.mark.parametrize(("how", "error"), [("raise", RuntimeError), ("nan", GateRefused)])
def test_a_failed_operation_leaves_no_trace(make_host, tmp_path, how, error):
    host = make_host()
    do(host, "a", "count")
    before = host.checkpoint()
    with pytest.raises(error):
        do(host, "a", "count_and_fail", how=how)
    assert host.checkpoint() == before
    assert not host.resident()[0].memory
    assert len(verify(tmp_path / "ledger" / "a.jsonl")) == 1
    assert sum_of(host, "a") == 1


@pytest.mark.parametrize("operation", ["undeclared", "missing", "name", "__init__", "_release"])
def test_only_declared_operations_run(make_host, operation):
    with pytest.raises(LookupError, match=f"method 'clerk' has no operation '{operation}'"):
        do(make_host(), "a", operation)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_no_image_of_a_site_leaves_it(make_host, split):
    with pytest.raises(GateRefused, match="site 'a' kept back latents of 'leak': tensor 'z' holds images of the site"):
        do(make_host(), "a", "leak", split=split)


def test_a_site_rejects_what_it_does_not_expect(make_host):
    host = make_host()

    def echo(kind, tensors):
        return host.handle(Call("a", "echo", 1, {"weights": Parcel(kind, tensors)}))

    assert echo("weights", {"w": torch.ones(2)}).weights["w"].tolist() == [1, 1]
    for tensors in ({"w": torch.ones(3)}, {"w": torch.ones(2).double()}, {"v": torch.ones(2)}):
        with pytest.raises(ParcelRejected):
            echo("weights", tensors)


def test_draws_depend_on_site_and_round_alone(make_host):
    torch.manual_seed(0)
    outside = torch.random.get_rng_state()
    first = do(make_host(), "a", "draw").metrics
    assert torch.equal(torch.random.get_rng_state(), outside)
    torch.manual_seed(1)
    again = make_host(1)
    do(again, "b", "draw")
    second = do(again, "a", "draw").metrics
    for name in ("global", "own"):
        assert torch.equal(first[name], second[name])
        for other in (do(again, "b", "draw"), do(again, "a", "draw", round=2)):
            assert not torch.equal(first[name], other.metrics[name])
