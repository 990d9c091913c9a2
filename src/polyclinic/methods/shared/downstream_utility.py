"""Downstream utility of synthetic images: train on real, on synthetic, on both; test on real; validation decides.

A site trains the study's network on each training set, from the same first weights and for the same number of steps,
and keeps of each the best on its real validation images. It releases the one that saw synthetic images only where its
own validation images say that they helped. Files and results call a training set "diet".
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.data.plots import contact_sheet
from polyclinic.errors import WorkFailed
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.generators.base import GeneratorModel, as_tensor, check_labels
from polyclinic.methods.shared.method import Federation, Parcel, Site, Weights
from polyclinic.methods.shared.site_generator import figures_parcel, uniform_labels
from polyclinic.metrics.distribution import NEIGHBOURS, precision_recall
from polyclinic.metrics.images import principal_components
from polyclinic.randomness import torch_rng

#: what a network can be trained on: a site's real images, its synthetic ones, both
OWN_SETS = ("real", "synthetic", "augmented")
#: and where sites share synthetic images: those of all sites, and the site's real images besides
SHARED_SETS = ("synthetic-all", "augmented-all")
TRAINING_SETS = (*OWN_SETS, *SHARED_SETS)
CHECKS = 5  # times that a network in training is scored on validation images
SHOWN = 8  # columns of the contact sheet
COVERED = 1000  # images that coverage is measured on


@dataclass(frozen=True)
class Selection:
    """Training and selection of networks; `release`: a training set whose network is always released."""

    steps: int
    margin: float = 0.0
    release: str | None = None


@dataclass(frozen=True)
class TrainedNetwork:
    """A network's weights and its score on validation images, which is larger where it is better."""

    weights: dict[str, Tensor]
    score: float


# --- at a site --------------------------------------------------------------------------------------------


def sample_part(site: Site, model: GeneratorModel, count: int | None) -> ImageSet:
    """`count` synthetic images, or as many as real ones, with labels drawn alike from the classes that the site has."""
    real = site.data.train
    labels = uniform_labels(count or len(real), real.labels, site.trainer.target, site.rng("synthetic labels"))
    return ImageSet(model.sample(labels, site.rng("synthetic")).numpy(), labels.numpy())


def received_part(site: Site, tensors: Mapping[str, Tensor]) -> ImageSet:
    """Synthetic images of other sites, as they came; WorkFailed where they are not like the site's own."""
    images, labels = tensors.get("images", torch.empty(0)), tensors.get("labels", torch.empty(0))
    shape = tuple(site.data.train.images.shape[1:])
    if images.dtype != torch.uint8 or tuple(images.shape[1:]) != shape:
        raise WorkFailed(f"synthetic images of other sites are {images.dtype} {tuple(images.shape)}, not uint8 {shape}")
    return ImageSet(images.numpy(), check_labels(labels, len(images), site.trainer.target).numpy())


def evaluate(site: Site, synthetic: ImageSet, selection: Selection, others: ImageSet | None = None) -> Parcel:
    """Train a network on each training set and keep the one to release; scores and coverage of synthetic images.

    `others` are synthetic images of the other sites, where sites share them.
    """
    networks = train_and_keep(site, synthetic, selection, others)
    wanted = selection.release if selection.release in networks else None  # the other sites' images may not have come
    chosen = wanted or choose_by_validation(networks, selection.margin)
    site.state.put("local", networks[chosen].weights)
    site.state.put("best", networks[chosen].weights)
    site.state["released"] = torch.tensor(TRAINING_SETS.index(chosen))
    draw_sheet(site, synthetic)
    figures = {f"validation_{name}": network.score for name, network in networks.items()}
    figures |= {f"test_{name}": test_score(site, network) for name, network in networks.items()}
    figures |= measure_coverage(site, synthetic)
    finite = {name: value for name, value in figures.items() if np.isfinite(value)}
    return figures_parcel(finite)


