"""What the coordinator half sees: replies, failures, what a run keeps, and how it is resumed."""

from types import SimpleNamespace

import pytest
import torch
from scripted_engine import SITES, Script, failing, weights

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Failure, Reply, sort_payload
from polyclinic.federation.collaborators import Observer
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import SitePosition


def size(kind, tensors, metadata=None):
    return len(Parcel(kind, tensors, metadata or {}).encoded)


def test_a_keyword_named_like_a_kind_travels_as_a_parcel(make):
    federation = make(lambda call: (Parcel("latents", {"z": torch.ones(1)}, {"samples": 5}),))
    federation.round = 7
    reply = federation.ask("b", "train", weights=weights(), synthetic_images={"x": torch.zeros(1)}, masks=None, lr=0.5)
    (call,) = federation.engine.calls
    assert (call.site, call.operation, call.round, call.to) == ("b", "train", 7, "coordinator")
    assert {name: parcel.kind for name, parcel in call.parcels.items()} == {
        "weights": "weights",
        "synthetic_images": "synthetic-images",
    }
    assert call.arguments == {"lr": 0.5}
    assert reply
    assert reply.latents["z"].tolist() == [1]
    assert reply.metadata == {"samples": 5}


def test_replies_are_taken_one_by_one_and_nothing_is_asked_meanwhile(make):
    """Sites work as their replies are taken, so that not all models lie in memory at once."""
    act = failing("b", "c", "d")
    federation = make(act)
    federation.engine.call = lambda calls: (
        federation.engine._answer(call) for call in calls if not worked.append(call.site)
    )
    worked = []
    replies = federation.ask_each("train", weights=weights())
    assert worked == []
    assert next(replies).site == "a"
    assert worked == ["a"]
    with pytest.raises(WorkFailed, match="1 of 4 sites are left"):
        next(replies)
    assert worked == list(SITES)
    assert [failure["site"] for failure in federation.failures] == ["b", "c", "d"]
    # A worker process would get two calls at once, and the order of calls would depend on the engine
    federation = make()
    replies = federation.ask_each("train")
    next(replies)
    for ask in (lambda: federation.ask("b", "train"), lambda: federation.ask_all("evaluate")):
        with pytest.raises(AssertionError, match="take all replies"):
            ask()
    assert [reply.site for reply in replies] == ["b", "c", "d"]
    assert federation.ask("b", "train")


def test_a_parcel_that_is_not_expected_or_of_another_is_its_sites_failure(make):
    def act(call):
        return (Parcel("weights", {"w": torch.zeros(5 if call.site == "b" else 4)}),)

    federation = make(act)
    assert [reply.site for reply in federation.ask_all("train")] == ["a", "c", "d"]
    (failure,) = federation.failures
    assert (failure["site"], failure["operation"]) == ("b", "train")
    assert "tensor 'w' is torch.float32 (5,), expected torch.float32 (4,)" in failure["reason"]
    assert federation.communication.summary(SITES)["per_site"]["b"] == 0
    federation = make(quorum=0.25)
    federation.engine.call = lambda calls: [Reply("a", (Parcel("weights", weights()),)) for _ in calls]
    assert [reply.site for reply in federation.ask_all("train")] == ["a"]
    assert [failure["site"] for failure in federation.failures] == ["b", "c", "d"]
    assert federation.failures[0]["reason"] == "answered in the name of site 'a'"
    per_site = federation.communication.summary(SITES)["per_site"]
    assert per_site["a"] > 0
    assert per_site["b"] == per_site["c"] == per_site["d"] == 0


def test_forward_hands_on_what_was_released_unread(make):
    secret = Parcel("latents", {"z": torch.arange(3.0)}, {"epsilon": 2})

    def act(call):
        return (secret,) if call.operation == "give" else (Parcel("metrics", {}, {"taken": True}),)

    federation = make(act)
    reply = federation.forward("a", "give", "c", "take", count=3)
    given, taken = federation.engine.calls
    assert (given.site, given.operation, given.to, given.arguments) == ("a", "give", "c", {"count": 3})
    assert (taken.site, taken.operation, taken.to) == ("c", "take", "coordinator")
    assert dict(taken.parcels) == {"latents": secret}
    assert reply.site == "c"
    assert reply.metadata == {"taken": True}  # the coordinator's half of a method gets nothing of the source
    with pytest.raises(AttributeError):
        reply.latents  # noqa: B018
    counted = federation.communication.summary(SITES)
    answer = size("metrics", {}, {"taken": True})
    of_keys = counted["by_kind"].pop("keys")
    assert counted["by_kind"] == {"latents": 2 * len(secret.encoded), "metrics": answer}
    each = of_keys // len(SITES)
    assert {site: count - each for site, count in counted["per_site"].items()} == {
        "a": len(secret.encoded),
        "b": 0,
        "c": len(secret.encoded) + answer,
        "d": 0,
    }


