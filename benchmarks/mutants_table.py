"""The table of campaigns with mutants, after somebody has looked at those that lived.

    python benchmarks/mutants_table.py [FILE ...]     prints the table of benchmarks/mutants/*.json, or of these
    python benchmarks/mutants_table.py --add FILE     adds what a campaign found to benchmarks/mutants/ROOM.json

Each survivor has a `word`: "harmless: ..." says why no result depends on it, "test: ..." names the test that was
written and kills it now, "simplified: ..." that the code has no such place any more, "gpu: ..." that it runs on a GPU
only, which the campaign did not have, so that it was not judged. Harmless mutants change no behaviour and do
not count; all others do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

#: a file for each room: a list of campaigns, each with its seeds, the mutants that live, and those that do not
FOLDER = Path(__file__).with_name("mutants")
LISTS = ("alive", "not_judged", "killed")
HEAD = (
    "| room | seeds | mutants | harmless | others | killed | of these by tier 2 | with the tests since |\n"
    "|---|---|---|---|---|---|---|---|"
)


def by_room(campaign: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a campaign found in each room."""
    seeds = campaign.get("seeds") or [campaign["seed"]]
    found: dict[str, dict[str, Any]] = {}
    for name in LISTS:
        for one in campaign[name]:
            room = one["where"].split("/")[2]
            found.setdefault(room, {"seeds": seeds, **{each: [] for each in LISTS}})[name].append(one)
    return found


def counts_of(part: dict[str, Any]) -> dict[str, Any]:
    """Mutants of one room judged, those that change behaviour, those killed then, and those killed now."""
    words = [one.get("word", "") for one in part["alive"]]
    starts = ("harmless", "gpu", ("test", "simplified"))
    harmless, gpu, mended = (sum(word.startswith(start) for word in words) for start in starts)
    killed = len(part["killed"])
    changed = len(words) + killed - gpu - harmless
    low, high = binomtest(killed, changed).proportion_ci() if changed else (0.0, 1.0)
    above = sum(one.get("tier") == 2 for one in part["killed"])
    counts = {"tried": changed + harmless, "harmless": harmless, "changed": changed, "killed": killed, "above": above}
    return {**counts, "low": low, "high": high, "since": killed + mended, "open": changed - killed - mended}


def row(room: str, part: dict[str, Any]) -> str:
    """A line of the table."""
    counts = counts_of(part)
    share, since = (counts[name] / max(counts["changed"], 1) for name in ("killed", "since"))
    killed = f"{counts['killed']} = {share:.0%} ({counts['low']:.0%}–{counts['high']:.0%})"
    seeds = " ".join(map(str, part["seeds"]))
    cells = [room, seeds, counts["tried"], counts["harmless"], counts["changed"], killed, counts["above"]]
    return "| " + " | ".join(map(str, [*cells, f"{counts['since']} = {since:.0%}"])) + " |"


def table(files: Iterable[Path]) -> str:
    rows = [row(file.stem, part) for file in files for part in json.loads(file.read_text(encoding="utf-8"))]
    return "\n".join([HEAD, *rows])


def add(file: Path) -> None:
    """Put a campaign beside the earlier ones of its rooms; words on a mutant that lived before come along."""
    FOLDER.mkdir(exist_ok=True)
    for room, part in by_room(json.loads(file.read_text(encoding="utf-8"))).items():
        target = FOLDER / f"{room}.json"
        known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else []
        known = [one for one in known if one["seeds"] != part["seeds"]]
        words = {_same(one): one["word"] for earlier in known for one in earlier["alive"] if "word" in one}
        for one in part["alive"]:
            if _same(one) in words:
                one.setdefault("word", words[_same(one)])
        target.write_text(json.dumps([*known, part], indent=1) + "\n", encoding="utf-8")


def _same(one: dict[str, Any]) -> tuple[str, ...]:
    return (one["where"].rpartition(":")[0], *(one[key] for key in ("function", "how", "before", "after")))


def main(arguments: Sequence[str]) -> None:
    files = [Path(one) for one in arguments if not one.startswith("--")]
    if "--add" in arguments:
        for file in files:
            add(file)
    print(table(files if files and "--add" not in arguments else sorted(FOLDER.glob("*.json"))))


if __name__ == "__main__":
    main(sys.argv[1:])
