"""Layer of the incoming check: a site inspects what a coordinator sends before it works with it.

What each figure measures, and which attack it stops:

- form: names, shapes, dtypes and kind are those that the operation takes (call_checks.py). Stops parts of a network
  that are left out, or sent as another kind.
- `largest`: the largest number, NaN and infinity included. Stops overflow filters: one image becomes infinite.
- `empty`: the share of a layer's rows that are zero. Stops networks whose units are all switched off but a few.
- `alike`: the share of a layer's rows that point the same way. Stops imprinted layers: bins are one row with other
  biases, and convolutions that are opened to let images through.
- `moved`: how far a row moved since weights last arrived, beside the site's own training. Stops imprints, traps,
  fishing, crafted sums, another network than the seed gives, and a control variate that carries one.
- `step`, `sgd_rate`: how long the study's steps are. Stops a learning rate that makes room for any weights.
- `dominance`: the share of one image in a gradient for a batch. Stops a gradient at the cut that is about one image.
- `longer`: gradients and generators beside the longest before. Stops a gradient that drowns the weights of a front.

What depends on what arrived alone is refused openly. `moved`, `dominance` and `longer` are compared with the site's own
training or batches, so they must not tell: they suspend the study. The check draws no random number that anything else
draws, and changes nothing but its own history in the site's state.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import DataDependentRefusal, LooksOn
from polyclinic.federation.layers import incoming_figures as figures
from polyclinic.federation.layers.incoming_figures import Figure, History, Weights, refuse
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import Parcels, Transaction
from polyclinic.files import atomic_write
from polyclinic.randomness import seeded, torch_rng

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike
    from polyclinic.federation.host import SiteHost
    from polyclinic.federation.operation import Operation
    from polyclinic.federation.site import Site

#: parcels that are inspected
INSPECTED = ("weights", "gradients", "generator")
#: what leaves where weights are scored, and nothing is trained with them
SCORED = ("metrics", "keys")
#: the operation that gives a site the finished model
KEPT = "keep_model"
#: fewest images of a site whose training says anything
FEWEST_IMAGES = 4
#: own training whose loss is so many times the largest so far has exploded: a divergence ends far above, honest rounds
#: at the largest rates allowed stay below
EXPLODED = 10.0
#: images by which a loss is known well enough to see that
IMAGES = 32
#: what helps against steps that are too long
SMALLER_RATE = "; choose a smaller optimizer.lr, or the site allows more in [incoming] of its policy"


def one_pass(site: Site) -> int:
    """The steps of one pass over a site's images."""
    return site.trainer.steps_in(site.data.train)


