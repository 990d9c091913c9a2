"""Sites that fail, what a run keeps, and how it is resumed, as the coordinator half sees them."""

import pytest
import torch
from scripted_engine import SITES, Script, failing, weights

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.federation_spec import Faults
from polyclinic.federation.state import SitePosition

# --- failures ----------------------------------------------------------------------------------------


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


# --- state, once, resume -----------------------------------------------------------------------------


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
