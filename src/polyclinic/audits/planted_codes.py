"""Planted codes: held-out images as the generator that was sent encodes them, with half of their codes exchanged.

They show the power of decoding. The codes that are exchanged come from other images at the same place, so that the
decoder still makes plausible images.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyclinic.audits.attack_coded_latents import public_trainer
from polyclinic.audits.planted_truth import truth_of_held_out
from polyclinic.audits.views import Planted, Seen, Tools, Truth
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.generators import CodedModel
from polyclinic.generators.base import as_tensor
from polyclinic.generators.replay_stream import SiteCodes, to_groups
from polyclinic.methods.shared.replay_space import public_limits
from polyclinic.randomness import torch_rng

EXCHANGED = 0.5  #: the share of an image's codes that are other images'


def planted_codes(seen: Seen, truth: Truth, model: CodedModel) -> list[Planted]:
    """Codes of as many held-out images as the budget asks about, half of each drawn anew."""
    other = truth_of_held_out(truth, seen.tools.effort.candidates)
    if other is None:
        return []
    part = other.data.train
    codes = model.encode(learned_images(seen.tools, as_tensor(part.images)))
    rng = torch_rng(seen.tools.seed, "audit", "planted codes")
    mixed = {level: exchange(values, EXCHANGED, rng) for level, values in codes.items()}
    groups = to_groups({seen.site: SiteCodes(mixed, as_tensor(part.labels))}, model)
    parcels = {kind: Parcel(kind, tensors) for kind, tensors in groups.items()}
    rest = tuple(one for one in seen.together if one.kind not in parcels)
    words = f"codes of {len(part)} held-out images, of which {EXCHANGED:.0%} are other images' codes"
    changed = replace(seen, parcel=parcels["codes"], together=(*parcels.values(), *rest))
    return [Planted("mixed codes", words, changed, other)]


def learned_images(tools: Tools, images: Tensor) -> Tensor:
    """What the study's generator learns of images uint8: themselves, or their latents rounded to bytes."""
    if not tools.assembly.study.in_latents:
        return images
    trainer = public_trainer(tools)
    return public_limits(trainer, tools.image_shape).to_bytes(trainer.latents(images.numpy()))


def exchange(codes: Tensor, share: float, rng: torch.Generator) -> Tensor:
    """Codes [N, h, w] in which a share of the places of each image have another image's code of the same place."""
    flat = codes.flatten(1)
    other = torch.rand(flat.shape, generator=rng).argsort(0)
    taken = torch.rand(flat.shape, generator=rng) < share
    return torch.where(taken, flat.gather(0, other), flat).reshape(codes.shape)
