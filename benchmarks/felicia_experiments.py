"""The three experiments of FELICIA (Rajotte et al. 2021), many federations at once on one device.

Each is described by a study in `examples/`; what a figure varies (alpha, beta, lambda, the seed) is varied here. All
owners of all these federations train as one stacked model (`polyclinic.generators.owners`).
"""

from __future__ import annotations

import dataclasses
import functools
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
from polyclinic.generators.products import Way
from polyclinic.randomness import numpy_rng, seed_of
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
    precision: str = "fp32"
    recorded: bool = True  #: on a GPU: each step as one CUDA graph
    way: Way = "products"  #: on a GPU: how convolutions of a stack are computed
    ways: tuple[Way, ...] = ()  #: those to be tried first, for the quickest
    thin: Way | None = None  #: and those next to pixels
    repeats: int = 1  #: classifiers of each diet at each look, whose marks are averaged
    real_repeats: int = 1  #: classifiers from real images alone
    size: int | None = None  #: side of the images, if it is not to be the study's
    small: dict[str, Any] = field(default_factory=dict)  #: settings of the generator other than the study's
    apart: bool = False  #: every class has networks of its own, without labels (PrivGAN's way)

    def quickly(self) -> dict[str, Any]:
        """How a stack is computed: on a GPU in the way that is quick there, each step as one CUDA graph."""
        if not self.device.startswith("cuda"):
            return {}
        return {"way": self.way, "thin": self.thin, "recorded": self.recorded}

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


def stacked(
    settings: GAN,
    term: CentralTerm,
    federations: list[Federated],
    target: Target,
    scale: Scale,
    say: Callable[[str], None],
) -> Owners:
    """The owners of all federations, as one model."""
    started = time.perf_counter()
    owners = Owners(
        settings, term, federations, target, device=scale.device, precision=scale.precision, **scale.quickly()
    )
    say(f"{len(owners.names)} owners built in {time.perf_counter() - started:.1f} s")
    return owners


def tuned(build: Callable[[Scale], Owners], scale: Scale, say: Callable[[str], None]) -> Scale:
    """On a GPU, and where several ways are to be tried: with the one in which these owners' steps are the quickest."""
    found: dict[Way, float] = {}
    for way in scale.ways if scale.device.startswith("cuda") else ():
        try:
            owners = build(dataclasses.replace(scale, way=way))
            found[way] = seconds_of_a_step(owners, scale.device)
        except RuntimeError as error:  # a way that a GPU cannot go is no reason to stop
            say(f"{way}: {str(error)[-300:]}")
        torch.cuda.empty_cache()
    say(f"seconds of a step: {found}")
    return dataclasses.replace(scale, way=min(found, key=lambda way: found[way])) if found else scale


def seconds_of_a_step(owners: Owners, device: str, steps: int = 20) -> float:
    for _ in range(6):
        owners.step()
    _wait(device)
    started = time.perf_counter()
    for _ in range(steps):
        told = owners.step()
    _wait(device)
    if not all(bool(torch.isfinite(value).all()) for value in told.values()):
        raise RuntimeError("losses are not finite")
    return round((time.perf_counter() - started) / steps, 4)


def train(
    owners: Owners, scale: Scale, found: dict[str, Any], look: Callable[[int, int], None], say: Callable[[str], None]
) -> None:
    """Steps until the work or the time, looks included, is over; `look(step, images per owner)` on the way.

    What it took is in `found["training"]` from the first look on.
    """
    started, looked, paused, step = time.perf_counter(), 0, 0.0, 0
    done = 0.0
    while done < 1:
        told = owners.step()
        step += 1
        if step % 10 and step != scale.steps:
            continue
        _wait(scale.device)
        spent = time.perf_counter() - started
        done = max(step / scale.steps, spent / scale.seconds)
        if scale.looks_at(min(done, 1.0)) > looked:
            looked = scale.looks_at(min(done, 1.0))
            found["training"] = _pace(owners, step, spent - paused)
            recognised = float(told["recognised"].mean()) if "recognised" in told else float("nan")
            say(f"step {step}, {spent:.0f} s, owners recognised {recognised:.2f}; {found['training']}")
            look(step, step * owners.settings.batch_size)
            paused += time.perf_counter() - started - spent


