"""What sites hand to the coordinator and to each other: pooled latents, shared images, replay, turns, alone or not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Failure, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedreplay import FedReplay, _counts, _pooled
from polyclinic.methods.shared import generative_replay, pooling
from polyclinic.methods.shared.local_training import one_pass
from polyclinic.questions.inspect import InspectSites
from polyclinic.randomness import torch_rng

# --- FedReplay


def test_latents_of_all_sites_are_pooled_and_mirrored_ones_come_last():
    sent = {
        "north/a/latents": torch.tensor([[1.0]]),
        "north/a/targets": torch.tensor([[1, 2]]),
        "north/a/flipped_latents": torch.tensor([[2.0]]),
        "south/latents": torch.tensor([[3.0]]),
        "south/targets": torch.tensor([[3, 4]]),
        "south/flipped_latents": torch.tensor([[4.0]]),
    }
    latents, targets = _pooled(sent)
    assert latents.flatten().tolist() == [1, 3, 2, 4]
    assert targets.tolist() == [[1, 2], [3, 4], [2, 1], [4, 3]], "a mask is mirrored with its image"
    assert _counts(sent) == {"north/a": 1, "south": 1}
    plain, labels = _pooled({"a/latents": torch.tensor([[1.0]]), "a/targets": torch.tensor([7])})
    assert (plain.tolist(), labels.tolist()) == ([[1]], [7])


def test_a_pass_has_no_incomplete_batch():
    rows = torch.arange(10.0)
    found = list(one_pass(rows, rows, 4, torch_rng("pass"), torch.device("cpu")))
    assert [len(one) for one, _ in found] == [4, 4]
    assert len({float(x) for one, _ in found for x in one}) == 8
    assert all(torch.equal(one, other) for one, other in found)


def test_an_image_is_mirrored_left_to_right():
    images = torch.arange(8.0).reshape(2, 1, 2, 2)
    trainer = SimpleNamespace(
        load=lambda weights: torch.nn.Identity(),
        split=lambda model: (model, None),
        forward=lambda x, front: x,
        in_order=lambda part: [(images[:1], torch.tensor([0])), (images[1:], torch.tensor([1]))],
        task=SimpleNamespace(dense=False),
    )
    site = SimpleNamespace(trainer=trainer, data=SimpleNamespace(train=None))
    latents, labels = FedReplay(flips=True, latents="fp32").give_latents(site, {})
    assert latents.tensors["flipped_latents"].flatten(1).tolist() == [[1, 0, 3, 2], [5, 4, 7, 6]]
    assert torch.equal(latents.tensors["latents"], images)
    assert (labels.kind, labels.tensors["targets"].tolist()) == ("labels", [0, 1])
    trainer.task.dense = True
    latents, masks = FedReplay(latents="fp32").give_latents(site, {})
    assert (set(latents.tensors), masks.kind) == ({"latents"}, "masks")


# --- shared images


def shared(count=2, labels=2, masks=None, **changes):
    parcels = [
        Parcel("real-images", {"images": torch.zeros(count, 1, 4, 4, dtype=torch.uint8), **changes}),
        Parcel("labels", {"labels": torch.zeros(labels)}),
    ]
    return Reply("north", (*parcels, *([Parcel("masks", masks)] if masks is not None else [])))


def checked(reply, dense=False):
    trainer = SimpleNamespace(task=SimpleNamespace(dense=dense))
    pooling.check_shared(SimpleNamespace(image_shape=(1, 4, 4), trainer=trainer), reply)


def test_shared_images_have_labels_and_masks():
    checked(shared())
    checked(shared(masks={"masks": torch.zeros(2, 4, 4)}), dense=True)
    for wrong in (shared(0, 0), shared(more=torch.zeros(2)), shared(images=torch.zeros(2, 1, 4, 4))):
        with pytest.raises(ParcelRejected, match="not images of the study's shape"):
            checked(wrong)
    for wrong in (shared(labels=3), shared(masks={"masks": torch.zeros(1, 4, 4)})):
        with pytest.raises(ParcelRejected, match="not as many labels or masks"):
            checked(wrong)
    with pytest.raises(ParcelRejected, match="the masks are missing"):
        checked(shared(masks={}), dense=True)


# --- replay


def test_a_site_that_cannot_train_the_generator_is_named():
    failed = Failure("north", "train_generator", "no room")
    federation = SimpleNamespace(ask=lambda *given, **more: failed, once=lambda name, make: make())
    with pytest.raises(WorkFailed, match="site 'north' could not train the generator: no room"):
        generative_replay.train_generator_at(federation, "north", {})


def distributed(**changes):
    """Which sites are asked what."""
    asked = []

    def ask_all(operation, **given):
        asked.append((operation, sorted(given)))
        codes = Parcel("codes", {f"{len(asked)}": torch.ones(1)})
        metrics = Parcel("metrics", {"psnr": torch.tensor(float(len(asked)))})
        return [Reply(site, (metrics if operation == "look_at_replay" else codes,)) for site in ("a", "b")]

    def ask(site, operation):
        asked.append((operation, site))
        return Reply(site, (Parcel("metrics", {"probe": torch.tensor(0.5)}),))

    settings = generative_replay.Replay(**{"probe": True, **changes.pop("replay", {})})
    federation = SimpleNamespace(
        replay_settings=settings,
        ask_all=ask_all,
        ask=ask,
        sites=("a", "b"),
        trainer=SimpleNamespace(privacy=changes.get("privacy")),
    )
    return generative_replay._distribute(federation, {"generator/w": torch.ones(1)}), asked


def test_codes_of_all_go_to_all_and_one_site_probes():
    found, asked = distributed()
    assert asked == [
        ("encode_images", ["generator"]),
        ("take_replay", ["codes", "generator"]),
        ("look_at_replay", []),
        ("probe_replay", "a"),
    ]
    assert {name: float(value) for name, value in found.items()} == {"psnr": 3, "probe": 0.5}


@pytest.mark.parametrize(
    ("changes", "operations"),
    [
        ({"replay": {"codes": "as-trained"}}, ["take_replay", "look_at_replay", "probe_replay"]),
        ({"replay": {"probe": False}}, ["encode_images", "take_replay", "look_at_replay"]),
        ({"replay": {"space": "latents"}}, ["encode_images", "take_replay", "look_at_replay"]),
        ({"privacy": SimpleNamespace(cover="all")}, ["encode_images", "take_replay"]),
        ({"privacy": SimpleNamespace(cover="some")}, ["encode_images", "take_replay", "look_at_replay"]),
    ],
)
def test_what_is_asked_follows_from_the_study(changes, operations):
    assert [operation for operation, _ in distributed(**changes)[1]] == operations


# --- alone, or as a stack


# --- inspect


def test_a_site_counts_its_images():
    train = ImageSet(
        np.full((6, 1, 64, 64), 40, np.uint8),
        np.array([0, 0, 0, 1, 1, 1]),
        cases=np.array([1, 1, 2, 2, 3, 3]),
        columns=np.array([["f", "1"], ["", "2"], ["f", ""], ["f", "1"], ["m", "1"], ["m", "1"]]),
    )
    validation = ImageSet(np.zeros((2, 1, 64, 64), np.uint8), np.array([0, 1]))
    data = SimpleNamespace(train=train, validation=validation)
    target = SimpleNamespace(classes=("no", "yes"), label_range=None)
    site = SimpleNamespace(data=data, min_cohort=0, trainer=SimpleNamespace(target=target))
    found = {name: tensor.tolist() for name, tensor in InspectSites().survey(site).tensors.items()}
    assert found["splits"] == [6, 2]
    assert found["patients"] == [3]
    assert found["labels"] == [3, 3]
    assert found["intensities"] == [0, 0, 6] + [0] * 13  # 40 of 255 in the third of 16 bins
    assert found["sides"] == [0, 6] + [0] * 7
    assert found["spacings"] == [0] * 9 + [6]
    assert found["missing"] == [2]
    assert set(found["labels told"]) == {1}
    train = ImageSet(train.images, train.labels)
    site.data = SimpleNamespace(train=train, validation=validation)
    found = {name: tensor.tolist() for name, tensor in InspectSites().survey(site).tensors.items()}
    assert (found["patients"], found["missing"]) == ([6], [0])


# --- what is looked at of replay


@pytest.mark.parametrize(("own", "wanted"), [(True, ["a", "b"]), (False, ["b"])])
@pytest.mark.parametrize("made", ["on-the-fly", "buffer"])
def test_a_site_replays_its_own_images_where_the_study_says_so(monkeypatch, own, wanted, made):
    """What is replayed is put together once, and filled into a buffer where that is asked for."""
    monkeypatch.setattr(generative_replay, "received", lambda site: ("model", {"a": 1, "b": 2}))
    monkeypatch.setattr(generative_replay, "source", lambda site, model, codes: list(codes))
    monkeypatch.setattr(generative_replay.replay_stream, "fill", lambda images, rng: (rng, images))
    settings = generative_replay.Replay(own=own, made=made)
    site = SimpleNamespace(name="a", replay_settings=settings, cache={}, lasting_rng=lambda purpose: purpose)
    found = generative_replay.replayed_images(site)
    assert found == (wanted if made == "on-the-fly" else ("buffer", wanted))
    assert generative_replay.replayed_images(site) is found


@pytest.mark.parametrize(
    ("ratio", "batch", "images", "size"), [(1.0, 8, 20, 8), (0.5, 8, 20, 4), (2.0, 8, 3, 6), (0.1, 8, 20, 1)]
)
@pytest.mark.parametrize("latents", [True, False])
def test_replayed_batches_are_a_share_of_real_ones(monkeypatch, ratio, batch, images, size, latents):
    monkeypatch.setattr(generative_replay, "replayed_images", lambda site: "images")
    monkeypatch.setattr(
        generative_replay.replay_stream, "stream", lambda source, size, rng, **given: iter([(source, size)])
    )
    monkeypatch.setattr(generative_replay.replay_space, "in_latents", lambda site: latents)
    limits = SimpleNamespace(to_latents=lambda units: f"latents of {units}")
    monkeypatch.setattr(generative_replay.replay_space, "limits_of", lambda site: limits)
    optimizer = SimpleNamespace(batch_size=batch, augment=())
    trainer = SimpleNamespace(optimizer=optimizer, task=None, device=None)
    site = SimpleNamespace(trainer=trainer, data=SimpleNamespace(train=range(images)), rng=torch_rng)
    site.replay_settings = generative_replay.Replay(ratio=ratio)
    found = generative_replay.replayed(site)
    assert found.size == size
    assert next(found.stream) == ("latents of images" if latents else "images", size)
    site.replay_settings = generative_replay.Replay(ratio=0.05)
    assert generative_replay.replayed(site) is None, "less than half an image is none"
