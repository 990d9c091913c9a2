"""How a run folder becomes numbers: test metrics, bytes, forgetting, what an audit recovered.

A claim names its measures with their words: `test mae`, `audited latents psnr inversion`.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from polyclinic.errors import WorkFailed
from polyclinic.files import atomic_write, read_json
from polyclinic.json_types import JsonObject
from polyclinic.run_folder import read_result
from polyclinic_lab import own_measures
from polyclinic_lab.origin import counted

#: run folders by arm, in the order of the seeds
Folders = Mapping[str, Sequence[Path]]
#: in a run folder: what its audit found
AUDIT = "audit.json"


@dataclass(frozen=True)
class Row:
    """One measured quantity of one arm: a value for each seed, or for each image; None where there is none.

    A seed with a value for each image has a list of them.
    """

    label: str
    metric: str
    values: tuple[float | Sequence[float] | None, ...]

    @property
    def known(self) -> list[float]:
        """A number for each seed: the mean over its images."""
        means = [statistics.fmean(one) if isinstance(one, Sequence) else one for one in self.values]
        return [value for value in means if value is not None]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.known)

    @property
    def std(self) -> float:
        """The sample standard deviation; 0 for one value."""
        return statistics.stdev(self.known) if len(self.known) > 1 else 0.0

    def as_json(self) -> dict[str, object]:
        numbers = {"mean": self.mean, "std": self.std, "n": len(self.known), "values": list(self.values)}
        return {"label": self.label, "metric": self.metric, **numbers}


def measure(words: Sequence[str], folders: Folders, scale: str) -> list[Row]:
    """A row for each arm and metric; `words`: the measures of a claim."""
    names = [(name, settings) for name, *settings in map(str.split, words)]
    if names[0][0] in OF_ALL:
        ((name, settings),) = names
        found = OF_ALL[name](folders, scale, *settings)
        rows = [Row(label, metric, tuple(values)) for (label, metric), values in found.items()]
        return [row for row in rows if row.known]
    rows = []
    for label, runs in folders.items():
        read = [
            {key: value for name, settings in names for key, value in OF_RUN[name](run, *settings).items()}
            if run.exists()
            else None
            for run in runs
        ]
        rows += rows_of(label, read)
    return rows


def rows_of(label: str, found: Sequence[Mapping[str, float | list[float]] | None]) -> list[Row]:
    """A row for each metric that every run has: values of different arms are compared seed by seed. None: no run."""
    known = [one for one in found if one is not None]
    names = [name for name in (known[0] if known else {}) if all(name in one for one in known)]
    return [Row(label, name, tuple(None if one is None else one[name] for one in found)) for name in names]


def kept(run: Path, name: str, compute: Callable[[Path], JsonObject]) -> JsonObject:
    """Figures of a run, from its file `name`; computed and written where that is not there."""
    file = run / name
    if not file.exists():
        with counted(run, name):
            atomic_write(file, json.dumps(compute(run), indent=1) + "\n")
    return read_json(file)


def test(run: Path, *names: str) -> dict[str, float]:
    """Metrics on the test images of all sites together."""
    return {name: read_result(run)["metrics"]["test"][name] for name in names}


def own_sites(run: Path, name: str, without: str = "") -> dict[str, float]:
    """The mean over sites of a metric, each model on its own site's test images; `without`: a site that is left out."""
    metrics = read_result(run)["metrics"]
    if not without:
        return {f"{name}, own site": metrics["mean"][name]}
    scores = [one[name] for site, one in metrics["per_site"].items() if site != without]
    return {f"{name}, own site, without {without}": statistics.fmean(scores)}


def across_sites(run: Path, name: str) -> dict[str, float]:
    """Every site's model on every site's test images: the mean, and how much the models differ (Table 3 of FedER)."""
    table = models_by_site(read_result(run), name)
    spreads = [statistics.pstdev(values) for values in table.values()]
    means = [statistics.fmean(values) for values in table.values()]
    return {f"{name}, all models": statistics.fmean(means), f"spread of {name}": statistics.fmean(spreads)}


def models_by_site(result: JsonObject, name: str) -> dict[str, list[float]]:
    """By site with test images: the metric of every site's model there; one common model is every site's."""
    across = result["metrics"].get("across_sites")
    if across is None:
        return {site: [one[name]] for site, one in result["metrics"]["per_site"].items() if name in one}
    sites = {site for scores in across.values() for site in scores}
    found = {site: [scores[site][name] for scores in across.values() if name in scores.get(site, {})] for site in sites}
    return {site: values for site, values in sorted(found.items()) if values}


