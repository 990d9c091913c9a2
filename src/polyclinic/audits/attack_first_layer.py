"""Attack on gradients and weights by algebra: analytic inversion of a first linear layer."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from polyclinic.attacks.gradient_inversion.analytic import AnalyticInversion, exact_batch, first_layer
from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_updates import AttackPlan
from polyclinic.audits.planting import planted_update
from polyclinic.audits.recovery import recovery
from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth, not_granted

AGREES = 0.95  #: share of units and images at which a solved batch agrees with ReLU


class AnalyticInversionAttack(Attack):
    """Computes the image behind an update of a network that begins with a linear layer (Phong et al. 2018)."""

    kinds: ClassVar[tuple[str, ...]] = ("gradients", "weights")

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        """Nothing where the network begins with another layer: no image can be computed then."""
        settings, tools = AnalyticInversion(kind=seen.kind), seen.tools
        shape, update = tools.image_shape, _update(seen)
        if not settings.fits(seen.network, shape) or not len(truth.used) or not update:
            return []
        if refused := not_granted(settings, seen):
            return [refused]
        found = settings.run(update, seen.network, shape)
        batch = exact_images(update, seen.network)
        result = recovery(
            torch.cat([found.inputs, batch]).reshape(-1, *shape),
            truth.images(truth.used),
            truth.held_out(tools.effort.candidates)[0].float() / 255,
            in_order=False,
            augmentation=tools.assembly.study.optimizer.augment,
            distance=tools.distance,
            device=tools.device,
            own=truth.used < truth.own if seen.sites > 1 else None,
            where=f"{seen.where}, {settings.name}",
        )
        unexplained = f"{float(found.residual):.1%} of the first layer's gradient is not explained by one image"
        solved = [f"a batch of {len(batch)} images was solved for, and agrees with ReLU"] if len(batch) else []
        assumed = [unexplained, *solved]
        return [Finding(settings.name, str(settings), result.verdict(tools.level), assumed, result.draw)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        return planted_update(seen, truth, AttackPlan(seen).steps_to_plant)


def exact_images(update: dict[str, Tensor], network: nn.Module) -> Tensor:
    """A small batch behind the first layer's gradient, [B, in], where ReLU lets it be solved for; else none."""
    name, layer = first_layer(network)  # type: ignore[misc]
    prefix = f"{name}." if name else ""
    found = exact_batch(layer, update[f"{prefix}weight"][0], update[f"{prefix}bias"][0])
    return found.images if found is not None and found.agreement > AGREES else torch.zeros(0, layer.in_features)


def _update(seen: Seen) -> dict[str, Tensor]:
    """Gradients as they were sent; of weights their change. Each with a leading dimension for the one target."""
    if seen.kind == "gradients":
        return {name: tensor[None] for name, tensor in seen.parcel.tensors.items()}
    before = seen.received("weights")
    return {name: (before[name] - tensor)[None] for name, tensor in seen.parcel.tensors.items() if name in before}
