"""The table of a campaign with mutants, after somebody has looked at those that lived.

    python benchmarks/mutants_table.py benchmarks/mutants_campaign.json

Each survivor has a `word`: "harmless: ..." says why no result depends on it, "test: ..." names the test that was
written and kills it now, "gpu: ..." that it runs on a GPU only, which the campaign did not have, so that it was not
judged. Harmless mutants change no behaviour and do not count; all others do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from scipy.stats import binomtest


def rows(campaign: dict[str, Any]) -> list[dict[str, Any]]:
    """Counts of each room: mutants judged, those that change behaviour, those killed then, and those killed now."""
    found = []
    for room, counts in campaign["rooms"].items():
        words = [one.get("word", "") for one in campaign["alive"] if one["room"] == room]
        harmless, gpu = (sum(word.startswith(start) for word in words) for start in ("harmless", "gpu"))
        tried = counts["tried"] - gpu
        changed = tried - harmless
        interval = binomtest(counts["killed"], changed).proportion_ci() if changed else (0.0, 1.0)
        since = counts["killed"] + sum(word.startswith("test") for word in words)
        about = {
            "room": room,
            "tried": tried,
            "killed": counts["killed"],
            "harmless": harmless,
            "changed": changed,
            "low": interval[0],
        }
        found.append({**about, "high": interval[1], "since": since, "open": changed - since})
    return found


def table(campaign: dict[str, Any]) -> str:
    lines = ["| room | mutants | harmless | others | killed | with the tests since |", "|---|---|---|---|---|---|"]
    for row in rows(campaign):
        share = f"{row['killed']} = {row['killed'] / row['changed']:.0%} ({row['low']:.0%}–{row['high']:.0%})"
        since = f"{row['since']} = {row['since'] / row['changed']:.0%}"
        lines.append(f"| {row['room']} | {row['tried']} | {row['harmless']} | {row['changed']} | {share} | {since} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