def cluster_gap(run: Path) -> dict[str, float]:
    """Distance of the models of two sites on the digits of both."""
    across = read_result(run)["metrics"].get("across_sites", {})
    means = [statistics.fmean(scores["accuracy"] for scores in own.values()) for own in across.values()]
    return {"gap of accuracy": max(means) - min(means)} if means else {}


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


def forgetting(run: Path) -> dict[str, float]:
    """How much worse the model is at the images of a site when the last site of the round has trained after it.

    The last site has no other after it. What a model gets right at a site where it has not trained yet says nothing of
    forgetting, so that models of earlier sites are left out.
    """
    from polyclinic.runner.compare.forgetting import matrices

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


def weights_parcels(run: Path) -> dict[str, float]:
    """The number of parcels with weights in the sites' ledgers."""
    return {"parcels with weights": float(kinds_that_left(run).count("weights"))}


def audited(run: Path, kind: str, name: str, attack: str) -> dict[str, float]:
    """Mean of a number of an attack's findings for a kind of parcel, as `polyclinic audit` has it; audited once.

    Nothing where no such parcel left; WorkFailed where the attack has findings, and none of them has such a number.
    """
    if kind not in kinds_that_left(run):
        return {}
    parcels = [one for one in audit_of(run, kind)["parcels"] if one["kind"] == kind]
    findings = [one for parcel in parcels for one in parcel["findings"] if attack in one["attack"]]
    values = [float(one["evidence"][name]) for one in findings if one["evidence"].get(name) is not None]
    if findings and not values:
        raise WorkFailed(f"{run}: the audit's findings on '{kind}' have no number '{name}'")
    return {name: statistics.fmean(values)} if values else {}


def audit_of(run: Path, kind: str, budget: str = "quick") -> dict[str, Any]:
    """The content of `audit.json`; parcels of the kind are audited where that is not there or not whole."""
    from polyclinic.audits.audit import audit

    file = run / AUDIT
    found: dict[str, Any] = read_json(file) if file.exists() else {}
    if found.get("complete") and found.get("budget") == budget:
        return found
    with counted(run, file.name):
        return audit(run, budget=budget, kinds=[kind])


def utility(run: Path, *sets: str) -> dict[str, float]:
    """Scores of networks that learnt the first site's real images, its generator's, or both (FELICIA, Figs. 6-10)."""
    from polyclinic_lab import generators

    found = kept(run, "utility.json", generators.utility)
    return {name: value for name, value in found.items() if name.rpartition(", ")[2] in sets}


def coverage(run: Path) -> dict[str, float]:
    """Coverage and recall of the sites' generators (FELICIA, Fig. 5)."""
    from polyclinic_lab import generators

    return kept(run, "coverage.json", generators.coverage)


def projected(folders: Folders, scale: str) -> Mapping[tuple[str, str], Sequence[list[float]]]:
    """How near the sites' generators come to the images that they learnt from, image by image (FedER, Figs. 3 and 4).

    The runs of the first arm have no privacy loss, those of the second have it.
    """
    if len(folders) < 2:  # nothing is kept of one arm alone
        return {}
    (plain, ours), (private, theirs) = folders.items()
    found = [
        kept(one, "projected.json", partial(_project, other=two))["distances"]
        for one, two in zip(ours, theirs, strict=True)
    ]
    return {(label, "distance"): [pair[place] for pair in found] for place, label in enumerate((plain, private))}


def _project(run: Path, other: Path) -> JsonObject:
    from polyclinic_lab import generators  # here: it imports the attacks

    return {"distances": generators.projected(run, other)}


def inverted(folders: Folders, scale: str, *words: str) -> Mapping[tuple[str, str], Sequence[float | None]]:
    """For each arm and image: whether it came back from its gradient, and how well (see `inversions`)."""
    from polyclinic_lab import inversions  # here: it imports the attacks

    return inversions.inverted(folders, scale, *words)


#: measures of one run, by name: numbers by metric
OF_RUN: dict[str, Callable[..., Mapping[str, float]]] = {
    one.__name__: one
    for one in (
        *(test, own_sites, across_sites, cluster_gap, replay_quality, carried, carried_each_round, forgetting),
        *(weights_parcels, audited, utility, coverage),
        own_measures.same_after_kill,
    )
}
#: measures of all runs of a claim together, or of none: values by label and metric
OF_ALL: dict[str, Callable[..., Mapping[tuple[str, str], Sequence]]] = {
    one.__name__: one
    for one in (own_measures.one_digest, own_measures.overhead, own_measures.epsilons, projected, inverted)
}
