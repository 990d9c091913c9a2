"""What a coordinator can ask, what is counted, and what happens when a site fails."""

import pytest
import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Failure, Reply
from polyclinic.federation.federation import Federation
from polyclinic.federation.federation_spec import Faults, FederationSpec
from polyclinic.federation.leaving.parcel import Expected, Parcel
from polyclinic.federation.observer import Observer
from polyclinic.federation.state import SitePosition

SITES = ("a", "b", "c", "d")
KEYS = ("give_key", "take_keys")  # what sites tell each other before the first parcel goes between two


def weights(value=0.0):
    return {"w": torch.full((4,), float(value))}


class Script:
    """An engine whose sites do what the test says: `act(call)` gives parcels, or raises."""

    simulation = True

    def __init__(self, act=lambda call: ()):
        self.act = act
        self.calls = []
        self.positions = {}
        self.events = []

    def call(self, calls):
        self.calls += [call for call in calls if call.operation not in KEYS]
        return [self._answer(call) for call in calls]

    def _answer(self, call):
        if call.operation in KEYS:
            return Reply(call.site, (Parcel("keys", {call.site: torch.zeros(32, dtype=torch.uint8)}),))
        try:
            return Reply(call.site, tuple(self.act(call)))
        except RuntimeError as error:
            return Failure(call.site, call.operation, str(error))

    def checkpoint(self):
        self.events.append("checkpoint")
        return dict(self.positions)

    def prune(self, positions):
        self.events.append(("prune", dict(positions)))

    def restore(self, positions):
        self.events.append(("restore", dict(positions)))

    def close(self):
        self.events.append("close")


@pytest.fixture
def make(tmp_path):
    def build(act=lambda call: (), sites=SITES, engine=None, **kwargs):
        spec = FederationSpec(
            sites=sites,
            seed=1,
            folder=tmp_path,
            initial_weights=weights,
            expected={"weights": Expected.like("weights", weights(), partial=True)},
            trainer=None,
            **kwargs,
        )
        return Federation(spec, engine or Script(act))

    return build


def size(kind, tensors, metadata=None):
    return len(Parcel(kind, tensors, metadata or {}).encoded)


def failing(*sites, only=None):
    """Sites that fail, at the operation `only` if it is given; the others send weights."""

    def act(call):
        if call.site in sites and call.operation in (only or call.operation):
            raise RuntimeError(f"{call.site} is down")
        return (Parcel("weights", weights(1)),)

    return act


# --- asking -------------------------------------------------------------------------------------------


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


def test_all_sites_are_asked_at_once_and_answer_in_order(make):
    federation = make(lambda call: (Parcel("metrics", {}, {"site": call.site}),))
    together = []
    call = federation.engine.call
    federation.engine.call = lambda calls: (together.append(len(calls)), call(calls))[1]
    assert [reply.metadata["site"] for reply in federation.ask_all("evaluate")] == list(SITES)
    assert together == [4]


def test_replies_can_be_taken_one_by_one(make):
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


def test_nothing_is_asked_while_replies_are_being_taken(make):
    """A worker process would get two calls at once, and the order of calls would depend on the engine."""
    federation = make()
    replies = federation.ask_each("train")
    next(replies)
    for ask in (lambda: federation.ask("b", "train"), lambda: federation.ask_all("evaluate")):
        with pytest.raises(AssertionError, match="take all replies"):
            ask()
    assert [reply.site for reply in replies] == ["b", "c", "d"]
    assert federation.ask("b", "train")


def test_a_parcel_that_is_not_expected_is_its_sites_failure(make):
    def act(call):
        return (Parcel("weights", {"w": torch.zeros(5 if call.site == "b" else 4)}),)

    federation = make(act)
    assert [reply.site for reply in federation.ask_all("train")] == ["a", "c", "d"]
    (failure,) = federation.failures
    assert (failure["site"], failure["operation"]) == ("b", "train")
    assert "tensor 'w' is torch.float32 (5,), expected torch.float32 (4,)" in failure["reason"]
    assert federation.communication.summary(SITES)["per_site"]["b"] == 0


def test_a_site_cannot_answer_for_another(make):
    federation = make(faults=Faults(quorum=0.25))
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


def test_keys_are_exchanged_before_the_first_parcel_and_not_again(make):
    federation = make(lambda call: (Parcel("latents", {}),))
    asked = []

    class Asked(Observer):
        def asking(self, operation, sites):
            asked.append(operation)

    federation.observer = Asked()
    federation.forward("a", "give", "c", "take")
    federation.forward("b", "give", "d", "take")
    assert asked == ["give_key", "take_keys", "give", "take", "give", "take"]


def test_forward_fails_where_one_of_the_two_does(make):
    def act(call):
        if call.operation in broken:
            raise RuntimeError("no")
        return (Parcel("latents", {}),)

    broken = {"give"}
    federation = make(act)
    failure = federation.forward("a", "give", "c", "take")
    assert (failure.site, failure.operation) == ("a", "give")
    assert [call.operation for call in federation.engine.calls] == ["give"]

    broken = {"take"}
    federation = make(act)
    assert federation.forward("a", "give", "c", "take").site == "c"
    before = len(federation.engine.calls)
    assert federation.forward("b", "give", "c", "take").site == "c"
    assert len(federation.engine.calls) == before  # nothing leaves 'b' for a site that cannot take it


