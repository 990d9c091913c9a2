"""Measures that need more than a run folder: equal models, a run after a kill, the price of a round, epsilon."""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic.errors import WorkFailed
from polyclinic.run_folder import read_result
from polyclinic_lab.origin import counted

Folders = Mapping[str, Sequence[Path]]
Values = dict[tuple[str, str], Sequence[float]]
#: seconds after which a run that should be killed has not begun: far more than a busy machine needs for a round
MOST_WAITING = 300
#: pairs of a run and a bare loop, beside the one that warms up
PAIRS = {"quick": 5, "full": 9}
OVERHEAD = "CPU seconds over those of a bare loop"


def one_digest(folders: Folders, scale: str) -> Values:
    """For each seed, how many different models the arms have released (`weights_sha256`)."""
    digests = [[read_result(run)["weights_sha256"] for run in runs] for runs in folders.values()]
    return {("all arms", "different models"): [float(len(set(one))) for one in zip(*digests, strict=True)]}


def same_after_kill(run: Path) -> dict[str, float]:
    """The number of different models that two runs of a study end in, one of them killed and resumed."""
    again = run.with_name(f"{run.name}-killed")
    if not (again / "result.json").exists():
        with counted(run, "killed and resumed"):
            _kill_and_resume(run / "study.toml", again)
    return {"different models": float(len({read_result(one)["weights_sha256"] for one in (run, again)}))}


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


def overhead(_: Folders, scale: str) -> Values:
    """Rounds of FedAvg beside a bare loop with the same steps, in turns, in one thread; the weights must be equal."""
    from polyclinic.runner.run.run import run
    from polyclinic.study import load_study
    from polyclinic_lab.bare_loop import InTurns, bare_rounds, difference

    ratios, apart = [], []
    study = load_study(Path(__file__).parent / "studies" / "overhead.toml")
    with tempfile.TemporaryDirectory() as folder:
        rounds = bare_rounds(study, Path(folder) / "cache")
        for number in range(PAIRS[scale] + 1):
            turns = InTurns(rounds(), bare_first=number % 2 == 0)
            result = run(study, Path(folder) / f"run{number}", display=turns, cache=Path(folder) / "cache")
            apart.append(difference(result.weights(), turns.bare_weights))
            ratios.append(turns.ours.cpu / turns.bare.cpu)
    # the first pair warms up
    return {("fedavg", OVERHEAD): ratios[1:], ("fedavg", "largest difference of weights"): [max(apart)]}


def epsilons(_: Folders, scale: str, *changes: str) -> Values:
    """Epsilon after a number of epochs for the paper's batch of 32 (Fig. 7 of Qu).

    `changes`: `noise=1.2`, `accountant=prv` or `delta=0.01`; delta is 1 / images if not given.
    """
    from polyclinic.privacy.epsilon import Accountant, compute_epsilon, sampling_rate_for, steps_in

    told = dict(change.split("=") for change in changes)
    noise, delta = float(told.get("noise", 0.7)), float(told.get("delta", 0))
    accountant: Accountant = "prv" if told.get("accountant") == "prv" else "rdp"
    found: Values = {}
    for samples, epochs in itertools.product((1144, 4575, 5000, 10000), (50, 100, 200, 225, 300)):
        steps, rate = steps_in(epochs, samples, 32), sampling_rate_for(samples, 32)
        spent = compute_epsilon(rate, noise, steps, delta or 1 / samples, accountant)
        found[f"{samples} images", f"epsilon after {epochs} epochs"] = [spent]
    return found
