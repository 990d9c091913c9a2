"""Check a claim: run its studies as `polyclinic compare` runs them, measure, judge, write `claim.json` and a figure.

Runs that are finished are not run again, so a claim that was interrupted goes on where it stopped. With a common
folder for the runs, claims that ask for the same study share its run.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from polyclinic import __version__
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.extras import picture_if_possible
from polyclinic.files import atomic_write, digest_of, make_folder, read_json
from polyclinic.json_types import JsonObject
from polyclinic.runner.compare.compare import Entry, default_jobs, for_method, run_all
from polyclinic.study import Study, load_study
from polyclinic.study.study import parse_sets
from polyclinic_lab.claim import Claim, Scale
from polyclinic_lab.figure import draw
from polyclinic_lab.measures import AUDIT, Row, measure
from polyclinic_lab.origin import cpu_of, cpu_seconds, last_commit, note_origin, origin_of

STUDIES = Path(__file__).parent / "studies"
#: the runs of a claim by arm, a seed each
Planned = Mapping[str, list[Entry]]


def reproduce(
    claim: Claim,
    out: Path,
    *,
    scale: Scale = "quick",
    seeds: int | None = None,
    phantom: bool = False,
    jobs: int | None = None,
    runs: Path | None = None,
    watch: Callable[[list[Entry]], None] = lambda _: None,
) -> JsonObject:
    """Run, measure and judge a claim; the content of `claim.json`. `runs`: a folder of runs that claims share."""
    begin = time.monotonic()
    make_folder(out)
    planned = plan(claim, out, scale, seeds, phantom=phantom, runs=runs)
    earlier = read_json(out / "claim.json") if (out / "claim.json").is_file() else {}
    check_same_question(earlier, claim, scale, phantom=phantom, out=out)
    run_missing([entry for arm in planned.values() for entry in arm], out, jobs, watch)
    return judge(claim, planned, out, scale=scale, phantom=phantom, begin=begin)


def plan(
    claim: Claim, out: Path, scale: Scale, seeds: int | None, *, phantom: bool, runs: Path | None = None
) -> dict[str, list[Entry]]:
    """The runs of every arm: in `out`, or in `runs`, where a run is named by the digest of its study."""
    if phantom and not claim.phantom:
        raise BadInput(f"--phantom: the claim '{claim.name}' needs no images of yours; leave the flag out")
    if not claim.study:
        return {label: [] for label in claim.arms}
    study = load_study(STUDIES / claim.study)
    planned = {}
    for label in claim.arms:
        changes = parse_sets(list(claim.changes(label, scale, phantom=phantom)))
        method = str(changes.pop("method.name", study.method.name))
        numbers = range(claim.first_seed, claim.first_seed + (seeds or claim.seeds[scale]))
        studies = [for_method(study, method, {**changes, "seed": n}) for n in numbers]
        planned[label] = [
            Entry(label, seed, one, runs / shared_name(one) if runs else out / f"{slug(label)}-seed{seed}")
            for seed, one in enumerate(studies)
        ]
    return planned


def shared_name(study: Study) -> str:
    """The folder of a study's run among those that claims share."""
    return f"{study.method.name}-seed{study.seed}-{digest_of(study.as_tables())[:12]}"


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-")


def check_same_question(earlier: JsonObject, claim: Claim, scale: Scale, *, phantom: bool, out: Path) -> None:
    """BadInput if the folder holds another claim, or this one at another scale or with other images."""
    asked = {"claim": claim.name, "scale": scale, "phantom": phantom}
    if earlier and {name: earlier.get(name) for name in asked} != asked:
        raise BadInput(f"--out {out}: holds the claim '{earlier.get('claim')}' at another scale or with other images")


def run_missing(entries: list[Entry], out: Path, jobs: int | None, watch: Callable[[list[Entry]], None]) -> None:
    """Run what is not finished, and note where and with which code it ran; WorkFailed where a run failed."""
    missing = [entry for entry in entries if entry.result is None]
    begun = {entry.folder for entry in missing if (entry.folder / "study.toml").exists()}
    spent: dict[Path, float] = {}

    def ended(entry: Entry, cpu: float) -> None:
        spent[entry.folder] = cpu

    failed = run_all(entries, out, jobs or default_jobs(entries[0].study), watch, ended) if entries else {}
    for entry in missing:
        if entry.result is not None:
            note_origin(entry.folder, None if entry.folder in begun else spent.get(entry.folder))
    if failed:
        raise WorkFailed("\n".join(f"{folder}: {words}" for folder, words in failed.items()))


