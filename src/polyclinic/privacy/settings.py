"""The `[privacy]` table of a study, and the sentences about what cannot be trained with differential privacy."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator

from polyclinic.errors import BadInput
from polyclinic.privacy.clipped_sums import Clipping
from polyclinic.privacy.epsilon import Accountant, default_delta, sampling_rate_for, steps_for
from polyclinic.settings import Settings

#: what can be trained with differential privacy: by a site, or (primary) by a coordinator on what sites have sent
PrivateNetwork = Literal["classifier", "encoder", "primary", "generator", "prior"]


class Privacy(Settings):
    """Differential privacy of the sites' training images. The classifier stands for the network of any task."""

    on: tuple[PrivateNetwork, ...] = Field(
        ("classifier",),
        min_length=1,
        description="what is trained with it: classifier (the network of any task), encoder, primary (what the "
        "coordinator of fedreplay trains on latents), generator, prior",
    )
    cover: Literal["named", "all"] = Field(
        "named",
        description="named: what `on` names is covered, and the result says what is not; all: a study that would "
        "release anything else is refused, scores included",
    )
    noise_multiplier: float = Field(0.7, gt=0, allow_inf_nan=False, description="deviation of noise, in clipping norms")
    noise_form: Literal["per-batch", "per-image"] = Field(
        "per-batch",
        description="one noise for the sum of a batch's gradients (Abadi et al. 2016), or one for each image of it "
        "(Qu et al. 2022, Algorithm 3 as printed): sqrt(batch size) times as much in the sum",
    )
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=False, description="clipping norm of an image's gradient")
    unit: Literal["image", "patient"] = Field(
        "image",
        description="whom epsilon protects: one image, or a patient, whose images all take part in a step or none "
        "does, and the sum of their gradients is clipped. Needs patients in the data, and a pass for each patient",
    )
    delta: float | None = Field(None, gt=0, lt=1, description="1 / training images of a site if not given")
    target_epsilon: float | None = Field(None, gt=0, allow_inf_nan=False, description="sites stop before this epsilon")
    clipping: Clipping = Field(
        "ghost",
        description="ghost: bound each image's gradient without storing it, where the network's layers allow that; "
        "stored: store the gradient of each image (slower); the results differ by rounding",
    )
    accountant: Accountant = Field("rdp", description="rdp (as in the papers), or prv (tighter, takes seconds)")

    score_noise: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="noise of scores that leave, in units of what one image can change them; each score is entered in "
        "the account like a step. Without it scores on validation and test images leave as they are",
    )

    @field_validator("on")
    @classmethod
    def _once_each(cls, value: tuple[PrivateNetwork, ...]) -> tuple[PrivateNetwork, ...]:
        if len(set(value)) < len(value):
            raise ValueError("must name each part once")
        return value

    def noise_in_sum(self, images: float) -> float:
        """The noise in the sum of a batch of so many images on average, in clipping norms: what an account enters.

        Independent noise of each image adds up in squares. It is drawn for the expected number of images, as the true
        one is private.
        """
        return self.noise_multiplier * math.sqrt(images) if self.noise_form == "per-image" else self.noise_multiplier

    def delta_for(self, images: int) -> float:
        """The delta of a site with so many training images."""
        return self.delta if self.delta is not None else default_delta(images)


@dataclass(frozen=True)
class Facts:
    """The facts of a study that decide whether it can be trained with differential privacy."""

    method: str
    #: what its sites train and could train with differential privacy
    parts: Collection[str]
    #: the method's own reason against, a sentence with the cure
    method_obstacle: str | None = None
    #: the network's reason against, a sentence with the cure
    network_obstacle: str | None = None
    #: the generator's reason against, a sentence with the cure
    generator_obstacle: str | None = None
    #: kinds of parcel that the study releases and that no private training covers
    uncovered: Collection[str] = ()
    #: whether scores on validation or test images are released
    scores: bool = False
    #: why they cannot be noised, a sentence with the cure
    score_obstacle: str | None = None


