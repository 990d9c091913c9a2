"""The three experiments of FELICIA (Rajotte et al. 2021), many federations at once on one device.

Each is described by a study in `examples/`; what a figure varies (alpha, beta, lambda, the seed) is varied here. All
owners of all these federations train as one stacked model (`polyclinic.generators.gan.owners`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from felicia_common import Material, Save, Scale, stacked, train
from felicia_worth import Exam, worth
from torch import Tensor

from polyclinic.data.partitions.clusters import fit_clusters, small_pixels
from polyclinic.generators.gan.owners import Federated
from polyclinic.metrics.distribution import precision_recall
from polyclinic.metrics.principal_components import principal_components
from polyclinic.randomness import numpy_rng
from polyclinic.tasks import Target

# --- 1: digits, coverage of the input space ------------------------------------------------------------

DIGIT = 4
SHOWN = 2000  # images of each generator, as in Fig. 5


def digits(data: Path, scale: Scale, say: Callable[[str], None], save: Save) -> dict[str, Any]:
    """Digit four in two clusters, alpha % exchanged: coverage of held-out fours by each owner's made ones."""
    material = Material("digits", data, {"per_class": None, "keep": {"labels": [DIGIT]}})
    alphas, weights = scale.points, scale.weights
    plan = [(seed, alpha, weight) for seed in scale.each_seed() for alpha in alphas for weight in weights]
    federations, views = [], {}
    for seed in scale.each_seed():
        for alpha in alphas:
            sites = material.sites(seed, mixing=alpha, per_class=False)
            held = {name: material.images(parts["train"]) for name, parts in sites.items()}
            federations += [Federated(seed, weight, held) for weight in weights]
        views[seed] = View(material, seed, scale.device)
    settings = material.gan(scale).model_copy(update={"condition": "none", "spread": True})
    owners = stacked(settings, material.term(scale), federations, Target(), scale, say)
    rows: list[dict[str, Any]] = []
    clouds: dict[str, Any] = {}

    def look(step: int, images: int) -> None:
        every = owners.samples(torch.zeros(SHOWN, dtype=torch.long), "coverage")
        for (place, owner), made in zip(owners.names, every, strict=True):
            seed, alpha, weight = plan[place]
            at = views[seed].pca.project(made)
            row = {"seed": seed, "alpha": alpha, "lambda": weight, "owner": owner, "images": images}
            rows.append({**row, **views[seed].marks(at.to(scale.device))})
            if seed == scale.first_seed:
                clouds[f"{alpha}/{weight}/{owner}"] = at[:, :2].numpy()
                clouds[f"made/{alpha}/{weight}/{owner}"] = made[:12].numpy()
        save(found)

    clouds |= {"real": views[scale.first_seed].background, "cluster": views[scale.first_seed].background_cluster}
    found: dict[str, Any] = {"training": {}, "rows": rows, "clouds": clouds}
    train(owners, scale, found, look, say)
    return found


class View:
    """Principal components and two clusters of the training fours, and held-out fours in these coordinates."""

    def __init__(self, material: Material, seed: int, device: str) -> None:
        parts = material.splits(seed)
        fours = {name: material.images(parts[name]).images for name in parts}
        known = fours["train"][:SHOWN]
        self.pca = principal_components(known)
        clusters = fit_clusters(small_pixels(known.numpy()), 2, numpy_rng(seed, "view"))
        self.test, self.validation = (self.pca.project(fours[name]).to(device) for name in ("test", "validation"))
        of_test = clusters.nearest(fours["test"].numpy(), np.arange(len(fours["test"])))
        self.of_cluster = [self.test[torch.from_numpy(of_test == one).to(device)] for one in (0, 1)]
        self.background = self.pca.project(known)[:, :2].numpy()
        self.background_cluster = clusters.nearest(known.numpy(), np.arange(len(known)))

    def marks(self, at: Tensor) -> dict[str, float]:
        """Of made fours at these coordinates: how they cover test fours, those of either cluster (one of them their
        owner has but few of), and validation fours, to choose by."""
        each = {f"coverage_{k + 1}": precision_recall(real, at)["coverage"] for k, real in enumerate(self.of_cluster)}
        return {
            **precision_recall(self.test, at),
            **each,
            "validation": precision_recall(self.validation, at)["coverage"],
        }


# --- 2 and 3: what made images are worth ---------------------------------------------------------------


def bias(data: Path, scale: Scale, say: Callable[[str], None], save: Save, *, study: str = "bias") -> dict[str, Any]:
    """Two classes of two sub-groups each; the share of one sub-group at the first owner varies, as beta does in Fig. 6:
    of horses among deer and horses, or of nines among fours and nines."""
    material = Material(study, data, {"size": scale.size} if scale.size else None)
    shares, weights = scale.points, scale.weights
    table = material.tables["sites"]
    plan, federations, validation, exams = [], [], [], {}
    for seed in scale.each_seed():
        test = material.splits(seed)["test"]
        assert material.dataset.subgroup is not None
        exams[seed] = Exam(material.images(test).images, material.dataset.labels[test], material.dataset.subgroup[test])
        for share in shares:
            sites = material.sites(seed, share=share)
            held = {name: material.images(parts["train"]) for name, parts in sites.items()}
            for weight in weights:
                plan.append({"seed": seed, "share": share, "lambda": weight})
                federations.append(Federated(seed, weight, held))
                validation.append(material.images(sites["biased"]["validation"]))
    rare, made = table["subgroup"], table["per_class"]
    return worth(material, scale, plan, federations, "biased", validation, exams, made, rare, say, save)


def skin(data: Path, scale: Scale, say: Callable[[str], None], save: Save) -> dict[str, Any]:
    """Skin lesions: 300 + 300 images with 10 melanomas at hospital 1; lambda varies as in Figs. 8-10."""
    material, weights = Material("skin", data, {"size": scale.size} if scale.size else None), scale.weights
    plan, federations, validation, exams = [], [], [], {}
    for seed in scale.each_seed():
        test = held_out(material, seed)
        assert material.dataset.subgroup is not None
        exams[seed] = Exam(material.images(test).images, material.dataset.labels[test], material.dataset.subgroup[test])
        sites = material.sites(seed)
        held = {name: material.images(parts["train"]) for name, parts in sites.items()}
        for weight in weights:
            plan.append({"seed": seed, "lambda": weight})
            federations.append(Federated(seed, weight, held))
            validation.append(material.images(sites["hospital-1"]["validation"]))
    return worth(material, scale, plan, federations, "hospital-1", validation, exams, 200, "MEL", say, save)


def held_out(material: Material, seed: int) -> np.ndarray:
    """200 + 200 images of the test split."""
    test = material.splits(seed)["test"]
    labels, rng = material.dataset.labels[test], numpy_rng(seed, "held out")
    return np.concatenate([rng.permutation(test[labels == one])[:200] for one in (0, 1)])


EXPERIMENTS: dict[str, Callable[[Path, Scale, Callable[[str], None], Save], dict[str, Any]]] = {
    "digits": digits,
    "bias": bias,
    "digit-bias": functools.partial(bias, study="digit_bias"),
    "skin": skin,
}
