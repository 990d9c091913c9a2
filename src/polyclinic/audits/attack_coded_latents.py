"""Attacks on codes of latents (`replay.space = "latents"`): decoded to latents, which are then inverted like any."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from polyclinic.audits.attack_latents import invert
from polyclinic.audits.attack_with_decoder import decode_latents
from polyclinic.audits.views import Finding, NotTried, Seen, Truth
from polyclinic.methods.shared.replay_space import public_limits

if TYPE_CHECKING:
    from polyclinic.audits.views import Tools
    from polyclinic.generators import CodedModel
    from polyclinic.generators.base import Codes
    from polyclinic.training.loop import Trainer

#: why a generator of latents is not attacked by itself
NO_IMAGES = "the generator makes latents and no images; what comes back from its codes is tested"


def invert_codes(seen: Seen, truth: Truth, model: CodedModel, codes: Codes) -> list[Finding | NotTried]:
    """Search for images whose latents are the decoded ones. The frozen layers are public: the attacker has them."""
    tools = seen.tools
    limits = public_limits(public_trainer(tools), tools.image_shape)
    count = 4 * tools.effort.images
    few = {level: values[:count] for level, values in codes.items()}
    latents = limits.to_latents(model.decode(few).float() / 255)
    return [*invert(seen, truth, latents), decode_latents(seen, truth, latents)]


def shape_of_latents(tools: Tools) -> tuple[int, ...]:
    """The shape [C, H, W] of what the study's generator learns."""
    return tuple(public_trainer(tools).latents(np.zeros((1, *tools.image_shape), np.uint8)).shape[1:])


def public_trainer(tools: Tools) -> Trainer:
    """A trainer whose network begins with the public weights, as the study's does."""
    trainer = tools.assembly.trainer()
    trainer.load(tools.assembly.initial_weights())
    return trainer
