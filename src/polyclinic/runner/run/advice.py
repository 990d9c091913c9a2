"""Signs of a poor result, each as one sentence with the cure: said while a run goes on, and kept in its result.

`before` looks at the study and the counts of images, `after` at what came out. (`recorder.Watch` sees the rounds.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyclinic.data.labels import tells_class
from polyclinic.json_types import JsonMapping
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.one_round import OneRound
from polyclinic.study import Study
from polyclinic.tasks import Task

FEWEST_STEPS = 10  #: of a site in a round
ENOUGH_STEPS = 500  #: of a site in all rounds, however few it takes in one
FEWEST_VALIDATION = 30  #: images of all sites together, below which the best round is a matter of luck
LEAST_PSNR = 18.0  #: dB of replayed images
LEAST_USAGE = 0.05  #: share of a generator's codes that occur
LEAST_DICE = 0.05
NEXT_TO_NOTHING = 0.01  #: what a score must be above that of guessing to count as better
WEAK = 0.2  #: of the way from guessing to a balanced accuracy of 1, below which a model is a poor one


# --- before the first round -----------------------------------------------------------------------------


def before(study: Study, info: JsonMapping) -> list[str]:
    """What the study and the counts of images tell."""
    # how many images a deployed site has is not known at the coordinator
    counts = {site: own for site, own in (info.get("counts") or {}).items() if own}
    found = (
        _left_out(info),
        _hospitals(study, info),
        _batches(study, counts),
        _few_steps(study, counts),
        _small_validation(study, counts),
    )
    return [sentence for sentence in found if sentence]


def _left_out(info: JsonMapping) -> str | None:
    left = info.get("left_out") or {}
    if not left:
        return None
    sites = ", ".join(f"{count} of {name}" for name, count in left.items())
    return f"images of sites that sites.names does not list are left out: {sites}; add the sites there to use them"


def _hospitals(study: Study, info: JsonMapping) -> str | None:
    """Whether the hospital nearly is the class. Where a study spreads images itself, it may be meant so."""
    counts = info.get("class_counts") or {}
    known = [own["train"] for own in counts.values() if own]
    if study.sites.partition != "column" or study.task.like != "classification" or not known:
        return None
    return class_is_site(*found) if (found := tells_class(known)) else None


def _batches(study: Study, counts: JsonMapping) -> str | None:
    small = {
        site: own["train"] for site, own in counts.items() if own["train"] < study.optimizer.at_site(site).batch_size
    }
    if not small or isinstance(study.method, OneRound):
        return None
    site = min(small, key=lambda name: small[name])
    return (
        f"site '{site}' has {small[site]} training images, fewer than one batch of "
        f"{study.optimizer.at_site(site).batch_size}; lower optimizer.batch_size"
    )


def _few_steps(study: Study, counts: JsonMapping) -> str | None:
    method = study.method
    if not isinstance(method, LocalWork) or not counts:
        return None
    steps = max(_steps(study, method, site, own["train"]) for site, own in counts.items())
    if steps >= FEWEST_STEPS or steps * method.rounds > ENOUGH_STEPS:
        return None
    return (
        f"a site takes {steps} step{'s' * (steps > 1)} a round at most, {steps * method.rounds} in all; lower "
        "optimizer.batch_size, or raise method.local_epochs"
    )


def _steps(study: Study, method: LocalWork, site: str, images: int) -> int:
    """Steps of a site in a round, as `LocalWork.steps_at` counts them."""
    in_a_pass = max(1, images // study.optimizer.at_site(site).batch_size)
    return method.local_steps or (method.local_epochs or 1) * in_a_pass


def _small_validation(study: Study, counts: JsonMapping) -> str | None:
    images = sum(own["validation"] for own in counts.values())
    chooses = study.evaluation.select == "best" and study.evaluation.every > 0 and study.method.rounds > 1
    if not counts or not chooses or images >= FEWEST_VALIDATION:
        return None
    return (
        f"{images} validation images are too few to choose the best round by; raise data.validation, or set "
        "evaluation.select = 'last'"
    )


# --- at the end -----------------------------------------------------------------------------------------


def after(study: Study, guessed: Mapping[str, float], metrics: JsonMapping, reports: JsonMapping) -> list[str]:
    """What the released model's scores, beside those `guessed` without images, and the generator's figures tell."""
    pooled = metrics.get("test") or (metrics.get("validation") or {}).get("pooled") or {}
    scored = guessing(study, pooled, guessed) if study.evaluation.final != "none" else None
    found = (scored, poor_replay(reports.get("replay") or {}), no_help(study.task, metrics.get("diets") or {}))
    return [sentence for sentence in found if sentence]


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
    if better or found > 5 * NEXT_TO_NOTHING:
        weak = better or pooled["accuracy"] < share
        return _rarer_missed(study, pooled, guessed) if weak and found < WEAK * (1 - even) else None
    return (
        f"the model is no better than always saying the most frequent class (accuracy {pooled['accuracy']:.3f}, and "
        f"{share:.3f} without a look at the images); {_cure(study)}"
    )


def _rarer_missed(study: Study, pooled: Mapping[str, float], guessed: Mapping[str, float]) -> str:
    balance = "" if isinstance(study.method, OneRound) else "set optimizer.balanced_batches = true; "
    return (
        f"the model is weak: it finds few images of some classes (balanced accuracy {pooled['balanced_accuracy']:.3f}, "
        f"and {guessed['balanced_accuracy']:.3f} without a look at the images; accuracy {pooled['accuracy']:.3f}, and "
        f"{guessed['accuracy']:.3f}); {balance}{_cure(study)}"
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
    return (
        f"replayed images {' and '.join(words)}, which is poor; raise generator.epochs, or lower generator.batch_size"
    )


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
