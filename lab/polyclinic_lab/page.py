"""`pages/claims.md`: a table for each paper, written from the records.

python -m polyclinic_lab.page
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from polyclinic.json_types import JsonObject
from polyclinic_lab.claim import CLAIMS, SCALES, Claim
from polyclinic_lab.records import RECORDS, Kept, is_stale, records

PAGE = Path(__file__).parents[1] / "pages" / "claims.md"
VERDICTS = ("yes", "no", "undecided")
HEAD = """\
# Claims of the papers, and what came of them

Written by `python -m polyclinic_lab.page`. `polyclinic reproduce CLAIM --out DIR` checks a claim again; its rule,
arms and settings are in `polyclinic_lab/claims/`, all measured values, the machine and the commit behind the verdict.

- *yes*: the whole 95 % interval of the differences, seed by seed, lies on the claimed side. *no*: it lies on the other
  side. *undecided*: it has both signs, or there are fewer than two pairs of runs. Claims on gradient inversion compare
  image by image. In brackets: seeds, or images.
- `quick` has small networks and images (two cores, at most 15 minutes), `full` comes near to the paper (a GPU).
  Numbers are those of the largest scale that was run: mean ± standard deviation over seeds, of what the rule asks.
- `*`: the rule was written when a result was known. `†`: the study has changed since the record. Some claims got six
  seeds when three had left them open: to look twice makes a wrong yes or no a little likelier than one in twenty.
"""


def page(folder: Path = RECORDS) -> str:
    """The whole page."""
    kept = records(folder)
    papers = dict.fromkeys(claim.paper for claim in CLAIMS.values())
    lines = [HEAD, *_counts(kept, list(papers))]
    for paper in papers:
        lines += [
            "",
            f"## {paper}",
            "",
            *_table([c for c in CLAIMS.values() if c.paper == paper and not c.decides], kept),
        ]
    return "\n".join([*lines, "", *_reasons(kept)]) + "\n"


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
    yield "| | sentence | the paper | ours | quick | full | claim |"
    yield "|---|---|---|---|---|---|---|"
    for claim in claims:
        found = kept.get((claim.name, "full")) or kept.get((claim.name, "quick"))
        ours = _numbers(claim, found["ours"]) if found else ""
        theirs = _numbers(claim, [vars(number) for number in claim.numbers])
        verdicts = " | ".join(_verdict(claim, scale, kept) for scale in SCALES)
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
            told.setdefault(metric, []).append(f"{label} = {_spread(row['mean'], row['std'])}")
    return "; ".join(f"{metric}: {', '.join(values)}" for metric, values in told.items())


def _verdict(claim: Claim, scale: str, kept: Kept) -> str:
    """The verdict with a link to its record; the number of seeds; a mark for a study that has changed since."""
    found = kept.get((claim.name, scale))
    if found is None:
        return "-"
    seeds = max((row["n"] for row in found["ours"]), default=0)
    word = f"[{found['verdict']}](../records/{claim.name}-{scale}.json)"
    return f"{word}{f' ({seeds})' if claim.arms else ''}{' †' if is_stale(found) else ''}"


def _reasons(kept: Kept) -> Iterator[str]:
    """Findings of the experiments that look for the reason why a claim did not hold."""
    yield "## Why some did not hold"
    yield ""
    yield "Experiments that change one thing each, with rules of their own; *yes* means that it is a reason."
    for claim in CLAIMS.values():
        experiments = [one for one in CLAIMS.values() if one.decides == claim.name]
        if experiments:
            verdicts = [
                f"`{one.name}` {', '.join(_verdict(one, scale, kept) for scale in SCALES if (one.name, scale) in kept)}"
                for one in experiments
            ]
            told = f"**{claim.name}**: {claim.finding} Tried: {'; '.join(verdicts)}."
            yield "\n".join(["", *textwrap.wrap(told, 118, break_long_words=False, break_on_hyphens=False)])


def _spread(mean: float, std: float | None) -> str:
    if abs(mean) >= 1000:  # MB
        return f"{mean:,.0f}"
    return f"{mean:.3g}" + (f" ± {std:.2g}" if std else "")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
