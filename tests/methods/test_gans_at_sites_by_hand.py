"""GANs at sites: who can be stacked, rows of a batch, samples; models that are kept; means of joined rows: by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput
from polyclinic.files import write_tensors
from polyclinic.methods.shared import training_gans
from polyclinic.methods.shared.training_gans import STEPS
from polyclinic.questions import statistics
from polyclinic.questions.evaluate import second_model


@pytest.fixture
def gans(monkeypatch):
    """Sites with settings of a GAN; private ones by name."""
    monkeypatch.setattr(training_gans, "adversarial_settings", lambda at: at.generator)
    monkeypatch.setattr(training_gans.private, "is_private", lambda site, part: site.name == "private")
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
    assert training_gans.batch_rows(gans()) == 8
    assert training_gans.batch_rows(gans(images=5)) == 5
    assert training_gans.batch_rows(gans(images=5, balances_classes=True)) == 8
    assert training_gans.batch_rows(gans(images=5, balances_classes=True, classes=0)) == 5
    assert training_gans.steps_taken(gans()) == 0
    assert training_gans.steps_taken(gans(steps=7)) == 7


def test_sites_are_stacked_where_all_is_alike(gans):
    def groups(*sites):
        return [len(group) for group in training_gans.stackable(list(sites))]

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


def test_classes_take_turns_where_a_batch_has_each_as_often(gans):
    turns = training_gans.classes_take_turns
    assert turns([gans(), gans("b")])
    assert not turns([gans(takes_turns=False)])
    assert not turns([gans(classes=0)])
    assert not turns([gans(classes=3, labels=(0, 1, 2))]), "eight rows are not three times as many"
    assert not turns([gans(), gans("b", labels=(0,))])


# --- models that are kept, read and joined


def test_a_second_model_is_of_the_same_network(tmp_path):
    file = tmp_path / "second.safetensors"
    write_tensors(file, {"w": torch.ones(2)})
    assert second_model(str(file), {"w": torch.zeros(2)}).tensors["w"].tolist() == [1, 1]
    for other in ({"w": torch.zeros(3)}, {"w": torch.zeros(2).double()}, {"v": torch.zeros(2)}):
        with pytest.raises(BadInput, match="has other tensors than the first model"):
            second_model(str(file), other)


# --- statistics


def test_dice_is_that_of_a_patients_images_together():
    """Patient 1 has two images: 1 of 2 and 2 pixels are right, together 2 * 3 / (4 + 4)."""
    said = torch.zeros(3, 1, 4)
    said[0, 0, :2] = said[1, 0, :2] = said[2, 0, 0] = 0.9
    true = torch.zeros(3, 1, 1, 4)
    true[0, 0, 0, 1:3] = true[1, 0, 0, :2] = 1
    task = SimpleNamespace(predictions=lambda output, target: output)
    trainer = SimpleNamespace(task=task, target=None, outputs=lambda part: [(said[:2], true[:2]), (said[2:], true[2:])])
    part = ImageSet(np.zeros((3, 1, 1, 4), np.uint8), np.zeros(3), cases=np.array([1, 1, 2]))
    found = statistics._dice_of_patients(trainer, part)
    assert found[0] == pytest.approx(0.75)
    assert np.isnan(found[1])
    assert found[2] == 0


@pytest.mark.parametrize("bounds", [(0.0, 100.0), None])
def test_what_one_patient_can_change_of_an_error(bounds):
    labels = np.array([10.0, 20.0, 30.0, 50.0])
    part = ImageSet(np.zeros((4, 1, 1, 1), np.uint8), labels, cases=np.array([1, 1, 2, 3]))
    task = SimpleNamespace(
        dense=False, like="regression", bounded=lambda said, _: said * 0, predictions=lambda said, _: said[:, 0]
    )
    trainer = SimpleNamespace(
        task=task,
        target=SimpleNamespace(label_range=bounds),
        load=lambda weights: None,
        outputs=lambda part: [(torch.ones(4, 1), None)],
    )
    found = statistics.score(SimpleNamespace(trainer=trainer, min_cohort=0), part, {})
    most = (100 if bounds else 40) * 0.5 * 3  # half of the images are one patient's, of three
    assert found.bounds == pytest.approx({"mae": most, "bias": most, "rmse": most * 2})
    assert float(found.metrics(np.ones((1, 4)))["mae"][0]) == pytest.approx(26.5)
    coarse = statistics.score(SimpleNamespace(trainer=trainer, min_cohort=5), part, {})
    assert float(coarse.metrics(np.ones((1, 4)))["mae"][0]) == pytest.approx(27.5)
