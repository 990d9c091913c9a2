"""Signs of a poor result, each as one sentence with the cure: said while a run goes on, and kept in its result.

`before` looks at the study and the counts of images, `Watch` at every scored round, `after` at what came out.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyclinic.data.labels import tells_class
from polyclinic.data.parts import PreparedSites, open_site
from polyclinic.federation.call import Reply
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.one_round import OneRound
from polyclinic.study import Study
from polyclinic.tasks import Task

#: scored rounds in a row after which a sign of a poor result is no accident
ROUNDS_TO_JUDGE = 3
FEWEST_STEPS = 10  #: of a site in a round
ENOUGH_STEPS = 500  #: of a site in all rounds, however few it takes in one
FEWEST_VALIDATION = 30  #: images of all sites together, below which the best round is a matter of luck
LEAST_PSNR = 18.0  #: dB of replayed images
LEAST_USAGE = 0.05  #: share of a generator's codes that occur
LEAST_DICE = 0.05
NEXT_TO_NOTHING = 0.01  #: what a score must be above that of guessing to count as better
WEAK = 0.2  #: of the way from guessing to a balanced accuracy of 1, below which a model is a poor one


# --- before the first round -----------------------------------------------------------------------------


def before(study: Study, info: JsonMapping) -> Iterator[str]:
    """What the study and the counts of images tell."""
    method, classes = study.method, info.get("class_counts") or {}
    # how many images a deployed site has is not known at the coordinator
    counts = {site: own for site, own in (info.get("counts") or {}).items() if own}
    batches = {site: study.optimizer.at_site(site).batch_size for site in counts}
    if left := info.get("left_out"):
        sites = ", ".join(f"{count} of {name}" for name, count in left.items())
        yield f"images of sites that sites.names does not list are left out: {sites}; add the sites there to use them"
    known = [own["train"] for own in classes.values() if own]
    # where a study spreads images itself, that the hospital nearly is the class may be meant so
    if study.sites.partition == "column" and study.task.like == "classification" and known:
        yield from [class_is_site(*found)] if (found := tells_class(known)) else []
    small = [site for site, own in counts.items() if own["train"] < batches[site]]
    if small and not isinstance(method, OneRound):
        site = min(small, key=lambda name: counts[name]["train"])
        yield (
            f"site '{site}' has {counts[site]['train']} training images, fewer than one batch of {batches[site]}; "
            "lower optimizer.batch_size"
        )
    if isinstance(method, LocalWork) and counts:
        passes = max(max(1, own["train"] // batches[site]) for site, own in counts.items())
        steps = method.local_steps or (method.local_epochs or 1) * passes  # as `LocalWork.steps_at` counts them
        if steps < FEWEST_STEPS and steps * method.rounds <= ENOUGH_STEPS:
            yield (
                f"a site takes {steps} step{'s' * (steps > 1)} a round at most, {steps * method.rounds} in all; lower "
                "optimizer.batch_size, or raise method.local_epochs"
            )
    images = sum(own["validation"] for own in counts.values())
    chooses = study.evaluation.select == "best" and study.evaluation.every > 0 and method.rounds > 1
    if counts and chooses and images < FEWEST_VALIDATION:
        yield (
            f"{images} validation images are too few to choose the best round by; raise data.validation, or set "
            "evaluation.select = 'last'"
        )


# --- while rounds go on --------------------------------------------------------------------------------


class Watch:
    """Sees every scored round; says what several in a row have shown."""

    def __init__(self, memory: JsonMapping | None = None) -> None:
        """`memory`: what a checkpoint kept of it, so that a resumed run says the same."""
        known = memory or {}
        self.one_class = int(known.get("one_class", 0))
        self.losses: list[float] = list(known.get("losses", []))
        self.some_told_apart = bool(known.get("some_told_apart", False))
        self.best_is_one_class = bool(known.get("best_is_one_class", False))

    def memory(self) -> JsonObject:
        """What a checkpoint must keep; no more losses are needed than are looked at."""
        return {
            "one_class": self.one_class,
            "losses": self.losses[: ROUNDS_TO_JUDGE + 2],
            "some_told_apart": self.some_told_apart,
            "best_is_one_class": self.best_is_one_class,
        }

    def scored(self, task: Task, replies: Sequence[Reply], pooled: Mapping[str, float]) -> Iterator[str]:
        """Sentences about the rounds so far, each of which is said once."""
        self.one_class = self.one_class + 1 if predicts_one_class(task, replies) else 0
        self.some_told_apart |= self.one_class == 0
        if "loss" in pooled:
            self.losses.append(pooled["loss"])
        if self.one_class == ROUNDS_TO_JUDGE:
            yield (
                f"the model has put every validation image into the same class in {ROUNDS_TO_JUDGE} rounds; raise "
                "method.rounds or method.local_epochs, lower optimizer.batch_size, or try another optimizer.lr"
            )
        if len(self.losses) == ROUNDS_TO_JUDGE + 1 and min(self.losses[1:]) >= self.losses[0]:
            yield (
                f"the validation loss has not fallen since the first round ({self.losses[0]:.3g}, now "
                f"{self.losses[-1]:.3g}); lower optimizer.lr, or train longer in each round (method.local_epochs)"
            )

    def choose(self) -> None:
        """The round that was scored last is the best so far."""
        self.best_is_one_class = self.one_class > 0

    def chosen(self, study: Study) -> str | None:
        """What to say of the round that was chosen: a metric of ranks such as AUC does not see one class."""
        if not (self.best_is_one_class and self.some_told_apart and study.evaluation.select == "best"):
            return None
        metric = study.evaluation.metric or study.task.metric
        other = "balanced_accuracy" if metric != "balanced_accuracy" else "accuracy"
        return (
            f"the round that {metric} chose puts every validation image into the same class, and another round does "
            f"not; set evaluation.metric = '{other}', or train longer (method.rounds, method.local_epochs)"
        )


def predicts_one_class(task: Task, replies: Sequence[Reply]) -> bool:
    """Whether images of several classes were all put into one."""
    sums = [dict(reply.metrics) for reply in replies if reply.parcels]
    confusion = functools.reduce(task.add, sums).get("confusion") if sums else None
    if confusion is None:
        return False
    return int((confusion.sum(0) > 0).sum()) == 1 and int((confusion.sum(1) > 0).sum()) > 1


# --- at the end -----------------------------------------------------------------------------------------


def after(study: Study, guessed: Mapping[str, float], metrics: JsonMapping, reports: JsonMapping) -> list[str]:
    """What the released model's scores, beside those `guessed` without images, and the generator's figures tell."""
    pooled = metrics.get("test") or (metrics.get("validation") or {}).get("pooled") or {}
    scored = guessing(study, pooled, guessed) if study.evaluation.final != "none" else None
    found = (scored, poor_replay(reports.get("replay") or {}), no_help(study.task, metrics.get("diets") or {}))
    return [sentence for sentence in found if sentence]


def guessed_scores(study: Study, parts: PreparedSites) -> dict[str, float]:
    """Scores, by metric, of somebody who has seen no image, on the images that score the model. Empty for masks, one
    class only, deployed sites (their labels are their own) and a study without a last evaluation."""
    task, split = study.task, study.evaluation.final
    if task.name == "multilabel":
        return {}
    if task.like == "classification" and split != "none":
        counts = [of_site[split] for of_site in (parts.info.get("class_counts") or {}).values() if of_site]
        total = np.sum(counts, axis=0) if counts else np.zeros(0)
        there = int((total > 0).sum())
        return {} if there < 2 else {"accuracy": float(total.max() / total.sum()), "balanced_accuracy": 1 / there}
    if task.like != "regression" or split == "none" or not all((parts.folder / one).is_dir() for one in parts.names):
        return {}  # at deployed sites nobody sees the labels
    sites = [open_site(parts.folder, name) for name in parts.names]
    known = np.concatenate([site.train.labels for site in sites])
    asked = np.concatenate([getattr(site, split).labels for site in sites])
    if not len(known) or not len(asked):
        return {}
    errors = asked - known.mean()
    return {"mae": float(np.abs(errors).mean()), "rmse": float(np.sqrt((errors**2).mean()))}


def guessing(study: Study, pooled: Mapping[str, float], guessed: Mapping[str, float]) -> str | None:
    """Whether the model is no better than the guess of somebody who has seen no image, or little better."""
    if study.task.like == "segmentation":
        dice = pooled.get("dice")
        if dice is None or dice > LEAST_DICE:
            return None
        return f"the masks hit next to nothing (Dice {dice:.3f}); {_cure(study)}"
    if study.task.like == "classification":
        return _majority(study, pooled, guessed)
    return _mean(study, pooled, guessed)


def _cure(study: Study) -> str:
    if isinstance(study.method, OneRound):
        return "try another model.backbone, or a method that trains in rounds"
    return "train longer (method.rounds, method.local_epochs), or try another optimizer.lr"


def _majority(study: Study, pooled: Mapping[str, float], guessed: Mapping[str, float]) -> str | None:
    if not {"accuracy", "balanced_accuracy"} <= {*pooled} & {*guessed}:
        return None
    share, even = guessed["accuracy"], guessed["balanced_accuracy"]
    better, found = pooled["accuracy"] > share + NEXT_TO_NOTHING, pooled["balanced_accuracy"] - even
    if not better and found <= 5 * NEXT_TO_NOTHING:
        return (
            f"the model is no better than always saying the most frequent class (accuracy {pooled['accuracy']:.3f}, "
            f"and {share:.3f} without a look at the images); {_cure(study)}"
        )
    if found >= WEAK * (1 - even) or not (better or pooled["accuracy"] < share):
        return None
    settled = study.optimizer.balanced_batches or isinstance(study.method, OneRound)
    balance = "" if settled else "set optimizer.balanced_batches = true; "
    return (
        f"the model is weak: it finds few images of some classes (balanced accuracy {pooled['balanced_accuracy']:.3f}, "
        f"and {even:.3f} without a look at the images; accuracy {pooled['accuracy']:.3f}, and {share:.3f}); "
        f"{balance}{_cure(study)}"
    )


def _mean(study: Study, pooled: Mapping[str, float], guessed: Mapping[str, float]) -> str | None:
    if not {"mae"} <= {*pooled} & {*guessed} or pooled["mae"] < guessed["mae"] * (1 - NEXT_TO_NOTHING):
        return None
    return (
        f"the model is no better than always saying the mean (mean absolute error {pooled['mae']:.3g}, and "
        f"{guessed['mae']:.3g} without a look at the images); {_cure(study)}"
    )


def poor_replay(found: Mapping[str, float]) -> str | None:
    """Whether replayed images are too far from real ones to stand for them."""
    used = [value for name, value in found.items() if name.startswith("code_usage_")]
    psnr = found.get("psnr")
    if (psnr is None or psnr >= LEAST_PSNR) and (not used or max(used) >= LEAST_USAGE):
        return None
    words = [*([f"come back at {psnr:.1f} dB"] if psnr is not None else [])]
    words += [f"use {max(used):.0%} of the codes"] if used else []
    cure = "raise generator.epochs, or lower generator.batch_size"
    return f"replayed images {' and '.join(words)}, which is poor; {cure}"


def no_help(task: Task, diets: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Whether synthetic images beside real ones made networks no better at most of the sites."""
    higher = 1 if task.better == "higher" else -1
    pairs = [
        (table["real"]["test"][task.metric], table["augmented"]["test"][task.metric])
        for table in diets.values()
        if table and task.metric in table.get("real", {}).get("test", {}) and table.get("augmented")
    ]
    worse = sum(higher * (augmented - real) <= 0 for real, augmented in pairs)
    if not pairs or worse <= len(pairs) / 2:
        return None
    return (
        f"synthetic images did not help: at {worse} of {len(pairs)} sites a network is no better with them than with "
        "the site's own images alone; raise method.rounds, or choose another [generator]"
    )


def class_is_site(told: float, most: float) -> str:
    """What to say where the hospital nearly is the class."""
    return (
        f"the site alone tells the class of {told:.0%} of the images (the most frequent class has {most:.0%}): a model "
        "can learn to recognise hospitals instead of diseases; look at the scores of each site, and add images of "
        "other classes there"
    )