class Inspection(Layer):
    """The incoming check of a process. It knows the weights that the study begins with at a site, unless they follow
    from more than the study's seed. `has_course` is false for a method whose weights do not come nearer step by step: a
    head that is solved for at once is far from the first one, and no site has trained it."""

    def __init__(self, host: SiteHost) -> None:
        super().__init__(host)
        self.limits, traits = self.spec.policy.incoming, getattr(self.spec.method, "traits", None)
        self.has_course = traits is None or traits.gradual
        #: how many steps a site takes in a round
        self.steps: Callable[[Site], int] = getattr(self.spec.method, "steps_at", one_pass)

    def is_needed(self) -> bool:
        return self.limits.on

    def arriving(self, transaction: Transaction) -> None:
        """Inspect what came with a call: ParcelRejected or DataDependentRefusal where a figure is above its limit,
        LooksOn where the site must not work with it though it keeps what it saw (incoming_figures.py)."""
        words = ""
        for name, parcel in transaction.received.items():
            if parcel.kind in INSPECTED:
                sealed = transaction.call.parcels[name].kind == SEALED
                words = self._inspect(transaction.site, parcel, transaction.declared, sealed=sealed) or words
        if words:
            raise LooksOn(words)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        self.note_own(transaction.site, parcels, transaction.received.values())
        return parcels

    # --- what arrives -------------------------------------------------------------------------------

    def _inspect(self, site: Site, parcel: Parcel, declared: Operation | None, *, sealed: bool) -> str:
        history = History(site.state)
        # where latents of every image leave, the front was trained elsewhere, for as long as the study says
        has_course = self.has_course and not sealed and not (declared and "latents" in declared.releases)
        works = sealed or not _only_scored(declared)
        if parcel.kind == "weights" and history.has_passed(parcel.digest, has_course=has_course):
            return figures.looks_on(history.owed(), self.limits) if has_course and works else ""
        # brought to the device of the site's network once: all figures are computed there
        tensors = {name: tensor.to(site.trainer.device) for name, tensor in parcel.tensors.items()}
        refuse(figures.largest(tensors, self.limits), ParcelRejected)
        if parcel.kind != "weights":
            self._inspect_lengths(site, parcel, history)
            return ""
        refuse(figures.rows(tensors, self.limits), ParcelRejected)
        if not works:
            return ""
        kept = sealed or declared is None or bool(declared.releases)
        if has_course:
            self._inspect_weights(site, tensors, history, parcel.digest, kept=kept)
            if words := figures.looks_on(history.owed(), self.limits):
                return words
        if kept:
            history.take_passed(parcel.digest, has_course=has_course)
        return ""

    def _inspect_lengths(self, site: Site, parcel: Parcel, history: History) -> None:
        """Gradients and generators: how long they are beside those before; whether a gradient is of one image; how far
        a correction of the site's own gradients (SCAFFOLD's control) moves weights in a round."""
        tensors = figures.floating(parcel.tensors)
        own = site.trainer.model.state_dict() if parcel.kind == "gradients" else {}
        corrections = {name: tensor for name, tensor in tensors.items() if name in own}
        refuse(self._corrected(site, corrections, history), DataDependentRefusal)
        found = {name: float(t.double().norm()) for name, t in tensors.items() if name not in corrections}
        before = history.most(parcel.kind)
        refuse(figures.lengths(found, before, self.limits), DataDependentRefusal)
        if parcel.kind == "gradients":
            longer = {name: tensors[name] for name in found if found[name] > before.get(name, 0.0)}
            refuse(figures.dominances(longer, self.limits), DataDependentRefusal)
        history.take_most(parcel.kind, found)

    def _corrected(self, site: Site, corrections: Weights, history: History) -> Iterator[Figure]:
        """How far a round's steps along a correction alone would move the weights that came."""
        last, own = history.last(), site.state.group("control")
        drift = {name: one - own[name] if name in own else one for name, one in corrections.items()}
        reach = self._lr(site) * self.steps(site)
        found = figures.movement(figures.stepped(last, drift, reach, by_sign=_by_sign(site)), last)
        self._rehearse_before(site, history, found)
        yield from figures.moved(found, self._own(site, history), self.limits, " by the control variate")

    def _inspect_weights(self, site: Site, weights: Weights, history: History, digest: str, *, kept: bool) -> None:
        """Compare weights with those that arrived last. Weights of an operation that releases nothing are not `kept`:
        it may be called as often as one likes, and the course could be walked to any weights by small steps."""
        fits = site.trainer_for(weights) is site.trainer and _fits(weights, site.trainer)
        if not fits or len(site.data.train) < FEWEST_IMAGES:
            return
        if not history.last():
            first = self.spec.first_weights(site.name)
            if first is not None:
                history.take(first, 0)
            refuse(self._steps(site, {**weights, **history.last()}), ParcelRejected, SMALLER_RATE)
        missed = history.rounds_since(site.round) - 1
        words = f"; the site missed {missed} rounds before" if missed else ""
        found = figures.movement(weights, history.last())
        self._rehearse_before(site, history, found)
        rounds = self._rounds(site, history, found, digest if kept else None)
        moved = figures.moved(found, self._own(site, history), self.limits, rounds=rounds)
        refuse(moved, DataDependentRefusal, words)
        if kept:
            self._take(site, history, weights, rounds, digest)

    def _steps(self, site: Site, weights: Weights) -> Iterator[Figure]:
        """How far one step moves rows of the first weights, or the learning rate where that does not say how far.
        Whoever may choose any rate has room for any weights, and an honest study at it would be stopped later."""
        lr = site.trainer.optimizer.lr
        if not _by_sign(site):
            yield Figure("sgd_rate", "the study", lr, self.limits.sgd_rate)
            return
        everywhere = {name: torch.ones_like(one) for name, one in figures.floating(weights).items()}
        after = figures.stepped(weights, everywhere, lr, by_sign=True)
        for layer, value in figures.movement(after, weights).items():
            yield Figure("step", layer, value, self.limits.step)

    def _rounds(self, site: Site, history: History, moved: Mapping[str, float], digest: str | None) -> int:
        """The rounds whose movement these weights may bring; without a digest no more than at once."""

        def may_return() -> bool:
            if digest is None or history.owed():
                return digest is not None
            if not site.secret:
                return history.returns() < self.limits.returns
            known = figures.returned_with(site.folder)
            return digest in known or len(known) < self.limits.returns

        gap = history.rounds_since(site.round)
        return figures.rounds_allowed(moved, self._own(site, history), self.limits, gap, may_return=may_return)

    def _take(self, site: Site, history: History, weights: Weights, rounds: int, digest: str) -> None:
        """Remember weights that passed, and what the site owes after them. A second arrival of a round pays nothing.
        Where the site looks on, it does not move the course either: nothing shows how many of them came."""
        if site.round <= history.last_round() and history.owed():
            return
        if site.round > history.last_round():
            owed = figures.owed_after(history.owed(), rounds, self.limits)
            returned = rounds > self.limits.at_once and not history.owed()
            if returned and site.secret and digest not in (known := figures.returned_with(site.folder)):
                content = json.dumps([*known, digest])
                atomic_write(site.folder / figures.RETURNED, content, private=True, durable=True)
            history.take_owed(owed, returned=returned)
        history.take(weights, site.round)

    # --- the site's own training --------------------------------------------------------------------

    def note_own(self, site: Site, released: Iterable[Parcel], came: Iterable[Parcel] = ()) -> None:
        """Note how far the site's own training moves weights: what comes back may move farther, but not much. It begins
        at the weights that `came` with the call: those that passed before do not move the course, and the way from
        them to the last ones is not the site's."""
        history = History(site.state)
        last = dict(history.last())
        for parcel in came:
            if parcel.kind == "weights":
                last.update({name: one for name, one in parcel.tensors.items() if name in last})
        sent = {parcel.kind: parcel for parcel in released}
        if not last or not {"weights", "gradients"} & set(sent):
            return
        if "weights" in sent:
            trained = {**site.state.group("local"), **sent["weights"].tensors}
            steps = int(sent["weights"].metadata.get("steps", 0)) or one_pass(site)
        else:
            lr, by_sign = self._lr(site), _by_sign(site)
            trained, steps = figures.stepped(last, sent["gradients"].tensors, lr, by_sign=by_sign), 1
        self._note_own(site, history, last, trained, steps)

    def _note_own(self, site: Site, history: History, last: Weights, trained: Weights, steps: int) -> None:
        """Remember what the site's own training did. Where its loss exploded, all of it counts as one step: it is no
        measure of honest training, and whoever wants room for other weights could choose such a learning rate."""
        device = site.trainer.device
        trained, last = ({name: tensor.to(device) for name, tensor in one.items()} for one in (trained, last))
        if not _fits(trained, site.trainer):
            return
        known = {**history.last(), **site.trainer.initial_local, **site.state.group("local")}
        history.take_most("loss", {"mean": _loss(site, {**known, **last})})
        exploded = not _loss(site, {**known, **trained}) <= EXPLODED * history.most("loss")["mean"]  # NaN has, too
        found = {
            layer: value if math.isfinite(value) else 0.0 for layer, value in figures.movement(trained, last).items()
        }
        history.take_movement(figures.counted(found, 1 if exploded else steps), self._lr(site))

    def _rehearse_before(self, site: Site, history: History, found: Mapping[str, float]) -> None:
        """Where weights come that others have trained, before the site has trained itself (the first turn of a cycle,
        a round that it did not take part in): see what its own training does from the weights before."""
        if max(found.values(), default=0.0) <= self.limits.moved or history.most("own"):
            return
        known = {**history.last(), **site.trainer.initial_local, **site.state.group("local")}
        steps = self.steps(site)
        self._note_own(site, history, history.last(), rehearse(site, known, steps), steps)

    def _own(self, site: Site, history: History) -> dict[str, float]:
        """How far the site's training moves the rows of each layer, at the learning rate of this round or the last."""
        return history.own(max(self._lr(site), self._lr(site, site.round - 1)))

    def _lr(self, site: Site, round: int | None = None) -> float:
        return max(site.trainer.optimizer.lr_in(site.round if round is None else round), 1e-30)


