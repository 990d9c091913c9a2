"""Volumes in the folder of a site's part: links to prepared files, or copies, and a list of them."""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from polyclinic.data.volumes.volume import Volume, rows_of

#: the list of the volumes of a part
FACTS = "volumes.json"


def write(folder: Path, volumes: np.ndarray) -> None:
    """Put the files of volumes [N] into `folder`, which nobody else needs to open then."""
    rows = []
    for number, volume in enumerate(volumes):
        places = {"image": volume.image_at, "mask": volume.mask_at}
        names = {name: f"{number}.{name}.npy" for name, place in places.items() if place is not None}
        for name, file in names.items():
            _put(places[name], folder / file)
        rows.append({**names, "spacing": list(volume.spacing), "origin": dict(volume.origin)})
    (folder / FACTS).write_text(json.dumps(rows), encoding="utf-8")


def opened(folder: Path) -> np.ndarray:
    """The volumes of a part, [N]; no file of them stays open."""
    rows = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    volumes = [
        Volume(
            folder / row["image"], folder / row["mask"] if "mask" in row else None, tuple(row["spacing"]), row["origin"]
        )
        for row in rows
    ]
    return rows_of(volumes)


def _put(source: Path | np.ndarray | None, target: Path) -> None:
    """The same file under another name; a copy where the disk has no links."""
    if not isinstance(source, Path):
        np.save(target, np.asarray(source), allow_pickle=False)
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
