"""Audits a run: reads its ledgers, takes the parcels that its sites kept, attacks each, writes down what was found."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.assembly import Assembly, device_of
from polyclinic.attacks.perceptual import Distance, Pixels, perceptual_distance
from polyclinic.audit import latents, made, updates
from polyclinic.audit.case import Finding, NotTried, Seen, Tools, Truth
from polyclinic.audit.settings import BUDGETS, Audit
from polyclinic.audit.words import verdicts
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.kept import TELLING, Release, releases
from polyclinic.federation.ledger import LedgerBroken, verify
from polyclinic.federation.parcel import Parcel
from polyclinic.settings import nearest
from polyclinic.study import Study, load_study

#: (what is being attacked, attacks done, attacks in all)
Progress = Callable[[str, int, int], None]

#: what is done with a parcel of each kind; a new kind of parcel is one new line
ATTACKS: dict[str, Callable[[Seen, Truth], list[Finding | NotTried]]] = {
    "gradients": updates.attack,
    "weights": updates.attack,
    "activations": latents.attack,
    "latents": latents.attack,
    "generator": made.of_generator,
    "codes": made.of_codes,
    "synthetic-images": made.of_synthetic_images,
}

Lines = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Target:
    """One kept parcel of one site."""

    site: str
    release: Release
    number: int

    @property
    def parcel(self) -> Parcel:
        return self.release.parcels[self.number]

    @property
    def name(self) -> str:
        return f"{self.site}, round {self.release.round}, {self.release.operation}: {self.parcel.kind}"


def audit(
    folder: str | Path,
    *,
    budget: str = "quick",
    features: str = "pixels",
    kinds: Iterable[str] = (),
    sites: Iterable[str] = (),
    device: str = "auto",
    progress: Progress | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Audit a run folder; the content of `audit.json`, which is written anew after every parcel."""
    folder = Path(folder)
    study, lines = read_run(folder)
    wanted = targets(folder, study, lines, budget, tuple(kinds), tuple(sites))
    assembly = Assembly(study, prepare(study.data, study.sites, cache=cache), folder.resolve())
    tools = tools_for(assembly, budget, features, device)
    report = head(study, tools, budget, lines)
    for done, target in enumerate(wanted):
        if progress:
            progress(target.name, done, len(wanted))
        report["parcels"].append(one(tools, target, folder))
        report["verdicts"] = verdicts(report["parcels"], lines)
        write(folder, report)
    if progress:
        progress("done", len(wanted), len(wanted))
    return report


# --- reading a run ------------------------------------------------------------------------------------


def read_run(folder: Path) -> tuple[Study, Lines]:
    """The study of a run and the lines of its ledgers, whose chains hold."""
    if not (folder / "study.toml").exists():
        raise BadInput(f"{folder}: is not a run folder; name one that `polyclinic run` wrote")
    try:
        lines = {file.stem: verify(file) for file in sorted((folder / "ledger").glob("*.jsonl"))}
    except LedgerBroken as error:
        raise WorkFailed(f"the chain is broken: {error}") from None
    return load_study(folder / "study.toml"), lines


def targets(
    folder: Path, study: Study, lines: Lines, budget: str, kinds: tuple[str, ...], sites: tuple[str, ...]
) -> list[Target]:
    """The kept parcels that are to be attacked, each of which is what its ledger says left."""
    kept = {path.parent.name: releases(path) for path in sorted((folder / "sites").glob("*/kept"))}
    if not any(kept.values()):
        raise BadInput(
            f"{folder}: its sites kept no parcels to attack; run the study with a table [audit], for example "
            "--set audit.keep_parcels=1"
        )
    _check_names("--sites", sites, list(kept))
    _check_names("--kinds", kinds, list(ATTACKS))
    found = []
    for site, release in chosen({s: r for s, r in kept.items() if not sites or s in sites}, budget):
        check_digests(site, release, lines.get(site, []))
        numbers = [n for n, parcel in enumerate(release.parcels) if parcel.kind in (kinds or TELLING)]
        found += [Target(site, release, number) for number in numbers]
    return found


