"""Attacks on released parcels: one file an attack, and the solvers and networks that attacks are built from.

Attacks know parcels, networks and public knowledge; they know no method, no site and never the truth, which enters
the scoring alone.
"""

from importlib import import_module
from typing import Any

#: modules and the public names in each, which are imported when they are asked for
_PUBLIC = {
    "attack": ("AttackSettings", "Capability", "ThreatModel", "Verdict"),
    "coordinator": ("CraftedSum", "Fishing", "Imprint", "OverflowFilter", "TrapWeights"),
    "copies": ("CopySearch", "find_copies"),
    "decoders": ("PairedDecoder", "SurrogateDecoder"),
    "gradient_inversion.networks": ("LeNet", "with_random_weights"),
    "gradient_inversion.objective": ("LocalTraining",),
    "gradient_inversion.priors": ("GaussianPrior",),
    "gradient_inversion.settings": ("PRESETS", "GradientInversion"),
    "gradient_inversion.solver": ("Knowledge",),
    "latent_inversion": ("LatentInversion", "read_latents"),
    "membership": ("LossThreshold", "NearestSynthetic", "ShadowModels"),
    "projection": ("Projection",),
    "scoring": ("draw_curves", "draw_images", "identified", "score", "score_trajectory"),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