def train_and_keep(
    site: Site, synthetic: ImageSet, selection: Selection, others: ImageSet | None = None
) -> dict[str, TrainedNetwork]:
    """Networks for all training sets; of each, the one of this or an earlier round that validation scores best."""
    before = {
        name: TrainedNetwork(weights, float(site.state[f"score-{name}"]))
        for name in TRAINING_SETS
        if (weights := site.state.group(f"diet-{name}"))
    }
    known = {name: network for name, network in before.items() if name == "real"}
    now = train_networks(site, training_sets(site.data.train, synthetic, others), selection.steps, known)
    best = {n: before[n] if n in before and before[n].score > trained.score else trained for n, trained in now.items()}
    for name, network in best.items():
        site.state.put(f"diet-{name}", network.weights)
        site.state[f"score-{name}"] = torch.tensor(network.score, dtype=torch.float64)
    return best


def training_sets(real: ImageSet, synthetic: ImageSet, others: ImageSet | None) -> dict[str, ImageSet]:
    """Training sets by name; `others` are synthetic images of the other sites, where sites share them."""
    found = {"real": real, "synthetic": synthetic, "augmented": join(real, synthetic)}
    if others is not None:
        of_all = join(synthetic, others)
        found |= {"synthetic-all": of_all, "augmented-all": join(real, of_all)}
    return found


def train_networks(
    site: Site, sets: Mapping[str, ImageSet], steps: int, known: Mapping[str, TrainedNetwork]
) -> dict[str, TrainedNetwork]:
    """A network for each training set, all from the same weights and seed; those in `known` are not trained again."""
    seed = int(torch.randint(2**62, (), generator=site.lasting_rng("learners")))
    networks = dict(known)
    for name, part in sets.items():
        if name not in networks:
            initial = site.trainer.load(site.trainer.initial_local)
            optimizer = site.trainer.optimizer.make(initial.parameters(), 1)
            networks[name] = train_network(site.trainer, optimizer, part, site.data.validation, steps, torch_rng(seed))
    return networks


def train_network(
    trainer: TrainerLike,
    optimizer: torch.optim.Optimizer,
    train: ImageSet,
    validation: ImageSet,
    steps: int,
    rng: torch.Generator,
) -> TrainedNetwork:
    """The trainer's network at the best of several checks; after the last step if there are no validation images."""
    batches = trainer.batches(train, rng)
    best: TrainedNetwork | None = None
    checks = [round(steps * number / CHECKS) for number in range(CHECKS + 1)]
    for some in (end - start for start, end in itertools.pairwise(checks) if end > start):
        trainer.train(batches, some, optimizer)
        now = TrainedNetwork(trainer.weights(), score(trainer, validation) if len(validation) else 0.0)
        if best is None or now.score > best.score or not len(validation):
            best = now
    assert best is not None
    return best


def choose_by_validation(networks: Mapping[str, TrainedNetwork], margin: float = 0.0) -> str:
    """The training set with synthetic images where they helped on validation images, else real images alone."""
    mixed = [name for name in ("augmented", "augmented-all") if name in networks]
    best = max(mixed, key=lambda name: networks[name].score)
    return best if networks[best].score > networks["real"].score + margin else "real"


def score(trainer: TrainerLike, part: ImageSet) -> float:
    """The task's own metric of the network as it stands, signed so that more is better; ties go by the loss."""
    metrics = trainer.task.finish(trainer.evaluate(part))
    value = metrics.get("auc", metrics.get(trainer.task.metric, float("nan")))
    higher = trainer.task.better == "higher"
    return (value if higher else -value) - 1e-6 * metrics.get("loss", 0.0)


def test_score(site: Site, network: TrainedNetwork) -> float:
    """For curves along training; nothing is chosen by it."""
    site.trainer.load(network.weights)
    return score(site.trainer, site.data.test) if len(site.data.test) else float("nan")


