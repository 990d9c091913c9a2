"""The picture of a study's sites says what the numbers say."""

import numpy as np
import pytest

from polyclinic.data.plots import contact_sheet, draw, label_words, mosaic, outlined
from polyclinic.errors import BadInput


def sites(labels, k=3, channels=1):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (k, channels, 8, 8), dtype=np.uint8)
    return {name: (np.array(values), images) for name, values in labels.items()}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def saved(figure, path):
    figure.savefig(path, dpi=40)
    return path.stat().st_size


def test_bars_have_the_lengths_of_the_counts(tmp_path):
    labels = {"Ulm": [0] * 30 + [1] * 10, "Graz": [0] * 5 + [1] * 35}
    figure = draw(sites(labels), classes=("healthy", "diseased"), title="Two sites")
    bars, heat, images = figure.axes
    assert [bar.get_width() for bar in bars.patches] == [30, 5, 10, 35]
    assert [tick.get_text() for tick in bars.get_yticklabels()] == ["Ulm", "Graz"]
    assert {"30", "10", "35", "40"} <= set(texts(bars))
    # class shares differ by 30/40 - 5/40
    assert heat.get_title(loc="left") == "Labels differ: mean pairwise KS 0.62"
    assert texts(heat).count("0.62") == 2
    assert [tick.get_text() for tick in images.get_yticklabels()] == ["Ulm", "Graz"]
    assert saved(figure, tmp_path / "two.png") > 1000


def test_ages_are_drawn_as_histograms_with_their_medians(tmp_path):
    rng = np.random.default_rng(0)
    labels = {"young": rng.normal(50, 5, 200), "old": rng.normal(150, 5, 100)}
    figure = draw(sites(labels, channels=3), unit="months")
    ridges, heat, _ = figure.axes
    assert ridges.get_xlabel() == "months"
    median = np.median(labels["old"])
    assert f"100 images\nmedian {median:.0f} months" in texts(ridges)
    assert heat.get_title(loc="left").endswith("1.00")
    assert saved(figure, tmp_path / "ages.png") > 1000


@pytest.mark.parametrize("count", [1, 3, 40])
def test_any_number_of_sites_and_classes(count, tmp_path):
    rng = np.random.default_rng(0)
    labels = {f"site-{k}": rng.integers(0, count, 50) for k in range(count)}
    figure = draw(sites(labels), classes=tuple(f"class-{c}" for c in range(count)))
    assert saved(figure, tmp_path / "many.png") > 1000
    if count == 40:
        assert figure.axes[2].get_title(loc="left") == "Training images (the first 12 of 40 sites)"


def test_contact_sheets_captions_and_outlines_by_hand(tmp_path):
    dark, light = np.zeros((2, 1, 4, 4), np.uint8), np.full((1, 1, 4, 4), 200, np.uint8)
    sheet = mosaic([dark, light], gap=1)
    assert sheet.shape == (10, 10, 3)
    assert sheet[:4, :4].max() == 0
    assert sheet[:4, 5:9].max() == 0
    assert (sheet[5:9, :4] == 200).all()
    assert (sheet[5:9, 5:9] == 255).all()
    assert (sheet[4] == 255).all()
    assert label_words(np.array([1, 0]), ("clear", "ill")) == ["ill", "clear"]
    assert label_words([83.5, 120], (), "months") == ["83.5 months", "120 months"]
    assert len(label_words([0], ("a very long name of a class that fits nowhere",))[0]) <= 26
    masks = np.zeros((1, 9, 9), np.uint8)
    masks[0, 2:7, 2:7] = 1
    drawn = outlined(np.zeros((1, 1, 9, 9), np.uint8), masks)
    assert drawn.shape == (1, 3, 9, 9)
    edge = drawn[0, 0] == 255
    assert edge.sum() == 16  # the border of a square of five
    assert not edge[3:6, 3:6].any()
    with pytest.raises(BadInput, match="there are no images to show"):
        contact_sheet({"real": np.zeros((0, 1, 8, 8), np.uint8)}, tmp_path / "sheet.png")