@pytest.mark.parametrize(("silent", "named"), [("a", "a"), ("c", "c"), ("ac", "a")])
def test_a_site_that_tells_no_key_is_named_and_nothing_leaves_the_source(make, silent, named):
    federation = make(lambda call: (Parcel("latents", {}),), quorum=0.25)
    answer = federation.engine._answer
    federation.engine._answer = lambda call: (
        Failure(call.site, call.operation, "no key") if call.site in silent else answer(call)
    )
    failure = federation.forward("a", "give", "c", "take")
    assert (failure.site, failure.operation) == (named, "take" if named == "c" and silent != "c" else "give")
    assert federation.engine.calls == []


@pytest.mark.parametrize("wire", ["exact", "fp16", "delta"])
def test_numbers_are_rounded_on_their_way_to_a_site_where_the_wire_does(wire):
    """What is sent as a difference is so on its way back only."""
    sent = Parcel("weights", {"w": torch.linspace(0, 1, 1024)})
    parcels, arguments = sort_payload({"weights": sent, "lr": 0.5, "labels": None}, wire)
    assert arguments == {"lr": 0.5}
    assert list(parcels) == ["weights"]
    rounded = not torch.equal(parcels["weights"].tensors["w"], sent.tensors["w"])
    assert rounded is (wire == "fp16")
    assert (parcels["weights"] is sent) is not rounded


def test_bytes_are_those_of_encoded_parcels_and_weights_that_a_site_holds_do_not_travel_again(make):
    sent = Parcel("weights", weights(2), {"samples": 10})
    federation = make(lambda call: (sent, Parcel("metrics", {"n": torch.tensor(1)})))
    federation.ask_all("train", weights=weights(1))
    down, up = size("weights", weights(1)), len(sent.encoded)
    metrics = size("metrics", {"n": torch.tensor(1)})
    assert federation.communication.summary(SITES) == {
        "total_bytes": 4 * (down + up + metrics),
        "sent_bytes": 4 * (up + metrics),
        "received_bytes": 4 * down,
        "by_kind": {"metrics": 4 * metrics, "weights": 4 * (down + up)},
        "by_operation": {"train": 4 * (down + up + metrics)},
        "per_site": dict.fromkeys(SITES, down + up + metrics),
    }
    federation = make()
    one = size("weights", weights(1))

    def received():
        return federation.communication.summary(SITES)["received_bytes"]

    federation.ask_all("evaluate", weights=weights(1))
    assert received() == 4 * one
    federation.ask_all("train", weights=weights(1))  # equal numbers, another object
    assert received() == 4 * one
    federation.ask("a", "train", weights=weights(2))
    assert received() == 5 * one
    federation.ask("a", "train", weights=weights(1))  # a site holds one set, the last
    assert received() == 6 * one
    federation.ask("a", "train", latents=weights(1))
    federation.ask("a", "train", latents=weights(1))  # other kinds travel each time
    assert received() == 6 * one + 2 * size("latents", weights(1))


def test_a_failed_site_sits_out_the_round_and_is_back_in_the_next(make):
    act = failing("b", only=["train"])
    federation = make(act)
    asked = []
    for number in federation.rounds(2, federation.state()):
        before = len(federation.engine.calls)
        federation.ask_all("train")
        federation.ask_all("evaluate")
        assert not federation.ask("b", "evaluate")
        asked.append([(call.site, call.operation) for call in federation.engine.calls[before:]])
        assert federation.failures[-1] == {"round": number, "site": "b", "operation": "train", "reason": "b is down"}
    assert asked[0] == asked[1]
    assert asked[0] == [(site, "train") for site in SITES] + [(site, "evaluate") for site in "acd"]
    assert len(federation.failures) == 2


