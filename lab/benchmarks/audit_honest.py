"""Honest studies of many methods: is what left recomputed, and does the search for hidden images alarm without any?

Each study is tiny. Every kept parcel is held against its operation, carried out again, and searched for images that had
no part in it: held-out ones take the place of training images, so that whatever is found is a false alarm.
"""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from audit_power import HonestParcel
from audit_power_leaks import VQVAE2, study_tables
from measuring import finish, flags

from polyclinic.audits.attack import Finding
from polyclinic.audits.audit import Clock, build_tools, look_inside
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.errors import BadInput
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study

STUDIES = 60
PLAIN = ("fedavg", "fedprox", "fedavgm", "fedsgd", "cwt", "scaffold", "fedopt", "moon", "feddyn", "ditto")
ENCODER = {"model": {"backbone": "efficientnet-lite0-1024", "input_size": 32}}
#: methods and settings, by turns
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedbn", {"model": {"backbone": "small-cnn"}}),
    *((name, {}) for name in (*PLAIN, "fedrep", "fedper", "finetune", "fedavg-share")),
    ("fedavg", {"optimizer": {"name": "adam", "keep_state": True, "augment": ["flip", "turn"]}}),
    ("fedavg", {"privacy": {"noise_multiplier": 1.0}, "model": {"norm": "group"}}),
    ("fedavg", {"defence": {"name": "quantise", "bits": 8}}),
    ("fedavg", {"engine": {"wire": "fp16"}}),
    ("fedavg", {"federation": {"sum": "secure"}, "sites": {"count": 3}}),
    ("fedsgd", {"method": {"batch": "mini"}, "optimizer": {"batch_size": 1}}),
    ("splitnn", {"model": {"backbone": "small-cnn"}}),
    ("fedreplay", {"model": {"backbone": "small-cnn", "cut": "conv2"}}),
    ("fedavg-replay", {"generator": VQVAE2 | {"epochs": 1}, "replay": {"probe": False, "codes": "as-trained"}}),
    ("cwt-replay", {"generator": VQVAE2 | {"epochs": 1}, "replay": {"probe": False}}),
    ("analytic", ENCODER),
    ("gaussian-heads", ENCODER),
)


def look_at(number: int, folder: Path) -> list[dict[str, Any]]:
    """What is said of each kept parcel of one study."""
    method, changes = CASES[number % len(CASES)]
    own = {"name": method, "rounds": 2, **changes.get("method", {})}
    own = {
        name: value
        for name, value in own.items()
        if name != "rounds" or "model" not in changes or changes is not ENCODER
    }
    tables = study_tables(200 + number, folder, {"data": {"seed": number, "samples": 160}}, {**changes, "method": own})
    run(parse_study(tables), folder / "run")
    assembly, lines = open_run(folder / "run")
    tools = build_tools(assembly, "quick", "pixels", "cpu")
    rows = []
    for one in parcels_to_audit(folder / "run", assembly.study, lines, "standard", (), ()):
        honest = HonestParcel(one.parts, one.number, one.others, one.peers, one.not_kept)
        begin = time.perf_counter()
        results, why = look_inside(honest, honest.seen(tools), honest.truth(tools), Clock())
        alarms = [
            str(found.finding.verdict) for found in results if isinstance(getattr(found, "finding", None), Finding)
        ]
        facts = {"study": number, "method": method, "operation": one.release.operation, "kind": one.parcel.kind}
        rows.append({**facts, "why": why, "alarms": alarms, "seconds": round(time.perf_counter() - begin, 2)})
    return rows


def main() -> None:
    parser = flags(__doc__, "a study of each sort")
    parser.add_argument("--studies", type=int, default=STUDIES)
    parser.add_argument("--first", type=int, default=0, help="number of the first study")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    failed = []
    for number in range(options.first, options.first + (len(CASES) if options.quick else options.studies)):
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = look_at(number, Path(folder))
        except BadInput as error:
            failed.append(f"{CASES[number % len(CASES)][0]}: {error}")
            print(failed[-1], flush=True)
            continue
        rows += found
        open_ = sorted({row["why"] for row in found if row["why"]})
        alarms = [alarm for row in found for alarm in row["alarms"]]
        print(number, CASES[number % len(CASES)][0], len(found), open_, alarms, flush=True)
    figures = {
        "benchmark": "audit_honest",
        "quick": options.quick,
        "studies": len({row["study"] for row in rows}),
        "failed": failed,
        "parcels": len(rows),
        "recomputed": sum(not row["why"] for row in rows),
        "open": dict(Counter(f"{row['operation']}: {row['why']}" for row in rows if row["why"])),
        "alarms": [row for row in rows if row["alarms"]],
        "seconds_mean": round(sum(row["seconds"] for row in rows) / max(1, len(rows)), 2),
        "seconds_most": max((row["seconds"] for row in rows), default=0.0),
    }
    finish(figures, options)


if __name__ == "__main__":
    main()
