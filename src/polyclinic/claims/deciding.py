"""Experiments that look for the reason why a claim did not hold: our code, the data, the scale, or the paper?

Each changes one thing of the claim that it is about (`decides`) and has a rule of its own, written before its run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polyclinic.claims import feder, felicia, gradient_inversion, qu
from polyclinic.claims.claim import Claim, Measure, Minutes, Scale
from polyclinic.claims.gradient_inversion import attack, gaussian
from polyclinic.claims.measures import of_runs, test
from polyclinic.claims.rules import AtMost, Lower, Rule, higher

KNOWN = {claim.name: claim for module in (qu, feder, felicia, gradient_inversion) for claim in module.CLAIMS}
OWN = feder.OWN
RARE_HORSES = "accuracy of horse, augmented"


def _why(
    name: str,
    about: str,
    question: str,
    rule: Rule,
    arms: Mapping[str, tuple[str, ...]],
    *,
    common: tuple[str, ...] = (),
    quick: tuple[str, ...] = (),
    full: tuple[str, ...] = (),
    arms_at: Mapping[Scale, Mapping[str, tuple[str, ...]]] | None = None,
    minutes: float = 8,
    gpu_minutes: float | None = None,
) -> Claim:
    """An experiment on the studies of the claim `about`, with other arms and changes of all of them.

    Minutes on a GPU are those of the whole claim where nothing nearer is known.
    """
    base = KNOWN[about]
    return replace(
        base,
        name=f"why-{name}",
        place=f"{base.place}: why?",
        sentence=question,
        numbers=(),
        arms=arms,
        rule=rule,
        common=(*base.common, *common),
        scales={"quick": (*base.scales["quick"], *quick), "full": (*base.scales["full"], *full)},
        arms_at=arms_at or {},
        minutes={"quick": Minutes(minutes, 3), "full": Minutes(None, gpu_minutes or base.minutes["full"].gpu)},
        axis="",
        post_hoc=False,
        decides=about,
        finding="",
        picture="",
    )


def _methods(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (f"method.name={name}",) for name in names}


RETINA = (
    _why(
        "retina-more-skew",
        "qu-figure5-retina-high",
        "Is it the skew? With two sites that hardly share a label (KS 0.95), FedAvg falls 0.05 below pooled training.",
        higher("centralized", "fedavg", "accuracy", 0.05),
        _methods("centralized", "fedavg"),
        common=("sites.target_ks=0.95", "sites.count=2"),
        gpu_minutes=5,
    ),
    _why(
        "retina-longer-turns",
        "qu-figure5-retina-high",
        "Is it the length of a turn? Averaged after every fifth pass, FedAvg falls below pooled training by 0.05.",
        higher("centralized", "fedavg", "accuracy", 0.05),
        {
            "centralized": ("method.name=centralized",),
            "fedavg": ("method.name=fedavg", "method.local_epochs=5", "evaluation.every=1"),
        },
        arms_at={"quick": {"fedavg": ("method.rounds=2",)}, "full": {"fedavg": ("method.rounds=4",)}},
        gpu_minutes=5,
    ),
    _why(
        "retina-sgd",
        "qu-figure5-retina-high",
        "Is it the optimiser? With the paper's SGD, FedAvg falls below pooled training by 0.05.",
        higher("centralized", "fedavg", "accuracy", 0.05),
        _methods("centralized", "fedavg"),
        common=("optimizer.name=sgd", "optimizer.lr=0.01"),
        quick=("optimizer.lr=0.01",),
        gpu_minutes=5,
    ),
)

SHARING = (
    _why(
        "sharing-more",
        "qu-figure5-bone-age-high",
        "Is it the share? With 20 % instead of 5 %, FedAvg+Share has at most 0.7 of FedAvg's error.",
        Lower("fedavg-share", "fedavg", "mae", factor=0.7),
        {"fedavg": ("method.name=fedavg",), "fedavg-share": ("method.name=fedavg-share", "method.share=0.2")},
        gpu_minutes=9,
    ),
    _why(
        "sharing-longer",
        "qu-figure5-bone-age-high",
        "Is it the length? With three times the rounds, sharing 5 % leaves at most 0.7 of FedAvg's error.",
        Lower("fedavg-share", "fedavg", "mae", factor=0.7),
        _methods("fedavg", "fedavg-share"),
        quick=("method.rounds=30", "evaluation.every=15"),
        full=("method.rounds=60",),
        minutes=12,
        gpu_minutes=27,
    ),
    _why(
        "sharing-less-skew",
        "qu-figure5-bone-age-high",
        "Is it the skew? At KS 0.63, sharing 5 % leaves at most 0.9 of FedAvg's error.",
        Lower("fedavg-share", "fedavg", "mae", factor=0.9),
        _methods("fedavg", "fedavg-share"),
        common=("sites.target_ks=0.63",),
        gpu_minutes=9,
    ),
)

SKIN = (
    _why(
        "skin-skewed-labels",
        "feder-table4-methods",
        "Is it the data? With labels skewed on purpose (KS 0.4) over four sites, FedER is better than FedAvg.",
        higher("feder", "fedavg", "accuracy, all models"),
        _methods("fedavg", "feder"),
        common=("sites.partition=label-skew", "sites.count=4", "sites.target_ks=0.4", 'data.site=""'),
    ),
    _why(
        "skin-longer-generator",
        "feder-table4-methods",
        "Is it the generator? Three times as many steps raise FedER's accuracy.",
        higher("longer", "feder", OWN),
        {"feder": ("method.name=feder",), "longer": ("method.name=feder",)},
        arms_at={  # without the search of the length, which would choose the steps
            "quick": {"longer": ("generator.steps=450",)},
            "full": {"feder": ("generator.steps=10000",), "longer": ("generator.steps=30000",)},
        },
        full=("tuning.on=false",),
        minutes=15,
    ),
    _why(
        "skin-mix",
        "feder-table4-methods",
        "Is it the mix? With three quarters real images in a batch instead of half, FedER is better.",
        higher("mostly real", "half", OWN),
        {
            "half": ("method.name=feder",),
            "mostly real": ("method.name=feder", "method.real_share=0.75"),
        },
    ),
)

VARIANTS = (
    _why(
        "variants-longer-generator",
        "feder-table6-variants",
        "Is it the generator? With three times as many steps, FedER-A is better than FedAvg.",
        higher("feder-a", "fedavg", OWN),
        _methods("fedavg", "feder-a"),
        quick=("generator.steps=450",),
        full=("tuning.on=false", "generator.steps=30000"),
        minutes=6,
    ),
    _why(
        "variants-rounds",
        "feder-table6-variants",
        "Is it the length? With three times the rounds, FedER-A is better than FedAvg.",
        higher("feder-a", "fedavg", OWN),
        _methods("fedavg", "feder-a"),
        quick=("method.rounds=24", "evaluation.every=3"),
        full=("method.rounds=300",),
        minutes=6,
    ),
    _why(
        "variants-mix",
        "feder-table6-variants",
        "Is it the mix? With three quarters real images in a batch instead of half, FedER-A is better than FedAvg.",
        higher("feder-a", "fedavg", OWN),
        {"fedavg": ("method.name=fedavg",), "feder-a": ("method.name=feder-a", "method.real_share=0.75")},
        minutes=6,
    ),
)

ANIMALS = (
    _why(
        "animals-augmented",
        "felicia-figure6-animals",
        "Does the discriminator learn its images by heart? With augmentation, FELICIA helps the rare horses.",
        higher("FELICIA", "local GAN", RARE_HORSES),
        felicia.LAMBDAS,
        common=("generator.augment=true",),
        minutes=12,
    ),
    _why(
        "animals-more-horses",
        "felicia-figure6-animals",
        "Are the horses too rare? With 10 % instead of 2 %, FELICIA helps them.",
        higher("FELICIA", "local GAN", RARE_HORSES),
        felicia.LAMBDAS,
        common=("sites.share=0.1",),
        minutes=12,
    ),
    _why(
        "animals-weight",
        "felicia-figure6-animals",
        "Is it lambda? With 1 instead of 3, FELICIA helps the rare horses.",
        higher("FELICIA", "local GAN", RARE_HORSES),
        {"local GAN": ("method.weight=0",), "FELICIA": ("method.weight=1",)},
        minutes=12,
    ),
)

GRADIENTS = (
    _why(
        "adaptive-rate",
        "gradients-table3-adaptive",
        "Is it the learning rate? With 1 instead of 0.1, the adaptive Gaussian fails less often than Euclid.",
        Lower("AG", "Eucl", "failed"),
        {"Eucl": attack("euclidean", "TG", 1.0), "AG": attack("adaptive-gaussian", "TG", 1.0)},
        gpu_minutes=6,
    ),
    _why(
        "adaptive-kernel",
        "gradients-table3-adaptive",
        "Is it the kernel? With one exponential over all layers, the adaptive Gaussian fails less often.",
        Lower("whole gradient", "per layer", "failed"),
        {
            "per layer": attack("adaptive-gaussian", "TG"),
            "whole gradient": attack("adaptive-gaussian", "TG", kernel="whole-gradient"),
        },
        gpu_minutes=6,
    ),
    _why(
        "adaptive-factor",
        "gradients-table3-adaptive",
        "Is it the version of their code? With 2 n Var instead of n Var, the adaptive Gaussian fails less often.",
        Lower("2 n Var", "n Var", "failed"),
        {
            "n Var": attack("adaptive-gaussian", "TG"),
            "2 n Var": attack("adaptive-gaussian", "TG", variance_factor=2),
        },
        gpu_minutes=6,
    ),
    _why(
        "lambda-kernel",
        "gradients-table1-lambda",
        "Is it the kernel? With one exponential for each layer, lambda² = 50 gives worse images than 200.",
        higher("200", "50", "ssim"),
        {str(value): gaussian(value, "TG", kernel="per-layer") for value in (50, 200)},
        gpu_minutes=4,
    ),
    _why(
        "lambda-smaller",
        "gradients-table1-lambda",
        "Is it the size of the gradients? A lambda² of 5 gives worse images than 200.",
        higher("200", "5", "ssim"),
        {str(value): gaussian(value, "TG") for value in (5, 200)},
        gpu_minutes=4,
    ),
    _why(
        "lambda-scaled",
        "gradients-table1-lambda",
        "Is it the scale? Multiplied by lambda², the distance of 50 gives worse images than that of 200.",
        higher("200", "50", "ssim"),
        {
            str(value): attack("gaussian", "TG", variance=value, kernel="whole-gradient", scaled="true")
            for value in (50, 200)
        },
        gpu_minutes=4,
    ),
)

RESNET = (
    replace(
        _why(
            "resnet-longer",
            "gradients-figure3-resnet",
            "Is it the length? With ten times the steps, no image fails from the transformed Gaussian.",
            AtMost("TG", "failed", 0.0, exact=True),
            {"TG": KNOWN["gradients-figure3-resnet"].arms["TG"]},
            quick=(f"{gradient_inversion.ATTACK}.iterations=4000",),
        ),
        minutes={"quick": Minutes(None, 3), "full": Minutes(None, 150)},  # two cores would take 38 minutes at `quick`
    ),
)

PRIVATE = "cwt-replay, private"
PRIVACY = (
    _why(
        "privacy-noise",
        "qu-table2-privacy",
        "Is it the noise? With 0.1 in place of 0.7, which promises little, private replay beats sharing 5 %.",
        Lower(PRIVATE, "fedavg-share", "mae"),
        {
            PRIVATE: (*KNOWN["qu-table2-privacy"].arms[PRIVATE], "privacy.noise=0.1"),
            "fedavg-share": ("method.name=fedavg-share",),
        },
    ),
    _why(
        "privacy-steps",
        "qu-table2-privacy",
        "Is it the length? With three times the epochs (at `full` eight times, as its batches are eight times larger), "
        "the private generator's replay beats sharing 5 %.",
        Lower(PRIVATE, "fedavg-share", "mae"),
        {PRIVATE: KNOWN["qu-table2-privacy"].arms[PRIVATE], "fedavg-share": ("method.name=fedavg-share",)},
        # eight times at `quick` would take half an hour on two cores
        arms_at={"quick": {PRIVATE: ("generator.epochs=72",)}, "full": {PRIVATE: ("generator.epochs=240",)}},
        minutes=14,
    ),
)

MONTHS = (
    replace(
        _why(
            "months-size",
            "qu-figure5-bone-age-high",
            "Is it the network and the size? ResNet-34 at 256 px (enlarged) is better than ResNet-18 at 64 px.",
            Lower("ResNet-34, 256 px", "ResNet-18, 64 px", "mae"),
            {
                "ResNet-18, 64 px": ("model.backbone=resnet18", "data.size=64"),
                "ResNet-34, 256 px": ("model.backbone=resnet34", "data.size=256"),
            },
            common=("method.name=centralized",),
        ),
        measure=of_runs(test("mae")),
        minutes={"quick": Minutes(None, 2), "full": Minutes(None, 6)},
    ),
    replace(
        _why(
            "months-public-weights",
            "qu-figure5-bone-age-high",
            "Is it the start? From public weights at 256 px (enlarged), pooled training reaches 9 months.",
            AtMost("public weights, 256 px", "mae", 9.0),
            {
                "public weights, 256 px": (
                    *("model.backbone=efficientnet-lite0", "model.weights=public", "data.size=64"),
                    *("model.input_size=256", "optimizer.batch_size=64"),
                )
            },
            common=("method.name=centralized",),
        ),
        measure=of_runs(test("mae")),
        minutes={"quick": Minutes(None, 2), "full": Minutes(None, 19)},
    ),
)


def _epsilon(name: str, question: str, measure: Measure, *, post_hoc: bool = False) -> Claim:
    """The account of Fig. 7 with one thing changed; its rule is that of the figure: both figures of the paper."""
    base = KNOWN["qu-figure7-epsilon"]
    told = {
        "name": f"why-epsilon-{name}",
        "sentence": question,
        "place": f"{base.place}: why?",
        "numbers": (),
        "finding": "",
    }
    return replace(base, **told, measure=measure, post_hoc=post_hoc, decides=base.name)


EPSILON = (
    _epsilon(
        "account",
        "Is it the account? With the tighter PRV in place of RDP, both epsilons are as small as the paper's.",
        qu.epsilons(accountant="prv"),
        post_hoc=True,
    ),
    _epsilon(
        "delta",
        "Is it delta? With 0.01, which promises little, both epsilons are as small as the paper's.",
        qu.epsilons(delta=0.01),
    ),
    _epsilon(
        "noise",
        "Is it the noise? With 1.2 in place of 0.7, both epsilons are as small as the paper's.",
        qu.epsilons(noise=1.2),
        post_hoc=True,
    ),
)

CLAIMS = (*RETINA, *SHARING, *SKIN, *VARIANTS, *ANIMALS, *GRADIENTS, *RESNET, *PRIVACY, *MONTHS, *EPSILON)
