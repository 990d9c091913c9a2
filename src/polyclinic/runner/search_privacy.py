"""What a search of settings costs in privacy: every trial trained on the same images, and its score chose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.json_types import JsonObject, parse_json
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon

if TYPE_CHECKING:
    from polyclinic.runner.compare import Entry


def cost_of_search(runs: Iterable[Entry]) -> JsonObject | None:
    """Epsilon of all finished private runs together, at the site where it is largest; None where no run was private.

    Settings that were picked by the scores of these runs have used their training images so much.
    """
    by_site: dict[str, list[JsonObject]] = {}
    private = 0
    for run in runs:
        found = dict(_records(run.folder)) if run.result is not None else {}
        private += bool(found)
        for site, record in found.items():
            by_site.setdefault(site, []).append(record)
    if not private:
        return None
    worst = max((_composed(records) for records in by_site.values()), key=lambda cost: cost["epsilon"])
    return {"runs": private, **worst}


def _records(folder: Path) -> Iterator[tuple[str, JsonObject]]:
    """What each site of a run had spent at the end, by its ledger."""
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        lines = (parse_json(line) for line in file.read_text(encoding="utf-8").splitlines())
        spent = [line["privacy"] for line in lines if line.get("privacy") and line["privacy"]["mechanisms"]]
        if spent:
            yield file.stem, max(spent, key=lambda record: record["steps"])


def _composed(records: list[JsonObject]) -> JsonObject:
    history = [Mechanism(**one) for record in records for one in record["mechanisms"]]
    delta = min(record["delta"] for record in records)
    accountant = records[0]["accountant"]
    return {"epsilon": composed_epsilon(history, delta, accountant), "delta": delta, "accountant": accountant}


def sentence(cost: JsonObject) -> str:
    return (
        f"privacy: the {cost['runs']} private runs of this search have spent epsilon {cost['epsilon']:.3g} together, "
        f"at delta {cost['delta']:.3g}. Settings picked by them are not free: count that, or pick them on other images."
    )
