"""Settings of claims whose paper chooses them by cross-validation: every arm's method gets the same budget.

    python -m polyclinic_lab.tuning --claims feder-table4-methods --scale full --out runs/tuning

searches what a claim's `tune` names with `polyclinic tune --folds`, on training images of the first seed alone, and
writes the choices to `tuned.json`. From then on they are changes of every arm that has the method on these images.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from polyclinic.files import atomic_write, digest_of, read_json
from polyclinic.runner.compare.tune import parse_over, space_of, tune
from polyclinic.study import Study
from polyclinic_lab.claim import CLAIMS, TUNED, Claim, Scale, find_claim, tuned_name
from polyclinic_lab.judge import plan

FOLDS = 3
#: steps of a generator while settings are searched: three folds at three sites need nine
STEPS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", default="", help="names, commas between; all with something to tune if not given")
    parser.add_argument("--arms", default="", help="labels, commas between; all if not given")
    parser.add_argument("--scale", choices=("quick", "full"), required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"))
    parser.add_argument("--jobs", type=int)
    options = parser.parse_args()
    names = [name for name in options.claims.split(",") if name] or list(CLAIMS)
    for claim in [find_claim(name) for name in names]:
        search(claim, options.scale, options.out, options.jobs, options.arms.split(",") if options.arms else claim.arms)
    print(json.dumps({"benchmark": "tuning", "chosen": chosen_before()}))


def search(claim: Claim, scale: Scale, out: Path, jobs: int | None, arms: Iterable[str]) -> None:
    """Choose settings of arms of a claim that have none yet, each written down as soon as it is chosen."""
    planned = plan(claim, out, scale, 1, phantom=False) if claim.tune else {}
    for label in planned.keys() & set(arms):
        name = tuned_name(claim, label, scale)
        study = shortened(planned[label][0].study)
        space = space_of(parse_over(claim.tune), study.method.name)
        if name not in chosen_before() and space:
            budget = FOLDS * count(space.values())
            found = tune(study, space, out / digest_of(name)[:12], budget=budget, folds=FOLDS, jobs=jobs)
            chosen = found["methods"][study.method.name]["chosen"]
            told = {name: [f"{setting}={value}" for setting, value in chosen.items()]}
            atomic_write(TUNED, json.dumps(chosen_before() | told, indent=1) + "\n")


def shortened(study: Study) -> Study:
    """The study with a shorter training of its generator, where that has phases."""
    longest = study.tuning.lengths().most_steps if study.tuning else 0
    return study.with_settings({"tuning.most_steps": STEPS}) if longest > STEPS else study


def chosen_before() -> dict[str, list[str]]:
    """What other searches, perhaps beside this one, have chosen until now."""
    return read_json(TUNED) if TUNED.exists() else {}


def count(values: Iterable[Sequence[object]]) -> int:
    """The number of combinations."""
    found = 1
    for some in values:
        found *= len(some)
    return found


if __name__ == "__main__":
    main()
