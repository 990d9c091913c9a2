"""The audit of a run: attack the parcels that its sites kept, each with what fits its kind, and write `audit.json`."""

import contextlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyclinic.audits import ATTACKS, Attack
from polyclinic.audits.attack import EVERY_QUESTION, Finding, NotTried, Planted, Results, Seen, Tools
from polyclinic.audits.attack_generators import load_generator, model_of_codes
from polyclinic.audits.canaries import audit_epsilon
from polyclinic.audits.coordinator import rehearse
from polyclinic.audits.hidden import hidden_images
from polyclinic.audits.hidden_volumes import hidden_patches
from polyclinic.audits.open_run import LedgerLines, open_run
from polyclinic.audits.parcels import AuditedParcel, parcels_to_audit, released_models
from polyclinic.audits.patients import audit_patients
from polyclinic.audits.recompute import why_unexplained
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
    patients: bool = False,
    epsilon: bool = False,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Audit a run folder; the content of `audit.json`, which is written anew after every parcel.

    At a deployed site, `folder` is `KIT/runs/NAME`; `study` names the run's study where the kit has it no more.
    `plugins`: where the study's plug-ins are now, if they have moved. `trajectory`: steps of a gradient inversion at
    which images, loss and distance are kept and drawn, 0 being the start; the last step is always added.
    `coordinator`: also rehearse a coordinator that sends crafted weights, with and without the site's incoming check.
    `epsilon`: also bound epsilon from below, by canaries in the site's private training (`audits.canaries`).
    `patients`: also test every single patient, with reference runs (`audits.patients`).
    """
    folder = Path(folder)
    with only_site_plugins(folder):
        assembly, lines = open_run(folder, study=study, plugins=plugins, cache=cache)
        chosen = parcels_to_audit(folder, assembly.study, lines, budget, tuple(kinds), tuple(sites))
        wanted = [*chosen, *released_models(folder, assembly, chosen)]
        tools = replace(
            build_tools(assembly, budget, features, device, trajectory),
            level=FALSE_ALARMS / count_tests(wanted, volumes=assembly.study.data.volumes),
        )
        clock = Clock(tools.effort.minutes)
        report = _empty_report(assembly.study, tools, budget, lines)
        for done, audited in enumerate(wanted):
            if progress:
                progress(audited.name, done, len(wanted))
            report["parcels"].append(audit_parcel(tools, audited, folder, clock))
            report["verdicts"] = verdicts(report["parcels"], lines)
            report["complete"] = done + 1 == len(wanted) and not (coordinator or epsilon or patients)
            _write_report(folder, report)
        if coordinator:
            report["coordinator"] = rehearse(tools, wanted[0].site)
            _write_report(folder, report)
        if epsilon:
            report["epsilon"] = audit_epsilon(assembly, wanted[0].site)
            _write_report(folder, report)
        if patients:
            report["patients"] = audit_patients(tools, folder, sites, progress)
            report["verdicts"] = verdicts(report["parcels"], lines, report["patients"])
            _write_report(folder, report)
        if not report["complete"]:
            _write_report(folder, report | {"complete": True})
        if progress:
            progress("done", len(wanted), len(wanted))
        return report | {"complete": True}


def build_tools(assembly: Assembly, budget: str, features: str, device: str, trajectory: Sequence[int] = ()) -> Tools:
    try:
        where = device_of(device)
    except BadInput:
        raise BadInput(
            f"--device: there is no '{device}' here; write auto or cpu, or cuda where there is a GPU"
        ) from None
    if any(step < 0 for step in trajectory) or sorted(set(trajectory)) != list(trajectory):
        raise BadInput("--trajectory: give steps in ascending order, each once, from 0 on, such as 0,10,100")
    if features not in FEATURES:
        hint = did_you_mean(features, list(FEATURES))
        raise BadInput(f"--features: no such choice: '{features}'{hint}; choose from {', '.join(FEATURES)}")
    distance: Distance = Pixels() if features == Pixels.name else perceptual_distance(features, device=where)
    granted = (assembly.study.audit or Audit()).threat
    return Tools(assembly, granted, EFFORTS[budget], distance, assembly.study.seed, where, tuple(trajectory))


def count_tests(wanted: Sequence[AuditedParcel], *, volumes: bool = False) -> int:
    """Tests of parcels that the audit is about to make: among so many, one may alarm by chance."""
    fitting = (attack for audited in wanted for attack in fitting_attacks(audited).values())
    return max(1, sum(attack.tests for attack in fitting if attack.volumes == volumes))


def fitting_attacks(audited: AuditedParcel) -> dict[str, type[Attack]]:
    """All attacks on a parcel of this kind, or those that make sense; those of plug-ins come last."""
    kind, only = audited.parcel.kind, audited.attacks
    working = ATTACKS.working().items()
    return {name: attack for name, attack in working if kind in attack.kinds and (not only or name in only)}


def left_open(fitting: Mapping[str, type[Attack]]) -> list[NotTried]:
    """The gaps that attacks on images leave in an audit of volumes; of a question that others ask there, none."""
    asked = {question for attack in fitting.values() if attack.volumes for question in attack.questions}
    why = "it attacks images of one shape, and has no form for volumes yet"
    return [
        NotTried(name, why, question)
        for name, attack in fitting.items()
        for question in attack.questions
        if not attack.volumes and question not in asked
    ]


def audit_parcel(tools: Tools, audited: AuditedParcel, folder: Path, clock: "Clock | None" = None) -> dict[str, Any]:
    """Attack one parcel; what audit.json says about it. Pictures show images, so they stay in the site's folder."""
    begin = time.perf_counter()
    release = audited.release
    as_sent, truth, clock = audited.seen(tools), audited.truth(tools), clock or Clock()
    results, doubt = look_inside(audited, as_sent, truth, clock)
    seen, gaps = without_unread(as_sent)
    fitting, volumes = fitting_attacks(audited), tools.assembly.study.data.volumes
    fits = {name: kind for name, kind in fitting.items() if kind.volumes == volumes}
    results += [found for name, kind in fits.items() for found in run_attack(name, kind, seen, truth, clock, doubt)]
    results += left_open(fitting) if volumes else []
    if not fitting:
        results += [NotTried("every attack", "none is for this kind of parcel; a plug-in can add one")]
    results += gaps
    stem = folder / "sites" / audited.site / "audit" / f"{release.name}-{audited.parcel.kind}"
    return {
        "site": audited.who, "sites": audited.sites, "round": release.round, "operation": release.operation,
        "kind": audited.kind_that_left, "digests": audited.digests,
        **({} if audited.is_released_model else {"recomputed": not doubt}),
        "findings": [_finding_json(one, stem, folder) for one in results if isinstance(one, CheckedFinding)],
        "not_tried": [asdict(result) for result in results if isinstance(result, NotTried)],
        "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def look_inside(audited: AuditedParcel, seen: Seen, truth: Truth, clock: "Clock") -> tuple[list[Any], str]:
    """Images that lie in a parcel's numbers, and the gap that it leaves in every question where it is not, bit for bit,
    what its operation gives for the images that were used; and that in words."""
    found: list[Finding] = []
    try:
        with clock.limit():
            why, again = ("", {}) if audited.is_released_model else why_unexplained(seen.tools, audited)
    except OutOfTime as error:
        why, again = f"carrying its operation out again was cut off: {error}", {}
    with contextlib.suppress(OutOfTime), clock.limit():
        if seen.tools.assembly.study.data.volumes:
            found = [] if audited.is_released_model else hidden_patches(seen, truth)
        elif not audited.is_released_model:
            found = hidden_images(seen, truth, why, again)
    gaps = [NotTried("recomputation", why, EVERY_QUESTION)] if why else []
    return [*(CheckedFinding(one, (), 0.0) for one in found), *gaps], why


class OutOfTime(BaseException):
    """Raised in work that takes more than its share of a budget; no attack may catch it as a failure of its own."""


class Clock:
    """The time that a budget has; 0 minutes: as long as it takes."""

    def __init__(self, minutes: float = 0) -> None:
        self.minutes, self._begun = minutes, time.monotonic()

    @property
    def left(self) -> float:
        return 60 * self.minutes - (time.monotonic() - self._begun)

    @contextlib.contextmanager
    def limit(self) -> Iterator[None]:
        """A while that is cut off at a quarter of the time that is left, so that what comes after it is tried as well.
        Only begun in time where no alarm can be set (another thread, another system)."""
        share = self.left / 4
        if self.minutes and share <= 0:
            raise OutOfTime(f"the budget's {self.minutes:g} minutes were used up; use a larger budget")
        can_cut = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
        if not self.minutes or not can_cut:
            yield
            return

        def cut(*_: object) -> None:
            raise OutOfTime(f"it took {share:.0f} seconds, a quarter of what the budget had left; use a larger budget")

        before = signal.signal(signal.SIGALRM, cut)
        signal.setitimer(signal.ITIMER_REAL, share)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def run_attack(
    name: str, attack: type[Attack], seen: Seen, truth: Truth, clock: Clock, doubt: str = ""
) -> list[CheckedFinding | NotTried]:
    """One attack with its power check, in its share of the budget's time. `doubt`: why nothing found says nothing."""
    guarded = Guarded(name, attack)
    try:
        with clock.limit():
            return [*run_with_power(guarded, seen, truth, doubt), *guarded.gaps]
    except OutOfTime as error:
        return [NotTried(name, str(error), question) for question in attack.questions]


class Guarded(Attack):
    """An attack whose failure is a gap in what is known, while the audit goes on with the others. Where one of
    Polyclinic's own fails, but for want of memory, that is a mistake in it, and is raised."""

    kinds: ClassVar[tuple[str, ...]] = ()

    def __init__(self, name: str, attack: type[Attack]) -> None:
        self.name, self.kind = name, attack
        self.gaps: list[NotTried] = []

    def attack(self, seen: Seen, truth: Truth) -> Results:
        return self._tried(lambda: self.kind().attack(seen, truth), Finding | NotTried, seen)

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        return self._tried(lambda: self.kind().planted(seen, truth), Planted, seen)

    def _tried(self, work: Callable[[], Any], kind: Any, seen: Seen) -> list[Any]:
        try:
            found = work()
        except torch.OutOfMemoryError:
            why = f"memory of {seen.tools.device} is too small; use a smaller budget, or the CPU"
        except (BadInput, WorkFailed):
            raise
        except Exception as error:
            if self.name in ATTACKS.builtin:
                raise
            why = f"the attack ({ATTACKS.origin(self.name)}) failed: {reason(error)}"
        else:
            if isinstance(found, list) and all(isinstance(one, kind) for one in found):
                return found
            wanted = "Planted" if kind is Planted else "Finding"
            why = f"the attack ({ATTACKS.origin(self.name)}) gave {found!r:.50}, and must give a list of {wanted}"
        self.gaps.append(NotTried(self.name, why, EVERY_QUESTION))
        return []


def draw_plot(draw: Callable[[Any], None], path: Path) -> bool:
    """Whether there was something to draw."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with picture_if_possible():
            draw(path)
        return path.is_file()
    except OSError as error:
        raise BadInput(f"{path}: cannot be written ({error.strerror}); make room or give access to it") from None


def _finding_json(tested: CheckedFinding, stem: Path, folder: Path) -> dict[str, Any]:
    """What audit.json says of a finding, whose pictures are drawn under `stem`."""
    found, power = tested.finding, [vars(one) for one in tested.power]
    written = {
        "attack": found.attack, "question": found.question, "verdict": tested.word, "words": str(found.verdict),
        "evidence": _figures(found.verdict.evidence),
        "power": [{**one, "evidence": _figures(one["evidence"]), "seconds": round(one["seconds"], 1)} for one in power],
        "doubt": found.doubt, "seconds": round(tested.seconds, 1), "threat_model": found.threat_model,
        "assumed": found.assumed,
        "picture": _picture(found.draw, stem.with_name(f"{stem.name}-{found.attack}.png"), folder),
    }  # fmt: skip
    if search := found.search:
        steps = stem.with_name(f"{stem.name}-{found.attack}-steps.png")
        curves = {"steps": list(search.steps), **_figures({"loss": search.loss, "distance": search.distance})}
        written["trajectory"] = {**curves, "picture": _picture(search.draw, steps, folder)}
    return written


def _picture(draw: Callable[[Path], None] | None, path: Path, folder: Path) -> str | None:
    """Where the picture is in the run folder, if there was something to draw."""
    return str(path.relative_to(folder)) if draw is not None and draw_plot(draw, path) else None


def _figures(evidence: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _json_number(value) for name, value in evidence.items()}


def _json_number(value: Any) -> Any:
    """Plain JSON: figures of four digits, null for what is not a number."""
    if isinstance(value, list):
        return [_json_number(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def _empty_report(study: Study, tools: Tools, budget: str, lines: LedgerLines) -> dict[str, Any]:
    return {
        "method": study.method.name, "seed": study.seed, "threat_model": str(tools.threat),
        "threat_model_in_brief": tools.threat.brief(), "threat_table": tools.threat.table(),
        "granted": sorted(tools.threat.granted), "budget": budget, "level": tools.level,
        "features": tools.distance.name, "complete": False, "verdicts": verdicts([], lines), "parcels": [],
    }  # fmt: skip


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