# --- counting -----------------------------------------------------------------------------------------


def test_bytes_are_those_of_encoded_parcels_both_ways(make):
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


def test_weights_that_a_site_holds_do_not_travel_again(make):
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


def test_what_a_simulator_hands_out_is_not_counted(make):
    federation = make(lambda call: (Parcel("metrics", {}),))
    federation.ask_all("evaluate", counted=False, weights=weights(1))
    assert federation.communication.summary(SITES)["received_bytes"] == 0
    assert federation.communication.summary(SITES)["sent_bytes"] == 4 * size("metrics", {})


def test_every_sum_of_the_summary_adds_up(make):
    federation = make(failing("b"), faults=Faults(quorum=0.1))
    for number in range(3):
        federation.ask_all("train", weights=weights(number))
        federation.ask("c", "finish", gradients=weights(number))
    summary = federation.communication.summary(SITES)
    assert summary["total_bytes"] > 0
    for table in ("by_kind", "by_operation", "per_site"):
        assert sum(summary[table].values()) == summary["total_bytes"]
    assert summary["sent_bytes"] + summary["received_bytes"] == summary["total_bytes"]


# --- failures -----------------------------------------------------------------------------------------


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


def test_after_the_last_round_all_sites_are_asked_again(make):
    """Else the test images of a site that failed in the last round would silently be missing, or not,
    depending on whether the run was resumed."""
    federation = make(failing("b", only=["train"]))
    for _ in federation.rounds(1, federation.state()):
        federation.ask_all("train")
    assert [reply.site for reply in federation.ask_all("evaluate")] == list(SITES)


@pytest.mark.parametrize(
    ("sites", "quorum", "may_fail"),
    [
        (4, 0.5, 2),
        (5, 0.5, 2),
        (3, 0.5, 1),
        (2, 0.5, 1),
        (1, 0.5, 0),
        (10, 0.7, 3),
        (4, 1.0, 0),
        (4, 0.01, 3),
        (3, 0.34, 1),
    ],
)
def test_at_least_the_quorum_must_be_left(make, sites, quorum, may_fail):
    names = tuple(f"s{k}" for k in range(sites))
    if may_fail:
        federation = make(failing(*names[:may_fail]), names, faults=Faults(quorum=quorum))
        assert len(federation.ask_all("train")) == sites - may_fail
    federation = make(failing(*names[: may_fail + 1]), names, faults=Faults(quorum=quorum))
    with pytest.raises(WorkFailed, match=rf"site 's{may_fail}' failed in round 0 \(train\): s{may_fail} is down"):
        federation.ask_all("train")


def test_failures_of_a_round_add_up_over_its_operations(make):
    down = set()

    def act(call):
        if call.site in down:
            raise RuntimeError("down")
        return ()

    federation = make(act)
    for site in "ab":
        down.add(site)
        federation.ask_all("train")
    down.add("c")
    with pytest.raises(WorkFailed, match="1 of 4 sites are left and 2 are needed"):
        federation.ask_all("evaluate")


def test_one_failure_is_enough_where_the_study_says_stop(make):
    federation = make(failing("c"), faults=Faults("stop", 0.1))
    with pytest.raises(WorkFailed, match=r"'c'.*engine.on_failure = 'stop'"):
        federation.ask_all("train")
    with pytest.raises(WorkFailed):
        make(failing("c"), faults=Faults("stop", 0.1)).ask("c", "train")


def test_a_failure_is_false_and_a_reply_is_true(make):
    federation = make(failing("a"))
    assert not federation.ask("a", "train")
    assert federation.ask("b", "train")
    assert Reply("x", ())


# --- state, once, resume ------------------------------------------------------------------------------


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


def test_once_is_made_once_even_if_killed_before_the_first_round(make):
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


def test_once_belongs_before_the_first_round(make):
    """A checkpoint of it would be one without the state of the rounds so far."""
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


def test_old_site_states_are_pruned_only_after_the_checkpoint_is_there(make, tmp_path):
    engine = Script()
    there = []
    engine.prune = lambda positions: there.append((tmp_path / "checkpoint" / "manifest.json").exists())
    make(engine=engine).save()
    assert there == [True]


def test_no_checkpoints_where_none_are_wanted(make, tmp_path):
    federation = make(checkpoint_every=0)
    for _ in federation.rounds(3, federation.state(weights=weights())):
        pass
    assert not (tmp_path / "checkpoint").exists()


def test_draws_of_the_coordinator_depend_on_purpose_and_round(make):
    federation = make()
    first = torch.rand(3, generator=federation.rng("batches"))
    assert torch.equal(first, torch.rand(3, generator=make().rng("batches")))
    assert not torch.equal(first, torch.rand(3, generator=federation.rng("other")))
    federation.round = 1
    assert not torch.equal(first, torch.rand(3, generator=federation.rng("batches")))