def chosen(kept: Mapping[str, list[Release]], budget: str) -> list[tuple[str, Release]]:
    """As many sites and releases of each operation as the budget has: sites in order, of releases the last first."""
    allowed = BUDGETS[budget]
    by_operation: dict[str, dict[str, list[Release]]] = {}
    for site, found in kept.items():
        for release in found:
            by_operation.setdefault(release.operation, {}).setdefault(site, []).append(release)
    picked = []
    for of_sites in by_operation.values():
        for site in list(of_sites)[: allowed.sites or None]:
            picked += [(site, release) for release in of_sites[site][: allowed.releases or None]]
    return picked


def check_digests(site: str, release: Release, lines: list[dict[str, Any]]) -> None:
    """WorkFailed unless the kept files are, byte for byte, what the site's ledger says left."""
    left = {(line["round"], line["operation"], line["kind"], line["digest"]) for line in lines}
    for file, parcel, digest in zip(release.files, release.parcels, release.digests, strict=True):
        if (release.round, release.operation, parcel.kind, digest) not in left:
            raise WorkFailed(
                f"site '{site}': {file} is not what its ledger says left; it was changed after it was kept"
            )


def _check_names(flag: str, given: tuple[str, ...], known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise BadInput(f"{flag}: no such choice: '{name}'{nearest(name, known)}; choose from {', '.join(known)}")


# --- attacking ----------------------------------------------------------------------------------------


def tools_for(assembly: Assembly, budget: str, features: str, device: str) -> Tools:
    where = device_of(device)
    distance: Distance = Pixels() if features == "pixels" else perceptual_distance(features, device=where)
    granted = (assembly.study.audit or Audit()).threat
    return Tools(assembly, granted, BUDGETS[budget], distance, assembly.study.seed, where)


def one(tools: Tools, target: Target, folder: Path) -> dict[str, Any]:
    """Attack one parcel; what audit.json says about it. Pictures show images, so they stay in the site's folder."""
    begin = time.perf_counter()
    release, parcel = target.release, target.parcel
    truth = Truth(target.site, release, open_site(tools.assembly.parts.folder, target.site), tools.seed)
    results = ATTACKS[parcel.kind](Seen(target.site, parcel, release, tools), truth)
    pictures = folder / "sites" / target.site / "audit"
    pictures.mkdir(parents=True, exist_ok=True)
    findings = []
    for found in (result for result in results if isinstance(result, Finding)):
        path = pictures / f"{release.name}-{parcel.kind}-{found.attack}.png"
        if found.draw:
            found.draw(path)
        findings.append(_plain(found, str(path.relative_to(folder)) if found.draw else None))
    return {
        "site": target.site,
        "round": release.round,
        "operation": release.operation,
        "kind": parcel.kind,
        "digest": parcel.digest,
        "findings": findings,
        "not_tried": [{"attack": r.attack, "why": r.why} for r in results if isinstance(r, NotTried)],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _plain(found: Finding, picture: str | None) -> dict[str, Any]:
    return {
        "attack": found.attack,
        "leak": found.verdict.leak,
        "words": str(found.verdict),
        "evidence": {name: _number(value) for name, value in found.verdict.evidence.items()},
        "threat_model": found.threat_model,
        "assumed": found.assumed,
        "picture": picture,
    }


def _number(value: Any) -> Any:
    """Plain JSON: figures of four digits, null for what is not a number."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


# --- writing ------------------------------------------------------------------------------------------


def head(study: Study, tools: Tools, budget: str, lines: Lines) -> dict[str, Any]:
    return {
        "method": study.method.name,
        "seed": study.seed,
        "threat_model": str(tools.threat),
        "granted": sorted(tools.threat.granted),
        "budget": budget,
        "features": tools.distance.name,
        "verdicts": verdicts([], lines),
        "parcels": [],
    }


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """`audit.json`, whole or not at all."""
    partial = folder / "audit.json.partial"
    partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "audit.json")
