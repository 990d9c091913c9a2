"""`docs/claims.md`: a scoreboard of all claims, then a section each, written from the kept `claim.json` files."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyclinic.claims.catalogue import CLAIMS
from polyclinic.claims.claim import SCALES, Claim

RECORDS = Path(__file__).parent / "records"
HEAD = """# Claims of the papers, and what came of them here

This page is written by `python docs/building/claims_page.py` from the files in
`src/polyclinic/claims/records/`. `polyclinic reproduce CLAIM --out DIR` checks a claim again.
`yes`: the whole 95 % interval lies on the claimed side. `no`: it lies on the other side.
*Post hoc*: a result was known when the rule was written.

"""


def records(folder: Path = RECORDS) -> dict[tuple[str, str], dict[str, Any]]:
    """The kept `claim.json` files, by claim and scale."""
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return {(one["claim"], one["scale"]): one for one in kept}


def last_verdict(name: str, kept: dict[tuple[str, str], dict[str, Any]], scale: str) -> str:
    """What came of a claim at a scale, in a few words."""
    found = kept.get((name, scale))
    if found is None:
        return "not run"
    real = ", phantoms" if found["phantom"] else ""
    return f"{found['holds']} ({found['date']}{real})"


def page(folder: Path = RECORDS) -> str:
    """The whole page."""
    kept = records(folder)
    lines = [HEAD, "| claim | where | quick | full |", "|---|---|---|---|"]
    for claim in CLAIMS.values():
        cells = [last_verdict(claim.name, kept, scale) for scale in SCALES]
        lines.append(f"| [{claim.name}](#{claim.name}) | {claim.paper}, {claim.place} | {' | '.join(cells)} |")
    for claim in CLAIMS.values():
        lines += ["", *_section(claim, kept)]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _section(claim: Claim, kept: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    yield f"## {claim.name}"
    yield ""
    yield from _wrapped(claim.sentence)
    yield ""
    yield from _wrapped(f"*Rule{', post hoc' if claim.post_hoc else ''}*: {claim.rule.words}.")
    yield ""
    yield from _wrapped(f"*The paper's data*: {claim.paper_data}. *Ours*: {claim.our_data}.")
    found = [kept[claim.name, scale] for scale in SCALES if (claim.name, scale) in kept]
    for one in found:
        yield ""
        where = f"({one['date']}, {one['machine']}, commit {one['commit'][:10]})"
        yield from _wrapped(f"**{one['scale']}: {one['holds']}** {where}. {one['why']}.")
        yield ""
        yield from _table(one)
    if not any(one["scale"] == "full" for one in found):
        minutes = claim.minutes["full"].gpu
        yield ""
        yield f"Not run at `full`; about {minutes:g} minutes on a GPU." if minutes else "Needs no GPU."


def _table(found: dict[str, Any]) -> Iterator[str]:
    theirs = {(row["label"], row["metric"]): row for row in found["paper_numbers"]}
    yield "| | metric | the paper | ours | runs |"
    yield "|---|---|---|---|---|"
    for row in found["ours"]:
        paper = theirs.get((row["label"], row["metric"]))
        told = _spread(paper["mean"], paper["std"]) if paper else ""
        yield f"| {row['label']} | {row['metric']} | {told} | {_spread(row['mean'], row['std'])} | {row['n']} |"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False)


def _spread(mean: float, std: float | None) -> str:
    return f"{mean:.3g}" + (f" ± {std:.2g}" if std else "")
