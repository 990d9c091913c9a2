"""Attack: have several runs work at the same time, each with the whole budget as it was when they began."""

import pytest
from attacked_site import PRIVATE, ask, first_weights

from polyclinic.deployment.deployed_site import held_run
from polyclinic.errors import BadInput
from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.budget import EPSILON_LOCK, FOLDER, LOCK, Budget
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.files import lock


def test_runs_that_were_all_opened_before_the_first_release_share_one_budget(kit):
    size = len(ask(kit.host("measure"), "train", weights=first_weights(kit.host("measure2"))).parcels[0].encoded)
    kit.policy(max_bytes=3 * size + 100)
    hosts = [kit.host(f"run-{number}") for number in range(4)]
    weights = first_weights(hosts[0])
    for host in hosts[:2]:
        ask(host, "train", weights=weights)
    for host in hosts[2:]:
        with pytest.raises(GateRefused, match="bytes would have left"):
            ask(host, "train", weights=weights)


def test_no_other_run_can_spend_between_the_check_and_the_line_on_disk(kit, monkeypatch):
    """At both ends, and at the charge between them, another run finds the budget locked."""
    kit.policy(max_bytes=10**9)
    host, seen = kit.host(), []

    def watched(owner, name):
        original = getattr(owner, name)

        def watching(self, *arguments, **keywords):
            with pytest.raises(TimeoutError), lock(kit.folder / "runs" / LOCK, wait=0):
                pass
            seen.append(name)
            return original(self, *arguments, **keywords)

        monkeypatch.setattr(owner, name, watching)

    watched(Budget, "check")
    watched(Budget, "spend")
    watched(Ledger, "commit")
    assert ask(host, "train", weights=first_weights(host)).parcels
    assert seen == ["check", "spend", "commit"]
    with lock(kit.folder / "runs" / LOCK, wait=0):
        pass  # it is free again


def test_epsilon_of_runs_at_once_adds_up(kit):
    [parcel] = ask(kit.host("a", privacy=PRIVATE), "train", weights=first_weights(kit.host("b"))).parcels
    kit.policy(max_epsilon=2.5 * parcel.privacy["epsilon"])
    hosts = [kit.host(f"run-{number}", privacy=PRIVATE) for number in range(3)]
    ask(hosts[0], "train", weights=first_weights(hosts[0]))
    for host in hosts[1:]:
        with pytest.raises(GateRefused, match=r"epsilon .* would be spent"):
            ask(host, "train", weights=first_weights(host))


def test_a_run_is_open_once(kit):
    """Two processes with one run would write two lines after the same one, and each count only its own."""
    spec = {"kit": str(kit.folder), "run": "run"}
    with (
        held_run(spec),
        pytest.raises(BadInput, match="another process of this site works on run 'run'"),
        held_run(spec, wait=0),
    ):
        pass


def at_work(kit, monkeypatch, host, meanwhile):
    """What another run of the site gets while this one trains; then this one fails."""
    train = type(host.spec.method).train

    def train_slowly(self, site, **given):
        meanwhile()
        raise OSError("the disk is full")

    train_slowly.operation = train.operation
    monkeypatch.setattr(type(host.spec.method), "train", train_slowly)
    with pytest.raises(OSError, match="the disk is full"):
        ask(host, "train", weights=first_weights(host))
    monkeypatch.setattr(type(host.spec.method), "train", train)


def test_what_a_run_works_on_is_set_aside_and_given_back_if_it_fails(kit, monkeypatch):
    """Else both would do the work, and the second learn afterwards, from its images, that it was for nothing."""
    size = len(ask(kit.host("measure"), "train", weights=first_weights(kit.host("measure2"))).parcels[0].encoded)
    kit.policy(max_bytes=int(2.5 * size))
    first, second = kit.host("first"), kit.host("second")
    refused = []

    def meanwhile():
        monkeypatch.setattr(type(second.spec.method), "train", first_train)
        with pytest.raises(GateRefused, match="bytes would have left"):
            ask(second, "train", weights=first_weights(second))
        refused.append(True)

    first_train = type(first.spec.method).train
    at_work(kit, monkeypatch, first, meanwhile)
    assert refused
    assert not list((kit.folder / FOLDER).glob("*.json"))
    assert ask(second, "train", weights=first_weights(second)).parcels  # the first one's share was given back


def test_what_a_killed_process_had_set_aside_counts_no_longer(kit):
    size = len(ask(kit.host("measure"), "train", weights=first_weights(kit.host("measure2"))).parcels[0].encoded)
    kit.policy(max_bytes=int(2.5 * size))
    folder = kit.folder / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / "killed.json").write_text(f"[{10 * size}, 0]")
    host = kit.host("run")
    assert ask(host, "train", weights=first_weights(host)).parcels


def test_one_run_at_a_time_spends_epsilon(kit, monkeypatch):
    """How much is known afterwards: all that is left is set aside for it."""
    kit.policy(max_epsilon=1000.0)
    host, seen = kit.host("run", privacy=PRIVATE), []

    def meanwhile():
        with pytest.raises(TimeoutError), lock(kit.folder / "runs" / EPSILON_LOCK, wait=0):
            pass
        seen.append(True)

    at_work(kit, monkeypatch, host, meanwhile)
    assert seen
    with lock(kit.folder / "runs" / EPSILON_LOCK, wait=0):
        pass


def test_nothing_is_begun_once_epsilon_is_spent(kit, monkeypatch):
    [parcel] = ask(kit.host("a", privacy=PRIVATE), "train", weights=first_weights(kit.host("b"))).parcels
    kit.policy(max_epsilon=parcel.privacy["epsilon"])
    host = kit.host("run", privacy=PRIVATE)
    monkeypatch.setattr(type(host.spec.trainer), "load", lambda *a: pytest.fail("the site worked nevertheless"))
    with pytest.raises(GateRefused, match=r"epsilon .* is spent"):
        ask(host, "train", weights=first_weights(host))
