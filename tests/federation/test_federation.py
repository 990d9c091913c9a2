"""What a coordinator can ask, what is counted, and what happens when a site fails."""

import pytest
import torch
from scripted_engine import SITES, failing, weights

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Failure, Reply, sort_payload
from polyclinic.federation.ledger.parcel import Parcel


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
