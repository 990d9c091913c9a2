"""Gradient inversion of one kept parcel, scored beside the site's images; of a network's front as well.

A SplitNN site hands on the weights of a front, which has no loss of its own: it was trained with gradients at the cut,
which the coordinator computed and sent. A turn of one step is attacked with the very gradients that were sent; of a
longer one those of the last step are too few, and gradients at the cut are searched for together with the images.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.gradient_inversion.objective import LocalTraining
from polyclinic.attacks.gradient_inversion.priors import GaussianPrior
from polyclinic.attacks.gradient_inversion.settings import PRESETS, GradientInversion
from polyclinic.attacks.gradient_inversion.solver import ImageTrajectory, Knowledge
from polyclinic.attacks.scoring import draw_images, non_converging
from polyclinic.audits.attack import Finding, NotTried, SearchSteps, Seen, not_granted
from polyclinic.audits.recovery import Recovery, score_unordered
from polyclinic.audits.truth import Truth, start_near
from polyclinic.audits.verdicts import count_of
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.images import mean_squared_error
from polyclinic.models import split
from polyclinic.study.tables import Effort

#: a search for so few images is cheap, and takes more steps
FEW, FEW_TIMES = 1, 5
#: learning rate of a search that starts from images; Geiping et al.'s 0.1 is for one that starts from noise
FROM_IMAGES = 0.01
#: weights of a prior of public images beside a cosine distance, where one image is searched for and where several are;
#: tried with seeds that no counted case has (docs/audit.md)
IMAGE_PRIOR, IMAGES_PRIOR = 1e-4, 1e-3
#: share by which a search may stay above the loss of the true images and still count as ended
ENOUGH = 0.05


@dataclass(frozen=True)
class Search:
    """A search for the images behind an update: the attack, what it knows, and what it takes for granted in words.

    `parcels`: the update, or rounds of the same images that are searched together. `doubt`: why a longer attack may
    win whatever the loss."""

    settings: GradientInversion
    knowledge: Knowledge
    assumed: list[str]
    parcels: tuple[Parcel, ...]
    doubt: str = ""

    def knowing(self, known: dict[str, Any], settings: dict[str, Any], words: str) -> "Search":
        """The same with more knowledge, and settings that use it."""
        return replace(
            self,
            settings=self.settings.model_copy(update=settings),
            knowledge=replace(self.knowledge, **known),
            assumed=[*self.assumed, words],
        )

    def from_images(self, own: Tensor, seed: int, words: str) -> "Search":
        """The same from the mean of the attacker's own images [M, C, H, W], which are its prior as well.

        A start that looks like an image is worth more than a longer search: 500 steps from here gave 32 dB where 1,000
        from noise gave 25 (LeNet-5, one image of 28 px)."""
        count = self.knowledge.batch_size
        known = {"start_images": start_near(own, count, seed)[None], "image_prior": GaussianPrior.of(own)}
        weight = IMAGE_PRIOR if count == 1 else IMAGES_PRIOR
        return self.knowing(known, {"start": "given", "lr": FROM_IMAGES, "image_prior": weight}, words)


def geiping(effort: Effort, images: int, **changes: Any) -> GradientInversion:
    """The attack of Geiping et al.: its cosine does not mind that an update's length says little about its images.

    Their weight of roughness is for 224 px; on small images a hundredth of it gave 8 dB more.
    """
    steps = effort.update_steps * (FEW_TIMES if images <= FEW else 1)
    return PRESETS["geiping"].model_copy(update={"iterations": steps, "total_variation": 1e-4, **changes})


def invert_and_score(
    seen: Seen, truth: Truth, search: Search, *, has: Iterable[Capability] = (), labels: Tensor | None = None
) -> Finding | NotTried:
    """Run the attack if the threat model grants what it needs; `has`: what the attacker has made itself.

    `labels` of the true images [B], where the search simulates the update as it was made: then its loss is compared
    with that of the true images.
    """
    tools, settings, doubt = seen.tools, search.settings, search.doubt
    made = {*has, *([Capability.PRIOR] if settings.start == "given" else [])}
    if refused := not_granted(settings.name, settings.needs - made, seen):
        return refused
    if tools.trajectory:  # else what the study's [audit.gradient_inversion] asks for
        steps = (*(step for step in tools.trajectory if step < settings.iterations), settings.iterations)
        settings = settings.model_copy(update={"trajectory": steps})
    try:
        back = settings.run(search.parcels, search.knowledge, seed=tools.seed, device=tools.device)
    except (BadInput, ValueError) as error:  # ValueError: batch norm of a single value
        return NotTried(settings.name, str(error))
    result = score_unordered(seen, truth, back.images[0], settings.name)
    shown = None if back.trajectory is None else search_steps(back.trajectory, result)
    verdict = result.verdict(tools.level)
    # the error of the images that the search started from, and how many images did not converge
    rows = list(result.rows)
    after, start = (mean_squared_error(images[0, rows], result.truth) for images in (back.images, back.start))
    verdict.evidence.update(mse_of_start=float(start.mean()), non_converging=int(non_converging(after, start).sum()))
    if not doubt and labels is not None and not verdict.leak:
        assert back.distance is not None, "every search tells it"
        doubt = unfinished(seen, truth, replace(search, settings=settings), labels, float(back.distance[0]))
    return Finding(settings.name, back.threat_model, verdict, search.assumed, result.draw, shown, doubt=doubt)


def unfinished(seen: Seen, truth: Truth, search: Search, labels: Tensor, distance: float) -> str:
    """Why a longer search may win: its gradients are farther from those that were sent than the true images' are, so it
    did not find the best images. Roughness and priors do not count: the true images may be unlikely ones.

    Where it is not, the update itself does not tell more (noise, a defence), however long one searches.
    """
    if seen.tools.assembly.study.optimizer.augment:
        return "images were augmented at random, so that the loss of the true ones is not known"
    rounds = len(search.parcels)
    start = truth.images(torch.cat(truth.batches))[None].expand(rounds, -1, -1, -1, -1)
    where = replace(search.knowledge, labels=labels[None].expand(rounds, *labels.shape), start_images=start)
    once = {"iterations": 1, "lr": 1e-9, "restarts": 1, "trajectory": ()}
    settings = search.settings.model_copy(update={"start": "given", "label": "known", **once})
    try:
        at_truth = settings.run(search.parcels, where, seed=0, device=seen.tools.device)
    except (BadInput, ValueError) as error:
        return f"the loss of the true images is not known ({error})"
    assert at_truth.distance is not None, "every search tells it"
    best = float(at_truth.distance[0])
    if distance <= best * (1 + ENOUGH):
        return ""
    found = f"its distance is {distance:.2g}, that of the true images {best:.2g}"
    return f"the search had not ended: {found}; use a larger budget"


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
    knowledge = Knowledge(
        front,
        seen.tools.image_shape,
        batch_size=len(at_cut) if exact else min(len(at_cut), effort.images),
        loss=loss_with_gradients,
        label_shape=tuple(at_cut.shape[1:]),
        training=LocalTraining(study.optimizer.lr_in(seen.round)),
        labels=at_cut[None] if exact else None,
    )
    label = "known" if exact else "joint"
    settings = geiping(effort, knowledge.batch_size, kind="weights", label=label, iterations=effort.update_steps)
    search = Search(settings, knowledge, [_assumed(steps, knowledge.batch_size, exact)], (seen.parcel,))
    return invert_and_score(seen, truth, search, has={Capability.LABELS})


def loss_with_gradients(activations: Tensor, gradients: Tensor) -> Tensor:
    """A loss [] whose gradients w.r.t. the activations are `gradients`."""
    return (activations * gradients).sum()


def _assumed(steps: int, images: int, exact: bool) -> str:
    if exact:
        batch = count_of(images, "image")
        return f"the turn was one step on {batch} with the gradients at the cut that the coordinator sent"
    turn = count_of(steps, "step")
    return f"a turn of {turn} is taken for one on {images}, gradients at the cut being searched for too"
