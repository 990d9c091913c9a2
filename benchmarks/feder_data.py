"""Natural sites for FedER's tables: real images by the source they came from, as many of either class at each site.

The paper's test sets are balanced; so are whole sites here, so that accuracy means the same in training and test, and a
buffer with as many images of each class does not help merely by being balanced.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polyclinic.randomness import numpy_rng

#: sources of Fed-ISIC2019 with enough melanomas to speak of (vidir_molemax has 24 of 3,954)
SKIN_SITES = ("vidir_modern", "rosendahl", "vienna_dias", "msk4")
CHEST_SITES = ("guangzhou", "tuberculosis", "nih")
#: images of a class that a site has at most, unless another number is given
MOST = 700


def skin(folder: Path, size: int, most: int = MOST) -> dict[str, np.ndarray]:
    """Melanoma or not, by source: fed_isic5_64_jpeg.npz. Groups are lesions, where they are known."""
    pack = np.load(folder / "fed_isic5_64_jpeg.npz", allow_pickle=False)
    names = pack["site_names"].astype(str)
    labels, sites = (pack["labels"] == 0).astype(np.int64), names[pack["site"]]
    chosen = balanced(labels, sites, SKIN_SITES, most)
    lesions = pack["lesion"][chosen].astype(np.int64)
    patient = np.where(lesions < 0, -1 - chosen, lesions)  # an unknown lesion is one of its own
    data, ends = pack["jpeg"], pack["jpeg_off"]
    pictures = [Image.open(io.BytesIO(data[ends[i] : ends[i + 1]].tobytes())).convert("RGB") for i in chosen]
    images = np.stack([np.asarray(p.resize((size, size), Image.Resampling.BICUBIC)) for p in pictures])
    return {"images": images, "labels": labels[chosen], "site": sites[chosen], "patient": patient}


def chest(folder: Path, size: int, most: int = MOST) -> dict[str, np.ndarray]:
    """Finding or none, by source: children of Guangzhou (pneumonia), a tuberculosis collection, NIH ChestX-ray8."""
    lungs = np.load(folder / "pneumoniamnist.npz", allow_pickle=False)
    guangzhou = [np.concatenate([lungs[f"{s}_{what}"] for s in ("train", "val", "test")]) for what in _PARTS]
    tuberculosis = np.load(folder / "tb_cxr_64.npz", allow_pickle=False)
    pool = np.load(folder / "covid_cxr_64.npz", allow_pickle=False)
    nih = pool["site_names"][pool["site"]] == "NIH_ChestXray8"
    by_site = {
        "guangzhou": (guangzhou[0], guangzhou[1], None),
        "tuberculosis": (tuberculosis["images"], tuberculosis["labels"], None),
        "nih": (pool["images"][nih], (pool["labels"][nih] > 0).astype(np.int64), pool["patient"][nih]),
    }
    found: dict[str, list] = {"images": [], "labels": [], "site": [], "patient": []}
    for place, (site, (images, labels, patient)) in enumerate(by_site.items()):
        chosen = balanced(labels, np.full(len(labels), site), (site,), most)
        found["images"].append(np.stack([_resized(images[i], size) for i in chosen]))
        found["labels"].append(labels[chosen].astype(np.int64))
        found["site"].append(np.full(len(chosen), site))
        found["patient"].append((chosen if patient is None else patient[chosen]).astype(np.int64) + 10**6 * place)
    return {name: np.concatenate(parts) for name, parts in found.items()}


_PARTS = ("images", "labels")


def _resized(image: np.ndarray, size: int) -> np.ndarray:
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))


def balanced(labels: np.ndarray, sites: np.ndarray, names: tuple[str, ...], most: int = MOST) -> np.ndarray:
    """Indices of images, at each of these sites as many of class 1 as of class 0, at most `most` of each."""
    chosen = []
    for name in names:
        rng = numpy_rng(0, "balanced", name)
        classes = [rng.permutation(np.flatnonzero((sites == name) & (labels == k))) for k in (0, 1)]
        count = min(most, *map(len, classes))
        chosen += [some[:count] for some in classes]
    return np.sort(np.concatenate(chosen))


MAKERS = {"skin": skin, "chest": chest}
SITES = {"skin": SKIN_SITES, "chest": CHEST_SITES}
CLASSES = {"skin": ("other", "melanoma"), "chest": ("no finding", "finding")}


def prepared(task: str, folder: Path, size: int, most: int, out: Path) -> dict[str, Any]:
    """The `[data]` and `[sites]` tables of a study of this task; writes its images into `out`."""
    file = out / f"{task}-{size}-{most}.npz"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.npz")  # another process may be about to read it
        np.savez(partial, label_names=np.array(CLASSES[task]), **MAKERS[task](folder, size, most))
        partial.replace(file)
    data = {"source": "npz", "path": str(file), "size": size, "validation": 0.15, "test": 0.25}
    return {"data": data, "sites": {"partition": "column"}}
