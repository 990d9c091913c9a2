"""What made images are worth to their owner: classifiers from them alone and beside real ones, many at once.

Used by FELICIA's second and third experiment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from felicia_common import Material, Save, Scale, stacked, train
from torch import Tensor

from polyclinic.generators.gan.learners import Lesson, LessonNetwork, auc, teach
from polyclinic.generators.gan.model import GAN
from polyclinic.generators.gan.owners import Federated, Images
from polyclinic.randomness import seed_of
from polyclinic.tasks import Target

TAUGHT_AT_ONCE = 96  # classifiers: a GPU is busy with them, and its memory lasts


@dataclass(frozen=True)
class Exam:
    """Real images that no network has seen, the same for all, with their sub-groups."""

    images: Tensor
    labels: np.ndarray
    subgroup: np.ndarray

    def mark(self, logits: Tensor) -> dict[str, float]:
        """AUC, accuracy, both of each sub-group, and the mean of the sub-groups' accuracies.

        A sub-group's AUC is against the other class: it does not move with the threshold, as accuracies do.
        """
        scores = (logits[:, 1] - logits[:, 0]).cpu().numpy()
        right = (scores > 0) == (self.labels == 1)
        marks = {"auc": auc(scores, self.labels == 1), "accuracy": float(right.mean())}
        groups = {str(name): self.subgroup == name for name in np.unique(self.subgroup)}
        accuracies = {name: float(right[own].mean()) for name, own in groups.items()}
        aucs = {f"auc of {name}": self._against_the_other_class(scores, own) for name, own in groups.items()}
        return {**marks, "mean": float(np.mean(list(accuracies.values()))), **accuracies, **aucs}

    def _against_the_other_class(self, scores: np.ndarray, own: np.ndarray) -> float:
        label = self.labels[own][0]
        kept = own | (self.labels != label)
        return auc(scores[kept] * (1 if label == 1 else -1), own[kept])


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
    apart = settings.condition == "apart"
    if apart:
        settings, target = of_one_class(settings), Target()
        trained = [of_class(one, label) for one in federations for label in CLASSES]
    owners, expert = (
        stacked(settings, material.term(scale), trained, target, scale, say),
        Expert(material, scale, rare),
    )
    say(f"tells {rare} from the rest of its class: {expert.right} right")
    real = [one.owners[owner] for one in federations]
    base, rows = real_only(material, scale, plan, real, validation, exams), []
    made_labels = torch.arange(2 * made_per_class) % 2
    pictures: dict[str, np.ndarray] = {}

    def look(step: int, images: int) -> None:
        candidates, seen = [], [torch.empty(0)] * len(plan)
        every = owners.samples(made_labels, f"worth {step}")
        for place, key in enumerate(plan):
            makers = [len(CLASSES) * place + label for label in CLASSES] if apart else [place] * len(CLASSES)
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
            if key["seed"] == scale.first_seed:
                name = "/".join(f"{k}={v}" for k, v in key.items() if k != "seed")
                pictures[name] = made[:24].numpy()
        shares = expert.shares([key["seed"] for key in plan], seen)
        for place, row in enumerate(examine(candidates, material, scale, images, scale.repeats)):
            rows.append({**row, "rare_share": shares[place // len(DIETS)]})
        save(found)

    found: dict[str, Any] = {"training": {}, "real": base, "rows": rows, "pictures": pictures, "expert": expert.right}
    found |= {"rare": rare, "usual": expert.usual}
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
        of_class = np.unique(material.dataset.subgroup[material.dataset.labels == self.label])
        self.usual = next(str(name) for name in of_class if name != rare)
        self.parts = [self._of_class(material, material.splits(seed), rare) for seed in scale.each_seed()]
        channels, size = material.dataset.images.shape[1:3]
        lessons = [
            Lesson(parts["train"], parts["validation"], seed_of(seed, "expert"))
            for seed, parts in zip(scale.each_seed(), self.parts, strict=True)
        ]
        how: dict[str, Any] = {"steps": 2 * scale.learner_steps, "batch_size": 64, "lr": 1e-3, "device": scale.device}
        self.taught = teach(lessons, lambda: LessonNetwork(channels, 2, size), 2, **how, **scale.quickly())
        self.right = [round(self._accuracy(place), 3) for place in range(scale.seeds)]

    def _of_class(self, material: Material, splits: dict[str, np.ndarray], rare: str) -> dict[str, Images]:
        found = {}
        for name, index in splits.items():
            own = index[material.dataset.labels[index] == self.label]
            assert material.dataset.subgroup is not None
            is_rare = torch.from_numpy((material.dataset.subgroup[own] == rare).astype(np.int64))
            found[name] = Images(material.images(own).images, is_rare)
        return found

    def _accuracy(self, place: int) -> float:
        """Mean of both sub-groups, on test images."""
        test = self.parts[place]["test"]
        says = self.taught.logits(test.images)[place].argmax(-1).cpu()
        return float(np.mean([(says[test.labels == one] == one).float().mean() for one in (0, 1)]))

    def shares(self, seeds: list[int], sets: list[Tensor]) -> list[float]:
        """Of each set of made images (all as many) the share that its seed's expert takes for the rare sub-group."""
        by_seed = {seed: torch.cat([one for s, one in zip(seeds, sets, strict=True) if s == seed]) for seed in seeds}
        says = self.taught.logits_of_each([by_seed[seed] for seed in sorted(by_seed)]).argmax(-1).float()
        each = {seed: iter(says[place].split(len(sets[0]))) for place, seed in enumerate(sorted(by_seed))}
        return [float(next(each[seed]).mean()) for seed in seeds]


def of_one_class(settings: GAN) -> GAN:
    """Where classes have networks of their own: those of one, which get their share of a batch."""
    share = max(1, settings.batch_size // len(CLASSES))
    return settings.model_copy(update={"condition": "none", "balance": False, "batch_size": share})


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