def _pace(owners: Owners, step: int, seconds: float) -> dict[str, Any]:
    images = step * owners.settings.batch_size
    recorded = owners.recorded is not None and owners.recorded.play is not None
    return {
        "steps": step,
        "images_per_owner": images,
        "owners": len(owners.names),
        "seconds": round(seconds, 1),
        "steps_per_second": round(step / seconds, 1),
        "images_per_second": round(images * len(owners.names) / seconds),
        "way": owners.ways["way"],
        "one_graph": recorded,
        "gpu_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else 0,
    }


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


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
        views[seed] = View(material, seed, scale.device)
    settings = material.gan(scale).model_copy(update={"condition": "none", "spread": True})
    owners = stacked(settings, material.term(weight=1.0), federations, Target(), scale, say)
    rows: list[dict[str, Any]] = []
    clouds: dict[str, Any] = {}

    def look(step: int, images: int) -> None:
        every = owners.samples(torch.zeros(SHOWN, dtype=torch.long), "coverage")
        for (place, owner), made in zip(owners.names, every, strict=True):
            seed, alpha, weight = plan[place]
            at = views[seed].pca.of(made)
            row = {"seed": seed, "alpha": alpha, "lambda": weight, "owner": owner, "images": images}
            rows.append({**row, **views[seed].marks(at.to(scale.device))})
            if seed == 0:
                clouds[f"{alpha}/{weight}/{owner}"] = at[:, :2].numpy()
                clouds[f"made/{alpha}/{weight}/{owner}"] = made[:12].numpy()
        save(found)

    clouds |= {"real": views[0].background, "cluster": views[0].background_cluster}
    found: dict[str, Any] = {"training": {}, "rows": rows, "clouds": clouds}
    train(owners, scale, found, look, say)
    return found


class View:
    """Principal components and two clusters of the training fours, and held-out fours in these coordinates."""

    def __init__(self, material: Material, seed: int, device: str) -> None:
        parts = material.splits(seed)
        fours = {name: material.images(parts[name]).images for name in parts}
        known = fours["train"][:SHOWN]
        self.pca = components(known)
        clusters = fit_clusters(small_pixels(known.numpy()), 2, numpy_rng(seed, "view"))
        self.test, self.validation = (self.pca.of(fours[name]).to(device) for name in ("test", "validation"))
        of_test = clusters.nearest(fours["test"].numpy(), np.arange(len(fours["test"])))
        self.of_cluster = [self.test[torch.from_numpy(of_test == one).to(device)] for one in (0, 1)]
        self.background = self.pca.of(known)[:, :2].numpy()
        self.background_cluster = clusters.nearest(known.numpy(), np.arange(len(known)))

    def marks(self, at: Tensor) -> dict[str, float]:
        """Of made fours at these coordinates: how they cover test fours, those of either cluster (one of them their
        owner has but few of), and validation fours, to choose by."""
        each = {f"coverage_{k + 1}": measure(real, at)["coverage"] for k, real in enumerate(self.of_cluster)}
        return {**measure(self.test, at), **each, "validation": measure(self.validation, at)["coverage"]}


# --- 2 and 3: what made images are worth ---------------------------------------------------------------


TAUGHT_AT_ONCE = 96  # classifiers: a GPU is busy with them, and its memory lasts


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


def examine(
    candidates: Sequence[Candidate], material: Material, scale: Scale, images: int, repeats: int
) -> list[dict[str, Any]]:
    """Teach all candidates, each so many times from weights and draws of its own; the means of their marks on
    validation (to choose by) and on the exam (to report)."""
    turns = [(one, again(one.lesson, number)) for one in candidates for number in range(repeats)]
    marks: list[dict[str, float]] = []
    for start in range(0, len(turns), TAUGHT_AT_ONCE):
        marks += _marks(turns[start : start + TAUGHT_AT_ONCE], material, scale)
    rows = []
    for place, one in enumerate(candidates):
        own = marks[place * repeats : (place + 1) * repeats]
        rows.append({**one.key, "images": images, **{name: float(np.mean([m[name] for m in own])) for name in own[0]}})
    return rows


def again(lesson: Lesson, number: int) -> Lesson:
    return dataclasses.replace(lesson, seed=seed_of(lesson.seed, "repeat", number))


def _marks(turns: Sequence[tuple[Candidate, Lesson]], material: Material, scale: Scale) -> list[dict[str, float]]:
    """One classifier for each turn."""
    channels, size = material.dataset.images.shape[1:3]
    taught = teach(
        [lesson for _, lesson in turns],
        lambda: LessonNetwork(channels, 2, size),
        2,
        steps=scale.learner_steps,
        batch_size=64,
        lr=1e-3,
        device=scale.device,
        **scale.quickly(),
    )
    exams = {id(one.exam): one.exam for one, _ in turns}
    said = {key: taught.logits(exam.images).cpu() for key, exam in exams.items()}
    return [
        {"validation": float(taught.scores[place]), **one.exam.mark(said[id(one.exam)][place])}
        for place, (one, _) in enumerate(turns)
    ]


