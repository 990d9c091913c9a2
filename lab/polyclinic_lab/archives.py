"""The part of the image archives that some claims need, for a machine with little room.

    python -m polyclinic_lab.archives --claims qu-table3-cut-depth --scale quick --fit --out small

Writes the archives of these claims to the folder under their own names. Every row stays, so that all studies draw what
they drew; images that no study reads are black, which costs nothing in a packed folder. So POLYCLINIC_DATA=small gives
the same runs; the script prepares all studies from both, and ends with 1 if a digest of a split differs. `--fit` also
keeps images at the studies' size, where they are stored larger.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from polyclinic.data.archives import Archive, Chain
from polyclinic.data.datasets.npz import Columns, Npz
from polyclinic.data.parts import prepare
from polyclinic.data.pixels import Fit, fit_image, fit_mask
from polyclinic.study import Study
from polyclinic_lab.claim import Scale, find_claim
from polyclinic_lab.judge import plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", required=True, help="names, commas between")
    parser.add_argument("--scale", choices=("quick", "full"), default="quick")
    parser.add_argument("--fit", action="store_true", help="keep images at the studies' size")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    studies = studies_of(options.claims.split(","), options.scale)
    options.out.mkdir(parents=True, exist_ok=True)
    for file, mine in by_file(studies).items():
        write(file, [one for one in studies if one.data in mine], options.out / file.name, fit=options.fit)
    wrong = [one for one in studies if facts(one) != facts(one, options.out)]
    sizes = {file.name: file.stat().st_size for file in sorted(options.out.glob("*.npz"))}
    print(json.dumps({"benchmark": "archives", "studies": len(studies), "differ": len(wrong), "bytes": sizes}))
    sys.exit(1 if wrong else 0)


def studies_of(names: list[str], scale: Scale) -> list[Study]:
    """The studies of the claims that differ in data or sites; seeds do not change either."""
    found = {}
    for name in names:
        arms = plan(find_claim(name), Path("unused"), scale, 1, phantom=False)
        for entries in arms.values():
            study = entries[0].study
            if isinstance(study.data, Npz):
                found[study.data.model_dump_json() + study.sites.model_dump_json()] = study
    return list(found.values())


def by_file(studies: list[Study]) -> dict[Path, list[Npz]]:
    found: dict[Path, list[Npz]] = {}
    for study in studies:
        assert isinstance(study.data, Npz), "chosen before"
        found.setdefault(study.data.location, []).append(study.data)
    return found


def write(file: Path, studies: list[Study], target: Path, *, fit: bool) -> None:
    """The whole archive, with black or empty images in place of those that no study reads."""
    read = np.unique(np.concatenate([rows_read(one) for one in studies]))
    archive, sources = Archive(file), [one.data for one in studies if isinstance(one.data, Npz)]
    columns = Columns(archive, sources[0].images)
    used = np.isin(np.arange(len(columns.images)), read)
    masked = any(one.masks != "" for one in sources)
    arrays: dict[str, Any] = {}
    start = 0
    for prefix, length in zip(columns.prefixes, columns.images.lengths, strict=True):
        for name in (one for one in archive if one.startswith(prefix)):
            if masked or name != "masks":
                arrays |= blanked(archive, name, used[start : start + length])
        start += length
    if fit and len({one.size for one in sources}) == 1 and columns.prefixes == [""]:
        small = fitted({name: arrays[name][read] for name in ("masks",) if name in arrays}, columns, read, sources[0])
        arrays = {name: array for name, array in arrays.items() if name not in ("images", "jpeg", "jpeg_off", "masks")}
        for name, array in small.items():
            arrays[name] = np.zeros((len(used), *array.shape[1:]), array.dtype)
            arrays[name][read] = array
    np.savez(target, **arrays)


def rows_read(study: Study) -> np.ndarray:
    """The rows of the archive whose images the preparation of the study reads."""
    read: set[int] = set()
    whole = Chain.__getitem__

    def noted(self: Chain, row: int) -> np.ndarray:
        read.add(int(row))
        return whole(self, row)

    with mock.patch.object(Chain, "__getitem__", noted), tempfile.TemporaryDirectory() as cache:
        prepare(study.data, study.sites, cache=Path(cache))
    return np.array(sorted(read), dtype=np.int64)


def blanked(archive: Archive, name: str, used: np.ndarray) -> dict[str, np.ndarray]:
    """An array of images that is empty where `used` is false; other arrays as they are."""
    if name.endswith("_off"):
        return {}
    values = archive[name]
    if f"{name}_off" in archive:
        offsets = archive[f"{name}_off"]
        pieces = [values[offsets[row] : offsets[row + 1]] if used[row] else values[:0] for row in range(len(used))]
        ends = np.cumsum([0, *map(len, pieces)])
        return {name: np.concatenate(pieces), f"{name}_off": ends.astype(offsets.dtype)}
    pictures = values.ndim > 2 and len(values) == len(used)
    return {name: values * used.reshape(-1, *[1] * (values.ndim - 1)).astype(values.dtype) if pictures else values}


def fitted(arrays: dict[str, np.ndarray], columns: Columns, rows: np.ndarray, source: Npz) -> dict[str, np.ndarray]:
    """Images, and masks where there are any, as the preparation makes them, in place of the stored ones."""
    size = Fit(source.size, source.shape, source.channels)
    images = [columns.images[int(row)] for row in rows]
    colour = 3 if images[0].ndim == 3 else 1
    kept = {name: array for name, array in arrays.items() if name not in ("images", "jpeg", "jpeg_off")}
    kept["images"] = np.stack([fit_image(one, size, colour) for one in images]).transpose(0, 2, 3, 1).squeeze()
    if "masks" in kept:
        kept["masks"] = np.stack([fit_mask(one, size) for one in kept["masks"]])
    return kept


def facts(study: Study, folder: Path | None = None) -> dict[str, object]:
    """Facts of the preparation about a study's parts, from the archives in `folder` or from the whole ones."""
    before = os.environ["POLYCLINIC_DATA"]
    os.environ["POLYCLINIC_DATA"] = str(folder.resolve()) if folder else before
    try:
        with tempfile.TemporaryDirectory() as cache:
            return prepare(study.data, study.sites, cache=Path(cache)).info
    finally:
        os.environ["POLYCLINIC_DATA"] = before


if __name__ == "__main__":
    main()
