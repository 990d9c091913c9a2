"""The audit of a run: attack the parcels that its sites kept, each with what fits its kind, and write `audit.json`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyclinic.audits import ATTACKS, Attack
from polyclinic.audits.attack import EVERY_QUESTION, Finding, NotTried, SearchSteps, Seen, Tools
from polyclinic.audits.attack_generators import load_generator, model_of_codes
from polyclinic.audits.coordinator import rehearse
from polyclinic.audits.open_run import LedgerLines, open_run
from polyclinic.audits.parcels import AuditedParcel, parcels_to_audit, released_models
from polyclinic.audits.sum_layouts import names_of_sums
from polyclinic.audits.truth import Truth
from polyclinic.audits.verdicts import FALSE_ALARMS, CheckedFinding, run_with_power, verdicts
from polyclinic.data.own_images import only_site_plugins
from polyclinic.errors import BadInput, WorkFailed, did_you_mean
from polyclinic.extras import picture_if_possible
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.files import atomic_write
from polyclinic.metrics.perceptual import NAMES, Distance, Pixels, perceptual_distance
from polyclinic.registry import reason
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.machine import device_of
from polyclinic.study import Study
from polyclinic.study.tables import EFFORTS, Audit

#: (what is being attacked, attacks done, attacks in all)
Progress = Callable[[str, int, int], None]
#: what images may be compared by
FEATURES = (Pixels.name, *NAMES)


def audit(
    folder: str | Path,
    *,
    budget: str = "quick",
    features: str = "pixels",
    kinds: Iterable[str] = (),
    sites: Iterable[str] = (),
    device: str = "auto",
    study: Path | None = None,
    plugins: Sequence[str] = (),
    trajectory: Sequence[int] = (),
    coordinator: bool = False,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Audit a run folder; the content of `audit.json`, which is written anew after every parcel.

    At a deployed site, `folder` is `KIT/runs/NAME`; `study` names the run's study where the kit has it no more.
    `plugins`: where the study's plug-ins are now, if they have moved. `trajectory`: steps of a gradient inversion at
    which images, loss and distance are kept and drawn, 0 being the start; the last step is always added.
    `coordinator`: also rehearse a coordinator that sends crafted weights, with and without the site's incoming check.
    """
    folder = Path(folder)
    with only_site_plugins(folder):
        assembly, lines = open_run(folder, study=study, plugins=plugins, cache=cache)
        chosen = parcels_to_audit(folder, assembly.study, lines, budget, tuple(kinds), tuple(sites))
        wanted = [*chosen, *released_models(folder, assembly, chosen)]
        tools = replace(
            build_tools(assembly, budget, features, device, trajectory), level=FALSE_ALARMS / count_tests(wanted)
        )
        clock = Clock(tools.effort.minutes)
        report = _empty_report(assembly.study, tools, budget, lines)
        for done, audited in enumerate(wanted):
            if progress:
                progress(audited.name, done, len(wanted))
            report["parcels"].append(audit_parcel(tools, audited, folder, clock))
            report["verdicts"] = verdicts(report["parcels"], lines)
            report["complete"] = done + 1 == len(wanted)
            _write_report(folder, report)
        if coordinator:
            report["coordinator"] = rehearse(tools, wanted[0].site)
            _write_report(folder, report)
        if progress:
            progress("done", len(wanted), len(wanted))
        return report


def build_tools(assembly: Assembly, budget: str, features: str, device: str, trajectory: Sequence[int] = ()) -> Tools:
    where = _find_device(device)
    if any(step < 0 for step in trajectory) or sorted(set(trajectory)) != list(trajectory):
        raise BadInput("--trajectory: give steps in ascending order, each once, from 0 on, such as 0,10,100")
    if features not in FEATURES:
        hint = did_you_mean(features, list(FEATURES))
        raise BadInput(f"--features: no such choice: '{features}'{hint}; choose from {', '.join(FEATURES)}")
    distance: Distance = Pixels() if features == Pixels.name else perceptual_distance(features, device=where)
    granted = (assembly.study.audit or Audit()).threat
    return Tools(assembly, granted, EFFORTS[budget], distance, assembly.study.seed, where, tuple(trajectory))


def _find_device(device: str) -> str:
    try:
        return device_of(device)
    except BadInput:
        raise BadInput(
            f"--device: there is no '{device}' here; write auto or cpu, or cuda where there is a GPU"
        ) from None


