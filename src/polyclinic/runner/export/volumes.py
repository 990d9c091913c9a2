"""What lies beside an exported model of volumes: the preparation as MONAI's transforms, and a MONAI bundle.

The network takes patches and gives logits; a sliding window joins them. Names that a study chose lie in
`settings.json`, which no configuration evaluates.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.randomness import numpy_rng
from polyclinic.runner.export.preparation import metadata, write_json
from polyclinic.runner.predict.model_file import Card, VolumeCard
from polyclinic.runner.predict.volumes import inside_of, values_of
from polyclinic.tasks.volume_segmentation import overlapping

#: how far a probability may differ
TOLERANCE = 1e-4
SETTINGS = "settings.json"
DRAWN = 4  #: patches on which both models are compared


def drawn_patches(card: Card) -> np.ndarray:
    """Patches of noise and smooth shades, the same every time: float32 [4, C, X, Y, Z]."""
    rng, shape = numpy_rng("sample patches of an export"), (DRAWN, card.channels, *_sides(card))
    smooth = np.cumsum(rng.standard_normal(shape), axis=2) / 4
    return (rng.standard_normal(shape) + smooth).astype(np.float32)


def steps_of(volume: VolumeCard) -> list[dict[str, Any]]:
    """`Preparation.transforms` of a file's voxels in the words of a MONAI configuration."""
    known = volume.preparation
    steps: list[dict[str, Any]] = [
        {"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True},
        {"_target_": "Orientationd", "keys": "image", "axcodes": "RAS", "labels": None},
    ]
    if known.normalise == "each case":
        crop = {"source_key": "image", "select_fn": "$lambda voxels: voxels != 0", "allow_smaller": True}
        steps.append({"_target_": "CropForegroundd", "keys": "image", **crop})
    if known.spacing is not None:
        steps.append({"_target_": "Spacingd", "keys": "image", "pixdim": list(known.spacing), "mode": "bilinear"})
    if known.normalise == "each case":
        steps.append({"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": True, "channel_wise": True})
    if known.normalise == "fixed":
        low, high, mean, deviation = (
            [getattr(one, name) for one in known.intensities] for name in ("low", "high", "mean", "deviation")
        )
        bounds = ", ".join(f"voxels.new_tensor({some})[:, None, None, None]" for some in (low, high))
        clip = f"$lambda voxels: voxels.clone().clip_({bounds})"
        steps.append({"_target_": "Lambdad", "keys": "image", "func": clip})
        given = {"subtrahend": mean, "divisor": deviation, "channel_wise": True}
        steps.append({"_target_": "NormalizeIntensityd", "keys": "image", **given})
    # cases are kept as 16-bit numbers for training
    halved = [{"_target_": "CastToTyped", "keys": "image", "dtype": f"$torch.float{bits}"} for bits in (16, 32)]
    return [*steps, *halved]


def description(card: Card) -> dict[str, Any]:
    """What goes into the model and what comes out, in plain values."""
    assert card.volume is not None
    regions = overlapping(card.target)
    return {
        "channels": list(card.volume.channels),
        "structures": {name: list(values) for name, values in card.volume.structures.items()},
        "regions": regions,
        "activation": "sigmoid" if regions else "softmax",
        "patch": _sides(card),
        "overlap": card.task.get("overlap", 0.5),
        "input": {"type": "float32", "shape": ["batch", card.channels, *_sides(card)]},
        "output": {"type": "float32", "what": "logits of each structure, the background first unless they are regions"},
        "steps": steps_of(card.volume),
    }


def write_preparation(folder: Path, card: Card) -> None:
    """Write `preparation.json`: MONAI's transforms of a case, and how windows become a mask."""
    write_json(folder / "preparation.json", description(card))


PREDICTIONS = '''"""Finds the cases of a folder, and writes a mask of each in its own grid.

Part of Polyclinic, Apache License 2.0.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import nibabel
import numpy as np
import torch

SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))
ENDINGS = (".nii.gz", ".nii")


def items(folder):
    """An item for each case: CASE_CHANNEL.nii.gz of every channel; of one channel, every NIfTI file."""
    found, names = [], SETTINGS["channels"]
    for file in sorted(Path(folder).rglob("*")):
        ending = next((end for end in ENDINGS if file.name.endswith(end)), None)
        stem = file.name.removesuffix(ending or "")
        if ending is None or (len(names) > 1 and not stem.endswith("_" + names[0])):
            continue
        case = stem.removesuffix(names[0]) if len(names) > 1 else stem
        files = [file.with_name(case + name + ending) for name in names] if len(names) > 1 else [file]
        missing = [one.name for one in files if not one.is_file()]
        if missing:
            raise SystemExit(f"{file.parent}: {', '.join(missing)} is missing; a case needs all channels")
        found.append({"image": [str(one) for one in files], "name": case.rstrip("_") or file.parent.name})
    if not found:
        raise SystemExit(f"{folder}: holds no NIfTI files of {', '.join(names)}; name a folder with --dataset_dir")
    return found


{functions}

@torch.no_grad()
def write(dataset, network, inferer, postprocessing, device, folder):
    """NAME.nii.gz with the values of the structures, in the grid of the case."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for item in dataset:
        item["pred"] = inferer(item["image"][None].as_tensor().to(device), network)[0].cpu()
        shares = postprocessing(item)["pred"].numpy()
        mask = values_of(inside_of(shares, SETTINGS["regions"]), SETTINGS["structures"])
        affine = np.asarray(item["image"].meta["original_affine"])
        nibabel.save(nibabel.Nifti1Image(mask, affine), Path(folder) / f"{item['name']}.nii.gz")
'''


def inference(card: Card) -> dict[str, Any]:
    """The configuration of a bundle's inference."""
    assert card.volume is not None
    facts = description(card)
    active = {"sigmoid": facts["regions"], "softmax": not facts["regions"]}
    back = {"orig_keys": "image", "nearest_interp": False, "to_tensor": True}
    return {
        "imports": ["$import torch", "$import scripts.predictions as predictions"],
        "bundle_root": ".",
        "dataset_dir": "volumes",
        "output_dir": "predictions",
        "device": "$torch.device('cuda' if torch.cuda.is_available() else 'cpu')",
        "network": "$torch.jit.load(@bundle_root + '/models/model.ts', map_location=@device)",
        "preprocessing": {"_target_": "Compose", "transforms": facts["steps"]},
        "dataset": {"_target_": "Dataset", "data": "$predictions.items(@dataset_dir)", "transform": "@preprocessing"},
        "inferer": {
            "_target_": "SlidingWindowInferer",
            **{"roi_size": facts["patch"], "sw_batch_size": 2, "overlap": facts["overlap"], "mode": "gaussian"},
        },
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "Activationsd", "keys": "pred", **active},
                {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", **back},
            ],
        },
        "run": ["$predictions.write(@dataset, @network, @inferer, @postprocessing, @device, @output_dir)"],
    }


def write_bundle(folder: Path, card: Card, readme: str) -> None:
    """Write what MONAI expects around `models/model.ts`."""
    for name in ("configs", "docs", "scripts"):
        (folder / name).mkdir()
    write_json(folder / "configs" / "inference.json", inference(card))
    write_json(folder / "configs" / "metadata.json", metadata(card))
    write_json(folder / "scripts" / SETTINGS, description(card))
    functions = "\n\n".join(inspect.getsource(one) for one in (inside_of, values_of))
    (folder / "scripts" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "scripts" / "predictions.py").write_text(PREDICTIONS.replace("{functions}", functions), encoding="utf-8")
    (folder / "docs" / "README.md").write_text(readme, encoding="utf-8")


def _sides(card: Card) -> list[int]:
    assert not isinstance(card.size, int)
    return list(card.size)
