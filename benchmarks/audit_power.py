"""How often an audit finds planted leaks, misses them, or alarms without one; per budget, with minutes.

Leaks are small studies whose parcels are known to give something away, each at three strengths: *full*, *half* and
*quarter* (more images behind an update, fewer rounds, a deeper cut, fewer copies). Runs without a leak ask about
images that had no part in what was sent: the parcel of one site is audited with the images of the next one.

Every case is a line in the file --out; a case that is there is not run again, so that the benchmark can be stopped and
resumed. `--minutes` stops before a further case begins.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polyclinic.audits.audit import audit, audit_parcel, build_tools, count_tests
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import AuditedParcel, parcels_to_audit
from polyclinic.audits.power import FALSE_ALARMS
from polyclinic.audits.verdicts import gravest, question_verdict
from polyclinic.audits.views import Tools, Truth
from polyclinic.metrics.roc import share_interval
from polyclinic.runner.run import run
from polyclinic.study import parse_study

STRENGTHS = ("full", "half", "quarter")
BASE: dict[str, Any] = {
    "data": {"source": "fundus-phantom", "samples": 240, "size": 28, "test": 0.4},
    "sites": {"partition": "iid", "count": 2},
    "model": {"backbone": "lenet5"},
    "optimizer": {"batch_size": 8, "lr": 0.05, "momentum": 0.0},
    "evaluation": {"select": "last"},
    "engine": {"workers": 1, "device": "cpu", "durable": False},
    "audit": {"keep_parcels": 0},
}
VQVAE2 = {
    "name": "vqvae2", "prior_epochs": 1, "width": 16, "top_codes": 32, "bottom_codes": 32, "prior_width": 8,
    "prior_layers": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Leak:
    """A kind of leak: the parcels to attack, and the study for each strength as changes to the base."""

    name: str
    kind: str
    strengths: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    always: dict[str, Any]


def leaks() -> list[Leak]:
    sgd = {"method": {"name": "fedsgd", "rounds": 1, "batch": "mini"}}
    avg = {"method": {"name": "fedavg", "rounds": 1, "local_steps": 1}}
    one, two, four = ({"optimizer": {"batch_size": size}} for size in (1, 2, 4))
    many = [{"method": {"name": "fedavg", "rounds": rounds, "local_steps": 8}} for rounds in (60, 12, 3)]
    few = {"data": {"samples": 120}, "optimizer": {"lr": 0.1}}
    coded = [{"generator": {**VQVAE2, "epochs": epochs}} for epochs in (40, 8, 2)]
    cuts = [{"model": {"backbone": "small-cnn", "cut": cut}} for cut in ("conv1", "conv2", "conv3")]
    return [
        Leak("gradient, few images", "gradients", (one, two, four), sgd),
        Leak("gradient, small CNN", "gradients", (one, two, four), {**sgd, "model": {"backbone": "small-cnn"}}),
        Leak("gradient, 8 bits", "gradients", (one, two, four), {**sgd, "defence": {"name": "quantise", "bits": 8}}),
        Leak("weights after one step", "weights", (one, two, four), avg),
        Leak("sum of two sites", "gradients", (one, two, four), {**sgd, "audit": {"secure_sum": True}}),
        Leak("overfitted weights", "weights", (many[0], many[1], many[2]), few),
        Leak("latents", "latents", (cuts[0], cuts[1], cuts[2]), {"method": {"name": "fedreplay", "rounds": 1}}),
        Leak("activations", "activations", (cuts[0], cuts[1], cuts[2]), {"method": {"name": "splitnn", "rounds": 1}}),
        Leak("codes", "codes", (coded[0], coded[1], coded[2]), {"method": {"name": "cwt-replay", "rounds": 1}}),
        Leak("real images", "real-images", ({}, {}, {}), {"method": {"name": "fedavg-share", "rounds": 1}}),
        Leak(
            "labels of latents", "labels", (cuts[0], cuts[1], cuts[2]), {"method": {"name": "fedreplay", "rounds": 1}}
        ),
        Leak("momentum of one step", "weights", (one, two, four), {**avg, "optimizer": {"momentum": 0.9}}),
    ]


def study_tables(seed: int, *changes: dict[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {name: dict(table) for name, table in BASE.items()}
    for change in changes:
        for name, table in change.items():
            tables[name] = {**tables.get(name, {}), **table}
    return {"seed": seed, **tables}


# --- cases ----------------------------------------------------------------------------------------------


def leak_case(leak: Leak, strength: str, budget: str, folder: Path) -> dict[str, Any]:
    """Run the study that leaks and audit it; the verdict on the kind of parcel."""
    changed = leak.strengths[STRENGTHS.index(strength)]
    study = parse_study(study_tables(0, leak.always, changed))
    run(study, folder / "run")
    begin = time.perf_counter()
    kinds = [] if leak.kind in ("real-images", "labels") else [leak.kind]
    report = audit(folder / "run", budget=budget, kinds=kinds)
    found = report["verdicts"][leak.kind]
    return {"verdict": found["verdict"], "minutes": (time.perf_counter() - begin) / 60, "words": found["words"][:300]}


class OthersImages(AuditedParcel):
    """A parcel that is asked about the images of another site, which had no part in it."""

    def truth(self, tools: Tools) -> Truth:
        names = sorted(tools.assembly.prepared.names)
        other = names[(names.index(self.site) + 1) % len(names)]
        return Truth([], tools.site_data(other), tools.seed)


def honest_case(number: int, budget: str, folder: Path) -> dict[str, Any]:
    """An update of 64 images by one site; asked about are those of the other. Any alarm is a false one."""
    method = {"method": {"name": "fedavg", "rounds": 2, "local_steps": 8}}
    study = parse_study(study_tables(100 + number, {"data": {"seed": number}}, method))
    run(study, folder / "run")
    begin = time.perf_counter()
    assembly, lines = open_run(folder / "run")
    wanted = parcels_to_audit(folder / "run", assembly.study, lines, budget, ("weights",), ())
    tools = replace(build_tools(assembly, budget, "pixels", "cpu"), level=FALSE_ALARMS / count_tests(wanted))
    parcels = [audit_parcel(tools, OthersImages(one.parts, one.number), folder / "run") for one in wanted]
    questions = {name: question_verdict(name, parcels) for name in ("images", "membership")}
    minutes = (time.perf_counter() - begin) / 60
    words = {name: one["verdict"] for name, one in questions.items()}
    return {"verdict": gravest(list(words.values())), "minutes": minutes, "words": words}


def cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(what, strength, budget) of every case, the honest ones between the leaks."""
    planted = [(leak.name, strength) for strength in STRENGTHS for leak in leaks()]
    honest = [(f"honest {number}", "-") for number in range(4 if options.quick else 30)]
    for budget in options.budgets:
        yield from ((*one, budget) for one in (planted[:12] if options.quick else planted))
        yield from ((*one, budget) for one in honest)


