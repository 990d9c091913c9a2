"""The incoming check: alarms in honest rounds, attacks that it stops and what passing ones identify, and its cost.

    python benchmarks/incoming.py [--quick] [--part honest] [--part attacks] [--part cost] [--json FILE] [--plot FILE]

`honest` runs studies drawn at random (incoming_honest.py), `attacks` sends crafted weights to a site with the check
(incoming_attacks.py), `cost` times the check beside an epoch of ResNet-18, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import incoming_attacks
import incoming_honest
import incoming_sweeps
import torch
from incoming_plot import draw

from polyclinic import Study
from polyclinic.data.parts import prepare
from polyclinic.federation.call import Call
from polyclinic.federation.layers.incoming import Inspection
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared import local_training
from polyclinic.runner.assembly import Assembly

BACKBONES = ("cnn-64-128-64-32", "lenet5", "cnn-32-64-128", "small-cnn", "resnet18")
PARTS = ("honest", "attacks", "cost")


def honest(options: argparse.Namespace, scratch: str) -> dict[str, Any]:
    """Studies in turn until there are enough rounds, or the time is over. A line is printed when a study ends."""
    rows: list[dict[str, Any]] = []
    ends = time.time() + options.seconds
    numbers = (one for one in range(options.first, 10**6) if not options.cheap or incoming_honest.is_cheap(one))
    with _pool(options.workers) as pool:
        begin = lambda: pool.submit(  # noqa: E731
            incoming_honest.run_one, next(numbers), scratch, ends, options.each, options.away
        )
        waiting = {begin() for _ in range(options.workers)}
        while waiting:
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in ended:
                rows.append(one.result())
                print(json.dumps(rows[-1]), flush=True)
                if sum(row["rounds"] for row in rows) < options.rounds and time.time() < ends:
                    waiting.add(begin())
    return incoming_honest.summary(rows)


def attacks(options: argparse.Namespace, scratch: str) -> list[dict[str, Any]]:
    """Every attack on every backbone, before the first round and after honest ones."""
    backbones = BACKBONES[:1] if options.quick else options.backbones
    jobs = [(backbone, warm, seed) for seed in range(options.seeds) for backbone in backbones for warm in (0, 3)]
    with _pool(options.workers) as pool:
        done = [pool.submit(_attack, job, options, scratch) for job in jobs]
        return [row for one in done for row in one.result()]


def _sweeps(victim: incoming_attacks.Victim, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Attacks by small steps of biases, for networks that have them; 40 rounds, as in the review that found one."""
    if incoming_attacks._dense(victim.backbone) and victim.warm == 0:
        for attack in (incoming_sweeps.sweep, incoming_sweeps.span):
            yield attack(victim, 8 if options.quick else 40)


def _attack(job: tuple[str, int, int], options: argparse.Namespace, scratch: str) -> list[dict[str, Any]]:
    backbone, warm, seed = job
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        victim = incoming_attacks.Victim(
            backbone, Path(folder), images=options.images, warm=warm, seed=seed, shares=options.shares
        )
        victim.reads_stopped &= not options.unread
        rows = []
        for row in itertools.chain(_sweeps(victim, options), incoming_attacks.rows_of(victim, quick=options.quick)):
            print(json.dumps(row), flush=True)
            rows.append({**row, "seed": seed})
        return rows


def cost(options: argparse.Namespace, scratch: str) -> dict[str, Any]:
    """Seconds of the check and of an epoch of ResNet-18 at a site, in turns."""
    side, images = (28, 32) if options.quick else (64, 640)
    tables = {
        "data": {
            "source": "fundus-phantom",
            "size": side,
            "samples": round(images / 0.8),
            "validation": 0.1,
            "test": 0.1,
        },
        "sites": {"partition": "iid", "count": 1},
        "model": {"backbone": "resnet18"},
        "method": {"name": "fedavg", "rounds": 3},
        "engine": {"device": options.device, "workers": 1},
    }
    study = Study(**tables)
    parts = prepare(study.data, study.sites, cache=Path(scratch) / "cache")
    assembly = Assembly(study, parts, Path(scratch) / "cost")
    host, name = assembly.host(), parts.names[0]
    site = host.sites.get(name)
    weights, inspection = assembly.initial_weights(), host.inspection
    epochs, checks = [], []
    for number in range(2 if options.quick else options.pairs):
        epochs.append(_seconds(lambda: local_training.train(site, weights), site.trainer.device))
        other = {n: t * (1 + 1e-3 * (number + 1)) if t.dim() > 1 else t for n, t in weights.items()}
        parcel = Parcel("weights", other)
        call = Call(name, "train", 1, {"weights": parcel})
        checks.append(_seconds(lambda call=call: _check(inspection, site, call), site.trainer.device))
    ratios = [check / epoch for check, epoch in zip(checks[1:], epochs[1:], strict=True)]
    return {
        "images": len(site.data.train),
        "device": str(site.trainer.device),
        "epoch_seconds": statistics.median(epochs[1:]),
        "check_seconds": statistics.median(checks[1:]),
        "ratio": statistics.median(ratios),
        "pairs": len(ratios),
    }


def _check(inspection: Inspection, site: Any, call: Call) -> None:
    """What the check does in a round: with what arrives, and with what leaves."""
    inspection.arriving(SimpleNamespace(site=site, call=call, received=call.parcels, declared=None))
    inspection.note_own(site, call.parcels.values())


def _seconds(work: Any, device: torch.device) -> float:
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds, one backbone, few attacks, a small network")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--rounds", type=int, default=3000, help="honest rounds")
    parser.add_argument("--seconds", type=float, default=1e9, help="honest studies stop after so long")
    parser.add_argument("--first", type=int, default=0, help="number of the first honest study")
    parser.add_argument("--each", type=int, default=incoming_honest.ROUNDS, help="most rounds of an honest study")
    parser.add_argument("--away", type=int, default=0, help="rounds that one site of an honest study misses")
    parser.add_argument("--cheap", action="store_true", help="honest studies without generators and large networks")
    parser.add_argument("--images", type=int, default=16, help="images of the attacked site, all behind one gradient")
    parser.add_argument("--shares", default="random", choices=("random", "equal"), help="of images in gradients")
    parser.add_argument("--unread", action="store_true", help="what a stopped attack would have got back is not read")
    parser.add_argument("--seeds", type=int, default=1, help="attacked sites of each sort")
    parser.add_argument("--backbones", nargs="+", default=BACKBONES, help="networks that are attacked")
    parser.add_argument("--pairs", type=int, default=7, help="epochs and checks that are timed")
    parser.add_argument("--device", default="cpu", help="device of the timed epochs")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="picture of recovery against alarms")
    options = parser.parse_args()
    options.part = options.part or list(PARTS)
    if options.quick:
        options.rounds = min(options.rounds, 24)
    return options


def main() -> None:
    options, result = parse(), {"benchmark": "incoming"}
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.part:
            result[part] = {"honest": honest, "attacks": attacks, "cost": cost}[part](options, scratch)
    if options.plot and "attacks" in result:
        draw(result["attacks"], options.plot)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
