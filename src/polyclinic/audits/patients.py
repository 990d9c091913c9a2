"""Risk of each patient (`polyclinic audit RUN --patients`): reference runs on halves of the patients, and a verdict.

An average hides single patients: a model may remember one and tell nobody else apart. So every patient gets a test of
his or her own. *Withstood* is said only where no patient's risk is above the limit (`audit.patient_limit`), at 1 % over
all patients, and where the test would have found one at the limit. The list of patients stays at the site, in a file
that only its owner may read; a rounded number is all that the report has.
"""

import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, Word
from polyclinic.attacks.membership import lira, rmia
from polyclinic.attacks.patients import (
    LEVEL,
    POWER,
    Risks,
    gaps,
    gaussian_hits,
    hits_at_one_percent,
    hits_over_all,
    risks,
    rounded,
    smallest_risk,
)
from polyclinic.audits.attack import Tools
from polyclinic.audits.open_run import LedgerLines, images_of, read_ledgers
from polyclinic.audits.parcels import FROM_GENERATOR
from polyclinic.audits.recompute import ELSEWHERE, is_ours, plugin_in
from polyclinic.audits.references import AT_ONCE, Pool, References, halves
from polyclinic.data.opt_out import names_of
from polyclinic.data.parts import load, spread
from polyclinic.data.source import AtSites
from polyclinic.errors import WorkFailed
from polyclinic.files import atomic_write, digest_of
from polyclinic.json_types import JsonObject
from polyclinic.metrics.roc import separation
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study.tables import Audit

FEWEST = 8  #: patients of a site
#: per site: the losses that were computed so far, and the list of patients
SCORES, LIST = "references.npz", "patients.json"
#: (what is being done, done, in all)
Progress = Callable[[str, int, int], None]


