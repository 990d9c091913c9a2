"""What lies beside an exported model: the preparation of images, and a MONAI bundle.

The preparation is the code that this package uses itself, as a small package of its own, which needs NumPy and Pillow
(and pydicom, nibabel or SciPy for images that need them) but no Polyclinic. MONAI evaluates texts of a configuration
that begin with "$": names that a study chose stand in none that it parses but `metadata.json`, with words before them.
"""

import inspect
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic import __version__
from polyclinic.data import pixels, reading
from polyclinic.runner.evaluate.calibration import Calibration
from polyclinic.runner.predict.model_file import Card

FOLDER = "preparation"
INPUT = "images"  #: the name of the network's input
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


PREDICTIONS = '''"""Writes what the model says about images as a table, and masks as pictures.

Part of Polyclinic, Apache License 2.0.
"""

import csv
import json
from pathlib import Path

import numpy
import torch
from PIL import Image

from preparation import SETTINGS, frames, prepare


class Prepare:
    """A transform of MONAI's kind: {"image": file} gets the prepared image."""

    def __call__(self, item):
        return {**item, "pixels": prepare(item["file"], item["frame"] if item["frame"] >= 0 else None)}


def items(folder):
    """An item for each image, or slice, below a folder; -1 stands for no slice."""
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file() and not file.name.startswith("."))
    if not files:
        raise SystemExit(f"{folder}: holds no images; name a folder with --dataset_dir")
    return [{"file": str(file), "frame": -1 if f is None else f} for file in files for f in frames(file)]


def write(loader, network, inferer, folder):
    """predictions.csv, and masks/*.png (0 or 255, at the network's size) where the model draws masks."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = SETTINGS["classes"]
    with (folder / "predictions.csv").open("w", encoding="utf-8", newline="") as file, torch.no_grad():
        table = csv.writer(file)
        drawn = len(SETTINGS["output"]["shape"]) == 3
        values = ["share", "mask"] if drawn else [f"p({name})" for name in names] or [SETTINGS["unit"] or "value"]
        table.writerow(["file", "slice", *(["class"] if names and not drawn else []), *values])
        numbers = {}  # of files, in their order: two folders may hold images of the same name
        for batch in loader:
            outputs = inferer(torch.as_tensor(batch["pixels"]), network).numpy()
            for name, frame, output in zip(batch["file"], batch["frame"].tolist(), outputs):
                row = [name, "" if frame < 0 else frame]
                if drawn:
                    (folder / "masks").mkdir(exist_ok=True)
                    mask = (output > 0.5).astype("uint8") * 255
                    number = numbers.setdefault(name, len(numbers) + 1)
                    target = f"masks/{number:05d}-{Path(name).name}-{max(frame, 0):04d}.png"
                    Image.fromarray(mask).save(folder / target)
                    row += [float((output > 0.5).mean()), target]
                elif names:
                    row += [names[int(output.argmax())], *(float(p) for p in output)]
                else:
                    row.append(float(output))
                table.writerow(row)
'''

INFERENCE = {
    "imports": ["$import torch", "$import scripts.predictions as predictions"],
    "bundle_root": ".",
    "dataset_dir": "images",
    "output_dir": "predictions",
    "batch_size": 8,
    "network": "$torch.jit.load(@bundle_root + '/models/model.ts')",
    "preprocessing": {"_target_": "scripts.predictions.Prepare"},
    "dataset": {"_target_": "Dataset", "data": "$predictions.items(@dataset_dir)", "transform": "@preprocessing"},
    "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": "@batch_size", "num_workers": 0},
    "inferer": {"_target_": "SimpleInferer"},
    "run": ["$predictions.write(@dataloader, @network, @inferer, @output_dir)"],
}


def write_bundle(folder: Path, card: Card, readme: str) -> None:
    """Write what MONAI expects around `models/model.ts`."""
    for name in ("configs", "docs", "scripts"):
        (folder / name).mkdir()
    write_json(folder / "configs" / "inference.json", INFERENCE)
    write_json(folder / "configs" / "metadata.json", metadata(card))
    (folder / "scripts" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "scripts" / "predictions.py").write_text(PREDICTIONS, encoding="utf-8")
    (folder / "docs" / "README.md").write_text(readme, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def metadata(card: Card) -> dict[str, Any]:
    """The facts of a bundle under the names of MONAI's schema."""
    task, volume = card.built_task(), card.volume
    sides = [card.size, card.size] if isinstance(card.size, int) else list(card.size)
    shape = sides if task.dense else [1]
    channels = list(card.classes) if task.like == "classification" else ["mask" if task.dense else card.unit or "value"]
    if volume:
        background = task.outputs(card.target) - len(volume.structures)
        channels = ["background"][:background] + list(volume.structures)
    return {
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by polyclinic {__version__}"},
        "monai_version": version("monai"),
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {},
        "name": "a model that polyclinic released",
        "task": task.like,
        "description": "The model card is model_card.md, beside the folder configs.",
        "authors": "see the model card",
        "copyright": "see the model card",
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude",
                    "modality": "n/a",
                    "num_channels": card.channels,
                    "spatial_shape": sides,
                    "dtype": "float32" if volume else "uint8",
                    "value_range": [] if volume else [0, 255],
                    "is_patch_data": volume is not None,
                    "channel_def": {str(n): f"channel {n}" for n in range(card.channels)},
                }
            },
            "outputs": {
                "pred": {
                    "type": "value" if task.like == "regression" else "logits" if volume else "probabilities",
                    "format": task.like,
                    "num_channels": len(channels),
                    "spatial_shape": shape,
                    "dtype": "float32",
                    "value_range": list(card.label_range or ()) if task.like == "regression" or volume else [0, 1],
                    "is_patch_data": volume is not None,
                    "channel_def": {str(n): f"channel {n}: {name}" for n, name in enumerate(channels)},
                }
            },
        },
    }
