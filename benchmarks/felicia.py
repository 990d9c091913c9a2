"""FELICIA: the paper's three experiments as studies, its check of the clusters, and how fast stacked sites train.

    python benchmarks/felicia.py --quick                                 # one seed, minutes on a CPU
    python benchmarks/felicia.py --device cuda --jobs 12 --out runs/f    # three seeds: docs/results_felicia.md
    python benchmarks/felicia.py --only speed --device cuda              # stacked against one by one

Every figure is from `polyclinic.run`. Real images come from the folder that POLYCLINIC_DATA or --data names (mnist.npz,
cifar10_subset_jpeg.npz, fed_isic5_64_jpeg.npz); without it only the speed is measured, on phantoms. Tables are printed;
figures go to --out.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import felicia_figures
import felicia_runs
import felicia_speed


def main() -> None:
    options = _options()
    figures: dict[str, Any] = {"benchmark": "felicia", "quick": options.quick, "device": options.device}
    if "speed" in options.only:
        figures["speed"] = felicia_speed.measure(options.device, quick=options.quick)
    names = [name for name in felicia_runs.EXPERIMENTS if name in options.only]
    if names and options.data is None:
        print(f"{', '.join(names)}: needs real images; set POLYCLINIC_DATA", flush=True)
    elif names:
        with tempfile.TemporaryDirectory() as scratch:
            out = options.out or Path(scratch)
            varied = {"lambdas": options.lambdas, "alphas": options.alphas, "seeds": options.seeds}
            jobs = list(felicia_runs.plan(names, options.data, out, _settings(options), varied, quick=options.quick))
            out.mkdir(parents=True, exist_ok=True)
            figures["rows"] = felicia_runs.run_all(jobs, options.jobs, out / "rows.json")
            felicia_figures.draw(figures["rows"], out)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["speed", *felicia_runs.EXPERIMENTS]
    parser.add_argument("--quick", action="store_true", help="one seed, small networks, minutes on a CPU")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--data", type=Path, default=_folder(), help="folder with the real images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", type=Path, help="folder for runs and figures; a run that is there is not run again")
    parser.add_argument("--lambdas", type=float, nargs="+", help="values of lambda, instead of the experiment's own")
    parser.add_argument("--alphas", type=float, nargs="+", help="digits: alpha in percent, instead of 0 10 50")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds, instead of 0 1 2")
    parser.add_argument(
        "--set", type=felicia_runs.setting, nargs="+", default=[], metavar="NAME=VALUE", help="settings of all studies"
    )
    return parser.parse_args()


def _folder() -> Path | None:
    return Path(os.environ["POLYCLINIC_DATA"]) if os.environ.get("POLYCLINIC_DATA") else None


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    where = {"engine.device": options.device, "engine.graphs": options.device != "cpu", "engine.workers": 1}
    return {**where, "engine.checkpoint_every": 100, **dict(options.set)}


if __name__ == "__main__":
    main()
