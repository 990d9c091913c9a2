"""The preparation of images beside an exported model: the code that this package uses itself, as a small package of
its own, which needs NumPy and Pillow (and pydicom, nibabel or SciPy for images that need them) but no Polyclinic."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from polyclinic.data import pixels, reading
from polyclinic.runner.evaluate.calibration import Calibration
from polyclinic.runner.export.formats import INPUT
from polyclinic.runner.predict.model_file import Card

FOLDER = "preparation"
SETTINGS = "settings.json"
#: modules whose source is copied; they import each other, NumPy, Pillow, pydicom, nibabel and SciPy only
COPIED = (pixels, reading)

INIT = '''"""Prepares images for the model beside this folder, as its training images were prepared.

    from preparation import prepare
    images = prepare("image.png")[None]     # uint8 [1, channels, size, size]

`python -m preparation IMAGE OUT.npy` writes the array to a file. Part of Polyclinic, Apache License 2.0.
"""

import json
from pathlib import Path

from .pixels import Fit, fit_image, graham
from .reading import Reader

SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))


def _reader():
    window, slices = SETTINGS["window"], SETTINGS["slices"]
    return Reader(tuple(window) if window else None, slices if isinstance(slices, str) else tuple(slices))


def frames(file):
    """The slices that the model was made for, of a volume; (None,) for a picture."""
    return _reader().frames(Path(file))


def prepare(file, frame=None):
    """uint8 [channels, size, size] of an image file, or of one slice of a volume."""
    pixels = _reader().pixels(Path(file), frame)
    pixels = graham(pixels) if SETTINGS["graham"] else pixels
    return fit_image(pixels, Fit(SETTINGS["size"], SETTINGS["shape"]), SETTINGS["channels"]).copy()
'''

MAIN = """import sys

import numpy

from . import prepare

if len(sys.argv) != 3:
    sys.exit("usage: python -m preparation IMAGE OUT.npy")
numpy.save(sys.argv[2], prepare(sys.argv[1])[None])
"""


def write_preparation(folder: Path, card: Card, calibration: Calibration | None) -> None:
    """Write the package `preparation` into a folder."""
    package = folder / FOLDER
    package.mkdir()
    (package / "__init__.py").write_text(INIT, encoding="utf-8")
    (package / "__main__.py").write_text(MAIN, encoding="utf-8")
    for module in COPIED:
        name = module.__name__.rpartition(".")[2]
        (package / f"{name}.py").write_text(_standing_alone(inspect.getsource(module)), encoding="utf-8")
    described = json.dumps(description(card, calibration), indent=1, ensure_ascii=False)
    (package / SETTINGS).write_text(described + "\n", encoding="utf-8")


def _standing_alone(source: str) -> str:
    """A module's source with imports of its neighbours in place of imports from Polyclinic."""
    found = re.sub(r"from polyclinic\.(?:\w+\.)*(\w+) import", r"from .\1 import", source)
    if "polyclinic" in found:
        raise AssertionError("what is copied beside a model must not need polyclinic")
    return found


def description(card: Card, calibration: Calibration | None) -> dict[str, Any]:
    """What goes into the model and what comes out, in plain values."""
    return {
        "steps": _steps(card),
        "size": card.size,
        "channels": card.channels,
        "shape": card.shape,
        "window": card.window,
        "slices": card.slices,
        "graham": card.graham,
        "input": {"name": INPUT, "type": "uint8", "shape": ["batch", card.channels, card.size, card.size]},
        "output": {"type": "float32", **_output(card)},
        "classes": list(card.classes),
        "unit": card.unit,
        "calibration": calibration.model_dump(mode="json") if calibration else None,
    }


def _steps(card: Card) -> list[str]:
    shapes = {
        "squash": "oblong images are squashed",
        "pad": "oblong images are padded with black",
        "crop": "the central square is cut out",
    }
    window = f"centre {card.window[0]:g}, width {card.window[1]:g}" if card.window else "the file's own, else its range"
    return [
        f"DICOM and NIfTI intensities become 0 to 255 by a window: {window}; of a volume, slices: {card.slices}",
        *(
            ["fundus photographs are prepared as by B. Graham (2015): same radius, local average taken away"]
            if card.graham
            else []
        ),
        f"{shapes[card.shape]}, to a square",
        f"Pillow resizes it to {card.size} x {card.size} (bicubic), with {card.channels} channel(s)",
        "inside the model: division by 255, all that the network does, and from its outputs to predictions",
    ]


def _output(card: Card) -> dict[str, Any]:
    task = card.built_task()
    if task.dense:
        return {"shape": ["batch", card.size, card.size], "what": "probability of the mask, for each pixel"}
    if task.like == "regression":
        return {"shape": ["batch"], "what": f"value in {card.unit or 'the unit of the labels'}"}
    return {"shape": ["batch", len(card.classes)], "what": "probability of each class, in their order"}