def _by_sign(site: Site) -> bool:
    """Whether the optimizer's steps are about as long as its rate says."""
    return getattr(site.trainer.optimizer, "name", "sgd") != "sgd"


def rehearse(site: Site, weights: Weights, steps: int) -> dict[str, Tensor]:
    """The weights after so many steps of plain training from `weights` on the site's images; nothing of it is kept or
    leaves. A site that gets trained weights before it has trained itself sees here what training does."""
    trainer, address = site.trainer, site.address("rehearsal", site.round)
    copied = _copy(trainer, weights).requires_grad_(True)
    optimizer = trainer.optimizer.make(copied.parameters(), site.round)
    with seeded(*address, gpus=range(torch.cuda.device_count())):
        trainer.train(trainer.batches(site.data.train, torch_rng(*address)), steps, optimizer, model=copied)
    return {name: tensor.detach().cpu() for name, tensor in copied.state_dict().items()}


@torch.no_grad()
def _loss(site: Site, weights: Weights) -> float:
    """The mean loss of some of the site's training images, the same ones each time, spread evenly over all; of volumes,
    of patches. Batch norm goes by these images."""
    trainer, part, address = site.trainer, site.data.train, site.address("loss of some images")
    places = np.unique(np.linspace(0, len(part) - 1, min(IMAGES, len(part))).round().astype(int))
    masks = None if part.masks is None else part.masks[places]
    some, copied, losses = ImageSet(part.images[places], part.labels[places], masks), _copy(trainer, weights), []
    with seeded(*address, gpus=range(torch.cuda.device_count())), trainer.autocast():
        for images, targets in trainer.examples(some, torch_rng(*address)):
            losses.append(trainer.task.losses(copied(images).float(), targets, trainer.target))
    return float(torch.cat(losses).mean())


def _copy(trainer: TrainerLike, weights: Weights) -> torch.nn.Module:
    """A copy of the trainer's network, in training mode, with these weights."""
    copied = copy.deepcopy(trainer.model).train()
    own = copied.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
    return copied


def _only_scored(declared: Operation | None) -> bool:
    """Whether nothing but scores ever leaves of what is computed with the weights, or nothing as the run is over: they
    are not compared with a course, as those that a coordinator trains by itself have none, and as the weights that a
    round begins with are the ones that were scored."""
    if declared is None:
        return False
    return declared.address == KEPT or (bool(declared.releases) and set(declared.releases) <= set(SCORED))


def _fits(weights: Weights, trainer: TrainerLike) -> bool:
    own = trainer.model.state_dict()
    return all(name in own and own[name].shape == tensor.shape for name, tensor in weights.items())
