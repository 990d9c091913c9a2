"""Make records of claims from runs that a campaign has kept, perhaps in several pieces on several machines.

    python benchmarks/claims_records.py KEPT [KEPT ...] --scale full [--claims a,b] [--figures DIR]

KEPT is a folder of `claims_campaign.py --keep`. Nothing is run here: a claim of which no seed has all its runs is left
out, and a record of fewer seeds than the claim has says which runs are missing. Records go to the package; write the
page afterwards (`python docs/building/claims_page.py`). Figures go to DIR, for somebody to look at.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from polyclinic.claims.catalogue import CLAIMS, find_claim
from polyclinic.claims.claim import Claim
from polyclinic.claims.page import RECORDS, records
from polyclinic.claims.reproduce import judge, plan
from polyclinic.files import atomic_write, make_folder
from polyclinic.json_types import JsonObject


def main() -> None:
    options = parse()
    claims = [find_claim(name) for name in options.claims.split(",") if name] or list(CLAIMS.values())
    with tempfile.TemporaryDirectory() as folder:
        runs = join(options.kept, Path(folder))
        for claim in [one for one in claims if one.arms]:
            made = record(claim, runs, options)
            if made is not None:
                file = options.records / f"{claim.name}-{options.scale}.json"
                atomic_write(file, json.dumps(made, indent=1) + "\n")
                print(f"{claim.name}: {made['holds']}", *made["missing"], sep="\n  missing: ")


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
    """`claim.json` of the first seeds that have all their runs; None where there is no such seed."""
    planned = plan(claim, options.figures, options.scale, None, phantom=False, runs=runs)
    lacking = [entry for arm in planned.values() for entry in arm if not entry.folder.exists()]
    seeds = min((entry.seed for entry in lacking), default=claim.seeds[options.scale])
    if seeds == 0:
        return None
    out = options.figures / f"{claim.name}-{options.scale}"
    make_folder(out)
    whole = {label: arm[:seeds] for label, arm in planned.items()}
    found = judge(claim, whole, out, scale=options.scale, phantom=False, begin=time.monotonic())
    missing = [entry.words for entry in lacking]
    return found | {"missing": missing, "rule_commit": first_commit(claim, found, options)}


def first_commit(claim: Claim, found: JsonObject, options: argparse.Namespace) -> str:
    """The commit of the rule as an earlier record has it: later changes of the file did not change the rule."""
    known = [one for (name, _), one in records(options.records).items() if name == claim.name]
    same = [one["rule_commit"] for one in known if one["rule"] == found["rule"] and one["rule_commit"]]
    return str(same[0] if same else found["rule_commit"])


if __name__ == "__main__":
    main()
