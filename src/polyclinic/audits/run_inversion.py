"""Gradient inversion of one kept parcel, scored beside the site's images."""

from __future__ import annotations

from collections.abc import Iterable

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.settings import GradientInversion
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.audits.recovery import recovery
from polyclinic.audits.views import Finding, NotTried, Seen, Truth
from polyclinic.errors import BadInput


def invert_and_score(
    seen: Seen,
    truth: Truth,
    settings: GradientInversion,
    knowledge: Knowledge,
    assumed: list[str],
    *,
    has: Iterable[Capability] = (),
) -> Finding | NotTried:
    """Run the attack if the threat model grants what it needs; `has`: what the attacker has made itself."""
    tools = seen.tools
    missing = settings.needs - tools.threat.granted - set(has)
    if missing:
        return NotTried(settings.name, f"the threat model does not grant {', '.join(sorted(missing))}")
    try:
        back = settings.run([seen.parcel], knowledge, seed=tools.seed, device=tools.device)
    except (BadInput, ValueError) as error:  # ValueError: batch norm of a single value
        return NotTried(settings.name, str(error))
    result = recovery(
        back.images[0],
        truth.images(truth.used),
        truth.held_out(tools.effort.candidates)[0].float() / 255,
        in_order=False,
        augmentation=tools.assembly.study.optimizer.augment,
        distance=tools.distance,
        device=tools.device,
        own=truth.used < truth.own if seen.sites > 1 else None,
    )
    return Finding(settings.name, back.threat_model, result.verdict(), assumed, result.draw)
