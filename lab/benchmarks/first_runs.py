"""How long every method takes on the study that comes with Polyclinic, with two rounds: two minutes at most.

    python lab/benchmarks/first_runs.py [--quick] [--methods a,b] [--json FILE]

Each method is one `polyclinic run --set method.name=... --set method.rounds=2` in a process of its own, with its
defaults. `cpu_s` are seconds of a core that the command and its workers took, `wall_s` seconds on the clock; both count
the import of torch. A GPU is hidden from the runs. On an idle machine with two cores a run takes `cpu_s` at most.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import finish, flags

from polyclinic.methods import METHODS

LIMIT_S = 120  # what a method may take
ROUNDS = 2
ENCODER = ("model.backbone=efficientnet-lite0-1024", "model.input_size=128")  # as the error says that they need
#: settings without which a method cannot run on that study
NEEDED = {
    "private-head": [*ENCODER, "privacy.noise_multiplier=1.0"],
    "analytic": [*ENCODER],
    "gaussian-heads": [*ENCODER],
    "fedpft": [*ENCODER],
}
QUICK = ("fedavg", "cwt-replay")


def timed(method: str, folder: Path) -> dict[str, float]:
    """One run, as a user starts it; an exception with its last words where it fails."""
    sets = [f"method.name={method}", *([] if method in ONE_ROUND else [f"method.rounds={ROUNDS}"])]
    sets += NEEDED.get(method, [])
    flags = [word for setting in sets for word in ("--set", setting)]
    command = [sys.executable, "-m", "polyclinic", "run", *flags, "--out", str(folder / method), "--quiet"]
    before, began = os.times(), time.perf_counter()
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the limit is for two cores
    done = subprocess.run(command, capture_output=True, text=True, env=without_gpu)
    after, wall = os.times(), time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{method}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    cpu = sum(getattr(after, one) - getattr(before, one) for one in ("children_user", "children_system"))
    return {"cpu_s": round(cpu, 1), "wall_s": round(wall, 1)}


#: methods that say themselves that they have one round
ONE_ROUND = ("analytic", "gaussian-heads", "fedpft")


def main() -> None:
    parser = flags(__doc__, f"only {' and '.join(QUICK)}")
    parser.add_argument("--methods", help="the methods, with commas; all of them if not given")
    given = parser.parse_args()
    names = QUICK if given.quick else given.methods.split(",") if given.methods else tuple(METHODS.builtin)
    print(f"{'method':<16}{'CPU s':>8}{'clock s':>9}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = timed(name, Path(folder))
            print(f"{name:<16}{found[name]['cpu_s']:>8}{found[name]['wall_s']:>9}", flush=True)
    figures: dict[str, object] = {"benchmark": "first_runs", "limit_s": LIMIT_S, "rounds": ROUNDS, "methods": found}
    figures["above"] = [name for name, one in found.items() if one["cpu_s"] > LIMIT_S]
    finish(figures, given)


if __name__ == "__main__":
    main()
