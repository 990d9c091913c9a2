"""`pages/claims.md`, a table for each paper, and `pages/reasons.md`, why some did not hold and what to know of others;
written from the records.

python -m polyclinic_lab.page
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from polyclinic.json_types import JsonObject
from polyclinic_lab.claim import CLAIMS, SCALES, Claim
from polyclinic_lab.records import RECORDS, Kept, is_stale, records
from polyclinic_lab.rules import MOST_NEEDED

PAGES = Path(__file__).parents[1] / "pages"
VERDICTS = ("yes", "no", "undecided")
HEAD = """\
# Claims of the papers, and what came of them

Written by `python -m polyclinic_lab.page`. `polyclinic reproduce CLAIM --out DIR` checks a claim again. A verdict leads
to its record: all values, the rule, settings, data, machine, minutes and commit. [Why some did not hold](reasons.md).

- *yes*: the whole 95 % interval of the differences (seed by seed, or image by image) lies on the claimed side. *no*: it
  lies on the other side. *undecided*: it has both signs, or pooled training learnt too little to compare with. In
  brackets: seeds, or images; parts of the rule that hold; how many seeds would decide, in how many minutes more.
- `quick`: small networks and images (two cores, at most 15 minutes); `full` comes near to the paper (a GPU). Numbers
  are those of the largest scale that was run, mean ± standard deviation, of what the rule asks. *not run*: the
  experiment was made anew, and has not had a GPU yet.
- `*`: the rule was written when a result was known. `†`: the study has changed since the record.
"""
REASONS = """\
# Why some claims did not hold, and reserves about some that did

Written by `python -m polyclinic_lab.page`. Experiments that change one thing each, with rules of their own; *yes* means
that it is a reason. [All claims](claims.md).
"""


def pages(folder: Path = RECORDS) -> dict[str, str]:
    """The text of both pages by the names of their files."""
    kept = records(folder)
    return {"claims.md": page(kept), "reasons.md": "\n".join([REASONS, *_reasons(kept)]) + "\n"}


def page(kept: Kept) -> str:
    """The table of verdicts, and one for each paper."""
    papers = dict.fromkeys(claim.paper for claim in CLAIMS.values())
    lines = [HEAD, *_counts(kept, list(papers))]
    for paper in papers:
        claims = [claim for claim in CLAIMS.values() if claim.paper == paper and not claim.decides]
        lines += ["", f"## {paper}", "", *_table(claims, kept)]
    return "\n".join(lines) + "\n"


def _counts(kept: Kept, papers: list[str]) -> Iterator[str]:
    """Numbers of claims of each paper by verdict, at both scales."""
    columns = [(scale, verdict) for scale in SCALES for verdict in VERDICTS]
    yield f"| | {' | '.join(f'{scale}: {verdict}' for scale, verdict in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for paper in papers:
        mine = {claim.name for claim in CLAIMS.values() if claim.paper == paper and not claim.decides}
        found = [(scale, one["verdict"]) for (name, scale), one in kept.items() if name in mine]
        yield f"| {paper} | {' | '.join(str(found.count(column)) for column in columns)} |"


def _table(claims: list[Claim], kept: Kept) -> Iterator[str]:
    yield "| | sentence | the paper | ours | verdict | claim |"
    yield "|---|---|---|---|---|---|"
    for claim in claims:
        scales = [scale for scale in reversed(SCALES) if (claim.name, scale) in kept]
        ours = _numbers(claim, kept[claim.name, scales[0]]["ours"]) if scales else ""
        theirs = _numbers(claim, [vars(number) for number in claim.numbers])
        verdicts = "; ".join(f"{scale}: {_verdict(claim, scale, kept)}" for scale in scales) or "not run"
        sentence = f"{claim.sentence}{' `*`' if claim.post_hoc else ''}"
        yield f"| {claim.place} | {sentence} | {theirs} | {ours} | {verdicts} | `{claim.name}` |"


def _numbers(claim: Claim, rows: list[JsonObject]) -> str:
    """Labels that the rule asks about, by metric; what the paper has numbers of, where it has none of those."""
    sentences = claim.rule.sentences
    asked = dict.fromkeys((one.metric, label) for one in sentences for label in (one.label, one.other))
    theirs = dict.fromkeys((number.metric, number.label) for number in claim.numbers)
    asked |= {} if asked.keys() & theirs.keys() else theirs
    known = {(row["metric"], row["label"]): row for row in rows}
    told: dict[str, list[str]] = {}
    for metric, label in asked:
        if row := known.get((metric, label)):
            told.setdefault(metric, []).append(f"{label} {_spread(row['mean'], row['std'])}")
    return "; ".join(f"{metric}: {', '.join(values)}" for metric, values in told.items())


def _verdict(claim: Claim, scale: str, kept: Kept) -> str:
    """The verdict with a link to its record; the number of seeds; a mark for a study that has changed since."""
    found = kept.get((claim.name, scale))
    if found is None:
        return "-"
    seeds = max((row["n"] for row in found["ours"]), default=0)
    word = f"[{found['verdict']}](../records/{claim.name}-{scale}.json)"
    told = f" ({seeds}{_parts(claim, found)}{_needed(found, seeds)})" if claim.arms else ""
    return f"{word}{told}{' †' if is_stale(found) else ''}"


def _parts(claim: Claim, found: JsonObject) -> str:
    """How many of a rule's sentences hold, where they do not decide it together."""
    table = {(row["label"], row["metric"]): row["values"] for row in found["ours"]}
    words = [one.judge(table).word for one in claim.rule.sentences]
    met = claim.rule.provided is None or claim.rule.provided.judge(table).word == "yes"
    told = met and len(words) > 1 and found["verdict"] == "undecided"
    return f"; {words.count('yes')} of {len(words)} parts" if told else ""


def _needed(found: JsonObject, seeds: int) -> str:
    """How many seeds or images would decide what is open, and how many minutes more that is, one run after another."""
    counts = [int(one) for one in re.findall(r"about (\d+) \w+ would decide", found["why"])]
    if found["verdict"] != "undecided" or not counts or "make no pairs" in found["why"]:  # an arm lacks its values
        return ""
    if "are needed" in found["why"]:
        return f"; over {MOST_NEEDED} would"
    parts = ("runs", "audits") if found["study"] else ("this call",)
    minutes = sum(found["minutes"].get(name, 0) for name in parts) * (max(counts) / seeds - 1)
    return f"; {max(counts)} would{f', {minutes:.0f} min' if minutes else ''}"


def _reasons(kept: Kept) -> Iterator[str]:
    """Findings of the experiments that look for the reason why a claim did not hold."""
    for claim in CLAIMS.values():
        verdicts = [
            f"`{one.name}` {', '.join(_verdict(one, scale, kept) for scale in found) or 'not run'}"
            for one in CLAIMS.values()
            if one.decides == claim.name
            for found in [[scale for scale in SCALES if (one.name, scale) in kept]]
        ]
        if verdicts or (claim.finding and not claim.decides):
            tried = f" Tried: {'; '.join(verdicts)}." if verdicts else ""
            told = f"**{claim.name}**: {claim.finding}{tried}"
            yield "\n".join(["", *textwrap.wrap(told, 118, break_long_words=False, break_on_hyphens=False)])


def _spread(mean: float, std: float | None) -> str:
    if abs(mean) >= 1000:  # MB
        return f"{mean:,.0f}"
    return f"{mean:.3g}" + (f"±{std:.2g}" if std else "")


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")
