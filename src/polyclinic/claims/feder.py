"""Claims of FedER, "Decentralised learning by experience replay of privacy-preserving GAN samples"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polyclinic.claims.claim import Claim, Measure, Minutes, Number
from polyclinic.claims.measures import across_sites, carried_each_round, kinds_that_left, of_runs, own_sites
from polyclinic.claims.projection import DISTANCE, projected
from polyclinic.claims.rules import AllOf, AtMost, Lower, Rule, higher

PAPER = "FedER"
DATA = "melanoma: ISIC 2019 of three sources; tuberculosis: chest X-rays of two hospitals; 256 px"
OUR_DATA = "melanoma: Fed-ISIC2019 of four sources, 64 px"
OWN = "accuracy, own site"
#: few small images and a small GAN without the search of its length: an arm ends in some two minutes on two cores.
#: Batches of 16: with 64 a site took two steps a round, and every method but pooled training stayed at chance
QUICK = (
    *("data.size=32", "data.per_class=400", "model.backbone=small-cnn", "optimizer.lr=0.001", "method.rounds=8"),
    *("optimizer.batch_size=16", "generator.name=dcgan", "generator.steps=150", "generator.width=16"),
    *("method.buffer=128", "tuning.on=false"),
)
FULL = ("engine.precision=bf16", "method.rounds=100")
PLAIN: Mapping[str, tuple[str, ...]] = {
    name: (f"method.name={name}",) for name in ("standalone", "centralized", "fedavg", "fedprox", "fedbn")
}
REPLAY: Mapping[str, tuple[str, ...]] = {name: (f"method.name={name}",) for name in ("feder", "feder-a", "feder-b")}


def _weights_parcels(run: Path) -> dict[str, float]:
    """How many parcels with weights the sites' ledgers have."""
    return {"parcels with weights": float(kinds_that_left(run).count("weights"))}


def _claim(
    name: str,
    place: str,
    sentence: str,
    arms: Mapping[str, tuple[str, ...]],
    rule: Rule,
    numbers: tuple[Number, ...] = (),
    *,
    measure: Measure | None = None,
    minutes: float = 12,
    quick: tuple[str, ...] = (),
    axis: str = "",
    seeds: int = 3,
    post_hoc: bool = False,
    finding: str = "",
) -> Claim:
    return Claim(
        name=f"feder-{name}",
        paper=PAPER,
        place=place,
        sentence=sentence,
        numbers=numbers,
        paper_data=DATA,
        our_data=OUR_DATA,
        study="skin.toml",
        arms=arms,
        measure=measure or of_runs(own_sites("accuracy"), across_sites("accuracy")),
        rule=rule,
        minutes={"quick": Minutes(minutes, 4), "full": Minutes(None, 400)},  # 100,000 steps of four GANs, three seeds
        scales={"quick": (*QUICK, *quick), "full": FULL},
        phantom=("data.source=chest-phantom", "data.samples=900"),
        seeds={"quick": seeds, "full": seeds},
        axis=axis,
        post_hoc=post_hoc,
        finding=finding,
    )


