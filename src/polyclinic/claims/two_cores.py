"""How long the `quick` claims take on two cores: measured CPU seconds, kept in `two_cores.json`.

Runs may have been made side by side on a larger machine, each with one core and without a GPU: their CPU seconds count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic.claims.claim import Claim
from polyclinic.claims.cpu_time import ORIGIN, cpu_of
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write, read_json
from polyclinic.json_types import JsonObject
from polyclinic.runner.compare import Entry

FILE = Path(__file__).parent / "two_cores.json"
#: minutes that a `quick` claim may take on two cores
MOST = 15


def measured(claim: Claim, planned: Mapping[str, list[Entry]], judged: Path) -> JsonObject | None:
    """What the runs of a claim say of its minutes; None where no seed has all its runs, or a GPU helped.

    Seeds that were not run are taken to cost as much as the others. `judged`: the folder of `claim.json`, which has the
    CPU minutes of a claim without runs.
    """
    if not planned:
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
    """Write measurements beside those that the file has; a newer one of the same claim replaces the older."""
    claims = dict(sorted({**two_cores(file), **found}.items()))
    atomic_write(file, json.dumps({"format": 1, "claims": claims}, indent=1) + "\n")


def merge(others: Sequence[Path], file: Path = FILE) -> None:
    """Take the measurements of other files over; one of more seeds is not replaced by one of fewer."""
    for other in others:
        if not other.is_file():
            raise BadInput(f"{other}: no such file of minutes on two cores")
        known = two_cores(file)
        better = {name: one for name, one in two_cores(other).items() if one["seeds"] >= _seeds(known.get(name))}
        add(better, file)


def _seeds(one: JsonObject | None) -> int:
    return 0 if one is None else int(one["seeds"])


def minutes_on_two_cores(claim: Claim, found: Mapping[str, JsonObject]) -> str:
    """Measured minutes of the claim at `quick`; ~ before an estimate, also one from fewer seeds than the claim has; -
    where it is not meant to run there."""
    if one := found.get(claim.name):
        return f"{'' if _is_whole(claim, one) else '~'}{one['minutes']:.1f}"
    guess = claim.minutes["quick"].cpu
    return "-" if guess is None else f"~{guess:g}"


def _is_whole(claim: Claim, one: JsonObject) -> bool:
    return not claim.arms or _seeds(one) >= claim.seeds["quick"]


def in_words(claim: Claim, found: Mapping[str, JsonObject]) -> str:
    """A sentence about the minutes of the claim at `quick`, and where they come from; empty where it has none."""
    one, guess = found.get(claim.name), claim.minutes["quick"].cpu
    if one is None:
        return "" if guess is None else f"*Two cores*: about {guess:g} minutes at `quick`, not measured."
    of_all = claim.seeds["quick"] if claim.arms else 1
    source = f"the CPU time of {one['seeds']} of {of_all} seeds, {one['date']}, {one['machine']}"
    return f"*Two cores*: {one['minutes']:.1f} minutes at `quick` ({source}, commit {one['commit'][:10]})."


def summary(claims: Mapping[str, Claim], found: Mapping[str, JsonObject]) -> str:
    """How many of the claims that run at `quick` were measured, and which take longer than they may."""
    meant = [name for name, claim in claims.items() if claim.minutes["quick"].cpu is not None]
    known = {name: found[name]["minutes"] for name in meant if name in found}
    if not known:
        return f"Minutes on two cores are estimates: none of {len(meant)} claims at `quick` was measured."
    longest = max(known, key=lambda name: known[name])
    over = [name for name in known if known[name] > MOST]
    late = f"longer than {MOST} minutes: {', '.join(over)}" if over else f"none of them takes more than {MOST}"
    whole = sum(_is_whole(claims[name], found[name]) for name in known)
    told = f"{len(known)} of {len(meant)} claims at `quick` were measured, {whole} of them with all their seeds"
    return f"Minutes on two cores: {told}, the longest is {longest} with {known[longest]:.1f}; {late}."
