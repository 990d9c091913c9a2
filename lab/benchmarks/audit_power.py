"""How often an audit finds planted leaks, misses them, or alarms without one; per budget, with minutes.

Leaks (audit_power_leaks.py) are small studies whose parcels are known to give something away, each at three strengths.
Honest runs ask about images that had no part in what was sent: held-out images take the place of training images, so
that any alarm is a false one.

Every case is a line in the file --out; a case that is there is not run again, so that the benchmark can be stopped and
resumed. `--jobs` runs so many cases at once; `--minutes` stops before a further case begins.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from audit_power_leaks import REPLAY, STRENGTHS, SUMMED, _fedavg, _planted, leaks, register, study_tables
from measuring import finish, flags

from polyclinic.audits import audit as audit_module
from polyclinic.audits.attack import Tools
from polyclinic.audits.audit import audit, audit_parcel, build_tools, count_tests
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import AuditedParcel, parcels_to_audit
from polyclinic.audits.truth import Truth, truth_of_held_out
from polyclinic.audits.verdicts import FALSE_ALARMS, verdicts
from polyclinic.metrics.roc import share_interval
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study

HONEST = 60
SEED = 7  #: of the leaks; settings of attacks and leaks were tried with other seeds
#: what leaves in honest runs, by turns, and the study
HONEST_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("weights", _fedavg(2, 8)),
    ("gradients", {"method": {"name": "fedsgd", "rounds": 1, "batch": "mini"}, "optimizer": {"batch_size": 1}}),
    ("latents", {"method": {"name": "fedreplay", "rounds": 1}, "model": {"backbone": "small-cnn", "cut": "conv2"}}),
    ("generator", {**REPLAY, "generator": _planted(leak="near-copies", copies=0)}),
    ("statistics", {"method": {"name": "analytic"}, **SUMMED}),
    ("metrics", _fedavg(2, 4)),
)
Case = tuple[str, str, str]  #: what, strength, budget


def leak_case(what: str, strength: str, budget: str, folder: Path, device: str) -> dict[str, Any]:
    """Run the study that leaks and audit it; the verdict on the kind of parcel."""
    leak = next(one for one in leaks() if one.name == what)
    changed = leak.strengths[STRENGTHS.index(strength)]
    run(parse_study(study_tables(SEED, folder, leak.always, changed)), folder / "run")
    begin = time.perf_counter()
    kinds = [] if leak.kind == "real-images" else [leak.kind]
    report = audit(folder / "run", budget=budget, kinds=kinds, device=device)
    found = report["verdicts"][leak.kind]
    asked = {name: one["verdict"] for name, one in found.get("questions", {}).items()}
    minutes = (time.perf_counter() - begin) / 60
    return {"verdict": found["verdict"], "minutes": minutes, "questions": asked, "words": found["words"][:600]}


class HonestParcel(AuditedParcel):
    """A parcel that is asked about held-out images, which had no part in it."""

    def truth(self, tools: Tools) -> Truth:
        true = super().truth(tools)
        sizes = [len(batch) for batch in true.batches]
        other = truth_of_held_out(true, sum(sizes))
        assert other is not None, "honest studies hold out enough images"
        parts = torch.arange(len(other.data.train)).split(sizes) if sum(sizes) <= len(other.data.train) else []
        return Truth(list(parts), other.data, tools.seed)


def honest_case(number: int, budget: str, folder: Path, device: str) -> dict[str, Any]:
    """What one study sends, asked about images that had no part in it."""
    kind, changes = HONEST_KINDS[number % len(HONEST_KINDS)]
    if "generator" in changes:
        changes = {**changes, "generator": {**changes["generator"], "public": number}}
    tables = study_tables(100 + number, folder, {"data": {"seed": number}}, changes)
    run(parse_study(tables), folder / "run")
    begin = time.perf_counter()
    assembly, lines = open_run(folder / "run")
    wanted = parcels_to_audit(folder / "run", assembly.study, lines, budget, (kind,), ())
    tools = replace(build_tools(assembly, budget, "pixels", device), level=FALSE_ALARMS / count_tests(wanted))
    parcels = [
        audit_parcel(tools, HonestParcel(one.parts, one.number, one.others, one.peers), folder / "run")
        for one in wanted
    ]
    found = verdicts(parcels, lines)[kind]
    asked = {name: one["verdict"] for name, one in found.get("questions", {}).items()}
    minutes = (time.perf_counter() - begin) / 60
    words = found["words"][:600]
    return {"verdict": found["verdict"], "kind": kind, "minutes": minutes, "questions": asked, "words": words}


def cases(options: argparse.Namespace) -> list[Case]:
    """(what, strength, budget) of every case: leaks at full strength first; honest runs with the first budget."""
    strengths = STRENGTHS[:1] if options.quick else options.strengths
    planted = [(leak.name, strength) for strength in strengths for leak in leaks()]
    honest = [(f"honest {number}", "-") for number in range(4 if options.quick else options.honest)]
    first, *more = options.budgets
    found = [(*one, first) for one in (*planted, *honest)] + [(*one, budget) for budget in more for one in planted]
    return [case for case in found if not options.only or case[0] in options.only]


def run_case(case: Case, threads: int, end: float, device: str) -> dict[str, Any] | None:
    """The line of one case; None where the time is over."""
    if time.time() > end:
        return None
    torch.set_num_threads(threads)
    register()
    audit_module.draw_plot = lambda draw, path: False  # pictures cost more than some attacks, and nobody looks
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if case[0].startswith("honest"):
                result = honest_case(int(case[0].split()[1]), case[2], Path(folder), device)
            else:
                result = leak_case(*case, Path(folder), device)
    except Exception as error:  # one case that fails must not end a long benchmark; it is counted as such
        result = {"verdict": "failed", "minutes": 0.0, "words": f"{type(error).__name__}: {error}"}
    whole = round((time.perf_counter() - begin) / 60, 2)
    named = dict(zip(("what", "strength", "budget"), case, strict=True))
    return {**named, **result, "minutes_with_run": whole, "device": device}


def read_done(path: Path) -> dict[Case, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["what"], row["strength"], row["budget"]): row for row in rows}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by budget and strength; false alarms with their interval."""
    found: dict[str, Any] = {}
    for budget in dict.fromkeys(row["budget"] for row in rows):
        of_budget = [row for row in rows if row["budget"] == budget]
        by_strength = {
            strength: dict(Counter(row["verdict"] for row in of_budget if row["strength"] == strength))
            for strength in STRENGTHS
        }
        honest = [row["verdict"] for row in of_budget if row["what"].startswith("honest")]
        alarms = honest.count("leaks")
        interval = share_interval(alarms, len(honest)) if honest else (0.0, 1.0)
        minutes = [row["minutes"] for row in of_budget]
        found[budget] = {
            **by_strength,
            "honest": dict(Counter(honest)),
            "false_alarms": alarms,
            "false_alarms_interval": [round(end, 3) for end in interval],
            "minutes_mean": round(sum(minutes) / max(1, len(minutes)), 2),
            "minutes_most": round(max(minutes, default=0.0), 2),
        }
    return found


