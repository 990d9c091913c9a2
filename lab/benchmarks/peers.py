"""The same federated job by other programs: pfl-research, FedLab, Flower's simulation, NVFlare's simulator, and ours.

    python lab/benchmarks/peers.py --env pfl=DIR --env fedlab=DIR --env flower=DIR [--env nvflare=DIR] [--turns 3]

FedAvg of the small CNN with group norm on images of 32 px. Each program runs in its own environment (a virtual
environment's folder, with the same version of PyTorch), on the CPU, one thread in a process; programs without a
folder are left out. A program is started twice in each turn, with few rounds and with more: the difference is what
the further rounds took, so imports and start-up are left out. The programs take turns. CPU seconds are those of all
processes that a program starts; on a busy machine they say more than wall time. Weights must be those of the bare loop,
but for pfl-research, FedLab and ours, which shuffle by themselves. `--json FILE` keeps every turn;
each ratio is the median over the turns that have both.

With `--stay` each program is started once, all at the same time, and takes all its turns in that process: on a GPU a
start takes longer than the rounds. Only for programs that run in one process.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measuring import finish, flags, keep
from peers_runs import TIMED, serve

from polyclinic.data.parts import open_site, prepare
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study

RUNS = Path(__file__).parent / "peers_runs.py"
FEW = 1
#: programs whose batches come in an order of their own
SHUFFLING = ("pfl", "fedlab", "polyclinic")
MARK = "PEERS_RUN"
#: where programs compute
DEVICE = "PEERS_DEVICE"
#: what each program took in one turn
Turn = dict[str, dict[str, float]]
#: has a program take so many rounds; the seconds of them
Take = Callable[[str, int], dict[str, float]]


def study(sites: int, images: int, rounds: int) -> Study:
    held_out = 2 * sites
    total = sites * images + held_out
    data = {"source": "fundus-phantom", "size": 32, "samples": total, "validation": 0.0, "test": held_out / total}
    return Study(
        data=data,
        sites={"partition": "iid", "count": sites},
        model={"backbone": "small-cnn", "norm": "group"},
        optimizer={"batch_size": 32, "lr": 0.01, "momentum": 0.0},
        method={"name": "fedavg", "rounds": rounds},
        evaluation={"every": 0, "select": "last", "final": "none"},
        engine={"workers": 1, "threads": 1, "device": os.environ.get(DEVICE, "cpu"), "checkpoint_every": 0},
    )


def write_job(one: Study, cache: Path, file: Path) -> None:
    parts = prepare(one.data, one.sites, cache=cache)
    weights = Assembly(one, parts, Path()).initial_weights()
    held: dict[str, Any] = {"sites": len(parts.names)}
    held |= {f"weights/{name}": value.numpy() for name, value in weights.items()}
    for place, name in enumerate(parts.names):
        part = open_site(parts.folder, name).train
        held |= {f"images/{place}": part.images[:], f"labels/{place}": part.labels[:]}
    np.savez(file, **held)


def run_ours(folder: Path, sites: int, images: int, rounds: str, out: Path) -> None:
    """In a process of its own, as the others: `peers.py --ours`."""
    import polyclinic

    def work(count: int) -> Any:
        with tempfile.TemporaryDirectory(dir=folder) as made:
            result = polyclinic.run(study(sites, images, count), Path(made) / "run", cache=folder / "cache")
            return result.weights()

    torch.set_num_threads(1)
    if rounds == "-":
        serve(work, str(out))
        return
    np.savez(out, **{name: one.numpy() for name, one in work(int(rounds)).items()})


def timed(command: list[str], limit: float) -> dict[str, float]:
    """Wall seconds, and CPU seconds of all processes that the command starts (they inherit a mark)."""
    mark, spent = uuid.uuid4().hex, {}
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(command, env={**os.environ, **quiet, MARK: mark}, stdout=said, stderr=said)
        try:
            while child.poll() is None:
                spent |= _spent(mark)
                if time.perf_counter() - started > limit:
                    raise SystemExit(f"{command[1:3]}: not done after {limit:.0f} s")
                time.sleep(0.2)
        finally:
            _end(mark)
        if child.returncode:
            said.seek(0)
            raise SystemExit(f"{command}: exit {child.returncode}\n{said.read().decode(errors='replace')[-3000:]}")
    # the system knows exactly what children took, but not what daemons took that a program left behind
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    exact = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": time.perf_counter() - started, "cpu": max(exact, sum(spent.values()))}


class Staying:
    """A program that stays, and runs as often as it is asked."""

    def __init__(self, command: list[str], out: Path) -> None:
        self.name = " ".join(command[1:3])
        self.process = subprocess.Popen(
            [*command, "-", str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
        )

    def take(self, rounds: int) -> dict[str, float]:
        self.ask(rounds)
        return self.answer()

    def ask(self, rounds: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(TIMED):
                return json.loads(line.removeprefix(TIMED))
        raise SystemExit(f"{self.name}: ended without an answer, exit {self.process.wait()}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        try:
            if one.environ().get(MARK) == mark:
                found.append(one)
        except psutil.Error:
            continue
    return found


def _spent(mark: str) -> dict[int, float]:
    spent = {}
    for one in _marked(mark):
        try:
            times = one.cpu_times()
            spent[one.pid] = times.user + times.system
        except psutil.Error:
            continue
    return spent


def _end(mark: str) -> None:
    """Ends what a program has left running: these are our own children, known by the mark."""
    for one in _marked(mark):
        try:
            one.kill()
        except psutil.Error:
            continue


def difference(ours: Path, bare: Path) -> float:
    a, b = (np.load(one, allow_pickle=False) for one in (ours, bare))
    return float(max(np.abs(a[name] - b[name]).max() for name in b.files))


def measure(options: argparse.Namespace, folder: Path) -> None:
    job, size = folder / "job.npz", (options.sites, options.images)
    write_job(study(*size, 1), folder / "cache", job)
    folders = dict(one.split("=", 1) for one in options.env)
    commands = {"bare": [sys.executable, str(RUNS), "bare", str(job)]}
    commands["polyclinic"] = [sys.executable, __file__, "--ours", str(folder), *map(str, size)]
    commands |= {name: [f"{where}/bin/python", str(RUNS), name, str(job)] for name, where in folders.items()}
    with programs(commands, folder, options) as take:
        turns = take_turns(list(commands), take, folder, options)
    finish(summary(options, turns), options)


@contextlib.contextmanager
def programs(commands: dict[str, list[str]], folder: Path, options: argparse.Namespace) -> Iterator[Take]:
    """What has a program take so many rounds: started for them, or for all turns."""
    outs = {name: folder / f"{name}.npz" for name in commands}
    if not options.stay:
        yield lambda name, rounds: timed([*commands[name], str(rounds), str(outs[name])], options.limit)
        return
    staying = {name: Staying(command, outs[name]) for name, command in commands.items()}
    try:
        for one in staying.values():
            one.ask(FEW)  # libraries are loaded
        for one in staying.values():
            one.answer()
        yield lambda name, rounds: staying[name].take(rounds)
    finally:
        for one in staying.values():
            one.end()


def take_turns(names: list[str], take: Take, folder: Path, options: argparse.Namespace) -> list[Turn]:
    turns: list[Turn] = []
    for _ in range(options.turns):
        turns.append({})
        for name in names:
            few, many = (take(name, rounds) for rounds in (FEW, FEW + options.rounds))
            each = {kind: (many[kind] - few[kind]) / options.rounds for kind in many}
            away = difference(folder / f"{name}.npz", folder / "bare.npz")
            if name not in SHUFFLING and away > 1e-4 and options.device == "cpu":
                raise SystemExit(f"{name}: weights lie {away:.1e} from the bare loop's: it did not do the same work")
            turns[-1][name] = {**each, "start": few["cpu"], "away": away}
            print(name, {kind: round(one, 3) for kind, one in turns[-1][name].items()}, file=sys.stderr, flush=True)
            keep(summary(options, turns), options)  # a program that takes too long costs only itself
    return turns


def summary(options: argparse.Namespace, turns: list[Turn]) -> dict[str, Any]:
    """A row for each program, and all turns."""
    names = list(dict.fromkeys(name for turn in turns for name in turn))
    figures = {"benchmark": "peers", "sites": options.sites, "images of a site": options.images}
    figures |= {"rounds": options.rounds, "torch": torch.__version__, "device": options.device, "stay": options.stay}
    return figures | {"rows": [row(name, turns) for name in names], "turns": turns}


def row(name: str, turns: list[Turn]) -> dict[str, Any]:
    own = [turn[name] for turn in turns if name in turn]

    def ratio(kind: str, other: str) -> float | None:
        pairs = [(turn[name][kind], turn[other][kind]) for turn in turns if name in turn and other in turn]
        return round(statistics.median(one / of_other for one, of_other in pairs), 3) if pairs else None

    return {
        "program": name,
        "turns": len(own),
        "cpu seconds a round": round(statistics.median(one["cpu"] for one in own), 3),
        "cpu, ratio to the bare loop": ratio("cpu", "bare"),
        "cpu, ratio to polyclinic": ratio("cpu", "polyclinic"),
        "wall seconds a round": round(statistics.median(one["wall"] for one in own), 4),
        "wall, ratio to the bare loop": ratio("wall", "bare"),
        "wall, ratio to polyclinic": ratio("wall", "polyclinic"),
        "cpu seconds with one round, start-up included": round(statistics.median(one["start"] for one in own), 1),
        "largest difference of weights": max(one["away"] for one in own),
    }


def main() -> None:
    if sys.argv[1:2] == ["--ours"]:
        folder, sites, images, rounds, out = sys.argv[2:]
        run_ours(Path(folder), int(sites), int(images), rounds, Path(out))
        return
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, "one turn of two further rounds, ours and the bare loop")
    parser.add_argument("--env", action="append", default=[], help="PROGRAM=FOLDER of its virtual environment")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: pfl-research, the bare loop and ours there")
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--images", type=int, default=160, help="training images of each site; batches have 32")
    parser.add_argument("--rounds", type=int, default=6, help="further rounds, which are measured")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one start may take")
    parser.add_argument("--stay", action="store_true", help="start each program once, for all turns")
    options = parser.parse_args()
    if options.quick:
        options.turns, options.rounds, options.images = 1, 2, 64
    os.environ[DEVICE] = options.device
    return options


if __name__ == "__main__":
    main()
