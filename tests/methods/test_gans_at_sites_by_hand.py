"""GANs at sites and synthetic images, worked out by hand."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_feder_buffers import MASKS, site_with

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import GENERATORS
from polyclinic.methods.felicia import Felicia
from polyclinic.methods.shared import gan_plans, replay_space, site_generator
from polyclinic.methods.shared.central_discriminator import images_of_others, join_images
from polyclinic.methods.shared.gan_plans import STEPS
from polyclinic.methods.shared.replay_space import Limits
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target


@pytest.fixture
def gans(monkeypatch):
    """Sites with settings of a GAN; private ones by name."""
    monkeypatch.setattr(gan_plans, "adversarial_settings", lambda at: at.generator)
    monkeypatch.setattr(gan_plans.private, "is_private", lambda site, part: site.name == "private")
    settings = {"stackable": True, "separates_classes": False, "balances_classes": False, "batch_size": 8}
    settings["takes_turns"] = True

    def make(name="a", images=20, size=28, channels=1, labels=(0, 1), classes=2, steps=None, **changes):
        part = ImageSet(np.zeros((images, channels, size, size), np.uint8), np.resize(labels, images))
        return SimpleNamespace(
            name=name,
            generator=SimpleNamespace(**{**settings, **changes}),
            data=SimpleNamespace(train=part),
            trainer=SimpleNamespace(target=SimpleNamespace(classes=("x",) * classes)),
            state={} if steps is None else {STEPS: torch.tensor(steps)},
        )

    return make


def test_rows_of_a_batch_are_those_of_a_small_site_unless_images_are_repeated(gans):
    assert gan_plans.batch_rows(gans()) == 8
    assert gan_plans.batch_rows(gans(images=5)) == 5
    assert gan_plans.batch_rows(gans(images=5, balances_classes=True)) == 8
    assert gan_plans.batch_rows(gans(images=5, balances_classes=True, classes=0)) == 5
    assert gan_plans.steps_taken(gans()) == 0
    assert gan_plans.steps_taken(gans(steps=7)) == 7


def test_sites_are_stacked_where_all_is_alike_and_classes_take_turns(gans):
    def groups(*sites):
        return [len(group) for group in gan_plans.stackable(list(sites))]

    assert groups(gans(), gans("b")) == [2]
    assert groups(gans()) == [1]
    assert groups(gans(), gans("b", size=32)) == [1, 1]
    assert groups(gans(), gans("b", channels=3)) == [1, 1]
    assert groups(gans(), gans("b", images=3)) == [1, 1]
    assert groups(gans(), gans("b", steps=1)) == [1, 1]
    assert groups(gans(), gans("private")) == [1, 1]
    assert groups(gans(stackable=False), gans("b")) == [1, 1]
    apart = {"separates_classes": True}
    assert groups(gans(**apart), gans("b", **apart)) == [2]
    assert groups(gans(**apart), gans("b", labels=(0,), **apart)) == [1, 1]
    turns = gan_plans.classes_take_turns
    assert turns([gans(), gans("b")])
    assert not turns([gans(takes_turns=False)])
    assert not turns([gans(classes=0)])
    assert not turns([gans(classes=3, labels=(0, 1, 2))]), "eight rows are not three times as many"
    assert not turns([gans(), gans("b", labels=(0,))])


def reply(site, images, labels=None):
    tensors = {"images": images, **({} if labels is None else {"labels": labels})}
    return Reply(site, (Parcel("synthetic-images", tensors),))


def coordinator(classes=2):
    trainer = SimpleNamespace(device="cpu", target=SimpleNamespace(classes=tuple(map(str, range(classes)))))
    return SimpleNamespace(trainer=trainer, sites=("a", "b", "c"))


def test_images_are_joined_with_the_number_of_their_site_and_given_to_all_others():
    black, white = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.full((2, 1, 2, 2), 255, dtype=torch.uint8)
    found = join_images(coordinator(), [reply("c", black), reply("a", white)], per_class=False)
    assert found.site.tolist() == [2, 2, 0, 0]
    assert found.images.mean((1, 2, 3)).tolist() == pytest.approx([-1, -1, 1, 1])
    assert found.turns
    apart = [reply("a", black, torch.tensor([0, 1])), reply("b", white, torch.tensor([1, 0]))]
    assert not join_images(coordinator(), apart, per_class=True).turns
    in_turns = [reply("a", black, torch.tensor([0, 1])), reply("b", white, torch.tensor([0, 1]))]
    joined = join_images(coordinator(), in_turns, per_class=True)
    assert (joined.turns, joined.labels.tolist()) == (True, [0, 1, 0, 1])
    replies = [
        reply(name, torch.full((1, 1, 2, 2), n, dtype=torch.uint8), torch.tensor([n])) for n, name in enumerate("abc")
    ]
    given = images_of_others(replies)
    assert given["b"]["synthetic_images"].tensors["labels"].tolist() == [0, 2]
    assert given["b"]["synthetic_images"].tensors["images"].flatten().tolist() == [0] * 4 + [2] * 4
    assert images_of_others(replies[:1]) == {}


FLOATS, BYTES = torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2, dtype=torch.uint8)


@pytest.mark.parametrize(("operation", "tensors", "words"), [
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0, 1])}, None),
    ("start_round", {"images": BYTES, "labels": torch.tensor([0, 1])}, "none of the study's size"),
    ("generator_step", {"images": torch.zeros(2, 1, 2, 3), "labels": torch.tensor([0, 1])}, "none of the study's"),
    ("train_locally", {"images": FLOATS[:0], "labels": torch.zeros(0, dtype=torch.long)}, "none of the study's"),
    ("train_locally", {"labels": torch.tensor([0, 1])}, "none of the study's size"),
    ("start_round", {"images": FLOATS}, "came without labels"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0.0, 1.0])}, "labels that are no classes"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0])}, "give one each"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([0, 2])}, "labels run from 0 to 2"),
    ("start_round", {"images": FLOATS, "labels": torch.tensor([-1, 0])}, "labels run from -1 to 0"),
    ("give_images", {"images": BYTES, "labels": torch.tensor([0, 1])}, None),
    ("give_images", {"images": FLOATS, "labels": torch.tensor([0, 1])}, "none of the study's size"),
    ("give_images", {"images": BYTES}, "came without labels"),
    ("evaluate", {}, None),
])  # fmt: skip
def test_images_that_a_site_sends_are_looked_at(operation, tensors, words):
    """For the central discriminators of two classes, or for other sites."""
    trainer = SimpleNamespace(target=SimpleNamespace(classes=("no", "yes")))
    federation = SimpleNamespace(generator=GENERATORS["dcgan"](), image_shape=(1, 2, 2), trainer=trainer)
    check, sent = Felicia(central="per-class").check_reply, Reply("a", (Parcel("synthetic-images", tensors),))
    with pytest.raises(ParcelRejected, match=words) if words else nullcontext():
        check(federation, Call("a", operation, 1), sent)
    check(federation, Call("a", "generator_step", 1, arguments={"last": True}), Reply("a", ()))
    with pytest.raises(ParcelRejected, match="no synthetic images came"):
        check(federation, Call("a", "generator_step", 1, arguments={"last": False}), Reply("a", ()))


def channels(*values: tuple[float, float]) -> torch.Tensor:
    """Two images [1, 1] with a channel for each pair of values."""
    return torch.tensor(values).T[:, :, None, None]


def test_limits_lie_six_deviations_around_the_mean_of_a_channel():
    """Two values that differ by d have a deviation of d over the root of 2."""
    root = 2**0.5
    limits = Limits.of(channels((1.0, 1.0 + root), (4.0, 4.0 + 2 * root), (0.0, 3 * root)))
    middle = [1 + root / 2, 4 + root, 1.5 * root]
    assert limits.low.flatten().tolist() == pytest.approx([m - 6 * d for m, d in zip(middle, (1, 2, 3), strict=True)])
    assert limits.high.flatten().tolist() == pytest.approx([m + 6 * d for m, d in zip(middle, (1, 2, 3), strict=True)])
    assert limits.low.shape == (3, 1, 1)
    root = 2**0.5
    limits = Limits.of(channels((0.0, 0.1 * root), (0.0, 4 * root), (0.0, 9 * root)))
    half = (limits.high - limits.low).flatten() / 2
    assert half.tolist() == pytest.approx([6 * 0.4, 6 * 4, 6 * 9])
    still = Limits.of(torch.full((2, 3, 1, 1), 5.0))
    assert (still.high - still.low).flatten().tolist() == pytest.approx([12e-6] * 3, rel=0.2)


class Coded:
    """Codes are the images; what comes back from them is 51 brighter."""

    def __init__(self):
        self.codebook_sizes = {"top": 8}

    def encode(self, images):
        return {"top": images}

    def decode(self, codes):
        return codes["top"] + 51

    def usage(self, codes):
        return dict.fromkeys(codes, 0.25)

    def sample(self, labels, rng):
        return torch.full((len(labels), 1, 2, 2), 9, dtype=torch.uint8)


@pytest.fixture
def replayed(monkeypatch):
    """A site of 20 images, and the rows of its contact sheet."""
    drawn = []
    train = ImageSet(np.full((20, 1, 2, 3), 100, np.uint8), np.zeros(20, np.int64))
    target = SimpleNamespace(classes=("no", "yes"), unit="")
    site = SimpleNamespace(
        name="north",
        folder=Path("folder"),
        data=SimpleNamespace(train=train),
        trainer=SimpleNamespace(target=target, device="cpu"),
        rng=torch_rng,
        replay_settings=None,
        study=SimpleNamespace(method=None),
    )
    monkeypatch.setattr(replay_space, "CodedModel", Coded)
    monkeypatch.setattr(replay_space, "coloured", lambda values, size, side: (size, side))
    monkeypatch.setattr(replay_space, "contact_sheet", lambda rows, *rest: drawn.append((rows, *rest)))
    return site, drawn


def test_what_comes_back_from_codes_is_measured_and_shown(replayed):
    """51 of 255 is a fifth: 20 log10(5) dB."""
    site, drawn = replayed
    found = replay_space.measure(site, Coded(), sampled=False)
    figures = {name: float(value) for name, value in found.tensors.items()}
    assert figures == {"psnr": pytest.approx(13.9794, abs=1e-3), "code_usage_top": 0.25}
    [(rows, file, words, title)] = drawn
    assert list(rows) == ["real", "reconstructed", "top codes"]
    assert (len(rows["real"]), rows["top codes"]) == (10, (8, 3))
    assert (file.name, words) == ("replay.png", ["no"] * 10)
    assert title == "north: the first 10 of 20 training images, and what replays them"


@pytest.mark.parametrize(
    ("counts", "groups"), [((3, 3), [3, 3]), ((3,), None), ((3, 2), None), ((500, 3, 401), [400, 3, 400])]
)
def test_sites_are_told_apart_where_two_have_images_enough(monkeypatch, replayed, counts, groups):
    site, _ = replayed
    asked = []

    def tell_apart(images, rng, device, paired=None):
        asked.extend([] if "real" in images else [[len(one) for one in images.values()]])
        return {"accuracy": 0.75, "chance": 0.5, "auc": 0.5 + 0.25 * bool(paired)}

    monkeypatch.setattr(replay_space.probe, "tell_apart", tell_apart)
    sources = {
        str(number): SimpleNamespace(labels=[0] * count, images=lambda chosen, rng: chosen)
        for number, count in enumerate(counts)
    }
    found = replay_space.probe_images(site, Coded(), sources, sampled=False)
    figures = {name: float(value) for name, value in found.tensors.items()}
    more = {"which_site_accuracy": 0.75, "which_site_chance": 0.5} if groups else {}
    assert figures == {"real_or_replayed_auc": 0.75, **more}
    assert asked == ([groups] if groups else [])
    unpaired = replay_space.probe_images(site, Coded(), {}, sampled=True)
    assert float(unpaired.tensors["real_or_replayed_auc"]) == 0.5


@pytest.fixture
def sheet(monkeypatch, tmp_path):
    """What a contact sheet shows."""
    found = {}

    def contact_sheet(rows, file, words, title):
        found.update(rows=rows, file=file, words=words, title=title)

    monkeypatch.setattr(site_generator, "contact_sheet", contact_sheet)
    return found


def test_real_images_of_the_same_labels_stand_above_synthetic_ones(sheet, tmp_path):
    site = site_with(labels=torch.arange(40) // 20, folder=tmp_path)
    labels = torch.tensor([1, 0, 1])
    buffer = {"images": torch.full((3, 1, 28, 28), 7, dtype=torch.uint8), "labels": labels}
    site_generator._draw_sheet(site, buffer)
    real = torch.from_numpy(site.data.train.images)
    # the first image of class 1, the second of class 0, the third of class 1: none is shown twice
    assert torch.equal(sheet["rows"]["real"], real[[20, 1, 22]])
    assert torch.equal(sheet["rows"]["synthetic"], buffer["images"])
    assert set(sheet["rows"]) == {"real", "synthetic"}
    assert sheet["title"].startswith("west: 3 of 3 synthetic images")
    assert sheet["file"] == tmp_path / "synthetic.png"


def test_masks_are_shown_white_on_black_for_twelve_images(sheet, tmp_path):
    site = site_with(masks=MASKS.byte(), folder=tmp_path)
    made = torch.zeros(15, 28, 28, dtype=torch.uint8)
    made[1] = 1
    buffer = {"images": torch.zeros(15, 1, 28, 28, dtype=torch.uint8), "labels": torch.zeros(15), "masks": made}
    site_generator._draw_sheet(site, buffer)
    rows = sheet["rows"]
    assert {name: len(row) for name, row in rows.items()} == dict.fromkeys(rows, 12)
    assert rows["synthetic mask"].shape == (12, 1, 28, 28)
    assert rows["synthetic mask"].amax((1, 2, 3)).tolist() == [0, 255] + [0] * 10
    even = list(range(0, 24, 2))  # images of label 0
    assert rows["real mask"][:, 0, 0, 0].tolist() == [255 if place % 3 == 0 else 0 for place in even]
    assert sheet["title"].startswith("west: 12 of 15 synthetic images")


def test_an_empty_buffer_has_no_sheet_and_values_lie_in_their_range(sheet, tmp_path):
    site = site_with(folder=tmp_path)
    model = SimpleNamespace(sample=lambda labels, rng: torch.zeros(len(labels), 1, 28, 28, dtype=torch.uint8))
    site_generator.draw_buffer(site, model, 0)
    assert not sheet
    site_generator.draw_buffer(site, model, 1)
    assert sheet["title"].startswith("west: 1 of 1")
    target = Target((), label_range=(20.0, 30.0))
    ages = site_generator.uniform_labels(200, None, target, torch.Generator().manual_seed(0))
    drawn = torch.rand(200, generator=torch.Generator().manual_seed(0))
    assert ages.tolist() == pytest.approx((20 + 10 * drawn).tolist())
    nothing = site_generator.uniform_labels(3, None, Target(()), torch.Generator().manual_seed(0))
    assert nothing.tolist() == [0, 0, 0]