def main() -> None:
    options = arguments()
    done, end = read_done(options.out), time.time() + 60 * (options.minutes or 1e6)
    wanted = [case for case in cases(options) if case not in done]
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_case, case, options.threads, end, options.device) for case in wanted]
        for row in (future.result() for future in as_completed(waiting)):
            if row is None:
                continue
            done[row["what"], row["strength"], row["budget"]] = row
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            said = (row["what"], row["strength"], row["budget"], row["verdict"], f"{row['minutes']:.2f} min")
            print(*said, sep=" | ", flush=True)
    rows = list(done.values())
    figures = {"benchmark": "audit_power", "quick": options.quick, "cases": len(done), "budgets": summary(rows)}
    finish(figures, options)


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, "leaks at full strength and 4 honest runs")
    parser.add_argument("--out", type=Path, default=Path("audit_power.jsonl"), help="a line for each case; resumed")
    parser.add_argument("--budgets", nargs="+", default=["quick"], choices=("quick", "standard", "thorough"))
    parser.add_argument("--strengths", nargs="+", default=list(STRENGTHS), choices=STRENGTHS)
    parser.add_argument("--device", default="cpu", help="of the audits: cpu or cuda; the runs are on the CPU")
    parser.add_argument("--honest", type=int, default=HONEST, help="honest runs")
    parser.add_argument("--only", nargs="+", help="names of leaks, or 'honest 7'")
    parser.add_argument("--minutes", type=float, default=0, help="begin no case after so many minutes; 0: no limit")
    parser.add_argument("--jobs", type=int, default=1, help="cases at once")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