def check_facts(privacy: Privacy, facts: Facts) -> None:
    """BadInput, with the cure, if the study cannot be trained with differential privacy as it wants to be."""
    if facts.method_obstacle:
        raise BadInput(facts.method_obstacle)
    for part in privacy.on:
        if part not in facts.parts:
            raise BadInput(_not_trained(part, facts))
    if "prior" in privacy.on and "generator" not in privacy.on:
        raise BadInput(
            "privacy.on: a prior learns codes of a generator, which has seen every image without noise; "
            "name 'generator' beside 'prior'"
        )
    if "primary" in privacy.on and "encoder" not in privacy.on:
        raise BadInput(
            "privacy.on: the latents that the primary model learns come from an encoder, which has seen every image of "
            "its site without noise; name 'encoder' beside 'primary'"
        )
    if "primary" in privacy.on and privacy.unit == "patient":
        raise BadInput(
            "privacy.unit: the coordinator does not know whose latents it trains the primary model on; set "
            "privacy.unit = 'image', or take 'primary' out of privacy.on"
        )
    if privacy.score_noise is not None and facts.score_obstacle:
        raise BadInput(facts.score_obstacle)
    if privacy.cover == "all":
        _check_all_covered(privacy, facts)
    if {"generator", "prior"} & set(privacy.on) and facts.generator_obstacle:
        raise BadInput(facts.generator_obstacle)
    if {"classifier", "encoder"} & set(privacy.on) and facts.network_obstacle:
        raise BadInput(facts.network_obstacle)


def _check_all_covered(privacy: Privacy, facts: Facts) -> None:
    """BadInput if the study would release anything that differential privacy does not cover."""
    missing = [part for part in facts.parts if part not in privacy.on]
    if missing:
        raise BadInput(
            f"privacy.cover: 'all' needs every network that sites train in '{facts.method}' to be private; name "
            f"{', '.join(missing)} in privacy.on"
        )
    if "codes" in facts.uncovered:
        raise BadInput(
            "privacy.cover: codes of real images leave the sites, which nothing covers; set replay.codes = 'prior' and "
            "name classifier, generator and prior in privacy.on"
        )
    if facts.uncovered:
        kinds = ", ".join(sorted(facts.uncovered))
        raise BadInput(
            f"privacy.cover: '{facts.method}' releases {kinds} of real images, which nothing covers; choose fedavg, "
            "fedsgd, cwt or another method whose sites release weights only"
        )
    if facts.scores and privacy.score_noise is None:
        raise BadInput(
            "privacy.cover: scores on validation and test images are released as they are; set evaluation.every = 0 "
            "and evaluation.final = 'none', or privacy.score_noise = 5, or privacy.cover = 'named'"
        )


def _not_trained(part: str, facts: Facts) -> str:
    if not facts.parts:
        return f"privacy: sites train nothing in '{facts.method}'; take the table out, or choose another method.name"
    cures = {
        "generator": "add the table [replay], or take 'generator' out",
        "prior": "set replay.codes = 'prior', or take 'prior' out",
    }
    cure = cures.get(part, f"choose from {', '.join(sorted(facts.parts))}")
    return f"privacy.on: sites train no {part} in '{facts.method}' as it is set; {cure}"


def check_budget(privacy: Privacy, images: dict[str, int], batch_size: int) -> None:
    """BadInput if a site could not take a single step without passing the target. `images`: training images by site."""
    if privacy.target_epsilon is None:
        return
    for site, count in images.items():
        delta = privacy.delta_for(count)
        rate = sampling_rate_for(count, batch_size)
        noise = privacy.noise_in_sum(rate * count)
        if steps_for(privacy.target_epsilon, rate, noise, delta, privacy.accountant) == 0:
            raise BadInput(
                f"privacy.target_epsilon: at site '{site}' ({count} training images) a single step spends more than "
                f"{privacy.target_epsilon:g}; raise it or privacy.noise_multiplier"
            )
