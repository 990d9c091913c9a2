"""How long the `quick` claims take on two cores: measured CPU seconds, kept in `two_cores.json`.

Runs may have been made side by side on a larger machine, each with one core and without a GPU: their CPU seconds count.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from polyclinic.files import atomic_write, read_json
from polyclinic.json_types import JsonObject
from polyclinic.runner.compare.compare import Entry
from polyclinic_lab.claim import Claim
from polyclinic_lab.origin import ORIGIN, cpu_of

FILE = Path(__file__).parents[1] / "two_cores.json"


def measured(claim: Claim, planned: Mapping[str, list[Entry]], judged: Path) -> JsonObject | None:
    """Minutes of a claim by its runs; None where no seed has all its runs, or a GPU helped.

    Seeds that were not run are taken to cost as much as the others. `judged`: the folder of `claim.json`, which has the
    CPU minutes of a claim without runs.
    """
    if not any(planned.values()):
        return _without_runs(judged)
    by_seed = [[cpu_of(entry.folder) for entry in arms] for arms in zip(*planned.values(), strict=True)]
    whole = [[one for one in seconds if one is not None] for seconds in by_seed if None not in seconds]
    if not whole:
        return None
    of_all = sum(map(sum, whole)) / len(whole) * claim.seeds["quick"]
    first = next(read_json(e.folder / ORIGIN) for e in planned[next(iter(planned))] if cpu_of(e.folder) is not None)
    return _entry(first, min(len(whole), claim.seeds["quick"]), of_all, longest=max(map(max, whole)))


def _without_runs(judged: Path) -> JsonObject | None:
    found = read_json(judged / "claim.json") if (judged / "claim.json").is_file() else {}
    spent = found.get("minutes", {}).get("cpu")
    return None if spent is None or "no GPU" not in found["machine"] else _entry(found, 1, spent * 60, spent * 60)


def _entry(origin: JsonObject, seeds: int, seconds: float, longest: float) -> JsonObject:
    """Two cores share the runs; no core shares one."""
    about = {name: origin[name] for name in ("date", "machine", "commit")}
    minutes = max(seconds / 2, longest) / 60
    return {**about, "seeds": seeds, "cpu_minutes": round(seconds / 60, 2), "minutes": round(minutes, 2)}


def two_cores(file: Path = FILE) -> dict[str, JsonObject]:
    """The measurements by claim."""
    return dict(read_json(file)["claims"]) if file.is_file() else {}


def add(found: Mapping[str, JsonObject], file: Path = FILE) -> None:
    """Write measurements beside those that the file has; one of more seeds is not replaced by one of fewer."""
    known = two_cores(file)
    better = {name: one for name, one in found.items() if one["seeds"] >= known.get(name, {"seeds": 0})["seeds"]}
    claims = dict(sorted({**known, **better}.items()))
    atomic_write(file, json.dumps({"format": 1, "claims": claims}, indent=1) + "\n")


def minutes_on_two_cores(claim: Claim, found: Mapping[str, JsonObject]) -> str:
    """Measured minutes of the claim at `quick`; ~ before an estimate, also one from fewer seeds than the claim has; -
    where it is not meant to run there."""
    if one := found.get(claim.name):
        whole = not claim.arms or one["seeds"] >= claim.seeds["quick"]
        return f"{'' if whole else '~'}{one['minutes']:.1f}"
    guess = claim.minutes["quick"].get("cpu")
    return "-" if guess is None else f"~{guess:g}"