def worth(
    material: Material,
    scale: Scale,
    plan: list[dict[str, Any]],
    federations: list[Federated],
    owner: str,
    validation: list[Images],
    exams: dict[int, Exam],
    made_per_class: int,
    rare: str,
    say: Callable[[str], None],
    save: Save,
) -> dict[str, Any]:
    """Train all federations; judge the first owner's images on the way: alone, and beside its real ones."""
    settings, target, trained = material.gan(scale), material.target, federations
    if scale.apart:
        settings, target = settings.model_copy(update={"condition": "none", "balance": False}), Target()
        trained = [of_class(one, label) for one in federations for label in CLASSES]
    build = functools.partial(stacked, settings, material.term(weight=1.0), trained, target, say=say)
    scale = tuned(build, scale, say)
    owners, expert = build(scale), Expert(material, scale, rare)
    say(f"tells {rare} from the rest of its class: {expert.right} right")
    real = [one.owners[owner] for one in federations]
    base, rows = real_only(material, scale, plan, real, validation, exams), []
    made_labels = torch.arange(2 * made_per_class) % 2
    pictures: dict[str, np.ndarray] = {}

    def look(step: int, images: int) -> None:
        candidates, seen = [], [torch.empty(0)] * len(plan)
        every = owners.samples(made_labels, f"worth {step}")
        for place, key in enumerate(plan):
            makers = [len(CLASSES) * place + label for label in CLASSES] if scale.apart else [place] * len(CLASSES)
            of_each = [every[owners.names.index((maker, owner))] for maker in makers]
            made = torch.where((made_labels == 0)[:, None, None, None], *of_each)
            seen[place] = made[made_labels == expert.label]
            synthetic = Images(made, made_labels.to(real[place].labels.dtype))
            both = Images(torch.cat([real[place].images, made]), torch.cat([real[place].labels, synthetic.labels]))
            for diet, given in zip(DIETS, (synthetic, both), strict=True):
                seed = seed_of(key["seed"], "learner", step)
                candidates.append(
                    Candidate({**key, "diet": diet}, Lesson(given, validation[place], seed), exams[key["seed"]])
                )
            if key["seed"] == 0:
                name = "/".join(f"{k}={v}" for k, v in key.items() if k != "seed")
                pictures[name] = made[:24].numpy()
        shares = expert.shares([key["seed"] for key in plan], seen)
        for place, row in enumerate(examine(candidates, material, scale, images, scale.repeats)):
            rows.append({**row, "rare_share": shares[place // len(DIETS)]})
        save(found)

    found: dict[str, Any] = {"training": {}, "real": base, "rows": rows, "pictures": pictures, "expert": expert.right}
    train(owners, scale, found, look, say)
    return found


CLASSES = (0, 1)
DIETS = ("synthetic", "augmented")  # beside real only


class Expert:
    """For each seed a network that has seen all owners' real images of the class with the rare sub-group and tells that
    one from the other: no owner has it; it says what generators make, and decides nothing."""

    def __init__(self, material: Material, scale: Scale, rare: str) -> None:
        assert material.dataset.subgroup is not None
        self.label = int(material.dataset.labels[material.dataset.subgroup == rare][0])
        self.parts = [self._of_class(material, material.splits(seed), rare) for seed in range(scale.seeds)]
        channels, size = material.dataset.images.shape[1:3]
        lessons = [
            Lesson(parts["train"], parts["validation"], seed_of(seed, "expert"))
            for seed, parts in enumerate(self.parts)
        ]
        how: dict[str, Any] = {"steps": 2 * scale.learner_steps, "batch_size": 64, "lr": 1e-3, "device": scale.device}
        self.taught = teach(lessons, lambda: LessonNetwork(channels, 2, size), 2, **how, **scale.quickly())
        self.right = [round(self._accuracy(seed), 3) for seed in range(scale.seeds)]

    def _of_class(self, material: Material, splits: dict[str, np.ndarray], rare: str) -> dict[str, Images]:
        found = {}
        for name, index in splits.items():
            own = index[material.dataset.labels[index] == self.label]
            assert material.dataset.subgroup is not None
            is_rare = torch.from_numpy((material.dataset.subgroup[own] == rare).astype(np.int64))
            found[name] = Images(material.images(own).images, is_rare)
        return found

    def _accuracy(self, seed: int) -> float:
        """Mean of both sub-groups, on test images."""
        test = self.parts[seed]["test"]
        says = self.taught.logits(test.images)[seed].argmax(-1).cpu()
        return float(np.mean([(says[test.labels == one] == one).float().mean() for one in (0, 1)]))

    def shares(self, seeds: list[int], sets: list[Tensor]) -> list[float]:
        """Of each set of made images (all as many) the share that its seed's expert takes for the rare sub-group."""
        by_seed = {seed: torch.cat([one for s, one in zip(seeds, sets, strict=True) if s == seed]) for seed in seeds}
        says = self.taught.logits_of_each([by_seed[seed] for seed in sorted(by_seed)]).argmax(-1).float()
        each = {seed: iter(says[place].split(len(sets[0]))) for place, seed in enumerate(sorted(by_seed))}
        return [float(next(each[seed]).mean()) for seed in seeds]


def of_class(federation: Federated, label: int) -> Federated:
    """The same owners with their images of one class only."""
    kept = {name: one.labels == label for name, one in federation.owners.items()}
    owners = {name: Images(one.images[kept[name]], one.labels[kept[name]]) for name, one in federation.owners.items()}
    return Federated(federation.seed, federation.weight, owners)


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
    return examine(candidates, material, scale, 0, scale.real_repeats)


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
    return worth(material, scale, plan, federations, "biased", validation, exams, 1500, "horse", say, save)


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
    return worth(material, scale, plan, federations, "hospital-1", validation, exams, 200, "MEL", say, save)


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