def run_case(what: str, strength: str, budget: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if what.startswith("honest"):
            return honest_case(int(what.split()[1]), budget, Path(folder))
        leak = next(one for one in leaks() if one.name == what)
        return leak_case(leak, strength, budget, Path(folder))


# --- what is written ------------------------------------------------------------------------------------


def read_done(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
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
        }
    return found


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    done, begin = read_done(options.out), time.monotonic()
    for case in cases(options):
        if case in done or (options.minutes and time.monotonic() - begin > 60 * options.minutes):
            continue
        try:
            result = run_case(*case)
        except Exception as error:  # one case that fails must not end a long benchmark; it is counted as such
            result = {"verdict": "failed", "minutes": 0.0, "words": f"{type(error).__name__}: {error}"}
        done[case] = {**dict(zip(("what", "strength", "budget"), case, strict=True)), **result}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[case]) + "\n")
        print(*case, result["verdict"], f"{result['minutes']:.2f} min", sep=" | ", flush=True)
    figures = {"benchmark": "audit_power", "quick": options.quick, "cases": len(done), **summary(list(done.values()))}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leaks at full strength and 4 honest runs")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--out", type=Path, default=Path("audit_power.jsonl"), help="a line for each case; resumed")
    parser.add_argument("--budgets", nargs="+", default=["quick"], choices=("quick", "standard", "thorough"))
    parser.add_argument("--minutes", type=float, default=0, help="begin no case after so many minutes; 0: no limit")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
