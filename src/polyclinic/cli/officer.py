"""A ledger in plain sentences, for a data protection officer: what left, to whom, and what protects it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polyclinic.data.names import COORDINATOR
from polyclinic.data.own_images import find_kit
from polyclinic.federation.ledger.budget import Spent
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE
from polyclinic.json_types import JsonObject
from polyclinic.messages import human_bytes
from polyclinic.noted_files import read_result

#: what a sentence calls a kind, where its name says too little
WORDS = {
    "weights": "weights of a model",
    "gradients": "gradients (the change that its images ask of a model)",
    "activations": "activations (what a part of a model makes of its images)",
    "latents": "latents (compressed images)",
    "codes": "codes (compressed images)",
    "generator": "a generator (a model that draws images like its own)",
    "synthetic-images": "synthetic images",
    "statistics": "statistics",
    "metrics": "scores",
    "keys": "public keys",
    "masked": "numbers under masks, of which only the sum over all sites can be read",
    "shares": "shares of the secrets behind these masks",
    "labels": "labels of real images",
    "masks": "masks of real images",
    "real-images": "REAL IMAGES",
}


def sentences(lines: Sequence[JsonObject]) -> list[str]:
    """What a ledger says: what left, how often, to whom; what differential privacy covers and what not."""
    sent = [line for line in lines if line["bytes"]]
    if not sent:
        return ["Nothing left this site.", *_acts(lines)]
    total = human_bytes(sum(line["bytes"] for line in sent))
    return [f"What left ({total} in all):", *_what_left(sent), *_protection(sent), *_acts(lines)]


def refusals(run: Path) -> list[str]:
    """What was refused: at a site, by its own log of all runs; in a simulation, by the result of the run."""
    kit = find_kit(run if run.is_dir() else run.resolve().parent.parent)
    if kit:
        log = kit / "failures.log"
        texts = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        refused, where = [text for text in texts if "kept back" in text], f"by {log}, which is about all runs"
    elif (run / "result.json").exists():
        failures = read_result(run).get("failures", [])
        refused = [f"round {one['round']}: {one['reason']}" for one in failures if "kept back" in one["reason"]]
        where = "by result.json"
    else:
        return ["What was refused is not in this folder: see failures.log of the site's kit."]
    if not refused:
        return [f"The gate kept no parcel back ({where})."]
    return [f"The gate kept parcels back {len(refused)} times ({where}):", *(f"- {text}" for text in refused)]


def _what_left(lines: Sequence[JsonObject]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[JsonObject]] = {}
    for line in lines:
        groups.setdefault((line["kind"], line["operation"], line["to"]), []).append(line)
    for (kind, operation, to), group in groups.items():
        receiver = "the coordinator" if to == COORDINATOR else f"site '{to}', sealed: the coordinator cannot read it"
        size = human_bytes(sum(line["bytes"] for line in group))
        yield f"- {WORDS.get(kind, kind)}: {_times(group)}, {size}, to {receiver} (step '{operation}')."


def _times(group: Sequence[JsonObject]) -> str:
    rounds = sorted({line["round"] for line in group})
    often = "once" if len(group) == 1 else f"{len(group)} times"
    if rounds == [0]:
        return f"{often}, before the first round"
    span = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
    return f"{often}, in {span}"


def _protection(lines: Sequence[JsonObject]) -> Iterator[str]:
    records = [line["privacy"] for line in lines if line["privacy"]]
    bare = dict.fromkeys(line["kind"] for line in lines if line["privacy"] is None and line["kind"] not in OF_NO_IMAGE)
    if not records:
        yield "Differential privacy covers nothing of this: no epsilon limits what it tells about a patient."
        return
    spent = Spent()
    for line in lines:
        epsilon = (line["privacy"] or {}).get("epsilon")
        spent.add(line["kind"], line["bytes"], line["privacy"], float("inf") if epsilon is None else epsilon)
    last = records[-1]
    yield (
        f"Differential privacy: epsilon {spent.epsilon:.4g} in all at delta {last['delta']:g} "
        f"(accountant {last['accountant']}). It covers {_listed(last, 'covers')}."
    )
    if last["does_not_cover"]:
        yield f"It does not cover {_listed(last, 'does_not_cover')}."
    if bare:
        yield f"No epsilon holds for: {', '.join(WORDS.get(kind, kind) for kind in bare)}."


def _listed(record: Mapping[str, Sequence[str]], name: str) -> str:
    return "; ".join(record[name]) or "nothing"


def _acts(lines: Sequence[JsonObject]) -> Iterator[str]:
    """Lines that are about no parcel: keys that were changed, studies that were approved."""
    for line in lines:
        if not line["bytes"]:
            yield f"Line {line['index'] + 1}: {line['operation']} ({line['kind']} {line['digest'][:16]})."