def audit_patients(
    tools: Tools, folder: Path, sites: Iterable[str] = (), progress: Progress | None = None
) -> JsonObject:
    """What audit.json says of single patients; their list is written into each site's folder."""
    begun, assembly, count = time.monotonic(), tools.assembly, tools.effort.patient_references
    limit = (assembly.study.audit or Audit()).patient_limit
    facts: JsonObject = {"references": count, "limit": limit, "level": LEVEL, "power": POWER}
    if why := why_no_references(assembly, read_ledgers(folder)):
        return {"verdict": NOT_TESTED, "words": f"single patients were not tested: {why}", **facts}
    at = tuple(assembly.prepared.names) if assembly.open_data is None else _only_site(folder)
    pools = {site: Pool.of(assembly.open_images()(site)) for site in at}
    inside = {site: halves(count, pool.names, assembly.study.seed) for site, pool in pools.items()}
    asked = [site for site in pools if not sites or site in sites]
    if few := [site for site in asked if pools[site].members < FEWEST]:
        words = f"site '{few[0]}' has fewer than {FEWEST} patients"
        return {"verdict": NOT_TESTED, "words": f"single patients were not tested: {words}", **facts}
    references = References(assembly, pools, inside)
    scores = scores_of_references(references, folder, count, progress)
    patients = sum(pools[site].members for site in asked)
    known = {site: _of_training(pools[site], pools[site].mean(scores[site]), inside[site]) for site in asked}
    strongest = {site: pools[site].strongest(scores[site]) for site in asked}
    other = [_of_training(pools[site], one, inside[site]) for site, one in strongest.items() if one is not None]
    together = risks(*_joined(known.values()))
    if other:  # then all sites have the second test, those with one image a patient the same one again
        second = [_of_training(pools[s], known[s][0] if o is None else o, inside[s]) for s, o in strongest.items()]
        together = together.or_stronger(risks(*_joined(second)))
    smallest, start = smallest_risk(count, patients * (2 if other else 1)), 0
    of_sites, groups, called = {}, {}, names_at_sites(assembly, folder, pools)
    for site, (means, members) in known.items():
        rows = slice(start, start + means.shape[1])
        own = Risks(together.area[rows], together.chance[rows], together.corrected[rows], count)
        start = rows.stop
        of_sites[site], listed = _of_site(references, site, own, (means, members, scores[site]), folder)
        of_groups = [vars(one) for one in gaps(own.area, _groups(pools[site], assembly))]
        groups[site] = [{n: round(v, 3) if isinstance(v, float) else v for n, v in one.items()} for one in of_groups]
        named = [row | {"patient": called[site][place]} for place, row in listed]
        text = json.dumps({"references": count, "limit": limit, "patients": named}, indent=1, ensure_ascii=False) + "\n"
        atomic_write(_own_file(folder, site, LIST), text, private=True)
    word, words = verdict(together, limit, smallest)
    others = [site for site in pools if site not in asked]
    why = f"patients of {', '.join(others)} were not tested" if others else ""
    if word == WITHSTOOD and (why := why or why_another_model(references, folder)):
        word, words = NOT_TESTED, f"{words}. But {why}"
    if any(pools[site].names[0].startswith(f"{site}, image ") for site in asked):
        words += ". The data names no patients: every image counts as one"
    hits = {f"hits_{rate:g}": hits_over_all(*_joined(known.values()), rate) for rate in (0.01, 0.001)}
    return {
        "verdict": word, "words": words + _whose(assembly, asked), **facts, "tested": patients,
        "above_limit": rounded(int(together.above(limit).sum())), "told_apart": rounded(int(together.found.sum())),
        "smallest_risk": smallest, "mean_risk": round(float(together.area.mean()), 3), **hits,
        "what": "the final model", "sites": of_sites, "groups": groups,
        "lists": [str(_own_file(folder, site, LIST).relative_to(folder)) for site in asked],
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def verdict(found: Risks, limit: float, smallest: float | None) -> tuple[Word, str]:
    """Leaks, withstood or not tested, and why."""
    tested, models = len(found.area), f"{found.models} reference runs"
    above, unclear = int(found.above(limit).sum()), int(found.unclear(limit).sum())
    more = "take --budget thorough, which has more reference runs"
    if above:
        return LEAKS, f"{rounded(above)} of {tested} have a risk above {limit:g}: {models} tell who was trained on"
    if smallest is None or smallest > limit:
        least = "no risk at all" if smallest is None else f"a risk of {smallest:.2f} or more"
        return NOT_TESTED, f"{models} find {least} among {tested} patients, and the limit is {limit:g}; {more}"
    if unclear:
        return NOT_TESTED, f"{rounded(unclear)} of {tested} may have a risk above {limit:g}; {more}"
    below = f"; {rounded(int(found.found.sum()))} have a lower risk that is found" if found.found.any() else ""
    return WITHSTOOD, (
        f"no risk above {limit:g} was found in {tested} patients; {models} find one of {smallest:.2f} in "
        f"{POWER:.0%} of cases or more{below}"
    )


def why_no_references(assembly: Assembly, lines: LedgerLines) -> str:
    """Why the study cannot be carried out again many times here; empty where it can."""
    study = assembly.study
    if study.data.volumes:
        return "there are no reference runs of volumes"
    if any(line["kind"] in FROM_GENERATOR for of_site in lines.values() for line in of_site):
        return "its generator would have to be trained anew for every reference run"
    return ""


def why_another_model(references: References, folder: Path) -> str:
    """Why reference runs say nothing about the released model: it is not what the study gives."""
    study, sites = references.assembly.study, references.pools
    if not is_ours(type(study.method)) or any(plugin_in(references.assembly, site) for site in sites):
        return "code of a plug-in may act otherwise in reference runs"
    if references.assembly.open_data is not None:
        return "a site alone cannot carry the whole run out again, to see that the released model is nothing else"
    again = references.as_it_was()
    for site in references.pools:
        own, weights = again.get(site) or again[""], released_weights(folder, site)
        if weights is None or own.keys() != weights.keys():
            return "the run folder has no released model of the study's network"
        for name, tensor in own.items():
            if not torch.equal(tensor.cpu(), weights[name]):
                return f"the released model is not what the study gives when it is carried out again: {ELSEWHERE}"
    return ""


def names_at_sites(assembly: Assembly, folder: Path, pools: dict[str, Pool]) -> dict[str, Sequence[str]]:
    """What each pool's training patients are called where they are, as `withdraw` and `ledger who` know them: the
    number of an image where the data knows no patients. A rehearsal's images lie without names, and keep numbers."""
    source, sites, cache = images_of(folder, assembly.study, list(pools))
    if isinstance(source, AtSites):
        return {site: pool.names for site, pool in pools.items()}
    dataset = load(source, cache or assembly.prepared.folder.parents[1])
    where, names, found = spread(dataset, source, sites), names_of(dataset), {}
    for site, pool in pools.items():
        first = np.unique(pool.patients, return_index=True)[1][: pool.members]
        found[site] = names[where[site]["train"]][first].tolist()
    return found


def _only_site(folder: Path) -> tuple[str, ...]:
    return tuple(file.stem for file in sorted((folder / "ledger").glob("*.jsonl")))


def _whose(assembly: Assembly, asked: list[str]) -> str:
    if assembly.open_data is None:
        return ""
    return (
        f". Reference runs have the images of '{asked[0]}' alone, as no other site's are here: averages with other "
        "sites are left out"
    )


def _own_file(folder: Path, site: str, name: str) -> Path:
    path = folder / "sites" / site / "audit" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# --- reference runs ---------------------------------------------------------------------------------------------


def scores_of_references(
    references: References, folder: Path, count: int, progress: Progress | None
) -> dict[str, np.ndarray]:
    """The score of every image under every reference run's model, float64 [count, N] by site; runs that were done
    before an interruption are not done again."""
    assembly = references.assembly
    pools = {s: _digest(p, references, s) for s, p in references.pools.items()}
    key = digest_of([assembly.result_settings_json, count, pools])
    found = {site: _kept(_own_file(folder, site, SCORES), key) for site in references.pools}
    done, begun = min(len(rows) for rows in found.values()), time.monotonic()
    found = {site: rows[:done] for site, rows in found.items()}
    first = done
    while done < count:
        if progress:
            left = (time.monotonic() - begun) / max(1, done - first) * (count - done) / 60
            progress("reference runs" + (f", about {left:.0f} minutes left" if done > first else ""), done, count)
        numbers = range(done, min(count, done + (AT_ONCE if references.stacked else 1)))
        for models in references.models(numbers):
            for site, rows in found.items():
                new = references.scores(site, models.get(site) or models[""])
                if not np.isfinite(new).all():
                    raise WorkFailed(
                        f"a reference run gives site '{site}' a score that is no number; train more gently"
                    )
                found[site] = np.concatenate([rows.reshape(-1, len(new)), new[None]])
        done = numbers.stop
        for site, rows in found.items():
            buffer = io.BytesIO()
            np.savez(buffer, scores=rows, key=np.array(key))
            atomic_write(_own_file(folder, site, SCORES), buffer.getvalue(), private=True)
    return found


def _digest(pool: Pool, references: References, site: str) -> str:
    images = hashlib.sha256(np.ascontiguousarray(pool.part.images).tobytes())
    for array in (pool.part.labels, pool.patients, references.inside[site]):
        images.update(np.ascontiguousarray(array).tobytes())
    return images.hexdigest()


def _kept(file: Path, key: str) -> np.ndarray:
    try:
        with np.load(file, allow_pickle=False) as kept:
            return np.asarray(kept["scores"] if str(kept["key"]) == key else np.zeros((0, 0)))
    except (OSError, ValueError, KeyError, EOFError):  # none yet, or of a damaged disk
        return np.zeros((0, 0))


# --- scores -----------------------------------------------------------------------------------------------------


def _of_training(pool: Pool, scores: np.ndarray, inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores and memberships [S, P] of the site's training patients, who alone were in the run."""
    return scores[:, : pool.members], inside[:, : pool.members]


def _joined(known: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    scores, inside = (np.concatenate(some, 1) for some in zip(*known, strict=True))
    return scores, inside


def _of_site(
    references: References, site: str, own: Risks, kept: tuple[np.ndarray, np.ndarray, np.ndarray], folder: Path
) -> tuple[JsonObject, list[tuple[int, JsonObject]]]:
    """What the report has of a site, and the rows of the list that stays there, by place, the highest risk first."""
    (means, members, scores), pool = kept, references.pools[site]
    named = own.above((references.assembly.study.audit or Audit()).patient_limit)
    figures = {"risk": own.area, "chance": own.chance, "corrected": own.corrected}
    figures |= {"gaussian_hits_0.01_of_a_model": gaussian_hits(means, members)}
    if (hits := hits_at_one_percent(means, members)) is not None:
        figures["hits_0.01"] = hits
    facts: JsonObject = {"patients": pool.members, "above_limit": rounded(int(named.sum()))}
    facts |= {"mean_risk": round(float(own.area.mean()), 3), "highest_risk": round(20 * float(own.area.max())) / 20}
    if (weights := released_weights(folder, site)) is not None:
        of_released = _scores_of_released(references, site, scores, references.scores(site, weights))
        for name, found in of_released.items():
            figures[name] = found[: pool.members]
            if pool.count > pool.members:
                facts[f"auc_{name}"] = round(separation(found[: pool.members], found[pool.members :]).auc, 3)
    rows = [
        (
            int(place),
            {"patient": "", "above_limit": bool(named[place])}
            | {name: float(f"{values[place]:.4g}") for name, values in figures.items()},
        )
        for place in np.argsort(-own.area, kind="stable")
    ]
    return facts, rows


def _scores_of_released(
    references: References, site: str, scores: np.ndarray, observed: np.ndarray
) -> dict[str, np.ndarray]:
    """LiRA and RMIA of each patient of the pool, held-out ones last, under the model that was released."""
    pool, task = references.pools[site], references.assembly.study.task
    of_model, known = (torch.from_numpy(pool.mean(one)) for one in (observed, scores))
    population = torch.arange(pool.count) >= pool.members
    inside = torch.from_numpy(np.ascontiguousarray(references.inside[site]))
    found = {"lira": lira(of_model, known, inside)}
    if bool(population.any()):
        if task.like == "classification":  # log odds as log probabilities
            of_model, known = (torch.nn.functional.logsigmoid(one) for one in (of_model, known))
        found["rmia"] = rmia(of_model, known, population)
    return {name: values.numpy() for name, values in found.items()}


def released_weights(folder: Path, site: str) -> dict[str, torch.Tensor] | None:
    """The released model, the site's own where each has one; None where the run has none here."""
    file = folder / "model.safetensors"
    tensors = load_file(file) if file.is_file() else {}
    own = {name.removeprefix(f"{site}/"): one for name, one in tensors.items() if name.startswith(f"{site}/")}
    return own or tensors or None


def _groups(pool: Pool, assembly: Assembly) -> dict[str, np.ndarray]:
    """Training patients by class, sub-group and columns, by the first image of each."""
    first = np.array([int(np.flatnonzero(pool.patients == place)[0]) for place in range(pool.members)])
    groups: dict[str, np.ndarray] = {}
    if assembly.study.task.like == "classification" and np.asarray(pool.part.labels).dtype.kind in "iu":
        labels = np.asarray(pool.part.labels)[first]
        groups |= {f"class {name}": labels == place for place, name in enumerate(assembly.target.classes)}
    names = assembly.prepared.info.get("columns") or []
    tables = [("subgroup", pool.part.subgroup)]
    if pool.part.columns is not None:
        tables += [(name, np.asarray(pool.part.columns)[:, place]) for place, name in enumerate(names)]
    for name, values in tables:
        if values is not None:
            own = np.asarray(values)[first]
            groups |= {f"{name} {value}": own == value for value in np.unique(own)}
    return groups
