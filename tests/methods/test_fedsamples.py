"""Fedsamples: what leaves, labels by rounded counts, the site's own audit, and private counts by hand."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import GateRefusedData, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import Flow
from polyclinic.methods.shared import self_audit, site_samples
from polyclinic.methods.shared.self_audit import Learned
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target

FLOW = {"name": "flow", "steps": 8, "batch_size": 8, "width": 8, "levels": 2, "blocks": 1, "sample_steps": 2}
METHOD = {"name": "fedsamples", "rounds": 2, "looks": 2}


def test_samples_and_nothing_else_leave(tiny_run):
    two = {"partition": "iid", "count": 2}
    result = tiny_run(METHOD | {"looks": 1}, generator=FLOW, sites=two, data={"samples": 120, "validation": 0.4})
    lines = [line for path in (result.folder / "ledger").iterdir() for line in verify(path)]
    assert {line["kind"] for line in lines} == {"synthetic-images", "metrics"}
    assert {one["audit"] for one in result["samples"].values()} <= set(site_samples.VERDICTS)
    seen = json.loads((result.folder / "sites" / "site-1" / "samples-look-1.json").read_text())
    assert set(seen) == {"found", "copies", "level", "chances"}
    assert len(seen["chances"]) == 3


def site_of(labels, target, cases=None):
    part = ImageSet(np.zeros((len(labels), 1, 28, 28), np.uint8), np.array(labels), cases=cases)
    trainer = SimpleNamespace(target=target, privacy=None)
    data = SimpleNamespace(train=part)
    generator = Flow(**FLOW)
    return SimpleNamespace(
        data=data, trainer=trainer, rng=torch_rng, state={}, min_cohort=0, generator=generator, name="north"
    )


def test_labels_follow_rounded_counts_and_are_nobodys():
    site = site_of([0] * 14 + [1] * 16 + [2] * 3, Target(classes=("a", "b", "c")))
    assert site_samples.cell_labels(site, None).bincount(minlength=3).tolist() == [10, 20, 0]
    assert site_samples.cell_labels(site, 60).bincount(minlength=3).tolist() == [20, 40, 0]
    with pytest.raises(GateRefusedData, match="leaves no sample"):
        site_samples.cell_labels(site_of([0] * 10 + [1] * 10, Target(classes=("a", "b"))), 1)
    few = site_of([0] * 4 + [2] * 3, Target(classes=("a", "b", "c")))
    assert few.data.train.labels.tolist().count(1) == 0
    assert site_samples.cell_labels(few, None).bincount(minlength=3).tolist() == [10, 0, 10]
    ages = site_of([33.0] * 20 + [160.0] * 5, Target(label_range=(0.0, 160.0)))
    drawn = site_samples.cell_labels(ages, None)
    assert ((drawn >= 30) & (drawn < 40)).sum() == 20
    assert (drawn >= 150).sum() == 10
    assert not np.isin(drawn.numpy(), [33.0, 160.0]).any()


@pytest.mark.parametrize("shape", [(1, 28, 28), (24, 1, 1)])
def test_the_audit_finds_what_is_remembered_and_nothing_else(shape):
    """Images of one scene with noise: samples are other such images, or training images with little noise."""

    def images(name, count):
        noise = 30 * torch.randn(count, *shape, generator=torch_rng(name))
        return (128 + 40 * torch.linspace(-1, 1, shape[-1] * shape[0]).reshape(shape[0], 1, -1) + noise).clamp(0, 255)

    def learned(name, count):
        return Learned(images(name, count).byte(), torch.zeros(count), np.arange(count) // 2)

    train, held_out = learned("train", 60), learned("held out", 40)
    fresh = images("fresh", 80).byte()
    found = self_audit.look(fresh, train, held_out)
    assert not found.found
    remembered = (train.rows[:30].float() + 8 * torch.randn(30, *shape, generator=torch_rng("noise"))).clamp(0, 255)
    seen = self_audit.look(torch.cat([fresh[:50], remembered.byte()]), train, held_out)
    assert seen.found
    if shape[-1] > 1:
        once = torch.cat([fresh, train.rows[3:4].flip(-1)])
        assert self_audit.look(once, train, held_out).copies == 1


def test_a_site_stops_before_its_generator_remembers(study_of, tiny_run):
    """Few vectors are learned by heart in many steps; the last part at which nothing was found is kept."""
    generator = FLOW | {"space": "features", "steps": 360, "batch_size": 16, "lr": 2e-3, "width": 16, "average": 0.9}
    method = METHOD | {"looks": 12, "numbers": 16}
    model = {"backbone": "efficientnet-lite0-1024", "input_size": 32}
    more = {"data": {"samples": 240, "validation": 0.4}, "optimizer": {"augment": []}}
    result = tiny_run(method, generator=generator, model=model, **more)
    assert "stopped early" in {one["audit"] for one in result["samples"].values()}


def test_a_coordinator_refuses_what_are_no_samples():
    federation = SimpleNamespace(
        trainer=SimpleNamespace(target=Target(classes=("a", "b")), task=SimpleNamespace(dense=False))
    )

    def check(images=None, labels=None, audit="nothing found"):
        tensors = {
            "images": torch.zeros(4, 1, 8, 8, dtype=torch.uint8) if images is None else images,
            "labels": torch.tensor([0, 1, 1, 0]) if labels is None else labels,
        }
        reply = Reply("north", (Parcel("synthetic-images", tensors, {"audit": audit}),))
        site_samples.check(federation, reply, (1, 8, 8), site_samples.most_samples(Target(classes=("a", "b")), 3))

    check()
    for wrong in (
        {"images": torch.zeros(4, 1, 8, 8)},
        {"images": torch.zeros(3, 1, 8, 8, dtype=torch.uint8)},
        {"labels": torch.tensor([0, 1, 2, 0])},
        {"labels": torch.tensor([0.0, float("nan"), 1.0, 0.0])},
        {"labels": torch.tensor([0.0, 0.5, 1.0, 0.0])},
        {"labels": torch.tensor([0j, 1, 1, 0])},
        {"images": torch.zeros(5, 1, 8, 8, dtype=torch.uint8), "labels": torch.zeros(5, dtype=torch.int64)},
        {"audit": "all is well"},
    ):
        with pytest.raises(ParcelRejected):
            check(**wrong)


def test_a_site_of_few_images_sends_nothing():
    site = site_of([0, 1, 1], Target(classes=("a", "b")))
    with pytest.raises(GateRefusedData, match="3 training images"):
        site_samples.train(site, 1, 1, looks=False)


def test_private_samples_are_charged_as_steps_and_noisy_counts(tiny_run):
    """Steps of DP-SGD, and one count of all images with noise of fifteen: RDP adds both up."""
    generator = FLOW | {"space": "features", "draws": 2}
    more = {"model": {"backbone": "efficientnet-lite0-1024", "input_size": 32}, "optimizer": {"augment": []}}
    privacy = {"on": ["generator"], "noise_multiplier": 1.5, "delta": 1e-5}
    method = METHOD | {"numbers": 16, "rounds": 1}
    result = tiny_run(method, generator=generator, privacy=privacy, sites={"partition": "iid", "count": 2}, **more)
    lines = verify(result.folder / "ledger" / "site-1.jsonl")
    [record] = [line["privacy"] for line in lines if line["kind"] == "synthetic-images"]
    images = 24  # 80 images, of which 60 % are for training, at two sites
    steps = -(-8 // (images // 8)) * (images // 8)
    expected = [Mechanism(1.5, 8 / images, steps), Mechanism(site_samples.COUNT_NOISE, 1.0, 1)]
    found = [Mechanism(one["noise"], one["sampling_rate"], one["steps"]) for one in record["mechanisms"]]
    assert found == expected
    assert record["epsilon"] == pytest.approx(composed_epsilon(expected, 1e-5, "rdp"))
    assert record["covers"] == [site_samples.SAMPLES, site_samples.NOISY_COUNTS]
    assert site_samples.REFUSAL in record["does_not_cover"]
    assert not list(result.folder.glob("sites/*/samples-look-1.json")), "no look while it trains"


def test_a_private_count_moves_by_one_image_or_one_patient_at_most(monkeypatch):
    totals = []
    monkeypatch.setattr(site_samples.private, "is_private", lambda site, part: True)
    monkeypatch.setattr(site_samples.private, "settings_of", lambda site: SimpleNamespace(max_grad_norm=2.0))
    monkeypatch.setattr(
        site_samples.private_steps,
        "release_sum",
        lambda site, total, size, noise: (totals.append(total) or torch.tensor([64.0, 62.0, 40.0]), 1.0),
    )
    site = site_of([0, 0, 1, 2], Target(classes=("a", "b", "c")))
    drawn = site_samples.cell_labels(site, None)
    assert drawn.bincount(minlength=3).tolist() == [30, 30, 0]  # 32, 31 and 20 images: 20 can be noise alone
    [total] = totals
    everybody = torch.arange(4)
    assert total(everybody, None).tolist() == [4.0, 2.0, 2.0]
    assert (total(everybody, None) - total(everybody[1:], None)).norm() == pytest.approx(2.0)
    of_patients = total(everybody, torch.tensor([7, 7, 7, 8]))
    assert (of_patients - total(torch.tensor([3]), torch.tensor([8]))).norm() == pytest.approx(2.0)
    site_samples.cell_labels(site, None)
    assert len(totals) == 1, "counted and charged once"


def test_methods_with_replay_take_samples_and_no_generator_leaves(tiny_run):
    replay = {"codes": "samples", "looks": 1, "probe": False}
    more = {"sites": {"partition": "iid", "count": 2}, "data": {"samples": 40}}
    result = tiny_run({"name": "fedavg-replay", "rounds": 1}, generator=FLOW, replay=replay, **more)
    lines = [line for path in (result.folder / "ledger").iterdir() for line in verify(path)]
    assert {line["kind"] for line in lines} == {"synthetic-images", "metrics", "weights"}
    assert {one["audit"] for one in result["samples"].values()} == {"not tested"}
    assert any("data.validation" in one for one in result["warnings"])
