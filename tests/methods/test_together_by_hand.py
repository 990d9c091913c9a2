"""What sites do together or with two models, by hand: steps of a stack, own models, optimisers, sheets of images."""

from types import SimpleNamespace

import pytest
import torch
from test_feder_buffers import MASKS, site_with

from polyclinic.methods.shared import site_generator
from polyclinic.tasks import Target

# --- own models beside a common one -----------------------------------------------------------------


# --- optimisers -------------------------------------------------------------------------------------


# --- models that were brought -----------------------------------------------------------------------


# --- images -----------------------------------------------------------------------------------------


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


def test_no_more_real_images_are_shown_than_there_are(sheet, tmp_path):
    site = site_with(images=torch.zeros(2, 1, 28, 28).byte(), labels=torch.tensor([0, 1]), folder=tmp_path)
    site_generator._draw_sheet(site, {"images": torch.zeros(5, 1, 28, 28).byte(), "labels": torch.zeros(5)})
    assert len(sheet["rows"]["real"]) == 2


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