class Clock:
    """The time that a budget has; 0 minutes: as long as it takes."""

    def __init__(self, minutes: float = 0) -> None:
        self.minutes, self._begun = minutes, time.monotonic()

    @property
    def is_over(self) -> bool:
        return bool(self.minutes) and time.monotonic() - self._begun > 60 * self.minutes


def count_tests(wanted: Sequence[AuditedParcel]) -> int:
    """Tests of parcels that the audit is about to make: among so many, one may alarm by chance."""
    return max(1, sum(attack.tests for audited in wanted for attack in fitting_attacks(audited).values()))


def fitting_attacks(audited: AuditedParcel) -> dict[str, type[Attack]]:
    """All attacks on a parcel of this kind, or those that make sense; those of plug-ins come last."""
    kind, only = audited.parcel.kind, audited.attacks
    working = ATTACKS.working().items()
    return {name: attack for name, attack in working if kind in attack.kinds and (not only or name in only)}


def audit_parcel(tools: Tools, audited: AuditedParcel, folder: Path, clock: Clock | None = None) -> dict[str, Any]:
    """Attack one parcel; what audit.json says about it. Pictures show images, so they stay in the site's folder."""
    begin = time.perf_counter()
    release, parcel = audited.release, audited.parcel
    seen, gaps = without_unread(audited.seen(tools))
    results = [*_attack(fitting_attacks(audited), seen, audited.truth(tools), clock or Clock()), *gaps]
    findings = []
    for tested in (result for result in results if isinstance(result, CheckedFinding)):
        found = tested.finding
        path = folder / "sites" / audited.site / "audit" / f"{release.name}-{parcel.kind}-{found.attack}.png"
        shown = found.draw is not None and _draw_plot(found.draw, path)
        written = _finding_json(tested, str(path.relative_to(folder)) if shown else None)
        if found.search is not None:
            path = path.with_name(f"{path.stem}-steps.png")
            shown = found.search.draw is not None and _draw_plot(found.search.draw, path)
            written["trajectory"] = _search_json(found.search, str(path.relative_to(folder)) if shown else None)
        findings.append(written)
    return {
        "site": audited.who,
        "sites": audited.sites,
        "round": release.round,
        "operation": release.operation,
        "kind": audited.kind_that_left,
        "digests": audited.digests,
        "findings": findings,
        "not_tried": [asdict(result) for result in results if isinstance(result, NotTried)],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def _attack(
    fitting: Mapping[str, type[Attack]], seen: Seen, truth: Truth, clock: Clock
) -> list[CheckedFinding | NotTried]:
    """What all these attacks found, with their power checks."""
    if not fitting:
        return [NotTried("every attack", "none is for this kind of parcel; a plug-in can add one")]
    return [found for name, attack in fitting.items() for found in _in_time(name, attack(), seen, truth, clock)]


def _in_time(name: str, attack: Attack, seen: Seen, truth: Truth, clock: Clock) -> list[CheckedFinding | NotTried]:
    """One attack with its power check, while the budget has time."""
    if clock.is_over:
        return [
            NotTried(name, f"the budget's {clock.minutes:g} minutes were used up; use a larger budget", EVERY_QUESTION)
        ]
    return run_with_power(attack, seen, truth, partial(_run_attack, name, attack))


def _run_attack(name: str, attack: Attack, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
    """What one attack found; an audit goes on with the others where one is too much for the device."""
    try:
        return _checked(name, attack.attack(seen, truth))
    except torch.OutOfMemoryError:
        return [
            NotTried(
                name, f"memory of {seen.tools.device} is too small; use a smaller budget, or the CPU", EVERY_QUESTION
            )
        ]
    except (BadInput, WorkFailed):
        raise
    except Exception as error:
        if name in ATTACKS.builtin:
            raise
        raise WorkFailed(f"the attack '{name}' ({ATTACKS.origin(name)}) failed: {reason(error)}") from error


def _checked(name: str, found: Any) -> list[Finding | NotTried]:
    """What an attack gave; WorkFailed if it is no list of findings."""
    if not isinstance(found, list) or not all(isinstance(one, Finding | NotTried) for one in found):
        raise WorkFailed(
            f"the attack '{name}' ({ATTACKS.origin(name)}) gave {found!r:.50}, and must give a list of Finding"
        )
    return found


def _draw_plot(draw: Callable[[Any], None], path: Path) -> bool:
    """Whether there was something to draw."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with picture_if_possible():
            draw(path)
        return path.is_file()
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror}); make room or give access to it") from None


def _finding_json(tested: CheckedFinding, picture: str | None) -> dict[str, Any]:
    found = tested.finding
    return {
        "attack": found.attack,
        "question": found.question,
        "verdict": tested.word,
        "words": str(found.verdict),
        "evidence": _figures(found.verdict.evidence),
        "power": [
            {**vars(one), "evidence": _figures(one.evidence), "seconds": round(one.seconds, 1)} for one in tested.power
        ],
        "doubt": found.doubt,
        "seconds": round(tested.seconds, 1),
        "threat_model": found.threat_model,
        "assumed": found.assumed,
        "picture": picture,
    }


def _figures(evidence: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _json_number(value) for name, value in evidence.items()}


def _search_json(search: SearchSteps, picture: str | None) -> dict[str, Any]:
    loss, distance = ([_json_number(value) for value in values] for values in (search.loss, search.distance))
    return {"steps": list(search.steps), "loss": loss, "distance": distance, "picture": picture}


def _json_number(value: Any) -> Any:
    """Plain JSON: figures of four digits, null for what is not a number."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def _empty_report(study: Study, tools: Tools, budget: str, lines: LedgerLines) -> dict[str, Any]:
    return {
        "method": study.method.name,
        "seed": study.seed,
        "threat_model": str(tools.threat),
        "threat_model_in_brief": tools.threat.brief(),
        "threat_table": tools.threat.table(),
        "granted": sorted(tools.threat.granted),
        "budget": budget,
        "level": tools.level,
        "features": tools.distance.name,
        "complete": False,
        "verdicts": verdicts([], lines),
        "parcels": [],
    }


def _write_report(folder: Path, report: Mapping[str, Any]) -> None:
    write_file(folder / "audit.json", json.dumps(report, indent=2) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write atomically; BadInput where the file cannot be written."""
    try:
        atomic_write(path, text)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror}); make room or give access to it") from None


METRICS = frozenset({"histograms", "confusion"})
FEW = 8  #: numbers that a tensor of metrics may have without being looked at: a mean, a count
FEW_IN_ALL = 64  #: numbers of all such tensors together: images can be cut into small pieces
#: what attacks read of parcels whose tensors have fixed names
READ = {
    "synthetic-images": frozenset({"images", "labels", "masks"}),
    "activations": frozenset({"activations"}),
    "latents": frozenset({"latents", "low", "step", "flipped_latents", "flipped_low", "flipped_step"}),
}


def unread_names(seen: Seen) -> list[str]:
    """Names of tensors in a parcel that are neither of the study's network or generator nor of sums that are known
    here."""
    sent = seen.parcel.tensors
    if seen.kind in ("weights", "gradients"):
        known = set(seen.network.state_dict())
    elif seen.kind == "statistics":
        known = names_of_sums(seen.parcel) or set(sent)  # sums that are not known at all have a gap of their own
    elif seen.kind == "metrics":
        known = {*METRICS, *_small(sent)}
    elif seen.kind == "generator":
        model = load_generator(seen, {})
        known = set(sent) if isinstance(model, NotTried) else set(model.state())
    elif seen.kind == "codes":
        coded = model_of_codes(seen)
        known = set(sent) if isinstance(coded, NotTried) else {f"{seen.site}/{one}" for one in coded.codebook_sizes}
    else:
        known = set(READ.get(seen.kind, sent))
    return sorted(set(sent) - known)


def _small(sent: Mapping[str, Tensor]) -> set[str]:
    small = {name: tensor.numel() for name, tensor in sent.items() if name not in METRICS and tensor.numel() <= FEW}
    return set(small) if sum(small.values()) <= FEW_IN_ALL else set()


def without_unread(seen: Seen) -> tuple[Seen, list[NotTried]]:
    """What attacks can read of a parcel, and the gap that the rest leaves in every question."""
    names = unread_names(seen)
    if not names:
        return seen, []
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    rest = {name: tensor for name, tensor in seen.parcel.tensors.items() if name not in names}
    parcel = Parcel(seen.kind, rest, seen.parcel.metadata)
    together = tuple(parcel if one is seen.parcel else one for one in seen.together)
    gap = NotTried("every attack", f"the parcel holds {shown}, which no attack reads", EVERY_QUESTION)
    return replace(seen, parcel=parcel, together=together), [gap]
