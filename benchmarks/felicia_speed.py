"""FELICIA's speed: seconds of a step of K sites and the central discriminator, one by one, stacked, and as CUDA graphs.

The same short study is run in each way; what its sites' networks differ by from one by one stands beside the time.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import polyclinic
from polyclinic.federation.state import SitePosition, read_state
from polyclinic.methods.shared import gan_site
from polyclinic.study.tables import parse_study

#: settings of each way, and the steps of two runs, whose difference in time is that of the steps between
WAYS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "one_by_one": ({"stacked": "never"}, (5, 25)),
    "stacked": ({"stacked": "always"}, (5, 25)),
    "stacked_graphs": ({"stacked": "always", "graphs": True}, (150, 450)),
}
CHECKED_STEPS = 8  # a CUDA graph is recorded after three ordinary steps


def measure(device: str, *, quick: bool) -> list[dict[str, Any]]:
    """A row for each number of sites."""
    rows = []
    for sites in (2,) if quick else (2, 4, 16):
        row: dict[str, Any] = {"sites": sites}
        for name, (engine, steps) in WAYS.items():
            if name == "stacked_graphs" and device == "cpu":
                continue
            short, long = (2, 4) if quick else steps
            tables = study(sites, device, engine)
            row[name] = round((seconds(tables, long) - seconds(tables, short)) / (long - short), 5)
        rows.append(row | differences(sites, device))
        print(rows[-1], flush=True)
    return rows


def study(sites: int, device: str, engine: dict[str, Any]) -> dict[str, Any]:
    """DCGANs of width 16 at 32 px, batch 32, on drawn skin lesions."""
    return {
        "data": {"source": "skin-phantom", "size": 32, "samples": 100 * sites, "validation": 0.05, "test": 0.05},
        "sites": {"partition": "iid", "count": sites},
        "model": {"backbone": "lenet5"},
        "method": {"name": "felicia", "rounds": 1, "learner_steps": 1, "images": 8, "weight": 1.0},
        "generator": {"name": "dcgan", "width": 16},
        "evaluation": {"every": 0, "select": "last"},
        "engine": {"device": device, "workers": 1, **engine},
    }


def seconds(tables: dict[str, Any], steps: int) -> float:
    """Of the round of a run."""
    with tempfile.TemporaryDirectory() as folder:
        run(tables, steps, Path(folder) / "run")
        lines = (Path(folder) / "run" / "history.jsonl").read_text(encoding="utf-8").splitlines()
        return float(json.loads(lines[0])["seconds"])


def run(tables: dict[str, Any], steps: int, folder: Path) -> polyclinic.Result:
    method = {**tables["method"], "steps": steps}
    result = polyclinic.run(parse_study({**tables, "method": method}), folder)
    if result["failures"]:
        raise polyclinic.WorkFailed(str(result["failures"][0]))
    return result


def differences(sites: int, device: str) -> dict[str, float]:
    """How far stacked networks are from those trained one by one in float32: |difference| / |what training moved|."""
    torch.backends.cudnn.allow_tf32 = False
    gan_site.GRAPH_PAYS, pays = 1, gan_site.GRAPH_PAYS
    of_way = {name: {**engine, "precision": "fp32"} for name, (engine, _) in WAYS.items()}
    first = weights(study(sites, device, of_way["one_by_one"]), 1)
    alone = weights(study(sites, device, of_way["one_by_one"]), CHECKED_STEPS)
    found = {}
    for name in ("stacked",) if device == "cpu" else ("stacked", "stacked_graphs"):
        other = weights(study(sites, device, of_way[name]), CHECKED_STEPS)
        found[f"{name}_difference"] = float((other - alone).norm() / (alone - first).norm())
    gan_site.GRAPH_PAYS, torch.backends.cudnn.allow_tf32 = pays, True
    return found


def weights(tables: dict[str, Any], steps: int) -> torch.Tensor:
    """All parameters of the sites' generators and discriminators after so many steps."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        run(tables, steps, folder)
        manifest = json.loads((folder / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
        states = [read_state(folder, s, SitePosition(*at)).group("gan") for s, at in manifest["sites"].items()]
        named = [tensor for state in states for _, tensor in sorted(state.items())]  # a file keeps no order
        return torch.cat([tensor.flatten().double() for tensor in named if tensor.is_floating_point()])
