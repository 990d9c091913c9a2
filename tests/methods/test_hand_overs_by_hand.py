"""What sites hand to the coordinator and to each other: pooled latents, shared images, replay, turns, alone or not."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Failure, Reply
from polyclinic.federation.ledger.parcel import Parcel, ParcelRejected
from polyclinic.federation.operation import carry_out
from polyclinic.methods.feder import FedER
from polyclinic.methods.fedreplay import FedReplay, _batches, _counts, _pooled
from polyclinic.methods.shared import generative_replay, pooling, replay_space, site_generator
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
    found = list(_batches(rows, rows, 4, torch_rng("pass"), torch.device("cpu")))
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


def test_images_of_two_parts_follow_each_other():
    one, other = (ImageSet(np.full((1, 1, 2, 2), n, np.uint8), np.array([n])) for n in (1, 2))
    both = pooling.union(one, other)
    assert (both.labels.tolist(), both.images[:, 0, 0, 0].tolist(), both.masks) == ([1, 2], [1, 2], None)


# --- replay


def test_a_site_that_cannot_train_the_generator_is_named():
    failed = Failure("north", "train_generator", "no room")
    federation = SimpleNamespace(ask=lambda *given, **more: failed, once=lambda name, make: make())
    with pytest.raises(WorkFailed, match="site 'north' could not train the generator: no room"):
        generative_replay.train_generator_at(federation, "north", {})


def test_figures_of_replay_have_four_digits():
    told = {}
    federation = SimpleNamespace(
        once=lambda name, make: {"psnr": torch.tensor(20.123456)}, report=lambda name, value: told.update({name: value})
    )
    generative_replay.distribute(federation, {})
    assert told == {"replay": {"psnr": 20.1235}}


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


def test_a_generator_of_one_site_is_trained_alone(monkeypatch):
    monkeypatch.setattr(site_generator, "train_generator", lambda site: site.name)
    monkeypatch.setattr(site_generator, "_train_stack", lambda sites: ["stacked"] * len(sites))
    part = SimpleNamespace(images=np.zeros((3, 1, 28, 32), np.uint8))
    sites = [
        SimpleNamespace(name=name, data=SimpleNamespace(train=part), trainer=SimpleNamespace(stacked="always"))
        for name in ("a", "b")
    ]
    assert site_generator._train_group(sites[:1]) == ["a"]
    assert site_generator._train_group(sites) == ["stacked"] * 2
    sides = []
    monkeypatch.setattr(site_generator, "stacking_gans_pays", lambda count, side: sides.append((count, side)))
    for site in sites:
        site.trainer.stacked = "auto"
    assert site_generator._train_group(sites) == ["a", "b"]
    assert sides == [(2, 32)]


def test_sites_adapt_to_the_newest_model_where_they_are_told_so(monkeypatch):
    turns = []
    monkeypatch.setattr("polyclinic.methods.feder.queue_of", lambda site: site.name != "idle")
    monkeypatch.setattr(FedER, "take_turn", lambda self, site, newest: turns.append((site.name, newest)))

    def train(self, site, buffer):
        yield from ()
        return {"steps": len(site.name)}

    monkeypatch.setattr(FedER, "train", train)
    sites = [SimpleNamespace(name=name) for name in ("a", "idle", "bb")]
    found = carry_out([FedER().adapt(site, newest) for site, newest in zip(sites, [True, True, False], strict=True)])
    assert [one and one.metadata for one in found] == [{"steps": 1}, None, {"steps": 2}]
    assert turns == [("a", True), ("bb", False)]


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


class Coded:
    """Codes that come back one brighter; samples are all 9."""

    def encode(self, images):
        return {"codes": images}

    def decode(self, codes):
        return codes["codes"] + 1

    def sample(self, labels, rng):
        return torch.full((len(labels), 1, 2, 2), 9)


@pytest.mark.parametrize(("sampled", "coded", "value"), [(True, True, 9), (False, True, 4), (False, False, 9)])
def test_real_images_stand_beside_samples_or_what_came_back(monkeypatch, sampled, coded, value):
    pixels = np.full((500, 1, 2, 2), 3, np.uint8)
    monkeypatch.setattr(replay_space.replay_space, "learned", lambda own: pixels)
    monkeypatch.setattr(replay_space, "CodedModel", Coded if coded else int)
    part = SimpleNamespace(labels=np.zeros(500, np.int64))
    own = SimpleNamespace(data=SimpleNamespace(train=part), rng=torch_rng)
    real, replayed = replay_space.real_and_replayed(own, Coded(), sampled=sampled)
    assert (len(real), len(replayed), int(replayed.max())) == (400, 400, value)


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


@pytest.mark.parametrize("private", [True, False])
def test_accounts_are_opened_where_the_primary_model_is_private(monkeypatch, private):
    opened = []
    module = "polyclinic.methods.fedreplay.private_latents"
    monkeypatch.setattr(f"{module}.open_accounts", lambda federation, counts: opened.append(counts) or "accounts")
    sent = {"a/latents": torch.ones(3, 1), "a/targets": torch.zeros(3)}
    federation = SimpleNamespace(
        once=lambda name, make: sent if name == "latents" else {},
        trainer=SimpleNamespace(privacy=SimpleNamespace(on=("primary",)) if private else None),
        initial_weights=dict,
        state=lambda **values: SimpleNamespace(**values),
        rounds=lambda count, state: [],
    )
    FedReplay().run(federation)
    assert opened == ([{"a": 3}] if private else [])
