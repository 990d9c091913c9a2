"""`docs/claims.md`: a scoreboard of all claims, then a section each, written from the kept `claim.json` files."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyclinic.claims.catalogue import CLAIMS
from polyclinic.claims.claim import SCALES, Claim, Scale
from polyclinic.claims.two_cores import FILE, in_words, summary, two_cores
from polyclinic.json_types import JsonObject

RECORDS = Path(__file__).parent / "records"
#: claims that are run at `full` first, as far as there is time on a GPU
FULL_FIRST = (
    *("qu-figure5-bone-age-high", "qu-figure5-retina-high", "gradients-table1-lambda", "qu-table3-cut-depth"),
    *("qu-figure6-segmentation", "qu-table2-privacy", "felicia-figure8-synthetic", "felicia-figure8-augmented"),
    *("felicia-figure6-digits", "felicia-figure6-animals", "feder-table4-methods"),
)
VERDICTS = ("yes", "no", "not enough data", "not run")
#: `claim.json` files by claim and scale
Kept = dict[tuple[str, str], dict[str, Any]]
TITLE = "# Claims of the papers, and what came of them here\n"
HEAD = """
This page is written by `python docs/building/claims_page.py` from the files in
`src/polyclinic/claims/records/`. `polyclinic reproduce CLAIM --out DIR` checks a claim again;
`python benchmarks/claims_campaign.py` checks many, and makes a run that several need only once.

- `yes`: the whole 95 % interval lies on the claimed side. `no`: it lies on the other side.
- Methods of a claim have the same images, steps, settings and seeds; none is tuned by itself.
  Differences are taken seed by seed.
- `not enough data`: the interval has both signs, or there are fewer than two pairs of runs. Some
  claims got six seeds when three had left them open, with the same rule (last column); to look
  twice makes a wrong `yes` or `no` a little likelier than one in twenty.
- *Post hoc*: a result was known when the rule was written. The commit of the rule is in the record.
- Every record names its machine. Runs have a core each, or a core and a GPU that they share; with a
  GPU of its own a run takes at most as long.
- *Two cores*: half of the CPU time of all runs and audits without a GPU (`two_cores.json`); where
  some seeds were measured, the others are taken to cost the same.
- A curve of FELICIA has, after each number of steps, the network of that or an earlier round that
  the site's validation images score best: a point may be the same as the one before it.
- Commits 07b3dbfac6 and bc246f5ebc are 78abc01 and its successors, and 6c9f988df6 is 555a6dc4, but
  for their parents.

"""


def records(folder: Path = RECORDS) -> Kept:
    """The kept `claim.json` files, by claim and scale."""
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return {(one["claim"], one["scale"]): one for one in kept}


def last_verdict(name: str, kept: Kept, scale: str) -> str:
    """What came of a claim at a scale, in a few words."""
    found = kept.get((name, scale))
    if found is None:
        return "not run"
    real = ", phantoms" if found["phantom"] else ""
    return f"{found['holds']}{real}, {found['date']}"


def is_stale(found: dict[str, Any]) -> bool:
    """Whether the claim's studies have changed since the record was made."""
    claim = CLAIMS[found["claim"]]
    now = {label: list(claim.changes(label, found["scale"], phantom=found["phantom"])) for label in claim.arms}
    return bool(now != found["changes"])


def minutes_of(claim: Claim, scale: Scale, kept: Kept) -> str:
    """Minutes of all runs and audits of a claim one after another, as they were measured; else about how many."""
    found = kept.get((claim.name, scale))
    if found is not None:
        return f"{sum(found['minutes'].get(name, 0) for name in ('runs', 'audits')):.1f}"
    guess = claim.minutes[scale].cpu if scale == "quick" else claim.minutes[scale].gpu
    return "-" if guess is None else f"~{guess:g}"


def page(folder: Path = RECORDS, times: Path = FILE) -> str:
    """The whole page."""
    kept, minutes = records(folder), two_cores(times)
    lines = [
        TITLE,
        *_counts(kept),
        HEAD,
        *_scoreboard(kept),
        "",
        *_wrapped(summary(CLAIMS, minutes)),
        "",
        *_wrapped(_full_first(kept)),
    ]
    for claim in CLAIMS.values():
        if not claim.decides:
            lines += ["", *_section(claim, kept, minutes)]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _counts(kept: Kept) -> Iterator[str]:
    """How many claims of each paper came to each verdict, at both scales: what fits on a screen."""
    columns = [(scale, verdict) for scale in SCALES for verdict in VERDICTS[:-1]]
    yield f"| | {' | '.join(f'{scale}: {verdict}' for scale, verdict in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for paper in dict.fromkeys(claim.paper for claim in CLAIMS.values()):
        found = [(scale, one["holds"]) for (_, scale), one in kept.items() if one["paper"] == paper]
        yield f"| {paper} | {' | '.join(str(found.count(column)) for column in columns)} |"


def _scoreboard(kept: Kept) -> Iterator[str]:
    """A row for each paper and a column for each verdict, with the names of all claims."""
    scales = ", ".join(f"{sum(scale == one for _, one in kept)} at `{scale}`" for scale in SCALES)
    yield from _wrapped(
        f"{len(CLAIMS)} claims and deciding experiments. Records: {scales}. *Why* marks an experiment that looks for "
        "the reason of a claim that did not hold; (full: ...) is the verdict at the larger scale; † "
        "marks a record of an earlier study of the claim, which has changed since."
    )
    yield ""
    yield f"| | {' | '.join(VERDICTS)} |"
    yield "|---" * (len(VERDICTS) + 1) + "|"
    for paper in dict.fromkeys(claim.paper for claim in CLAIMS.values()):
        mine = [claim for claim in CLAIMS.values() if claim.paper == paper]
        cells = [", ".join(_link(one, kept) for one in mine if _column(one, kept) == verdict) for verdict in VERDICTS]
        yield f"| {paper} | {' | '.join(cells)} |"


