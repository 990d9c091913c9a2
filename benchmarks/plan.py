"""What a study of 100 hospitals with 10^6 images each costs, on paper: bytes, hours and money, from measured rates.

    python benchmarks/plan.py                    writes docs/plan.md
    python benchmarks/plan.py --check            exit 1 if the page is not what the figures say
    python benchmarks/plan.py --measure          measures the encoder on this CPU first, and keeps the rate
    python benchmarks/plan.py --hospitals 20 --images 50000 --link 1000 --print

Rates come from benchmarks/figures; sizes of parcels are those that the product computes. Links and prices are
assumptions, and flags.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from performance_page import KEPT, ROOT, table

from polyclinic.federation.ledger.code_packing import pack
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.models import build

PAGE = ROOT / "docs" / "plan.md"
RATE = KEPT / "plan.json"
ROUNDS, PRIVATE_ROUNDS, FEATURES, PROJECTED = 20, 100, 1024, 1500


@dataclass(frozen=True)
class Plan:
    """A study on paper. `link`: Mbit/s of a hospital; `server`: of the coordinator; prices in dollars."""

    hospitals: int = 100
    images: int = 10**6
    link: float = 100.0
    server: float = 10_000.0
    gpu_hour: float = 3.0
    core_hour: float = 0.05
    gigabyte: float = 0.09
    cores: int = 16


@dataclass(frozen=True)
class Job:
    """What one method asks of a hospital: bytes up and down in all, seconds of a GPU, seconds of one core."""

    name: str
    up: float
    down: float
    gpu: float = 0.0
    core: float = 0.0


def rates() -> dict[str, float]:
    """Images a second: training on an H200 through Polyclinic, and features on one core."""
    cases = json.loads((KEPT / "gpu_round.json").read_text(encoding="utf-8"))["figures"]["cases"]
    case = next(one for one in cases if one["size"] == 224)
    seconds = case["ways"]["by reference"]["seconds"]
    trained = case["sites"] * case["steps"] * case["batch_size"] / seconds
    return {"trained": trained, "encoded": json.loads(RATE.read_text(encoding="utf-8"))["figures"]["images_per_second"]}


def jobs(plan: Plan) -> Iterator[Job]:
    """The methods of the table, by what leaves a hospital."""
    found, n = rates(), plan.images
    weights = Parcel("weights", build("resnet18", channels=3, outputs=2, size=224).state_dict()).size
    encode = n / found["encoded"]
    sums = Parcel("statistics", {"products": torch.zeros(FEATURES * (FEATURES + 1) // 2, dtype=torch.int64)}).size
    head = Parcel("gradients", {"head": torch.zeros(2, PROJECTED + 1)}).size
    latents = Parcel("latents", {"latents": torch.zeros(1, 40, 28, 28, dtype=torch.half)}).tensor_bytes
    codes = pack(torch.zeros(1, 56, 56, dtype=torch.int16), 512).numel() + pack(torch.zeros(1, 28, 28), 512).numel()
    train = ROUNDS * n / found["trained"]
    yield Job("`analytic`, 1,024 numbers", sums, 0, core=encode)
    yield Job(f"`private-head`, {PRIVATE_ROUNDS} rounds", PRIVATE_ROUNDS * head, PRIVATE_ROUNDS * head, core=encode)
    yield Job(f"`fedavg`, ResNet-18, {ROUNDS} rounds", ROUNDS * weights, ROUNDS * weights, gpu=train)
    yield Job("`fedreplay`, public front, block5, fp16", n * latents, 0, core=encode)
    everybody = plan.hospitals * n * codes
    yield Job(f"`cwt-replay`, codes at 224 px, {ROUNDS} rounds", n * codes, everybody, gpu=2 * train)


def row(job: Job, plan: Plan) -> list[str]:
    """Bytes of a hospital, hours, and money of all hospitals."""
    transfer = 8 * (job.up + job.down) / (plan.link * 1e6)
    at_server = 8 * plan.hospitals * (job.up + job.down) / (plan.server * 1e6)
    work = job.gpu + job.core / plan.cores
    hours = (work + max(transfer, at_server)) / 3600
    gigabytes = (job.up + job.down) / 1e9
    each = job.gpu / 3600 * plan.gpu_hour + job.core / 3600 * plan.core_hour + gigabytes * plan.gigabyte
    compute = f"{job.gpu / 3600:,.1f} h of a GPU" if job.gpu else f"{job.core / 3600:,.1f} core hours"
    return [job.name, size(job.up), size(job.down), compute, f"{hours:,.1f}", f"{plan.hospitals * each:,.0f}"]


def size(count: float) -> str:
    unit, factor = next(
        (u, f) for u, f in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if count >= f or f == 1
    )
    return f"{count / factor:,.1f} {unit}"


def page(plan: Plan) -> str:
    found, kept = rates(), json.loads(RATE.read_text(encoding="utf-8"))
    head = ["method", "leaves a hospital", "comes to it", "work of a hospital", "hours in all", "dollars in all"]
    prose = [
        f"{plan.hospitals} hospitals with {plan.images:,} images each, on paper. This page is written by "
        "`python benchmarks/plan.py`; its flags are the assumptions.",
        f"Measured: training of ResNet-18 at 224 px, {found['trained']:,.0f} images a second on one H200 with gate, "
        f"ledger and averaging (docs/performance.md); features of EfficientNet-Lite0 at 224 px, {found['encoded']:.1f} "
        f"images a second of one core ({kept['date']}, {kept['machine']}). Sizes of parcels are the product's.",
        f"Assumed: a link of {plan.link:,.0f} Mbit/s at a hospital and {plan.server:,.0f} Mbit/s at the coordinator, "
        f"{plan.cores} cores or one GPU at a hospital, {plan.gpu_hour:g} dollars for an hour of a GPU, "
        f"{plan.core_hour:g} for an hour of a core, {plan.gigabyte:g} for a gigabyte that travels. Nobody ran it.",
    ]
    notes = [
        "- Work and transfers are added up; hospitals work at the same time. `cwt-replay` trains in turns: its hours "
        f"are those of one hospital, and one after the other they are up to {plan.hospitals} times as many.",
        "- `cwt-replay` sends every code to every hospital: with so many images this is what to avoid. "
        '`replay.codes = "prior"` sends the generator instead of codes.',
        "- Latents and codes of real images can be decoded ([attacks_images.md](attacks_images.md)); sums and private "
        "steps are another matter ([choose.md](choose.md)).",
        "- Not counted, as nothing was measured at this size: training at the coordinator on latents (`fedreplay`), "
        "and the generator of `cwt-replay`, whose training with replayed images is taken as twice the steps.",
    ]
    text = [textwrap.fill(one, 100, break_on_hyphens=False) for one in prose]
    text.append(table(head, [row(job, plan) for job in jobs(plan)]))
    text.append("\n".join(textwrap.fill(one, 100, subsequent_indent="  ", break_on_hyphens=False) for one in notes))
    return "# A plan for many hospitals\n\n" + "\n\n".join(text) + "\n"


def measure() -> None:
    """Features of 64 images on one core, by the clock of the process, so that other work counts little."""
    from polyclinic.encoders import ENCODERS

    torch.set_num_threads(1)
    encoder, images = ENCODERS["efficientnet-lite0-1024"](), torch.zeros(64, 1, 64, 64, dtype=torch.uint8)
    encoder.features(images[:1])
    began = time.process_time()
    encoder.features(images)
    figures = {"benchmark": "plan", "images_per_second": round(64 / (time.process_time() - began), 1)}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    told = {"command": "python benchmarks/plan.py --measure", "machine": "one core of a busy machine with two cores"}
    told |= {"commit": commit.strip(), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "figures": figures}
    RATE.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("--print", action="store_true", help="print the page, and write nothing")
    options = vars(parser.parse_args())
    flags = {name: options.pop(name) for name in ("measure", "check", "print")}
    if flags["measure"]:
        measure()
    text = page(Plan(**options))
    if flags["check"]:
        raise SystemExit(0 if PAGE.read_text(encoding="utf-8") == text else f"{PAGE}: not what the figures say")
    if flags["print"]:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")
    print(json.dumps({"benchmark": "plan", **options, "rates": rates()}))


if __name__ == "__main__":
    main()
