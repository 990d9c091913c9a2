"""Chest X-rays of three sources in one archive, for FedER's claims: a source a site, as many of either class at each.

    python -m polyclinic_lab.chest --out DIR

reads three archives of $POLYCLINIC_DATA and writes `chest_sites_64.npz`. Guangzhou: children, pneumonia or none. NIH:
a finding or none. The tuberculosis collection has its two classes from different hospitals, so that a model may learn
the hospital in place of the disease: `feder-shortcut` judges the tables without it.
"""

import argparse
from pathlib import Path

import numpy as np

from polyclinic.data.datasets.npz import Npz
from polyclinic.data.pixels import Fit, fit_image
from polyclinic.randomness import numpy_rng

SIDE = 64
#: images of a class that a site has at most: the tuberculosis collection has so many patients
MOST = 700
NAME = "chest_sites_64.npz"
#: archive, and settings of its listing, by site; the first class of each has no finding
SOURCES: dict[str, tuple[str, dict[str, object]]] = {
    "guangzhou": ("pneumoniamnist", {}),
    "tuberculosis": ("tb_cxr_64", {}),
    "nih": ("covid_cxr_64", {"keep": {"site": [8]}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    parts = [of_source(site, number) for number, site in enumerate(SOURCES)]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    names = {"label_names": np.array(["no finding", "finding"]), "site_names": np.array(list(SOURCES))}
    np.savez_compressed(out / NAME, **arrays, **names)  # type: ignore[arg-type]  # names are no option of NumPy's
    print(f"{out / NAME}: {len(arrays['labels'])} images")


def of_source(site: str, number: int) -> dict[str, np.ndarray]:
    """The arrays of one site: as many images of either class, drawn; patients have numbers of their own."""
    archive, settings = SOURCES[site]
    listing = Npz.model_validate(
        {"source": "npz", "path": f"$POLYCLINIC_DATA/{archive}.npz", "size": SIDE, "split": "", **settings}
    ).listing()
    ill = np.asarray(listing.labels) > 0
    rng = numpy_rng(0, "balanced", site)
    count = min(MOST, int(ill.sum()), int((~ill).sum()))
    rows = np.sort(np.concatenate([rng.permutation(np.flatnonzero(ill == which))[:count] for which in (False, True)]))
    patients = np.arange(len(ill)) if listing.patient is None else np.asarray(listing.patient)
    return {
        "images": np.stack([fit_image(listing.picture(row), Fit(SIDE), 1)[0] for row in rows.tolist()]),
        "labels": ill[rows].astype(np.int64),
        "site": np.full(len(rows), number, dtype=np.int64),
        "patient": patients[rows].astype(np.int64) + number * 10**6,
    }


if __name__ == "__main__":
    main()