def judge(claim: Claim, planned: Planned, out: Path, *, scale: Scale, phantom: bool, begin: float) -> JsonObject:
    """Measure the runs, which are all there, and judge the claim; writes `claim.json` and the figure."""
    entries = [entry for arm in planned.values() for entry in arm]
    before = cpu_seconds()
    rows = measure(claim.measure, {label: [entry.folder for entry in arm] for label, arm in planned.items()}, scale)
    found = describe(claim, rows, scale, phantom=phantom) | origin_of([entry.folder for entry in entries])
    spent = {
        "runs": sum(entry.result["timing"]["seconds"] for entry in entries if entry.result),
        "audits": sum(audit_seconds(entry.folder) for entry in entries),
        "this call": time.monotonic() - begin,
    }
    cpu = cpu_of_all(entries, cpu_seconds() - before)
    spent |= {} if cpu is None else {"cpu": cpu}
    found["minutes"] = {name: round(value / 60, 1) for name, value in spent.items()}
    atomic_write(out / "claim.json", as_text(found))
    with picture_if_possible():
        draw(found, out / "claim.png")
    copy_picture(claim, planned, out / "picture.png")
    return found


def as_text(found: JsonObject) -> str:
    """JSON, each list of numbers in one line: there may be a hundred images."""
    numbers = re.compile(r"\[\s+([-+.\w]+(?:,\s+[-+.\w]+)*)\s+\]")
    return numbers.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(found, indent=1)) + "\n"


def describe(claim: Claim, rows: list[Row], scale: Scale, *, phantom: bool) -> JsonObject:
    """The content of `claim.json`: the paper's numbers beside ours, the rule, whether it holds."""
    verdict = claim.rule.judge({(row.label, row.metric): row.values for row in rows})
    numbers = [{"label": n.label, "metric": n.metric, "mean": n.mean, "std": n.std} for n in claim.numbers]
    return {
        "format": 1,
        "claim": claim.name,
        "paper": claim.paper,
        "place": claim.place,
        "sentence": claim.sentence,
        "paper_numbers": numbers,
        "ours": [row.as_json() for row in rows],
        "rule": claim.rule.words,
        "rule_commit": last_commit(claim.file),
        "post_hoc": claim.post_hoc,
        "verdict": verdict.word,
        "why": verdict.why,
        "data": {"paper": claim.paper_data, "ours": "phantoms" if phantom else claim.our_data},
        "scale": scale,
        "phantom": phantom,
        "axis": claim.axis,
        "study": claim.study,
        "changes": {label: list(claim.changes(label, scale, phantom=phantom)) for label in claim.arms},
        "version": __version__,
    }


def cpu_of_all(entries: list[Entry], measuring: float) -> float | None:
    """CPU seconds of all runs and what was measured of them; None where they are not known, or a GPU helped.

    A claim without runs has nothing but its measuring.
    """
    spent = [cpu_of(entry.folder) for entry in entries] or [measuring]
    known = [one for one in spent if one is not None]
    return sum(known) if len(known) == len(spent) else None


def audit_seconds(run: Path) -> float:
    """Seconds that the attacks on a run took; 0 without any."""
    audit = read_json(file) if (file := run / AUDIT).is_file() else {}
    findings = [one for parcel in audit.get("parcels", []) for one in parcel["findings"]]
    return sum(float(one.get("seconds") or 0) for one in findings)


def copy_picture(claim: Claim, planned: Planned, file: Path) -> None:
    """The picture that the paper has as well, as the first run of each arm drew it, one below the other."""
    from PIL import Image

    runs = [arm[0].folder for arm in planned.values() if arm] if claim.picture else []
    found = [Image.open(drawn[0]).convert("RGB") for run in runs if (drawn := sorted(run.glob(claim.picture)))]
    if found:
        sheet = Image.new("RGB", (max(one.width for one in found), sum(one.height for one in found)), "white")
        for place, one in enumerate(found):
            sheet.paste(one, (0, sum(above.height for above in found[:place])))
        sheet.save(file)
