"""The three experiments of FELICIA (Rajotte et al. 2021), many federations at once on one device.

Each is described by a study in `examples/`; what a figure varies (alpha, beta, lambda, the seed) is varied here. All
owners of all these federations train as one stacked model (`polyclinic.generators.owners`).
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.dataset import Dataset
from polyclinic.data.datasets import SOURCES
from polyclinic.data.partition import PARTITIONS, spread
from polyclinic.data.partitions.clusters import fit_clusters, small_pixels
from polyclinic.data.parts import load
from polyclinic.data.splits import split
from polyclinic.generators import GENERATORS
from polyclinic.generators.central import CentralTerm
from polyclinic.generators.coverage import components, measure
from polyclinic.generators.gan import GAN
from polyclinic.generators.learners import Lesson, LessonNetwork, auc, teach
from polyclinic.generators.owners import Federated, Images, Owners
from polyclinic.randomness import numpy_rng, seed_of, torch_rng
from polyclinic.tasks import Target

#: keeps what was found so far: whoever stops the work before its end has that
Save = Callable[[dict[str, Any]], None]

EXAMPLES = Path(__file__).parents[1] / "examples"


@dataclass(frozen=True)
class Scale:
    """How much work an experiment does: it trains for `steps`, or for `seconds` if those are over first."""

    steps: int
    seconds: float
    looks: int  #: moments at which what the generators make is judged
    seeds: int
    weights: tuple[float, ...]  #: lambdas; 0 is the local GAN
    points: tuple[float, ...] = ()  #: alphas in per cent, or shares of the rare sub-group
    learner_steps: int = 0
    device: str = "cpu"
    size: int | None = None  #: side of the images, if it is not to be the study's
    small: dict[str, Any] = field(default_factory=dict)  #: settings of the generator in a hurry

    def looks_at(self, trained: float) -> int:
        """How many looks are due after this share of the training."""
        return int(trained * self.looks + 1e-9)


class Material:
    """A study's images, spread over its sites as often as an experiment wants."""

    def __init__(self, name: str, data: Path, changes: dict[str, Any] | None = None) -> None:
        tables = tomllib.loads((EXAMPLES / f"felicia_{name}.toml").read_text(encoding="utf-8"))
        table = {**tables["data"], **(changes or {}), "path": str(data / Path(tables["data"]["path"]).name)}
        self.tables = tables
        self.source = SOURCES[table["source"]].model_validate({k: v for k, v in table.items() if v is not None})
        self.dataset: Dataset = load(self.source)
        self.target = Target(classes=self.dataset.classes)

    def gan(self, scale: Scale) -> GAN:
        settings = self.tables["generator"] | scale.small
        built = GENERATORS[settings["name"]].model_validate(settings)
        assert isinstance(built, GAN)
        return built

    def term(self, **changes: Any) -> CentralTerm:
        known = {name: value for name, value in self.tables["method"].items() if name in CentralTerm.model_fields}
        return CentralTerm.model_validate(known | changes)

    def splits(self, seed: int) -> dict[str, np.ndarray]:
        return split(self.dataset, validation=self.source.validation, test=self.source.test, seed=seed)

    def sites(self, seed: int, **changes: Any) -> dict[str, dict[str, np.ndarray]]:
        """Indices of every site's images: data are split and spread anew for every seed."""
        table = self.tables["sites"] | changes
        return spread(PARTITIONS[table["partition"]].model_validate(table), self.dataset, self.splits(seed), seed)

    def images(self, index: np.ndarray) -> Images:
        labels = torch.from_numpy(self.dataset.labels[index].copy())
        return Images(torch.from_numpy(np.ascontiguousarray(self.dataset.images[index])), labels)


def quickest(
    settings: GAN,
    term: CentralTerm,
    federations: list[Federated],
    target: Target,
    scale: Scale,
    say: Callable[[str], None],
) -> Owners:
    """The owners, computed in whichever of four ways is the fastest on this device."""

    def build_owners(precision: str, as_products: bool) -> Owners:
        where = {"device": scale.device, "precision": precision, "as_products": as_products}
        return Owners(settings, term, federations, target, **where)

    if not scale.device.startswith("cuda"):
        return build_owners("fp32", False)
    ways = [(precision, products) for products in (True, False) for precision in ("bf16", "fp32")]
    seconds: dict[tuple[str, bool], float] = {}
    for way in ways:
        seconds[way] = _seconds_if_it_works(lambda at=way: build_owners(*at), min(seconds.values(), default=1e9))
    say(f"seconds per step of {2 * len(federations)} owners (precision, as products): {seconds}")
    return build_owners(*min(ways, key=lambda way: seconds[way]))