def test_sums(site: Site, weights: Weights) -> Parcel | None:
    """The additive sums of a network's metrics on the site's test images, in all and by sub-group."""
    part = site.data.test
    if len(part) == 0:
        return None
    site.trainer.load(weights)
    sums = {f"/{name}": value for name, value in site.trainer.evaluate(part).items()}
    for group in np.unique(part.subgroup) if part.subgroup is not None else []:
        own = site.trainer.evaluate(part.take(part.subgroup == group))
        sums |= {f"{group}/{name}": value for name, value in own.items()}
    return Parcel("metrics", sums)


def measure_coverage(site: Site, synthetic: ImageSet) -> dict[str, float]:
    """Precision, recall, density and coverage of synthetic images against the site's held-out real ones."""
    held_out = [part.images[:COVERED] for part in (site.data.validation, site.data.test) if len(part)]
    if not held_out or min(sum(map(len, held_out)), len(synthetic)) <= NEIGHBOURS:
        return {}
    components = principal_components(as_tensor(np.asarray(site.data.train.images[:COVERED])))
    real = components.project(torch.from_numpy(np.concatenate(held_out)))
    return precision_recall(real, components.project(torch.from_numpy(synthetic.images[:COVERED])))


def draw_sheet(site: Site, synthetic: ImageSet) -> None:
    """Real and synthetic images of each class, in the site's own folder."""
    rows: dict[str, Tensor] = {}
    names = site.trainer.target.classes or ("",)
    for number, name in enumerate(names[:5]):
        for kind, part in (("real", site.data.train), ("synthetic", synthetic)):
            chosen = np.flatnonzero((part.labels == number) | (names == ("",)))[:SHOWN]
            if len(chosen):
                rows[f"{kind} {name}"] = torch.from_numpy(np.asarray(part.images[chosen]).copy())
    more = f"; the first 5 of {len(names)} classes" if len(names) > 5 else ""
    title = f"{site.name}: some of {len(site.data.train)} training and {len(synthetic)} synthetic images{more}"
    contact_sheet(rows, site.folder / "samples.png", (), title)


def join(a: ImageSet, b: ImageSet) -> ImageSet:
    """The images of two parts; masks and sub-groups, which synthetic images do not have, are dropped."""
    images, labels = (np.concatenate([getattr(part, name) for part in (a, b)]) for name in ("images", "labels"))
    return ImageSet(images, labels.astype(a.labels.dtype))


# --- at the coordinator -----------------------------------------------------------------------------------


def ask_utility(
    federation: Federation, operation: str, others: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Have every site evaluate its synthetic images as they are now, beside what `others` has for it: a row for the
    result."""
    figures = {
        reply.site: {name: round(float(value), 5) for name, value in reply.metrics.items()}
        for reply in federation.ask_all(operation, by_site=others)
    }
    return {"round": federation.round, "sites": figures}


def test_tables(federation: Federation, operation: str) -> dict[str, Any]:
    """By site and training set: the network's test metrics. Uncounted: only a simulator can try a site's networks at
    the other sites."""
    tables: dict[str, Any] = {}
    for site in federation.sites:
        state = federation.simulated_state(site)
        kept = {name: state.group(f"diet-{name}") for name in TRAINING_SETS}
        kept = {name: weights for name, weights in kept.items() if weights or name in OWN_SETS}
        table: dict[str, Any] = {name: test_metrics(federation, operation, weights) for name, weights in kept.items()}
        released = TRAINING_SETS[int(state["released"])] if "released" in state else ""
        tables[site] = {**table, "released": released} if any(table.values()) else {}
    return tables


def test_metrics(federation: Federation, operation: str, weights: Weights) -> dict[str, Any]:
    """Test metrics of one network, pooled over sites, and of each sub-group."""
    if not weights:
        return {}
    task = federation.trainer.task
    sums: dict[str, dict[str, dict[str, Tensor]]] = {}
    for reply in federation.ask_all(operation, counted=False, weights=weights):
        for name, value in reply.metrics.items():
            group, _, metric = name.rpartition("/")
            sums.setdefault(group, {}).setdefault(reply.site, {})[metric] = value
    scored = {group: task.finish(functools.reduce(task.add, of.values())) for group, of in sums.items()}
    return {"test": scored.pop("", {}), "subgroups": scored}
