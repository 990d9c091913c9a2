"""Audits: a run's kept parcels, each attacked with what fits its kind, scored where the images are, put into words.

This room knows studies, assemblies, parcels and attacks, and where a deployed site has its images; methods, sites and
engines know nothing of it. A further attack is one file and one line here, or a plug-in.
"""

from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_cases import CaseMembershipAttack
from polyclinic.audits.attack_generators import CopiesAttack, DecodingAttack, GeneratorAttack, NearCopiesAttack
from polyclinic.audits.attack_latents import LatentInversionAttack, LearnedDecoderAttack
from polyclinic.audits.attack_membership import (
    LossMembershipAttack,
    ReferenceGeneratorsAttack,
    ReferenceMembershipAttack,
)
from polyclinic.audits.attack_patches import PatchDecoderAttack
from polyclinic.audits.attack_site import SiteInferenceAttack
from polyclinic.audits.attack_sums import FeatureDecoderAttack, HistogramsAttack, SecondMomentsAttack
from polyclinic.audits.attack_updates import AnalyticInversionAttack, GradientInversionAttack
from polyclinic.registry import Registry
from polyclinic.study.tables import Audit

#: an audit runs all attacks that fit a parcel's kind, in this order
ATTACKS: Registry[type[Attack]] = Registry(
    "polyclinic.attacks",
    {
        "gradient-inversion": GradientInversionAttack, "analytic-inversion": AnalyticInversionAttack,
        "loss-threshold": LossMembershipAttack, "reference-models": ReferenceMembershipAttack,
        "site-inference": SiteInferenceAttack, "latent-inversion": LatentInversionAttack,
        "learned-decoder": LearnedDecoderAttack, "generator": GeneratorAttack, "decoding": DecodingAttack,
        "copies": CopiesAttack, "near-copies": NearCopiesAttack, "reference-generators": ReferenceGeneratorsAttack,
        "second-moments": SecondMomentsAttack, "feature-decoder": FeatureDecoderAttack,
        "score-histograms": HistogramsAttack, "case-membership": CaseMembershipAttack,
        "patch-decoder": PatchDecoderAttack,
    },
    base=Attack,
)  # fmt: skip

__all__ = ["ATTACKS", "Attack", "Audit"]
