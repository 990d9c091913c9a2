"""How far the figures that a deployed site tells lie from those of a simulation, which are fine.

Drawn cases of two classes, with AUC near 0.84, at sites of several sizes. `value` and `ends` are mean absolute
differences of the metrics and of the ends of their intervals over twenty sites, in thousandths; `wider` is how much
longer intervals are, in per cent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic.metrics.statistics.case_metrics import classification_metrics
from polyclinic.metrics.statistics.safe import bounds_of_classes, safe_intervals

SIZES, SITES, LEAST = (50, 200, 1000), 20, 10
METRICS = ("accuracy", "auc", "brier", "calibration_error")


def figures(count: int, sites: int) -> dict[str, Any]:
    rows = []
    for seed in range(sites):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 2, count)
        chance = 1 / (1 + np.exp(-(1.4 * (labels - 0.5) + rng.standard_normal(count))))
        metrics = classification_metrics(np.stack([1 - chance, chance], 1), labels, np.stack([1 - chance, chance], 1))
        bounds = bounds_of_classes(labels, None)
        fine, coarse = (safe_intervals(metrics, count, None, least, bounds) for least in (0, LEAST))
        rows.append([[fine[name][:3], coarse[name][:3]] for name in METRICS])
    found = np.array(rows)  # [sites, metrics, fine or coarse, 3]
    gaps = np.abs(found[:, :, 1] - found[:, :, 0])
    length = found[..., 2] - found[..., 1]
    return {
        "patients": count,
        "value": {name: round(1000 * float(gaps[:, n, 0].mean()), 2) for n, name in enumerate(METRICS)},
        "ends": {name: round(1000 * float(gaps[:, n, 1:].mean()), 2) for n, name in enumerate(METRICS)},
        "wider": round(100 * float((length[:, :, 1] / length[:, :, 0] - 1).mean()), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two sites of each size")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [figures(count, 2 if arguments.quick else SITES) for count in SIZES[: 2 if arguments.quick else None]]
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps({"rows": rows, "min_cohort": LEAST}))


if __name__ == "__main__":
    main()