CLAIMS = (
    _claim(
        "table1-rounds",
        "Table 1",
        "More rounds give higher accuracy.",
        {"2": ("method.name=feder", "method.rounds=2"), "8": ("method.name=feder", "method.rounds=8")},
        higher("8", "2", OWN),
        (Number("2", OWN, 0.8074), Number("8", OWN, 0.8113)),
        axis="rounds (the paper: 10 and 100, melanoma, 10 epochs each)",
    ),
    _claim(
        "table2-centralized",
        "Table 2",
        "FedER is at least as good as training on pooled images, and a little below models of the sites alone.",
        {**{name: PLAIN[name] for name in ("standalone", "centralized")}, "feder": REPLAY["feder"]},
        AllOf((higher("feder", "centralized", OWN, -0.02), higher("feder", "standalone", OWN, -0.05))),
        (Number("standalone", OWN, 0.7840), Number("centralized", OWN, 0.7764), Number("feder", OWN, 0.7836)),
    ),
    _claim(
        "table3-convergence",
        "Table 3",
        "The models of FedER agree across sites; those of the sites alone do not.",
        {"standalone": PLAIN["standalone"], "feder": REPLAY["feder"]},
        AllOf(
            (Lower("feder", "standalone", "spread of accuracy"), higher("feder", "standalone", "accuracy, all models"))
        ),
        (Number("standalone", "spread of accuracy", 0.1507), Number("feder", "spread of accuracy", 0.0108)),
    ),
    _claim(
        "table4-methods",
        "Table 4",
        "FedER is better than FedAvg, FedProx and FedBN.",
        {**{name: PLAIN[name] for name in ("fedavg", "fedprox", "fedbn")}, "feder": REPLAY["feder"]},
        AllOf(tuple(higher("feder", name, OWN) for name in ("fedavg", "fedprox", "fedbn"))),
        (
            Number("fedavg", OWN, 0.7333),
            Number("fedprox", OWN, 0.7516),
            Number("fedbn", OWN, 0.7419),
            Number("feder", OWN, 0.7836),
        ),
        post_hoc=True,
        finding="It is not that the labels are too alike: where they are skewed on purpose, FedER falls farther behind "
        "FedAvg. A longer generator and more real images in a batch each raise its mean by some 0.03, which six seeds "
        "cannot tell from chance. The paper's 100,000 steps were not tried.",
    ),
    _claim(
        "table5-buffer",
        "Table 5",
        "A buffer raises accuracy over all sites and makes the models agree.",
        {str(size): ("method.name=feder", f"method.buffer={size}") for size in (0, 64, 256)},
        AllOf((higher("256", "0", "accuracy, all models"), Lower("256", "0", "spread of accuracy"))),
        (
            Number("0", "accuracy, all models", 0.7548),
            Number("256", "accuracy, all models", 0.8107),
            Number("0", "spread of accuracy", 0.1141),
            Number("256", "spread of accuracy", 0.0360),
        ),
        axis="images in the buffer",
    ),
    _claim(
        "table6-variants",
        "Table 6",
        "FedER-A, which shares no weights, is on par with FedER and better than FedAvg; FedER-B is a little worse.",
        {"fedavg": PLAIN["fedavg"], **REPLAY},
        AllOf(
            (higher("feder-a", "feder", OWN, -0.03), higher("feder-a", "fedavg", OWN), higher("feder", "feder-b", OWN))
        ),
        (Number("feder", OWN, 0.8341), Number("feder-a", OWN, 0.8276), Number("feder-b", OWN, 0.7774)),
        minutes=15,
        finding="Neither three times the generator's steps, nor three times the rounds, nor more real images in a "
        "batch bring FedER-A above FedAvg: it stays 0.06 to 0.10 below. The generator of `quick` takes a few hundred "
        "steps; the paper's 100,000 were not tried.",
    ),
    _claim(
        "table7-bytes",
        "Table 7",
        "FedER sends more than FedAvg, and FedER-A less (ResNet-18, grey images; with colour FedER-A sends more).",
        {"fedavg": PLAIN["fedavg"], "feder": REPLAY["feder"], "feder-a": REPLAY["feder-a"]},
        AllOf((Lower("fedavg", "feder", "MB a site and round"), Lower("feder-a", "fedavg", "MB a site and round"))),
        (
            Number("fedavg", "MB a site and round", 45),
            Number("feder", "MB a site and round", 65),
            Number("feder-a", "MB a site and round", 20),
        ),
        measure=of_runs(carried_each_round),
        seeds=2,  # bytes do not depend on the seed
        quick=("model.backbone=resnet18", "method.rounds=1", "evaluation.every=0", "evaluation.select=last"),
    ),
    _claim(
        "figure2-sites",
        "Fig. 2",
        "With images spread evenly, FedER keeps its accuracy as the sites become more, on par with FedAvg.",
        {
            f"{method}, {count} sites": (f"method.name={method}", "sites.partition=iid", f"sites.count={count}")
            for method in ("fedavg", "feder")
            for count in (2, 6)
        },
        AllOf(
            (
                higher("feder, 6 sites", "fedavg, 6 sites", "accuracy, all models", -0.03),
                higher("feder, 6 sites", "feder, 2 sites", "accuracy, all models", -0.05),
            )
        ),
    ),
    _claim(
        "figure3-projection",
        "Fig. 3",
        "With the privacy loss, real images are farther from what the generator can make.",
        {
            "no privacy loss": ("method.name=feder", "tuning.alpha=0.0"),
            "privacy loss": ("method.name=feder", "tuning.alpha=1.0"),
        },
        higher("privacy loss", "no privacy loss", DISTANCE),
        measure=of_runs(projected),
        quick=(
            *("tuning.on=true", "tuning.most_steps=150", "tuning.most_tuning_steps=100", "tuning.check_every=50"),
            *("tuning.patience=150", "method.rounds=1", "data.per_class=200"),
        ),
        minutes=15,
        post_hoc=True,
    ),
    _claim(
        "a-shares-no-weights",
        "Fig. 5a",
        "FedER-A shares buffers of synthetic images and no model.",
        {"feder-a": REPLAY["feder-a"]},
        AtMost("feder-a", "parcels with weights", 0, exact=True),
        measure=of_runs(_weights_parcels),
        quick=("method.rounds=2",),
        minutes=4,
    ),
)
