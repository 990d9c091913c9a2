"""Claims of our own, about what goes beyond the papers."""

from __future__ import annotations

from collections.abc import Mapping

from polyclinic.claims.claim import Claim, Minutes
from polyclinic.claims.measures import audited, of_runs, test
from polyclinic.claims.own_measures import OVERHEAD, one_digest, overhead, same_after_kill
from polyclinic.claims.rules import AllOf, AtLeast, AtMost, Lower, Provided

PAPER = "Polyclinic"
#: a tenth of the hands trains
FEW_HANDS = ("data.validation=0.1", "data.test=0.8")
HANDS = "hand phantoms, drawn by the package"


def _same_model(name: str, place: str, sentence: str, arms: Mapping[str, tuple[str, ...]], *changes: str) -> Claim:
    return Claim(
        name=name,
        paper=PAPER,
        place=place,
        sentence=sentence,
        numbers=(),
        paper_data="-",
        our_data=HANDS,
        study="hands.toml",
        arms=arms,
        measure=one_digest,
        rule=AtMost("all arms", "different models", 1, exact=True),
        minutes={"quick": Minutes(3, 2), "full": Minutes(10, 4)},
        common=changes,
        scales={"quick": ("data.samples=300", "method.rounds=3")},
        seeds={"quick": 2, "full": 3},
    )


RESUMED: Mapping[str, tuple[str, ...]] = {
    name: (f"method.name={name}",) for name in ("fedavg", "cwt-replay", "fedreplay")
}

CLAIMS = (
    _same_model(
        "ours-partition-invariance",
        "docs/methods.md",
        "The one-round method `analytic` gives the same model for any partition of the images, to the last bit.",
        {
            "two sites": ("sites.count=2", "sites.partition=iid"),
            "seven sites": ("sites.count=7", "sites.partition=iid"),
            "four skewed sites": ("sites.count=4", "sites.partition=label-skew", "sites.target_ks=0.9"),
        },
        *("method.name=analytic", "model.backbone=efficientnet-lite0-1024", "model.input_size=64"),
    ),
    _same_model(
        "ours-engines-agree",
        "docs/engines.md",
        "One process and two worker processes end in the same model, to the last bit.",
        {"one process": ("engine.workers=1",), "two workers": ("engine.workers=2",)},
        "method.name=fedavg",
    ),
    _same_model(
        "ours-one-site",
        "docs/methods.md",
        "With one site, FedAvg, FedProx with mu 0 and FedAvgM with beta 0 end in one model, to the last bit.",
        {
            "fedavg": ("method.name=fedavg",),
            "fedprox": ("method.name=fedprox", "method.mu=0"),
            "fedavgm": ("method.name=fedavgm", "method.beta=0"),
        },
        *("sites.count=1", "sites.partition=iid"),
    ),
    Claim(
        name="ours-resume",
        paper=PAPER,
        place="docs/faults.md",
        sentence="A run that is killed (kill -9) and resumed ends in the model of an undisturbed one, to the last bit.",
        numbers=(),
        paper_data="-",
        our_data=HANDS,
        study="hands.toml",
        arms=RESUMED,
        measure=same_after_kill,
        rule=AllOf(tuple(AtMost(name, "different models", 1, exact=True) for name in RESUMED)),
        minutes={"quick": Minutes(4, 3), "full": Minutes(15, 8)},
        scales={"quick": ("data.samples=300", "method.rounds=6", "generator.epochs=2")},
        seeds={"quick": 2, "full": 3},
    ),
    Claim(
        name="ours-overhead",
        paper=PAPER,
        place="docs/performance.md",
        sentence="A round of FedAvg costs at most 10 % more CPU time than a bare PyTorch loop with the same steps.",
        numbers=(),
        paper_data="-",
        our_data="fundus phantoms, 10 sites of 320 images, small CNN, 32 px",
        study="overhead.toml",
        arms={},
        measure=overhead,
        rule=AllOf(
            (
                AtMost("fedavg", OVERHEAD, 1.1),
                AtMost("fedavg", "largest difference of weights", 1e-6, exact=True),
            )
        ),
        minutes={"quick": Minutes(4, None), "full": Minutes(6, None)},
        post_hoc=True,
    ),
    Claim(
        name="ours-public-front",
        paper=PAPER,
        place="docs/results.md",
        sentence="With a public encoder in front, FedReplay comes within 15 % of pooled training at high skew.",
        numbers=(),
        paper_data="-",
        our_data="RSNA bone age, boys; stored at 64 px, enlarged",
        study="bone_age_public.toml",
        arms={
            "centralized": ("method.name=centralized",),
            "fedreplay": ("method.name=fedreplay", "model.cut=block8"),
            "fedavg": ("method.name=fedavg",),
        },
        measure=of_runs(test("mae")),
        rule=Provided(  # a constant has an error of 32.4 months
            AtMost("centralized", "mae", 30),
            AllOf((Lower("fedreplay", "centralized", "mae", factor=1.15), Lower("fedreplay", "fedavg", "mae"))),
        ),
        minutes={"quick": Minutes(15, 2), "full": Minutes(None, 12)},
        scales={
            "quick": (*FEW_HANDS, "model.input_size=64", "method.rounds=3", "evaluation.every=3"),
            "full": ("model.input_size=128", "engine.precision=bf16"),
        },
        phantom=("data.source=hand-phantom", "data.samples=600"),
        post_hoc=True,
    ),
    Claim(
        name="ours-decoder-attack",
        paper=PAPER,
        place="docs/results.md",
        sentence="A decoder trained on other people's images gives images back from the latents of a deep cut: "
        "half of them can be picked out of hundreds.",
        numbers=(),
        paper_data="-",
        our_data="RSNA bone age, boys, 64 px",
        study="bone_age_public.toml",
        arms={"block5": ("model.cut=block5",), "block8": ("model.cut=block8",)},
        measure=of_runs(audited("latents", "picked", attack="decoder")),
        rule=AllOf((AtLeast("block5", "picked", 0.5), AtLeast("block8", "picked", 0.5))),
        minutes={"quick": Minutes(12, 3), "full": Minutes(None, 10)},
        common=("method.name=fedreplay", "audit.keep_parcels=0"),
        scales={
            "quick": (
                *FEW_HANDS,
                "model.input_size=64",
                "method.rounds=1",
                "evaluation.every=0",
                "evaluation.select=last",
            ),
        },
        phantom=("data.source=hand-phantom", "data.samples=600"),
        post_hoc=True,
    ),
)
