"""Attacks on released parcels: one file an attack, and the solvers and networks that attacks are built from.

Attacks know parcels, networks and public knowledge; they know no method, no site and never the truth, which enters
the scoring alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyclinic.attacks.attack import AttackSettings as AttackSettings
    from polyclinic.attacks.attack import Capability as Capability
    from polyclinic.attacks.attack import ThreatModel as ThreatModel
    from polyclinic.attacks.coordinator.crafted_sum import CraftedSum as CraftedSum
    from polyclinic.attacks.coordinator.fishing import Fishing as Fishing
    from polyclinic.attacks.coordinator.imprint import Imprint as Imprint
    from polyclinic.attacks.coordinator.overflow import OverflowFilter as OverflowFilter
    from polyclinic.attacks.coordinator.trap_weights import TrapWeights as TrapWeights
    from polyclinic.attacks.copies import CopySearch as CopySearch
    from polyclinic.attacks.copies import find_copies as find_copies
    from polyclinic.attacks.gradient_inversion.networks import LeNet as LeNet
    from polyclinic.attacks.gradient_inversion.networks import with_random_weights as with_random_weights
    from polyclinic.attacks.gradient_inversion.priors import DenoiserPrior as DenoiserPrior
    from polyclinic.attacks.gradient_inversion.priors import GaussianPrior as GaussianPrior
    from polyclinic.attacks.gradient_inversion.settings import PRESETS as PRESETS
    from polyclinic.attacks.gradient_inversion.settings import GradientInversion as GradientInversion
    from polyclinic.attacks.gradient_inversion.simulation import LocalTraining as LocalTraining
    from polyclinic.attacks.gradient_inversion.solver import Knowledge as Knowledge
    from polyclinic.attacks.latent_decoder import PairedDecoder as PairedDecoder
    from polyclinic.attacks.latent_decoder import SurrogateDecoder as SurrogateDecoder
    from polyclinic.attacks.latent_inversion import LatentInversion as LatentInversion
    from polyclinic.attacks.latent_inversion import read_latents as read_latents
    from polyclinic.attacks.membership.attacks import LossThreshold as LossThreshold
    from polyclinic.attacks.membership.attacks import NearestSynthetic as NearestSynthetic
    from polyclinic.attacks.membership.attacks import ShadowModels as ShadowModels
    from polyclinic.attacks.projection import Projection as Projection
    from polyclinic.attacks.scoring import identified as identified
    from polyclinic.attacks.scoring import score as score
    from polyclinic.attacks.scoring import score_trajectory as score_trajectory
    from polyclinic.attacks.trajectory_plots import draw_curves as draw_curves
    from polyclinic.attacks.trajectory_plots import draw_images as draw_images
    from polyclinic.attacks.verdict import Verdict as Verdict

#: public name -> the module that it lives in
_HOMES = {
    "AttackSettings": "attacks.attack",
    "Capability": "attacks.attack",
    "CopySearch": "attacks.copies",
    "CraftedSum": "attacks.coordinator.crafted_sum",
    "DenoiserPrior": "attacks.gradient_inversion.priors",
    "Fishing": "attacks.coordinator.fishing",
    "GaussianPrior": "attacks.gradient_inversion.priors",
    "GradientInversion": "attacks.gradient_inversion.settings",
    "Imprint": "attacks.coordinator.imprint",
    "Knowledge": "attacks.gradient_inversion.solver",
    "LatentInversion": "attacks.latent_inversion",
    "LeNet": "attacks.gradient_inversion.networks",
    "LocalTraining": "attacks.gradient_inversion.simulation",
    "LossThreshold": "attacks.membership.attacks",
    "NearestSynthetic": "attacks.membership.attacks",
    "OverflowFilter": "attacks.coordinator.overflow",
    "PRESETS": "attacks.gradient_inversion.settings",
    "PairedDecoder": "attacks.latent_decoder",
    "Projection": "attacks.projection",
    "ShadowModels": "attacks.membership.attacks",
    "SurrogateDecoder": "attacks.latent_decoder",
    "ThreatModel": "attacks.attack",
    "TrapWeights": "attacks.coordinator.trap_weights",
    "Verdict": "attacks.verdict",
    "draw_curves": "attacks.trajectory_plots",
    "draw_images": "attacks.trajectory_plots",
    "find_copies": "attacks.copies",
    "identified": "attacks.scoring",
    "read_latents": "attacks.latent_inversion",
    "score": "attacks.scoring",
    "score_trajectory": "attacks.scoring",
    "with_random_weights": "attacks.gradient_inversion.networks",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"polyclinic.{_HOMES[name]}"), name)
