"""Attacks on the weights of a network's front, which a SplitNN site hands on after its turn.

The front has no loss of its own: it was trained with gradients at the cut, which the coordinator computed and sent. A
turn of one step is attacked with the very gradients that were sent; of a longer one those of the last step are too
few, and gradients at the cut are searched for together with the images. (Activations of every step left, too.)
"""

from __future__ import annotations

from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.settings import PRESETS
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.audits.run_inversion import invert_and_score
from polyclinic.audits.verdicts import count_of
from polyclinic.audits.views import Finding, NotTried, Seen, Truth
from polyclinic.models import split


def is_front(seen: Seen) -> bool:
    """Whether the site was sent the network up to the study's cut, and nothing else."""
    cut = seen.tools.assembly.study.cut
    if cut is None or seen.kind != "weights":
        return False
    front, _ = split(seen.network, cut)
    return set(front.state_dict()) == set(seen.received("weights"))


def invert_front(seen: Seen, truth: Truth) -> Finding | NotTried:
    """Search for images that move the front as it was moved."""
    study, effort = seen.tools.assembly.study, seen.tools.effort
    at_cut = seen.received("gradients").get("activations")
    if at_cut is None or study.cut is None:
        return NotTried("gradient-inversion", "no gradients at the cut were sent to the site")
    front, _ = split(seen.network, study.cut)
    batches = int(seen.parcel.metadata.get("samples", 1)) // study.optimizer.at_site(seen.site).batch_size
    passes = getattr(study.method, "local_epochs", None) or 1
    steps = getattr(study.method, "local_steps", None) or passes * max(1, batches)
    exact = steps == 1 and study.optimizer.name == "sgd" and len(at_cut) <= effort.images
    changes = {
        "kind": "weights",
        "iterations": effort.update_steps,
        "total_variation": 1e-4,
        "label": "known" if exact else "joint",
    }
    knowledge = Knowledge(
        front,
        seen.tools.image_shape,
        batch_size=len(at_cut) if exact else min(len(at_cut), effort.images),
        loss=loss_with_gradients,
        label_shape=tuple(at_cut.shape[1:]),
        training=LocalTraining(study.optimizer.lr_in(seen.round)),
        labels=at_cut[None] if exact else None,
    )
    settings = PRESETS["geiping"].model_copy(update=changes)
    assumed = [_assumed(steps, knowledge.batch_size, exact)]
    return invert_and_score(seen, truth, settings, knowledge, assumed, has={Capability.LABELS})


def loss_with_gradients(activations: Tensor, gradients: Tensor) -> Tensor:
    """A loss [] whose gradients w.r.t. the activations are `gradients`."""
    return (activations * gradients).sum()


def _assumed(steps: int, images: int, exact: bool) -> str:
    if exact:
        batch = count_of(images, "image")
        return f"the turn was one step on {batch} with the gradients at the cut that the coordinator sent"
    turn = count_of(steps, "step")
    return f"a turn of {turn} is taken for one on {images}, gradients at the cut being searched for too"
