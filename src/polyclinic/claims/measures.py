"""How a run folder becomes numbers: test metrics, bytes, forgetting, what an audit recovered."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic.claims.claim import Measure, Row, Scale
from polyclinic.claims.cpu_time import counted
from polyclinic.errors import WorkFailed
from polyclinic.files import atomic_write, read_json, read_result
from polyclinic.json_types import JsonObject

#: numbers of one run, by metric
OfRun = Callable[[Path], Mapping[str, float]]


def of_runs(*readers: OfRun) -> Measure:
    """Measure every run by itself: a row for each arm and metric."""

    def measure(folders: Mapping[str, Sequence[Path]], scale: Scale) -> list[Row]:
        rows = []
        for label, runs in folders.items():
            found = [{name: value for read in readers for name, value in read(run).items()} for run in runs]
            rows += rows_of(label, found)
        return rows

    return measure


def rows_of(label: str, found: Sequence[Mapping[str, float]]) -> list[Row]:
    """A row for each metric that every run has: values of different arms are compared seed by seed."""
    names = [name for name in (found[0] if found else {}) if all(name in one for one in found)]
    return [Row(label, name, tuple(one[name] for one in found)) for name in names]


def test(*names: str) -> OfRun:
    """Metrics on the test images of all sites together."""
    return lambda run: {name: read_result(run)["metrics"]["test"][name] for name in names}


def own_sites(name: str, label: str = "own site") -> OfRun:
    """The mean over sites of a metric, each model on its own site's test images."""
    return lambda run: {f"{name}, {label}": read_result(run)["metrics"]["mean"][name]}


def across_sites(name: str) -> OfRun:
    """Every site's model on every site's test images: the mean, and how much the models differ (Table 3 of FedER)."""

    def read(run: Path) -> dict[str, float]:
        table = models_by_site(read_result(run), name)
        spreads = [statistics.pstdev(values) for values in table.values()]
        means = [statistics.fmean(values) for values in table.values()]
        return {f"{name}, all models": statistics.fmean(means), f"spread of {name}": statistics.fmean(spreads)}

    return read


def models_by_site(result: JsonObject, name: str) -> dict[str, list[float]]:
    """By site with test images: the metric of every site's model there; one common model is every site's."""
    across = result["metrics"].get("across_sites")
    if across is None:
        return {site: [one[name]] for site, one in result["metrics"]["per_site"].items() if name in one}
    sites = {site for scores in across.values() for site in scores}
    found = {site: [scores[site][name] for scores in across.values() if name in scores.get(site, {})] for site in sites}
    return {site: values for site, values in sorted(found.items()) if values}


def replay_quality(run: Path) -> dict[str, float]:
    """PSNR of what the generator replays, in dB, and the share of its codes that is in use."""
    found = read_result(run)["replay"]
    return {name.replace("_", " "): value for name, value in found.items() if name == "psnr" or "usage" in name}


def carried(run: Path) -> dict[str, float]:
    """All bytes that were carried, in MB."""
    return {"MB": read_result(run)["communication"]["total_bytes"] / 1e6}


def carried_each_round(run: Path) -> dict[str, float]:
    """MB that a site sends in a round, mean over sites and rounds."""
    result = read_result(run)
    told = result["communication"]
    return {"MB a site and round": told["sent_bytes"] / len(told["per_site"]) / result["rounds"] / 1e6}


def kept(run: Path, name: str, compute: Callable[[Path], JsonObject]) -> JsonObject:
    """What was computed of a run before, from its file `name`; computed and written where that is not there."""
    file = run / name
    if not file.exists():
        with counted(run, name):
            atomic_write(file, json.dumps(compute(run), indent=1) + "\n")
    return read_json(file)


def forgetting(run: Path) -> dict[str, float]:
    """How much worse the model is at the images of a site when the last site of the round has trained after it.

    The last site has no other after it. What a model gets right at a site where it has not trained yet says nothing of
    forgetting, so that models of earlier sites are left out.
    """
    from polyclinic.runner.forgetting import matrices

    found = kept(run, "forgetting.json", matrices)
    table = list(found["rounds"].values())[-1]
    *earlier, last = next(iter(table.values()))  # in the order in which sites have trained
    fresh, later = (
        statistics.fmean(table[site][model] for site, model in zip(earlier, models, strict=True))
        for models in (earlier, [last] * len(earlier))
    )
    sign = 1 if found["better"] == "higher" else -1
    return {"just trained": fresh, "after the last site": later, "lost": sign * (fresh - later)}


def kinds_that_left(run: Path) -> list[str]:
    """The kind of every parcel in the sites' ledgers."""
    lines = [json.loads(line) for file in sorted((run / "ledger").glob("*.jsonl")) for line in file.open()]
    return [str(line["kind"]) for line in lines if "kind" in line]


def audited(kind: str, name: str, *, budget: str = "quick", attack: str = "") -> OfRun:
    """Mean of a number of the findings for a kind of parcel, as `polyclinic audit` has it; audited once.

    Nothing where no such parcel left; WorkFailed where the attack has findings, and none of them has such a number.
    """

    def read(run: Path) -> dict[str, float]:
        if kind not in kinds_that_left(run):
            return {}
        parcels = [one for one in audit_of(run, budget, kind)["parcels"] if one["kind"] == kind]
        findings = [one for parcel in parcels for one in parcel["findings"] if attack in one["attack"]]
        values = [float(one["evidence"][name]) for one in findings if one["evidence"].get(name) is not None]
        if findings and not values:
            raise WorkFailed(f"{run}: the audit's findings on '{kind}' have no number '{name}'")
        return {name: statistics.fmean(values)} if values else {}

    return read


def audit_of(run: Path, budget: str, kind: str) -> dict[str, Any]:
    """The content of `audit.json`; parcels of the kind are audited where that is not there or not whole."""
    from polyclinic.audits.audit import audit

    file = run / "audit.json"
    found: dict[str, Any] = read_json(file) if file.exists() else {}
    if found.get("complete") and found.get("budget") == budget:
        return found
    with counted(run, file.name):
        return audit(run, budget=budget, kinds=[kind])
