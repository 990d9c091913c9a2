"""The transport campaign: a deployed federation over a real network, and faults of network, processes, clocks, disks.

    python lab/campaigns/transport.py --trials N --seed S [--only KIND,...] [--methods NAME,...] [--json FILE]

Server and sites run in network namespaces of this machine (Linux, root). Each trial submits a study and meets it with
one to three faults, drawn from the seed. It fails unless the run ends with the weights of an undisturbed simulated one,
or stops with an exit code and a sentence and, resumed, ends with them; it fails, too, if a traceback is shown, a
ledger does not hold, both sides' ledgers differ, or a parcel left twice. FILE gets a line of JSON for each trial.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transport_wire import isolated


def totals(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """How trials ended, and the same by the faults that they had and by what was run."""
    ended: dict[str, dict[str, Counter[str]]] = {"faults": {}, "studies": {}}
    for trial in trials:
        names = {"faults": {fault["kind"] for fault in trial["faults"]}, "studies": {trial["study"]}}
        for group, of in names.items():
            for name in of:
                ended[group].setdefault(name, Counter()).update([trial["problem"] or trial["outcome"]])
    return {"trials": len(trials), "ended": Counter(one["problem"] or one["outcome"] for one in trials), **ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds of faults, separated by commas; all by default")
    parser.add_argument("--methods", default="", help="studies, separated by commas; all by default")
    parser.add_argument("--json", type=Path, help="a line for each trial is added to this file")
    parser.add_argument("--keep", type=Path, help="logs and run folders of trials that failed are put into this folder")
    chosen = parser.parse_args()
    with isolated() as place:
        os.environ |= {"POLYCLINIC_CACHE": f"{place}/cache", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        begun = time.monotonic()
        from transport_trials import Campaign  # here: the processes around this one have no need of torch

        campaign = Campaign(place, chosen.seed, chosen.methods, chosen.only, chosen.keep)
        trials = []
        for number in range(chosen.first, chosen.first + chosen.trials):
            trials.append(trial := campaign.trial(number))
            line = json.dumps({"seed": chosen.seed, **asdict(trial)})
            print(line, flush=True)
            if chosen.json:
                with chosen.json.open("a") as file:
                    print(line, file=file)
        found = totals([asdict(trial) for trial in trials])
    print(json.dumps({"seed": chosen.seed, "seconds": round(time.monotonic() - begun), **found}), flush=True)
    sys.exit(any(trial.problem for trial in trials))


if __name__ == "__main__":
    main()
