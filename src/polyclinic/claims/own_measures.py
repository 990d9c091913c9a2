"""What our own claims measure: models that are the same to the last bit, a run after a kill, the price of a round."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic.claims.claim import Row, Scale
from polyclinic.claims.cpu_time import counted
from polyclinic.errors import WorkFailed
from polyclinic.files import read_result

#: seconds after which a run that should be killed has not begun
MOST_WAITING = 300
#: pairs of a run and a bare loop, beside the one that warms up
PAIRS: Mapping[Scale, int] = {"quick": 5, "full": 9}
OVERHEAD = "CPU seconds over those of a bare loop"


def one_digest(folders: Mapping[str, Sequence[Path]], scale: Scale) -> list[Row]:
    """For each seed, how many different models the arms have released (`weights_sha256`)."""
    digests = [[read_result(run)["weights_sha256"] for run in runs] for runs in folders.values()]
    return [Row("all arms", "different models", tuple(float(len(set(one))) for one in zip(*digests, strict=True)))]


def same_after_kill(folders: Mapping[str, Sequence[Path]], scale: Scale) -> list[Row]:
    """For each arm and seed, how many different models two runs of it end in, one of them killed and resumed."""
    return [Row(label, "different models", tuple(_models(run) for run in runs)) for label, runs in folders.items()]


def _models(run: Path) -> float:
    again = run.with_name(f"{run.name}-killed")
    if not (again / "result.json").exists():
        with counted(run, "killed and resumed"):
            _kill_and_resume(run / "study.toml", again)
    return float(len({read_result(one)["weights_sha256"] for one in (run, again)}))


def _kill_and_resume(study: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "polyclinic", "run", str(study), "--out", str(folder), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for_a_round(folder / "history.jsonl", process)
        finally:
            process.kill()
    if (folder / "result.json").exists():
        raise WorkFailed(f"{folder}: ended before it could be killed")
    subprocess.run([*command, "--resume"], check=True, capture_output=True, timeout=3600)


def _wait_for_a_round(history: Path, process: subprocess.Popen[bytes]) -> None:
    begin = time.monotonic()
    while not (history.exists() and history.read_bytes().count(b"\n")):
        if process.poll() is not None or time.monotonic() - begin > MOST_WAITING:
            raise WorkFailed(f"{history.parent}: no round of the run that was to be killed has ended")
        time.sleep(0.05)


def overhead(_: Mapping[str, Sequence[Path]], scale: Scale) -> list[Row]:
    """Rounds of FedAvg beside a bare loop with the same steps, in turns, in one thread; the weights must be equal."""
    from polyclinic.claims.bare_loop import InTurns, bare_rounds, difference
    from polyclinic.runner.run import run
    from polyclinic.study import load_study

    ratios, apart = [], []
    study = load_study(Path(__file__).parent / "studies" / "overhead.toml")
    with tempfile.TemporaryDirectory() as folder:
        rounds = bare_rounds(study, Path(folder) / "cache")
        for number in range(PAIRS[scale] + 1):
            turns = InTurns(rounds(), bare_first=number % 2 == 0)
            result = run(study, Path(folder) / f"run{number}", display=turns, cache=Path(folder) / "cache")
            apart.append(difference(result.weights(), turns.bare_weights))
            ratios.append(turns.ours.cpu / turns.bare.cpu)
    return [
        Row("fedavg", OVERHEAD, tuple(ratios[1:])),  # the first pair warms up
        Row("fedavg", "largest difference of weights", (max(apart),)),
    ]