@pytest.mark.parametrize(("sites", "quorum", "may_fail"), [
    (4, 0.5, 2),
    (5, 0.5, 2),
    (3, 0.5, 1),
    (2, 0.5, 1),
    (1, 0.5, 0),
    (10, 0.7, 3),
    (4, 1.0, 0),
    (4, 0.01, 3),
    (3, 0.34, 1),
])  # fmt: skip
def test_at_least_the_quorum_must_be_left(make, sites, quorum, may_fail):
    names = tuple(f"s{k}" for k in range(sites))
    if may_fail:
        federation = make(failing(*names[:may_fail]), names, quorum=quorum)
        assert len(federation.ask_all("train")) == sites - may_fail
    federation = make(failing(*names[: may_fail + 1]), names, quorum=quorum)
    with pytest.raises(WorkFailed, match=rf"site 's{may_fail}' failed in round 0 \(train\): s{may_fail} is down"):
        federation.ask_all("train")


def test_one_failure_is_enough_where_the_study_says_stop(make):
    federation = make(failing("c"), on_failure="stop", quorum=0.1)
    with pytest.raises(WorkFailed, match=r"'c'.*engine.on_failure = 'stop'"):
        federation.ask_all("train")
    with pytest.raises(WorkFailed):
        make(failing("c"), on_failure="stop", quorum=0.1).ask("c", "train")


def rounds_of(federation, count, stop=None):
    """A method: it keeps tensors and plain values. Stops inside round `stop`, before its checkpoint."""
    extra = federation.once("extra", lambda: {"x": torch.rand(2)})
    state = federation.state(weights=weights(0), seen=[])
    for number in federation.rounds(count, state):
        federation.ask_all("train", weights=state.weights)
        state.weights = {"w": state.weights["w"] * 2 + number + extra["x"][0]}
        state.seen = [*state.seen, number]
        federation.ask_all("evaluate", weights=state.weights)  # held by the sites when the next round begins
        if number >= 2:
            state.late = {"l": torch.tensor(number)}
        if number == stop:
            raise KeyboardInterrupt
    return state


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_resumed_run_gets_back_all_it_kept(make, every, stop):
    with pytest.raises(KeyboardInterrupt):
        rounds_of(make(checkpoint_every=every), 5, stop)
    resumed, done = make(checkpoint_every=every), (stop - 1) // every * every
    assert resumed.resume()
    assert resumed.round == done
    state = rounds_of(resumed, 5)
    assert state.seen == [1, 2, 3, 4, 5]
    assert int(state.late["l"]) == 5
    assert [call.round for call in resumed.engine.calls if (call.site, call.operation) == ("a", "train")] == list(
        range(done + 1, 6)
    )


def test_a_resumed_run_ends_with_the_same_numbers_and_bytes(make, tmp_path):
    torch.manual_seed(3)
    straight = make(failing("b", only=["train"]))
    expected = rounds_of(straight, 4)
    for path in (tmp_path / "checkpoint").iterdir():
        path.unlink()
    torch.manual_seed(3)
    for stop in (0, 2, 2, 3):
        federation = make(failing("b", only=["train"]))
        federation.resume()
        torch.manual_seed(3 if federation.round == 0 else 4)  # `once` must not be made anew
        if stop:
            with pytest.raises(KeyboardInterrupt):
                rounds_of(federation, 4, stop)
    final = make(failing("b", only=["train"]))
    assert final.resume()
    state = rounds_of(final, 4)
    assert torch.equal(state.weights["w"], expected.weights["w"])
    assert final.communication.summary(SITES) == straight.communication.summary(SITES)
    assert final.failures == straight.failures


def test_once_is_made_once_and_belongs_before_the_first_round(make):
    made = []

    def make_it():
        made.append(1)
        return {"x": torch.tensor([2.5])}

    first = make()
    first.resume()
    first.once("images", make_it)
    second = make()
    assert second.resume()
    assert second.once("images", make_it)["x"].tolist() == [2.5]
    assert made == [1]
    state = second.state(weights=weights(4))  # nothing but `once` was done: the state starts anew
    assert state.weights["w"].tolist() == [4, 4, 4, 4]
    second.save()
    third = make()
    third.resume()
    assert third.once("images", make_it)["x"].tolist() == [2.5]
    # A checkpoint of it would be one without the state of the rounds so far
    with pytest.raises(KeyboardInterrupt):
        rounds_of(make(), 5, stop=3)
    resumed = make()
    resumed.resume()
    with pytest.raises(AssertionError, match="before the first round"):
        resumed.once("forgotten", weights)
    again = make()
    again.resume()
    assert rounds_of(again, 3).seen == [1, 2, 3]


