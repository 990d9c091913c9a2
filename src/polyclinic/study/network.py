"""What the checks of a study ask of its network: its cuts, its norm layers, and whether it can be built and trained.

Backbones of the package say what they have in class attributes, so that a study is checked without importing torch.
Anybody else's network is built, and looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyclinic.errors import BadInput
from polyclinic.models import BACKBONES, Backbone, Encoded, find, norm_names, split
from polyclinic.models.imported import Imported, channels_of
from polyclinic.privacy.dp_sgd import BATCH_NORM, mixes_samples, obstacles
from polyclinic.randomness import torch_rng
from polyclinic.registry import reason

if TYPE_CHECKING:
    from polyclinic.study.tables import Study


def backbone_of(study: Study) -> type[Backbone]:
    return find(study.model.backbone, size=study.data.size, arguments=study.model.arguments)


def cuts_of(study: Study) -> tuple[str, ...]:
    return tuple(backbone_of(study).stages)[:-1]


def network_of(study: Study) -> Backbone:
    """The study's network, for a look at its layers; its weights are not needed, and have no memory where possible."""
    return backbone_of(study).without_weights(study.data.size, study.model.norm)


def has_batch_norm(study: Study) -> bool:
    """Whether the study's network has batch-norm layers."""
    said = _said_norm_layers(backbone_of(study))
    return bool(norm_names(network_of(study))) if said is None else said and study.model.norm == "batch"


def gives_square_map(study: Study, cut: str) -> bool:
    """Whether a stage gives a square map for a square image, and no vector. Of the package's networks only encoders
    that nobody trains end in a vector before the head; anybody else's is asked with an image that has no memory."""
    kind = backbone_of(study)
    if _said_norm_layers(kind) is not None:
        return not issubclass(kind, Encoded)
    shape = shape_at(study, cut)
    return len(shape) == 3 and shape[1] == shape[2]


def shape_at(study: Study, cut: str) -> tuple[int, ...]:
    """The shape of what a stage gives for one image of the study."""
    network, size = network_of(study), study.data.size
    network.resize_to(study.model.input_size or backbone_of(study).input_side(size), size)
    front = split(network.eval(), cut)[0]
    return tuple(front(torch.zeros(1, 1, size, size, device="meta")).shape[1:])


def network_obstacle(study: Study) -> str | None:
    """Why the study's network cannot be trained with differential privacy: a sentence with the cure, or None."""
    if _said_norm_layers(backbone_of(study)) is None:
        return next(iter(obstacles(network_of(study))), None)
    return BATCH_NORM if has_batch_norm(study) else None


def _said_norm_layers(kind: type[Backbone]) -> bool | None:
    """What a backbone of the package says of itself; None for anybody else's, derived from one of ours or not."""
    return kind.norm_layers if kind.__module__.startswith("polyclinic.") else None


def try_network(name: str, kind: type[Backbone], size: int, norm: str) -> None:
    """BadInput if a plug-in's network cannot be built, or gives a wrong shape: two images are sent through it."""
    where = f"'{name}' ({BACKBONES.origin(name)})"
    try:
        output = kind.without_weights(size, norm).eval()(torch.zeros(2, 1, size, size, device="meta"))
        shape = tuple(output.shape)
    except Exception as error:  # whatever a stranger's network does
        raise BadInput(f"model.backbone: {where} cannot take 1 x {size} x {size} images: {reason(error)}") from None
    wanted = (2, 2, size, size) if kind.dense else (2, 2)
    if shape != wanted:
        raise BadInput(
            f"model.backbone: {where} gives {shape} for 2 images and 2 outputs, and must give {wanted}; mend its last "
            "layer, or its `dense`"
        )


def try_private(study: Study) -> None:
    """BadInput if an importable network cannot be trained with gradients per image: nobody knows before it is tried."""
    kind = backbone_of(study)
    if not issubclass(kind, Imported):
        return
    from polyclinic.privacy.dp_sgd import try_gradients

    assert study.privacy is not None, "asked for private studies only"
    size = study.data.size
    images = torch.rand(2, channels_of(kind), size, size, generator=torch_rng(0, "trial"))
    network = kind.sample(size, study.model.norm)
    mixed = mixes_samples(network.eval(), torch.cat([images, 1 - images]))
    problem = "it mixes the images of a batch" if mixed else try_gradients(network, images, study.privacy.clipping)
    if problem:
        raise BadInput(
            f"privacy.on: {kind.name} cannot be trained with gradients per image ({problem[:120]}); choose another "
            f"network, such as {', '.join(BACKBONES.builtin)}"
        )
