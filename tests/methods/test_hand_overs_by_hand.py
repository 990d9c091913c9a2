"""What sites hand to the coordinator and to each other: latents, shared images, replay, counts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Failure, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedavg_share import FedAvgShare
from polyclinic.methods.fedreplay import FedReplay, _counts, _pooled
from polyclinic.methods.shared import generative_replay, replay_space, shared_images
from polyclinic.methods.shared.generative_replay import GenerativeReplay, Replay
from polyclinic.methods.shared.local_training import one_pass
from polyclinic.questions.inspect import InspectSites
from polyclinic.randomness import torch_rng


def test_latents_are_pooled_mirrored_and_passed_over():
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
    images = torch.arange(8.0).reshape(2, 1, 2, 2)
    trainer = SimpleNamespace(
        load=lambda weights: torch.nn.Identity(),
        split=lambda model: (model, None),
        forward=lambda x, front: x,
        examples=lambda part, rng: [(images[:1], torch.tensor([0])), (images[1:], torch.tensor([1]))],
        task=SimpleNamespace(dense=False),
    )
    site = SimpleNamespace(trainer=trainer, data=SimpleNamespace(train=None), rng=lambda purpose: None)
    latents, labels = FedReplay(flips=True, latents="fp32").give_latents(site, {})
    assert latents.tensors["flipped_latents"].flatten(1).tolist() == [[1, 0, 3, 2], [5, 4, 7, 6]]
    assert torch.equal(latents.tensors["latents"], images)
    assert (labels.kind, labels.tensors["targets"].tolist()) == ("labels", [0, 1])
    trainer.task.dense = True
    latents, masks = FedReplay(latents="fp32").give_latents(site, {})
    assert (set(latents.tensors), masks.kind) == ({"latents"}, "masks")
    rows = torch.arange(10.0)
    found = list(one_pass(rows, rows, 4, torch_rng("pass"), torch.device("cpu")))
    assert [len(one) for one, _ in found] == [4, 4]
    assert len({float(x) for one, _ in found for x in one}) == 8
    assert all(torch.equal(one, other) for one, other in found)


def shared(count=2, labels=2, masks=None, **changes):
    parcels = [
        Parcel("real-images", {"images": torch.zeros(count, 1, 4, 4, dtype=torch.uint8), **changes}),
        Parcel("labels", {"labels": torch.zeros(labels)}),
    ]
    return Reply("north", (*parcels, *([Parcel("masks", masks)] if masks is not None else [])))


def checked(reply, dense=False):
    trainer = SimpleNamespace(task=SimpleNamespace(dense=dense))
    shared_images.check_shared(SimpleNamespace(image_shape=(1, 4, 4), trainer=trainer), reply)


def test_images_are_counted_and_shared_with_labels_and_masks():
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
    return generative_replay.distribute(federation, {"generator/w": torch.ones(1)}), asked


@pytest.mark.parametrize(("changes", "operations"), [
    ({"replay": {"codes": "as-trained"}}, ["take_replay", "look_at_replay", "probe_replay"]),
    ({"replay": {"probe": False}}, ["encode_images", "take_replay", "look_at_replay"]),
    ({"replay": {"space": "latents"}}, ["encode_images", "take_replay", "look_at_replay"]),
    ({"privacy": SimpleNamespace(cover="all")}, ["encode_images", "take_replay"]),
    ({"privacy": SimpleNamespace(cover="some")}, ["encode_images", "take_replay", "look_at_replay"]),
])  # fmt: skip
def test_what_is_asked_follows_from_the_study(changes, operations):
    assert [operation for operation, _ in distributed(**changes)[1]] == operations


@pytest.mark.parametrize(("codes", "sampled"), [("prior", True), ("final-encoder", False)])
def test_a_probe_and_a_look_know_whether_images_are_samples(monkeypatch, codes, sampled):
    known = []
    monkeypatch.setattr(generative_replay, "received", lambda site: ("model", {"a": "codes of a", "b": "codes of b"}))
    monkeypatch.setattr(generative_replay, "source", lambda site, model, codes: codes)
    monkeypatch.setattr(replay_space, "probe_images", lambda site, model, by_site, sampled: (by_site, sampled))
    monkeypatch.setattr(replay_space, "measure", lambda site, model, sampled: known.append(sampled))
    site = SimpleNamespace(replay_settings=Replay(codes=codes))
    found = GenerativeReplay.probe_replay(None, site)
    assert found == ({"a": {"a": "codes of a"}, "b": {"b": "codes of b"}}, sampled)
    GenerativeReplay.look_at_replay(None, site)
    assert known == [sampled]


def test_who_trains_the_encoder_and_the_generator():
    counts = {"a": 3, "b": 9, "c": 9}
    replies = [Reply(name, (Parcel("statistics", {}, {"samples": count}),)) for name, count in counts.items()]
    federation = SimpleNamespace(sites=("a", "b", "c"), ask_all=lambda name: replies, rng=torch_rng)
    assert FedReplay(encoder_site="largest").choose(federation) == ["b", "c", "a"]
    assert FedReplay(encoder_site="c").choose(federation) == ["c"]
    drawn = FedReplay(encoder_site="random").choose(federation)
    assert sorted(drawn) == ["a", "b", "c"]
    place = int(torch.randint(3, (1,), generator=torch_rng("encoder site")))
    assert drawn[0] == federation.sites[place]
    failed = Failure("north", "train_generator", "no room")
    federation, before = SimpleNamespace(ask=lambda *given, **more: failed), {"generator/w": torch.ones(1)}
    assert generative_replay.train_generator_at(federation, "north", before) == before, "it is left out"


def part(*labels, masks=False):
    images = np.stack([np.full((1, 2, 2), label, np.uint8) for label in labels])
    return ImageSet(images, np.array(labels), masks=images[:, 0].copy() if masks else None)


@pytest.mark.parametrize("masks", [False, True])
def test_shared_images_are_parcels_and_become_images_again(masks):
    replies = [
        Reply(site, (*shared_images.release(own), Parcel("metrics", {"loss": torch.tensor(1.0)})))
        for site, own in (("a", part(1, 2, masks=masks)), ("b", part(3, masks=masks)))
    ]
    kinds = ["real-images", "labels", *(["masks"] if masks else []), "metrics"]
    assert [parcel.kind for parcel in replies[0].parcels] == kinds
    pooled = shared_images.pool(replies)
    assert pooled["labels"].tolist() == [1, 2, 3]
    assert shared_images.pool(replies[:1])["labels"].tolist() == [1, 2]
    assert list(shared_images.parcels_of(pooled)) == ["real_images", "labels", *(["masks"] if masks else [])]
    found = shared_images.pooled_images(pooled)
    assert (found.labels.tolist(), found.images[:, 0, 0, 0].tolist()) == ([1, 2, 3], [1, 2, 3])
    assert (found.masks is not None) is masks
    some = shared_images.release(part(4, 5, 6), np.array([2, 0]))
    assert some[1].tensors["labels"].tolist() == [6, 4]


@pytest.mark.parametrize(("share", "images", "given"), [(0.5, 8, 4), (0.01, 8, 1), (0.3, 9, 3), (1.0, 5, 5)])
def test_a_site_gives_its_share_of_images_and_one_at_least(share, images, given):
    part = ImageSet(np.arange(images, dtype=np.uint8)[:, None, None, None], np.arange(images))
    site = SimpleNamespace(data=SimpleNamespace(train=part), rng=torch_rng)
    real, labels = FedAvgShare(share=share).give_share(site)
    assert len(real.tensors["images"]) == given
    numbers = labels.tensors["labels"].tolist()
    assert numbers == sorted(set(numbers)) == real.tensors["images"].flatten().tolist()
