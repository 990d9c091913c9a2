"""Attack: score training images by an operation that has no argument `split`."""

import pytest
from attacked_site import KINDS, ask

from polyclinic.generators import probe

TINY = {"name": "vqvae2", "epochs": 1, "batch_size": 16, "width": 8, "blocks": 1, "top_codes": 8, "bottom_codes": 8}


@pytest.mark.parametrize("scores", ["fine", "coarse"])
def test_figures_about_replayed_training_images_leave_empty(kit, scores, monkeypatch):
    """With a generator of its choice the coordinator would learn how well training images come back."""
    monkeypatch.setattr(probe, "STEPS", 2)  # however well it has learnt: nothing leaves
    kit.policy(kinds=[*KINDS, "codes", "labels"], scores=scores)
    host = kit.host(replay={"codes": "final-encoder"}, generator=TINY, data__size=32)
    made = ask(host, "train_generator", 0).parcels
    ask(host, "take_replay", 0, parcels={parcel.kind: parcel for parcel in made})
    for operation in ("look_at_replay", "probe_replay"):
        [parcel] = ask(host, operation, 0).parcels
        assert (parcel.kind, parcel.tensors, parcel.metadata) == ("metrics", {}, {})


def test_figures_about_a_generator_leave_empty(kit):
    tiny = {"name": "dcgan", "steps": 1, "width": 2, "latent": 4}
    method = {"name": "centralized", "images": "synthetic", "rounds": 1}
    host = kit.host(method=method, generator=tiny, data__size=32, tuning={"on": False})
    images, figures = ask(host, "give_synthetic", 0).parcels
    assert len(images.tensors["images"])
    assert (figures.kind, figures.tensors) == ("metrics", {})


@pytest.mark.parametrize("scores", ["fine", "coarse"])
def test_a_parcel_that_mixes_splits_leaves_without_what_is_about_training_images(kit, scores):
    """FELICIA measures how well its synthetic images cover real ones along the axes of the training images."""
    kit.policy(scores=scores, min_cohort=5)
    method = {"name": "felicia", "rounds": 1, "steps": 1, "learner_steps": 1, "schedule": "local"}
    generator = {"name": "gan", "width": 4, "latent": 4, "batch_size": 8}
    host = kit.host(method=method, generator=generator, data__size=32, tuning={"on": False})
    ask(host, "train_alone", 1)
    [figures] = ask(host, "evaluate_utility", 1).parcels
    networks = ("real", "synthetic", "augmented")
    assert set(figures.tensors) == {f"{split}_{name}" for split in ("validation", "test") for name in networks}
    assert figures.metadata == {}
    told = [float(tensor) for tensor in figures.tensors.values()]
    rounded = all(abs(5 * one - round(5 * one)) < 1e-9 for one in told)  # in steps of a fifth
    assert rounded == (scores == "coarse")
