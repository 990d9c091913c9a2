"""Images of another kind than a study's: what `predict` says of them."""

import numpy as np
import pytest
from PIL import Image

from polyclinic import predict
from polyclinic.cli import run_app
from polyclinic.errors import Notice
from polyclinic.randomness import numpy_rng
from polyclinic.runner.evaluate.calibration import Looks, figures, looks_of
from polyclinic.runner.predict.model_file import read_model_file

GREY = Looks(images=10, brightness=(90, 110), contrast=(40, 60), colour=(0, 0))


def test_figures_by_hand():
    image = np.array([[[0, 100]], [[0, 40]], [[60, 100]]], np.uint8)  # two pixels: 0 0 60, and 100 40 100
    assert figures(image) == pytest.approx(
        {"brightness": 50.0, "contrast": np.std([0, 100, 0, 40, 60, 100]), "colour": 60}
    )


def test_the_range_of_all_sites_in_whole_grey_levels():
    sets = [np.full((6, 1, 4, 4), 20, np.uint8), np.zeros((0, 1, 4, 4), np.uint8), np.full((5, 1, 4, 4), 33, np.uint8)]
    sets[0][0, 0, 0, 0] = 29  # a mean of 20.56
    looks = looks_of(sets)
    assert (looks.images, looks.brightness, looks.contrast, looks.colour) == (11, (20, 33), (0, 3), (0, 0))
    assert looks_of(sets[:1]) is None, "six images say little"


def drawn(mean, spread):
    """A grey image with this mean and standard deviation."""
    half = np.full(32, spread)
    return (mean + np.concatenate([half, -half])).astype(np.uint8).reshape(8, 8)


@pytest.mark.parametrize(
    ("pixels", "words"),
    [
        (drawn(100, 50), ""),
        (drawn(73, 50), ""),  # within half of the width and eight levels
        (drawn(71, 50), "brightness 71, and 90 to 110 there"),
        (drawn(100, 21), "contrast 21, and 40 to 60 there"),
        (np.stack([drawn(100, 50)] * 3, -1), ""),
        (np.stack([drawn(100, 50), drawn(100, 50), drawn(91, 50)], -1), "colour 9, and 0 to 0 there"),
    ],
)
def test_what_is_outside_is_said(pixels, words):
    """Colour is that of the file: preparation takes it away."""
    image = (pixels if pixels.ndim == 2 else pixels[..., 0])[None]
    assert GREY.unlike(image, pixels) == words


def test_predict_says_that_images_are_of_another_kind(tiny, undisturbed, tmp_path, capsys):
    """A model of colour fundus images, its own kind and a grey picture of noise."""
    model = undisturbed(tiny("fedavg")).folder
    looks = read_model_file(model / "model.safetensors")[0].looks
    assert looks.colour[0] > 20
    noise = numpy_rng("noise").integers(0, 256, (28, 28)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    assert run_app(["predict", str(model), str(tmp_path / "noise.png")]) == 0
    assert "1 of 1 images do not look like those of the study, such as noise.png (" in capsys.readouterr().err
    with pytest.warns(Notice, match="do not look like those of the study"):
        [found] = predict(model, [tmp_path / "noise.png"])
    assert "brightness 12" in found.unlike