def _full_first(kept: Kept) -> str:
    """What came of the claims that are run at `full` first, and how long the others would take."""
    told = []
    for name in FULL_FIRST:
        found, minutes = kept.get((name, "full")), CLAIMS[name].minutes["full"].gpu
        runs = min((row["n"] for row in found["ours"]), default=0) if found else 0
        words = f"{found['holds']} ({runs} runs of each row)" if found else f"not run (about {minutes:g} minutes)"
        told.append(f"{name}: {words}")
    return f"At `full`, in the order in which a GPU's time is spent: {'; '.join(told)}."


def _column(claim: Claim, kept: Kept) -> str:
    found = [kept[claim.name, scale]["holds"] for scale in SCALES if (claim.name, scale) in kept]
    return found[0] if found else VERDICTS[-1]


def _link(claim: Claim, kept: Kept) -> str:
    """The claim without its paper's name, with the verdict at `full` where it was run there, too."""
    short = claim.name.partition("-")[2]
    full = kept.get((claim.name, "full"))
    told = f" (full: {full['holds']})" if full and (claim.name, "quick") in kept else " (full)" if full else ""
    mine = [kept[claim.name, scale] for scale in SCALES if (claim.name, scale) in kept]
    told += " †" if any(map(is_stale, mine)) else ""
    return f"[{'*why* ' if claim.decides else ''}{short}](#{claim.decides or claim.name}){told}"


def _section(claim: Claim, kept: Kept, minutes: dict[str, JsonObject], level: str = "##") -> Iterator[str]:
    yield f"{level} {claim.name}"
    yield ""
    yield from _wrapped(claim.sentence)
    yield ""
    yield from _wrapped(f"*Rule{', post hoc' if claim.post_hoc else ''}*: {claim.rule.words}.")
    if not claim.decides:
        yield ""
        yield from _wrapped(f"*The paper's data*: {claim.paper_data}. *Ours*: {claim.our_data}.")
    found = [kept[claim.name, scale] for scale in SCALES if (claim.name, scale) in kept]
    for one in found:
        yield ""
        yield from _verdict(one)
        yield ""
        yield from _table(one)
    yield from _not_run(claim, [one["scale"] for one in found])
    yield ""
    yield from _wrapped(in_words(claim, minutes))
    experiments = [other for other in CLAIMS.values() if other.decides == claim.name]
    if experiments:
        yield ""
        yield from _wrapped(f"*Why it did not hold so far*: {reason(experiments, kept)} {claim.finding}")
    for other in experiments:
        yield ""
        yield from _section(other, kept, minutes, "###")


def reason(experiments: list[Claim], kept: Kept) -> str:
    """What the deciding experiments say together; a reason is found where the rule of one of them holds."""
    named = {verdict: [one.name for one in experiments if _column(one, kept) == verdict] for verdict in VERDICTS}
    told = [f"{', '.join(names)}: {verdict}" for verdict, names in named.items() if names]
    found = "a reason was found" if named["yes"] else "reason not found"
    return f"{found} ({'; '.join(told)})."


def _verdict(found: dict[str, Any]) -> list[str]:
    given = ", as given" if found.get("commit_given") else ""
    spent = sum(found["minutes"].get(name, 0) for name in ("runs", "audits"))
    commits = ", ".join(one[:10] for one in found["commit"].split(", "))
    where = f"({found['date']}, {found['machine']}, commit {commits}{given}; {spent:.1f} minutes of runs)"
    stale = " The study has changed since: run it again." if is_stale(found) else ""
    images = found["data"]["ours"]
    others = "" if images == CLAIMS[found["claim"]].our_data else f" Images of this record: {images}."
    missing = f" Runs that are missing: {'; '.join(found['missing'])}." if found.get("missing") else ""
    return _wrapped(f"**{found['scale']}: {found['holds']}** {where}. {found['why']}.{missing}{others}{stale}")


def _not_run(claim: Claim, scales: list[str]) -> Iterator[str]:
    cpu, gpu = claim.minutes["quick"].cpu, claim.minutes["full"].gpu
    if "quick" not in scales and cpu:
        yield ""
        yield "Not run at `quick`."
    if "full" not in scales:
        yield ""
        yield f"Not run at `full`; about {gpu:g} minutes on a GPU." if gpu else "Needs no GPU."


def _table(found: dict[str, Any]) -> Iterator[str]:
    theirs = {(row["label"], row["metric"]): row for row in found["paper_numbers"]}
    yield "| | metric | the paper | ours | runs |"
    yield "|---|---|---|---|---|"
    for row in found["ours"]:
        paper = theirs.get((row["label"], row["metric"]))
        told = _spread(paper["mean"], paper["std"]) if paper else ""
        yield f"| {row['label']} | {row['metric']} | {told} | {_spread(row['mean'], row['std'])} | {row['n']} |"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _spread(mean: float, std: float | None) -> str:
    return f"{mean:.3g}" + (f" ± {std:.2g}" if std else "")
