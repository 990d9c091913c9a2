"""A MONAI bundle around a model in TorchScript: `python -m monai.bundle run --config_file configs/inference.json`.

MONAI evaluates texts of a configuration that begin with "$". Names that a study chose stand in none that it parses
but `metadata.json`, where each has words before it.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic import __version__
from polyclinic.runner.predict.model_file import Card

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
    "dataset": {
        "_target_": "Dataset",
        "data": "$predictions.items(@dataset_dir)",
        "transform": "@preprocessing",
    },
    "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": "@batch_size", "num_workers": 0},
    "inferer": {"_target_": "SimpleInferer"},
    "run": ["$predictions.write(@dataloader, @network, @inferer, @output_dir)"],
}


def write_bundle(folder: Path, card: Card, readme: str) -> None:
    """Write what MONAI expects around `models/model.ts`."""
    for name in ("configs", "docs", "scripts"):
        (folder / name).mkdir()
    _write_json(folder / "configs" / "inference.json", INFERENCE)
    _write_json(folder / "configs" / "metadata.json", metadata(card))
    (folder / "scripts" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "scripts" / "predictions.py").write_text(PREDICTIONS, encoding="utf-8")
    (folder / "docs" / "README.md").write_text(readme, encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def metadata(card: Card) -> dict[str, Any]:
    """The facts of a bundle under the names of MONAI's schema."""
    task = card.built_task()
    shape = [card.size, card.size] if task.dense else [1]
    channels = list(card.classes) if task.like == "classification" else ["mask" if task.dense else card.unit or "value"]
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
                    "spatial_shape": [card.size, card.size],
                    "dtype": "uint8",
                    "value_range": [0, 255],
                    "is_patch_data": False,
                    "channel_def": {str(n): f"channel {n}" for n in range(card.channels)},
                }
            },
            "outputs": {
                "pred": {
                    "type": {"classification": "probabilities", "segmentation": "probabilities"}.get(
                        task.like, "value"
                    ),
                    "format": task.like,
                    "num_channels": len(channels),
                    "spatial_shape": shape,
                    "dtype": "float32",
                    "value_range": [0, 1] if task.like != "regression" else list(card.label_range or ()),
                    "is_patch_data": False,
                    "channel_def": {str(n): f"channel {n}: {name}" for n, name in enumerate(channels)},
                }
            },
        },
    }