def _seconds_if_it_works(build_owners: Callable[[], Owners], best: float) -> float:
    """Infinity where a combination of stacking and arithmetic is not there in this version of torch."""
    try:
        return _seconds_per_step(build_owners(), best)
    except RuntimeError:
        return float("inf")


def _seconds_per_step(owners: Owners, best: float) -> float:
    """Measured over a few steps; over one, where that is much slower than the best known."""
    owners.step()
    owners.step()
    one = _timed(owners, 1)
    return one if one > 2 * best else _timed(owners, 8)


def _timed(owners: Owners, steps: int) -> float:
    _wait(str(owners.device))
    started = time.perf_counter()
    for _ in range(steps):
        owners.step()
    _wait(str(owners.device))
    return round((time.perf_counter() - started) / steps, 4)


def train(owners: Owners, scale: Scale, look: Callable[[int, int], None], say: Callable[[str], None]) -> dict[str, Any]:
    """Steps until the work or the time, looks included, is over; `look(step, images per owner)` on the way."""
    started, looked, paused = time.perf_counter(), 0, 0.0
    told: dict[str, Tensor] = {}
    step = 0
    while step < scale.steps:
        told = owners.step()
        step += 1
        if step % 10 == 0 or step == scale.steps:
            _wait(scale.device)
            spent = time.perf_counter() - started
            done = max(step / scale.steps, spent / scale.seconds)
            if scale.looks_at(min(done, 1.0)) > looked:
                looked = scale.looks_at(min(done, 1.0))
                pause = time.perf_counter()
                say(f"step {step}, {spent:.0f} s, recognised {_short(told.get('recognised'))}")
                look(step, step * owners.settings.batch_size)
                paused += time.perf_counter() - pause
                spent = time.perf_counter() - started
                done = max(step / scale.steps, spent / scale.seconds)
            if done >= 1:
                break
    seconds = time.perf_counter() - started - paused
    return {
        "steps": step,
        "images_per_owner": step * owners.settings.batch_size,
        "owners": len(owners.names),
        "seconds": round(seconds, 1),
        "images_per_second": round(step * owners.settings.batch_size * len(owners.names) / seconds),
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _short(values: Tensor | None) -> str:
    return "-" if values is None else f"{float(values.mean()):.2f}"


def sample(owners: Owners, federation: int, owner: str, labels: Tensor, purpose: str) -> Tensor:
    seed = owners.federations[federation].seed
    return owners.model(federation, owner).sample(labels, torch_rng(seed, owner, purpose))


# --- 1: digits, coverage of the input space ------------------------------------------------------------

DIGIT = 4
SHOWN = 2000  # images of each generator, as in Fig. 5


def digits(data: Path, scale: Scale, say: Callable[[str], None], save: Save) -> dict[str, Any]:
    """Digit four in two clusters, alpha % exchanged: coverage of held-out fours by each owner's made ones."""
    material = Material("digits", data, {"per_class": None, "keep": {"labels": [DIGIT]}})
    alphas, weights = scale.points, scale.weights
    plan = [(seed, alpha, weight) for seed in range(scale.seeds) for alpha in alphas for weight in weights]
    federations, views = [], {}
    for seed in range(scale.seeds):
        for alpha in alphas:
            sites = material.sites(seed, mixing=alpha, per_class=False)
            held = {name: material.images(parts["train"]) for name, parts in sites.items()}
            federations += [Federated(seed, weight, held) for weight in weights]
        views[seed] = _view(material, seed)
    settings = material.gan(scale).model_copy(update={"condition": "none", "spread": True})
    owners = quickest(settings, material.term(weight=1.0), federations, Target(), scale, say)
    rows: list[dict[str, Any]] = []
    clouds: dict[str, Any] = {}

    def look(step: int, images: int) -> None:
        for place, (seed, alpha, weight) in enumerate(plan):
            for owner in federations[place].owners:
                made = sample(owners, place, owner, torch.zeros(SHOWN, dtype=torch.long), "coverage")
                view = views[seed]
                at = view["components"].of(made)
                first = float((view["clusters"].nearest(made.numpy(), np.arange(len(made))) == 0).mean())
                covered = measure(view["real"], at)
                row = {"seed": seed, "alpha": alpha, "lambda": weight, "owner": owner, "images": images}
                rows.append({**row, **covered, "cluster_1": first, **_of_each_cluster(view, at)})
                if seed == 0:
                    clouds[f"{alpha}/{weight}/{owner}"] = at[:, :2].numpy()
                    clouds[f"made/{alpha}/{weight}/{owner}"] = made[:12].numpy()
        save(found)

    clouds |= {"real": views[0]["background"], "cluster": views[0]["background_cluster"]}
    found: dict[str, Any] = {"training": {}, "rows": rows, "clouds": clouds}
    return found | {"training": train(owners, scale, look, say)}


def _of_each_cluster(view: dict[str, Any], at: Tensor) -> dict[str, float]:
    """Coverage of the held-out fours of either cluster: one of them an owner has but few of."""
    members = [view["real"][torch.from_numpy(view["real_cluster"] == one)] for one in (0, 1)]
    return {f"coverage_{k + 1}": measure(real, at)["coverage"] for k, real in enumerate(members)}


def _view(material: Material, seed: int) -> dict[str, Any]:
    """Principal components and clusters of the training fours, and held-out fours in these coordinates."""
    parts = material.splits(seed)
    train_images = material.images(parts["train"]).images
    test = material.images(np.concatenate([parts["test"], parts["validation"]])).images[:SHOWN]
    pca = components(train_images[:SHOWN])
    clusters = fit_clusters(small_pixels(train_images[:SHOWN].numpy()), 2, numpy_rng(seed, "view"))
    background = train_images[:SHOWN]
    return {
        "components": pca,
        "clusters": clusters,
        "real": pca.of(test),
        "real_cluster": clusters.nearest(test.numpy(), np.arange(len(test))),
        "background": pca.of(background)[:, :2].numpy(),
        "background_cluster": clusters.nearest(background.numpy(), np.arange(len(background))),
    }


# --- 2 and 3: what made images are worth ---------------------------------------------------------------


@dataclass(frozen=True)
class Exam:
    """Real images that no network has seen, the same for all, with their sub-groups."""

    images: Tensor
    labels: np.ndarray
    subgroup: np.ndarray

    def mark(self, logits: Tensor) -> dict[str, float]:
        """AUC, accuracy, accuracy of each sub-group, and their mean."""
        scores = (logits[:, 1] - logits[:, 0]).cpu().numpy()
        right = (scores > 0) == (self.labels == 1)
        groups = {str(name): float(right[self.subgroup == name].mean()) for name in np.unique(self.subgroup)}
        mean = float(np.mean(list(groups.values())))
        return {"auc": auc(scores, self.labels == 1), "accuracy": float(right.mean()), "mean": mean, **groups}


@dataclass
class Candidate:
    """One owner's classifier-to-be: where it stands in the plan, and what it learns from."""

    key: dict[str, Any]
    lesson: Lesson
    exam: Exam


def examine(candidates: Sequence[Candidate], material: Material, scale: Scale, images: int) -> list[dict[str, Any]]:
    """Teach all candidates at once; their marks on validation (to choose by) and on the exam (to report)."""
    channels, size = material.dataset.images.shape[1:3]
    taught = teach(
        [one.lesson for one in candidates],
        lambda: LessonNetwork(channels, 2, size),
        2,
        steps=scale.learner_steps,
        batch_size=64,
        lr=1e-3,
        device=scale.device,
        as_products=scale.device.startswith("cuda"),
    )
    rows = []
    exams = {id(one.exam): one.exam for one in candidates}
    said = {key: taught.logits(exam.images).cpu() for key, exam in exams.items()}
    for place, one in enumerate(candidates):
        marks = one.exam.mark(said[id(one.exam)][place])
        rows.append({**one.key, "images": images, "validation": float(taught.scores[place]), **marks})
    return rows


def worth(
    material: Material,
    scale: Scale,
    plan: list[dict[str, Any]],
    federations: list[Federated],
    owner: str,
    validation: list[Images],
    exams: dict[int, Exam],
    made_per_class: int,
    say: Callable[[str], None],
    save: Save,
) -> dict[str, Any]:
    """Train all federations; judge the first owner's images on the way: alone, and beside its real ones."""
    owners = quickest(material.gan(scale), material.term(weight=1.0), federations, material.target, scale, say)
    real = [one.owners[owner] for one in federations]
    base, rows = real_only(material, scale, plan, real, validation, exams), []
    made_labels = torch.arange(2 * made_per_class) % 2
    pictures: dict[str, np.ndarray] = {}

    def look(step: int, images: int) -> None:
        candidates = []
        for place, key in enumerate(plan):
            made = sample(owners, place, owner, made_labels, f"worth {step}")
            synthetic = Images(made, made_labels.to(real[place].labels.dtype))
            both = Images(torch.cat([real[place].images, made]), torch.cat([real[place].labels, synthetic.labels]))
            for diet, given in (("synthetic", synthetic), ("augmented", both)):
                seed = seed_of(key["seed"], "learner", step)
                candidates.append(
                    Candidate({**key, "diet": diet}, Lesson(given, validation[place], seed), exams[key["seed"]])
                )
            if key["seed"] == 0:
                name = "/".join(f"{k}={v}" for k, v in key.items() if k != "seed")
                pictures[name] = made[:24].numpy()
        rows.extend(examine(candidates, material, scale, images))
        save(found)

    found: dict[str, Any] = {"training": {}, "real": base, "rows": rows, "pictures": pictures}
    return found | {"training": train(owners, scale, look, say)}


def real_only(
    material: Material,
    scale: Scale,
    plan: list[dict[str, Any]],
    real: list[Images],
    validation: list[Images],
    exams: dict[int, Exam],
) -> list[dict[str, Any]]:
    """Classifiers from the owner's real images alone, once for each distinct set of them."""
    candidates, seen = [], set()
    for place, key in enumerate(plan):
        known = {name: value for name, value in key.items() if name != "lambda"}
        if tuple(known.items()) not in seen:
            seen.add(tuple(known.items()))
            lesson = Lesson(real[place], validation[place], seed_of(key["seed"], "learner", "real"))
            candidates.append(Candidate({**known, "diet": "real"}, lesson, exams[key["seed"]]))
    return examine(candidates, material, scale, 0)


def bias(data: Path, scale: Scale, say: Callable[[str], None], save: Save) -> dict[str, Any]:
    """Cats and dogs against deer and horses; the share of horses at the first owner varies, as beta does in Fig. 6."""
    material = Material("bias", data)
    shares, weights = scale.points, scale.weights
    plan, federations, validation, exams = [], [], [], {}
    for seed in range(scale.seeds):
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
    return worth(material, scale, plan, federations, "biased", validation, exams, 750, say, save)


def skin(data: Path, scale: Scale, say: Callable[[str], None], save: Save) -> dict[str, Any]:
    """Skin lesions: 300 + 300 images with 10 melanomas at hospital 1; lambda varies as in Figs. 8-10."""
    material, weights = Material("skin", data, {"size": scale.size} if scale.size else None), scale.weights
    plan, federations, validation, exams = [], [], [], {}
    for seed in range(scale.seeds):
        test = held_out(material, seed)
        assert material.dataset.subgroup is not None
        exams[seed] = Exam(material.images(test).images, material.dataset.labels[test], material.dataset.subgroup[test])
        sites = material.sites(seed)
        held = {name: material.images(parts["train"]) for name, parts in sites.items()}
        for weight in weights:
            plan.append({"seed": seed, "lambda": weight})
            federations.append(Federated(seed, weight, held))
            validation.append(material.images(sites["hospital-1"]["validation"]))
    return worth(material, scale, plan, federations, "hospital-1", validation, exams, 200, say, save)


def held_out(material: Material, seed: int) -> np.ndarray:
    """200 + 200 images of the test split."""
    test = material.splits(seed)["test"]
    labels, rng = material.dataset.labels[test], numpy_rng(seed, "held out")
    return np.concatenate([rng.permutation(test[labels == one])[:200] for one in (0, 1)])


EXPERIMENTS: dict[str, Callable[[Path, Scale, Callable[[str], None], Save], dict[str, Any]]] = {
    "digits": digits,
    "bias": bias,
    "skin": skin,
}
