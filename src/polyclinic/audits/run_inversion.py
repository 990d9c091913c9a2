"""Gradient inversion of one kept parcel, scored beside the site's images; of a network's front as well.

A SplitNN site hands on the weights of a front, which has no loss of its own: it was trained with gradients at the cut,
which the coordinator computed and sent. A turn of one step is attacked with the very gradients that were sent; of a
longer one those of the last step are too few, and gradients at the cut are searched for together with the images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.settings import PRESETS, GradientInversion
from polyclinic.attacks.gradient_inversion.simulation import LocalTraining
from polyclinic.attacks.gradient_inversion.solver import ImageTrajectory, Knowledge, Reconstruction
from polyclinic.attacks.scoring import draw_images, non_converging
from polyclinic.audits.attack import Finding, NotTried, SearchSteps, Seen, not_granted
from polyclinic.audits.recovery import Recovery, recovery
from polyclinic.audits.truth import Truth
from polyclinic.audits.verdicts import count_of
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.images import mean_squared_error
from polyclinic.models import split

#: share by which a search may stay above the loss of the true images and still count as ended
ENOUGH = 0.05


def invert_and_score(
    seen: Seen,
    truth: Truth,
    settings: GradientInversion,
    knowledge: Knowledge,
    assumed: list[str],
    *,
    has: Iterable[Capability] = (),
    parcels: Sequence[Parcel] = (),
    doubt: str = "",
    labels: Tensor | None = None,
) -> Finding | NotTried:
    """Run the attack if the threat model grants what it needs; `has`: what the attacker has made itself; `parcels`:
    rounds of the same images, where several are searched together.

    `labels` of the true images [B], where the search simulates the update as it was made: then its loss is compared
    with that of the true images. `doubt`: why a longer attack may win whatever the loss.
    """
    tools = seen.tools
    if refused := not_granted(settings, seen, has=has):
        return refused
    if tools.trajectory:  # else what the study's [audit.gradient_inversion] asks for
        steps = steps_within(tools.trajectory, settings.iterations)
        settings = settings.model_copy(update={"trajectory": steps})
    try:
        back = settings.run(parcels or [seen.parcel], knowledge, seed=tools.seed, device=tools.device)
    except (BadInput, ValueError) as error:  # ValueError: batch norm of a single value
        return NotTried(settings.name, str(error))
    result = recovery(
        back.images[0],
        truth.images(truth.used),
        truth.held_out(tools.effort.candidates)[0].float() / 255,
        in_order=False,
        augmentation=tools.assembly.study.optimizer.augment,
        distance=tools.distance,
        device=tools.device,
        own=truth.used < truth.own if seen.sites > 1 else None,
        where=f"{seen.where}, {settings.name}",
    )
    search = None if back.trajectory is None else search_steps(back.trajectory, result)
    verdict = result.verdict(tools.level)
    verdict.evidence.update(of_search(back, result))
    if not doubt and labels is not None and not verdict.leak:
        known = replace(knowledge, labels=labels[None].expand(max(1, len(parcels)), *labels.shape))
        assert back.distance is not None, "every search tells it"
        doubt = unfinished(seen, truth, settings, known, float(back.distance[0]), parcels)
    return Finding(settings.name, back.threat_model, verdict, assumed, result.draw, search, doubt=doubt)


def of_search(back: Reconstruction, result: Recovery) -> dict[str, float | int]:
    """The error of the images that the search started from, and how many images did not converge."""
    rows = list(result.rows)
    error, start = (mean_squared_error(images[0, rows], result.truth) for images in (back.images, back.start))
    return {"mse_of_start": float(start.mean()), "non_converging": int(non_converging(error, start).sum())}


def unfinished(
    seen: Seen,
    truth: Truth,
    settings: GradientInversion,
    knowledge: Knowledge,
    distance: float,
    parcels: Sequence[Parcel] = (),
) -> str:
    """Why a longer search may win: its gradients are farther from those that were sent than the true images' are, so it
    did not find the best images. Roughness and priors do not count: the true images may be unlikely ones.

    Where it is not, the update itself does not tell more (noise, a defence), however long one searches.
    """
    if seen.tools.assembly.study.optimizer.augment:
        return "images were augmented at random, so that the loss of the true ones is not known"
    start = truth.images(torch.cat(truth.batches))[None].expand(max(1, len(parcels)), -1, -1, -1, -1)
    where = replace(knowledge, start_images=start)
    still = {
        "start": "given",
        "label": "known",
        "iterations": 1,
        "lr": 1e-9,
        "restarts": 1,
        "trajectory": (),
        "scales": (),
    }
    try:
        at_truth = settings.model_copy(update=still).run(
            parcels or [seen.parcel], where, seed=0, device=seen.tools.device
        )
    except (BadInput, ValueError) as error:
        return f"the loss of the true images is not known ({error})"
    assert at_truth.distance is not None, "every search tells it"
    best = float(at_truth.distance[0])
    if distance <= best * (1 + ENOUGH):
        return ""
    found = f"its distance is {distance:.2g}, that of the true images {best:.2g}"
    return f"the search had not ended: {found}; use a larger budget"


def steps_within(wanted: tuple[int, ...], iterations: int) -> tuple[int, ...]:
    """The steps that the search will take, and its last one."""
    return (*(step for step in wanted if step < iterations), iterations)


def search_steps(kept: ImageTrajectory, result: Recovery, most: int = 6) -> SearchSteps:
    """Loss and distance at the kept steps, and a picture of the images that came back best, each beside its true one.

    No picture where some of the images may be another site's.
    """
    loss, distance = (values[0].tolist() for values in (kept.loss, kept.distance))
    if result.shown is not None:
        return SearchSteps(kept.steps, loss, distance)
    best = result.error.argsort()[:most]
    images = {f"image {n + 1}": kept.images[0, :, result.rows[i]] for n, i in enumerate(best.tolist())}
    where = f"{result.where}, the best {len(best)} of {len(result.error)}"
    draw = partial(draw_images, rows=images, steps=kept.steps, truth=result.truth[best], where=where)
    return SearchSteps(kept.steps, loss, distance, draw)


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
