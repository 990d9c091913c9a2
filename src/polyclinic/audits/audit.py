"""Audits a run: attacks the parcels that its sites kept, each with what fits its kind, and writes what was found."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from polyclinic.audits import attack_latents, attack_synthetic, attack_updates
from polyclinic.audits.open_run import Lines, open_run
from polyclinic.audits.targets import Target, targets
from polyclinic.audits.verdicts import verdicts
from polyclinic.audits.views import Finding, NotTried, Seen, Tools, Truth
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write
from polyclinic.metrics.perceptual import NAMES, Distance, Pixels, perceptual_distance
from polyclinic.runner.assembly import Assembly, device_of
from polyclinic.settings import nearest
from polyclinic.study import Study
from polyclinic.study.audit_settings import BUDGETS, Audit

#: (what is being attacked, attacks done, attacks in all)
Progress = Callable[[str, int, int], None]

#: what images may be compared by
FEATURES = (Pixels.name, *NAMES)

#: what is done with a parcel of each kind; a new kind of parcel is one new line
ATTACKS: dict[str, Callable[[Seen, Truth], list[Finding | NotTried]]] = {
    "gradients": attack_updates.attack,
    "weights": attack_updates.attack,
    "activations": attack_latents.attack,
    "latents": attack_latents.attack,
    "generator": attack_synthetic.of_generator,
    "codes": attack_synthetic.of_codes,
    "synthetic-images": attack_synthetic.of_synthetic_images,
}


def audit(
    folder: str | Path,
    *,
    budget: str = "quick",
    features: str = "pixels",
    kinds: Iterable[str] = (),
    sites: Iterable[str] = (),
    device: str = "auto",
    study: Path | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Audit a run folder; the content of `audit.json`, which is written anew after every parcel.

    At a deployed site, `folder` is `KIT/runs/NAME`; `study` names the run's study where the kit has it no more.
    """
    folder = Path(folder)
    assembly, lines = open_run(folder, study=study, cache=cache)
    wanted = targets(folder, assembly.study, lines, budget, tuple(kinds), tuple(sites))
    tools = tools_for(assembly, budget, features, device)
    report = head(assembly.study, tools, budget, lines)
    for done, target in enumerate(wanted):
        if progress:
            progress(target.name, done, len(wanted))
        report["parcels"].append(one(tools, target, folder))
        report["verdicts"] = verdicts(report["parcels"], lines)
        report["complete"] = done + 1 == len(wanted)
        write(folder, report)
    if progress:
        progress("done", len(wanted), len(wanted))
    return report


def tools_for(assembly: Assembly, budget: str, features: str, device: str) -> Tools:
    where = _there(device)
    if features not in FEATURES:
        hint = nearest(features, list(FEATURES))
        raise BadInput(f"--features: no such choice: '{features}'{hint}; choose from {', '.join(FEATURES)}")
    distance: Distance = Pixels() if features == Pixels.name else perceptual_distance(features, device=where)
    granted = (assembly.study.audit or Audit()).threat
    return Tools(assembly, granted, BUDGETS[budget], distance, assembly.study.seed, where)


def _there(device: str) -> str:
    try:
        return device_of(device)
    except BadInput:
        raise BadInput(
            f"--device: there is no '{device}' here; write auto or cpu, or cuda where there is a GPU"
        ) from None


def one(tools: Tools, target: Target, folder: Path) -> dict[str, Any]:
    """Attack one parcel; what audit.json says about it. Pictures show images, so they stay in the site's folder."""
    begin = time.perf_counter()
    release, parcel = target.release, target.parcel
    results = _attacked(parcel.kind, target.seen(tools), target.truth(tools))
    findings = []
    for found in (result for result in results if isinstance(result, Finding)):
        path = folder / "sites" / target.site / "audit" / f"{release.name}-{parcel.kind}-{found.attack}.png"
        shown = found.draw is not None and _drawn(found.draw, path)
        findings.append(_plain(found, str(path.relative_to(folder)) if shown else None))
    return {
        "site": target.who,
        "round": release.round,
        "operation": release.operation,
        "kind": parcel.kind,
        "digests": [part.parcels[target.number].digest for part in target.parts.values()],
        "findings": findings,
        "not_tried": [{"attack": r.attack, "why": r.why} for r in results if isinstance(r, NotTried)],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _attacked(kind: str, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
    """What was found; an audit goes on with other parcels where one is too much for the device."""
    try:
        return ATTACKS[kind](seen, truth)
    except torch.OutOfMemoryError:
        return [
            NotTried("every attack", f"memory of {seen.tools.device} is too small; use a smaller budget, or the CPU")
        ]


def _drawn(draw: Callable[[Any], None], path: Path) -> bool:
    """Whether there was something to draw."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        draw(path)
        return path.is_file()
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror}); make room or give access to it") from None


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


def head(study: Study, tools: Tools, budget: str, lines: Lines) -> dict[str, Any]:
    return {
        "method": study.method.name,
        "seed": study.seed,
        "threat_model": str(tools.threat),
        "granted": sorted(tools.threat.granted),
        "budget": budget,
        "features": tools.distance.name,
        "complete": False,
        "verdicts": verdicts([], lines),
        "parcels": [],
    }


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """`audit.json`, whole or not at all."""
    whole_or_not(folder / "audit.json", json.dumps(report, indent=2) + "\n")


def whole_or_not(path: Path, text: str) -> None:
    """A file that nobody ever sees half written."""
    try:
        atomic_write(path, text)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror}); make room or give access to it") from None
