"""Records: `claim.json` files that are kept in `records/`, one for each claim and scale.

    python -m polyclinic_lab.records KEPT [KEPT ...] --scale full [--claims a,b] [--figures DIR]

makes them of runs that the campaign has kept (`--keep`), perhaps on several machines; nothing is run. What is missing
is said in the record.
"""

import argparse
import tempfile
import time
from pathlib import Path

from polyclinic.files import atomic_write, make_folder, read_json
from polyclinic.json_types import JsonObject
from polyclinic_lab.claim import CLAIMS, Claim, Scale, find_claim
from polyclinic_lab.judge import as_text, judge, plan
from polyclinic_lab.measures import OF_ALL

RECORDS = Path(__file__).parents[1] / "records"
#: records by claim and scale
Kept = dict[tuple[str, str], JsonObject]


def records(folder: Path = RECORDS) -> Kept:
    """The kept `claim.json` files, by claim and scale."""
    kept = [read_json(file) for file in sorted(folder.glob("*.json"))]
    return {(one["claim"], one["scale"]): one for one in kept}


def last_verdict(name: str, kept: Kept, scale: str) -> str:
    """The outcome of a claim at a scale, in a few words."""
    found = kept.get((name, scale))
    if found is None:
        return "not run"
    real = ", phantoms" if found["phantom"] else ""
    return f"{found['verdict']}{real}, {found['date']}"


def is_stale(found: JsonObject) -> bool:
    """True where the claim's studies have changed since the record was made."""
    claim = CLAIMS[found["claim"]]
    now = {label: list(claim.changes(label, found["scale"], phantom=found["phantom"])) for label in claim.arms}
    return bool(now != found["changes"])


def minutes_of(claim: Claim, scale: Scale, kept: Kept) -> str:
    """Minutes of all runs and audits of a claim one after another, as they were measured; else about how many."""
    found = kept.get((claim.name, scale))
    if found is not None:
        parts = ("runs", "audits") if claim.study else ("this call",)
        return f"{sum(found['minutes'].get(name, 0) for name in parts):.1f}"
    guess = claim.minutes[scale].get("cpu" if scale == "quick" else "gpu")
    return "-" if guess is None else f"~{guess:g}"


def main() -> None:
    options = parse()
    claims = [find_claim(name) for name in options.claims.split(",") if name] or list(CLAIMS.values())
    with tempfile.TemporaryDirectory() as folder:
        runs = join(options.kept, Path(folder))
        for claim in [one for one in claims if one.study]:
            made = record(claim, runs, options)
            if made is not None:
                file = options.records / f"{claim.name}-{options.scale}.json"
                atomic_write(file, as_text(made))
                print(f"{claim.name}: {made['verdict']}", *made["missing"], sep="\n  missing: ")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, nargs="+", metavar="KEPT")
    parser.add_argument("--scale", choices=("quick", "full"), required=True)
    parser.add_argument("--claims", default="", help="names, commas between; all if not given")
    parser.add_argument("--figures", type=Path, default=Path("runs/claim-figures"))
    parser.add_argument("--records", type=Path, default=RECORDS)
    return parser.parse_args()


def join(kept: list[Path], folder: Path) -> Path:
    """One folder with links to all runs that are finished and measured; the first of a name counts."""
    for run in [run for one in kept for run in sorted((one / "runs").iterdir())]:
        link = folder / run.name
        if (run / "result.json").exists() and (run / "measured").exists() and not link.exists():
            link.symlink_to(run.resolve())
    return folder


def record(claim: Claim, runs: Path, options: argparse.Namespace) -> JsonObject | None:
    """`claim.json` of all runs that are there, some seeds of some arms perhaps; None where the first seed lacks one.

    What is measured of all runs together is measured of the first seeds that have them all.
    """
    planned = plan(claim, options.figures, options.scale, None, phantom=False, runs=runs)
    lacking = [entry for arm in planned.values() for entry in arm if not entry.folder.exists()]
    seeds = min((entry.seed for entry in lacking), default=claim.seeds[options.scale])
    if seeds == 0:
        return None
    out = options.figures / f"{claim.name}-{options.scale}"
    make_folder(out)
    if claim.measure[0].split()[0] not in OF_ALL:
        seeds = 1 + max(entry.seed for arm in planned.values() for entry in arm if entry.folder.exists())
    there = {label: arm[:seeds] for label, arm in planned.items()}
    found = judge(claim, there, out, scale=options.scale, phantom=False, begin=time.monotonic())
    missing = [entry.words for entry in lacking]
    return found | {"missing": missing, "rule_commit": first_commit(claim, found, options)}


def first_commit(claim: Claim, found: JsonObject, options: argparse.Namespace) -> str:
    """The commit of the rule as an earlier record has it: later changes of the file did not change the rule."""
    known = [one for (name, _), one in records(options.records).items() if name == claim.name]
    same = [one["rule_commit"] for one in known if one["rule"] == found["rule"] and one["rule_commit"]]
    return str(same[0] if same else found["rule_commit"])


if __name__ == "__main__":
    main()