def test_sites_are_restored_checkpointed_and_pruned(make):
    engine = Script()
    federation = make(engine=engine)
    assert not federation.resume()
    engine.positions = {"a": SitePosition(3, 7)}
    for number in federation.rounds(2, federation.state()):
        engine.positions = {"a": SitePosition(2 + number, 7)}
    # the states of the checkpoint before stay
    assert engine.events[:3] == [("restore", {}), "checkpoint", ("prune", {})]
    assert engine.events[3:] == ["checkpoint", ("prune", {"a": SitePosition(3, 7)})]
    resumed = Script()
    resumed.simulation = False  # this site's state lies elsewhere
    make(engine=resumed).resume()
    assert resumed.events == [("restore", {"a": SitePosition(4, 7)})]


@pytest.mark.parametrize(
    ("every", "simulation", "saved_before", "pruned"),
    [(0, True, False, 3), (0, False, False, 0), (0, True, True, 0), (2, True, False, 2), (4, True, False, 1)],
)
def test_states_that_nobody_can_go_back_to_are_pruned_in_every_round(make, every, simulation, saved_before, pruned):
    """Without checkpoints, of simulated sites, and where no earlier checkpoint needs them; else at each checkpoint."""
    engine = Script()
    engine.simulation = simulation
    engine.saved_positions = lambda: {"a": SitePosition(9, 1)}
    if saved_before:
        make(engine=Script()).save()
    federation = make(engine=engine, checkpoint_every=every)
    for _ in federation.rounds(3, federation.state(weights=weights())):
        pass
    found = [event for event in engine.events if event[0] == "prune"]
    assert len(found) == pruned
    if not every:
        assert found == [("prune", {"a": SitePosition(9, 1)})] * pruned


def test_a_run_ends_where_its_patience_does_and_tells_its_seconds(make, monkeypatch):
    class Waiting(Observer):
        def rounds_without_progress(self, federation):
            return federation.round // 2

    for patience, rounds in ((None, 7), (1, 2), (2, 4), (3, 6)):
        federation = make(patience=patience, checkpoint_every=0)
        federation.observer = Waiting()
        assert list(federation.rounds(7, federation.state())) == list(range(1, rounds + 1))
    told, clock = [], iter([10.0, 12.5, 100.0, 101.0])

    class Timed(Observer):
        def round_done(self, federation, rounds, seconds):
            told.append((federation.round, rounds, seconds))

    monkeypatch.setattr("polyclinic.federation.federation.time", SimpleNamespace(perf_counter=clock.__next__))
    federation = make(checkpoint_every=0)
    federation.observer = Timed()
    list(federation.rounds(2, federation.state()))
    assert told == [(1, 2, 2.5), (2, 2, 1.0)]


@pytest.mark.parametrize(
    ("fraction", "sites"), [(1.0, 4), (0.9, 4), (0.76, 3), (0.5, 2), (0.3, 1), (0.01, 1), (0.63, 3)]
)
def test_a_share_of_the_sites_takes_part_in_a_round(make, fraction, sites):
    federation = make(fraction=fraction, checkpoint_every=0)
    drawn = []
    for _ in federation.rounds(20, federation.state()):
        drawn.append(federation.chosen)
        assert [reply.site for reply in federation.ask_all("train")] == list(federation.chosen)
    assert {len(one) for one in drawn} == {sites}
    assert all(one == tuple(site for site in SITES if site in one) for one in drawn)
    assert (len(set(drawn)) > 1) is (sites < 4)
    assert {site for one in drawn for site in one} == set(SITES)
    assert federation.chosen == SITES


def test_a_run_that_goes_on_from_the_checkpoint_before_says_so(make, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        rounds_of(make(), 5, stop=4)
    (tmp_path / "checkpoint" / "manifest.json").write_text("{")
    resumed = make()
    assert resumed.resume()
    assert resumed.round == 2
    [warning] = resumed.reports["warnings"]
    assert warning.endswith("the run goes on from the checkpoint before, of round 2")


def test_only_sites_with_the_same_network_take_each_others_weights(make):
    federation = make(backbones={"a": "resnet18", "b": "resnet18", "c": "lenet5"})
    assert [federation.alike("a", other) for other in "abcd"] == [True, True, False, False]
    assert federation.alike("d", "d")
