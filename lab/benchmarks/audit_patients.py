"""Single patients: planted outliers that `audit --patients` must name, and audits of patients whom no model saw.

Three sets of real radiographs (in the folder that POLYCLINIC_DATA names; drawn ones without it), 28 px, 120 patients
each, LeNet-5. Twenty patients are made outliers before any model is trained: mislabelled, rare (a negative), duplicated
(four more copies) and extreme (noise), all with the wrong class. The null: 30 audits of other patients by the same
models, with memberships drawn by lot. Settings are the product's: 64 reference runs, 1 % over all patients, limit 0.9.
"""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import finish, flags, keep
from torch.nn import functional as F

from polyclinic.attacks.patients import risks, smallest_risk
from polyclinic.audits.references import Pool, References, halves
from polyclinic.data.parts import ImageSet, prepare
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import parse_study

PATIENTS, LIMIT, AUDITS = 120, 0.9, 10
KINDS = ("mislabelled", "rare", "duplicated", "extreme")
#: file, and how many outliers are planted in it: twenty in all
SETS = {"pneumoniamnist": 7, "tb_cxr_64": 7, "boneage_rsna_male_64": 6}
STUDY: dict[str, Any] = {
    "data": {"source": "chest-phantom", "samples": 40, "size": 28},
    "sites": {"names": ["hospital"], "partition": "iid"},
    "task": {"name": "classification"}, "model": {"backbone": "lenet5"}, "method": {"name": "fedavg", "rounds": 1},
    "optimizer": {"name": "adam", "lr": 0.003, "batch_size": 30}, "evaluation": {"select": "last"},
    "engine": {"workers": 1, "durable": False},
}  # fmt: skip


def load(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, 1, 28, 28] and labels 0 or 1, one image a patient."""
    file = Path(os.environ.get("POLYCLINIC_DATA", "-")) / f"{name}.npz"
    rng = np.random.default_rng(sum(map(ord, name)))
    if not file.is_file():
        drawn = parse_study({**STUDY, "data": {**STUDY["data"], "samples": count, "seed": len(name)}}).data.load()
        return drawn.images, (drawn.labels > 0).astype(np.int64)
    with np.load(file, allow_pickle=False) as kept:
        key = next(one for one in ("images", "train_images") if one in kept.files)
        images = kept[key]
        labels = next(kept[one] for one in ("labels", "train_labels", "boneage_months") if one in kept.files).reshape(
            -1
        )
        whose = kept["patient"] if "patient" in kept.files else np.arange(len(images))
    rows = rng.permutation(np.unique(whose, return_index=True)[1])[:count]
    pixels = torch.from_numpy(images[np.sort(rows)]).float().reshape(len(rows), -1, *images.shape[1:3]).mean(1)[:, None]
    small = F.interpolate(pixels, size=(28, 28), mode="bilinear", antialias=True)
    values = labels[np.sort(rows)]
    return small.round().byte().numpy(), (
        values > np.median(values) if len(np.unique(values)) > 2 else values > 0
    ).astype(np.int64)


def planted(name: str, images: np.ndarray, labels: np.ndarray, count: int, first: int) -> tuple[Pool, dict[int, str]]:
    """The pool with outliers among its patients, and which they are."""
    rng = np.random.default_rng(first)
    images, labels, whose = images.copy(), labels.copy(), np.arange(len(images))
    chosen = {int(p): KINDS[(first + n) % len(KINDS)] for n, p in enumerate(rng.permutation(len(images))[:count])}
    for patient, kind in chosen.items():
        if kind == "rare":
            images[patient] = 255 - images[patient]
        if kind == "extreme":
            images[patient] = rng.integers(0, 256, images[patient].shape)
        labels[patient] = 1 - labels[patient]
    copies = np.array([p for p, kind in chosen.items() if kind == "duplicated" for _ in range(4)], np.int64)
    rows = np.concatenate([whose, copies])
    return Pool(
        ImageSet(images[rows], labels[rows]), rows, len(images), [f"{name} {n}" for n in range(len(images))]
    ), chosen


def main() -> None:
    parser = flags(__doc__, "8 reference runs, 1 set, 2 passes")
    parser.add_argument("--references", type=int, default=64)
    options = parser.parse_args()
    count, names = (8, list(SETS)[:1]) if options.quick else (options.references, list(SETS))
    epochs = 2 if options.quick else 60
    study = parse_study({**STUDY, "method": {**STUDY["method"], "local_epochs": epochs}})
    begun, rows, first = time.perf_counter(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        base = Assembly(study, prepare(study.data, study.sites), Path(folder))
        for name in names:
            images, labels = load(name, 2 * PATIENTS)
            pool, chosen = planted(name, images[:PATIENTS], labels[:PATIENTS], SETS[name], first)
            first += SETS[name]
            inside = {"hospital": halves(count, pool.names, name)}
            references = References(base, {"hospital": pool}, inside)
            models = [one[""] for one in references.models(range(count))]
            own = _scores(references, models)
            of_each = risks(own, inside["hospital"])
            found = of_each.above(LIMIT)
            other = ImageSet(images[PATIENTS:], labels[PATIENTS:])
            references.pools = {
                "hospital": replace(pool, part=other, patients=np.arange(len(other)), members=len(other))
            }
            null = _scores(references, models)
            alarms = [
                int(risks(null, halves(count, pool.names, "null", number)).above(LIMIT).sum())
                for number in range(AUDITS)
            ]
            rows.append({
                "set": name, "planted": len(chosen), "named": int(sum(found[list(chosen)])),
                "told_apart": int(sum(of_each.found[list(chosen)])),
                "missed": sorted(kind for patient, kind in chosen.items() if not found[patient]),
                "others_named": int(found.sum() - sum(found[list(chosen)])), "audits_of_others": AUDITS,
                "audits_that_name_somebody": sum(one > 0 for one in alarms),
            })  # fmt: skip
            keep({"benchmark": "audit_patients", "sets": rows}, options)
    totals = {
        key: sum(row[key] for row in rows)
        for key in ("planted", "named", "audits_of_others", "audits_that_name_somebody")
    }
    facts = {
        "references": count,
        "smallest_risk": smallest_risk(count, PATIENTS),
        "seconds": round(time.perf_counter() - begun),
    }
    finish({"benchmark": "audit_patients", **totals, **facts, "sets": rows}, options)


def _scores(references: References, models: list[Any]) -> np.ndarray:
    scores = np.stack([references.scores("hospital", model) for model in models])
    return references.pools["hospital"].mean(scores)


if __name__ == "__main__":
    main()
