"""The incoming check: a site inspects what a coordinator sends before it works with it.

What depends on the weights alone is refused openly. What has looked at the site's images, or at what its own training
did, must not tell: it suspends the study, as any other failure does. The check draws no random number that anything
else draws, and changes nothing but its own history in the site's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyclinic.federation.arriving import course, orders, returning, units
from polyclinic.federation.arriving.history import History
from polyclinic.federation.arriving.returning import Returns
from polyclinic.federation.arriving.settings import Figure, Incoming
from polyclinic.federation.arriving.trial import Trials, Tried
from polyclinic.federation.layers.layer import Layer
from polyclinic.federation.leaving.parcel import SEALED, Parcel, ParcelRejected
from polyclinic.federation.refusals import DataDependentRefusal, LooksOn

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike
    from polyclinic.federation.host import SiteHost
    from polyclinic.federation.operation import Operation
    from polyclinic.federation.site import Site
    from polyclinic.federation.transaction import Parcels, Transaction

Weights = Mapping[str, Tensor]

#: parcels that are inspected
INSPECTED = ("weights", "gradients", "generator")
#: what leaves where weights are scored, and nothing is trained with them
SCORED = ("metrics", "keys")
#: the operation that gives a site the finished model
KEPT = "keep_model"
#: fewest images that weights are tried on
FEWEST_IMAGES = 4
#: own training whose loss is so many times the largest so far has exploded
EXPLODED = 10.0
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
        self.limits, self.has_course = self.spec.policy.incoming, self.spec.has_course
        #: how many steps a site takes in a round
        self.steps: Callable[[Site], int] = getattr(self.spec.method, "steps_at", one_pass)
        self.trials = Trials(self.limits.images)

    def is_needed(self) -> bool:
        return self.limits.on

    def arriving(self, transaction: Transaction) -> None:
        """Inspect what came with a call: ParcelRejected or DataDependentRefusal where a figure is above its limit,
        LooksOn where the site must not work with it though it keeps what it saw (`returning`)."""
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

    def note_own(self, site: Site, released: Iterable[Parcel], came: Iterable[Parcel] = ()) -> None:
        """Note how far the site's own training moves weights: what comes back may move farther, but not much. It begins
        at the weights that `came` with the call: those that passed before do not move the course, and the way from
        them to the last ones is not the site's."""
        history = History(site.state)
        last = dict(history.last())
        for parcel in came:
            last.update(
                {name: one for name, one in parcel.tensors.items() if parcel.kind == "weights" and name in last}
            )
        sent = {parcel.kind: parcel for parcel in released}
        if not last or not {"weights", "gradients"} & set(sent):
            return
        if "weights" in sent:
            trained = {**site.state.group("local"), **sent["weights"].tensors}
            steps = int(sent["weights"].metadata.get("steps", 0)) or one_pass(site)
        else:
            lr, by_sign = self._lr(site), self._by_sign(site)
            trained, steps = course.stepped(last, sent["gradients"].tensors, lr, by_sign=by_sign), 1
        self._note_own(site, history, last, trained, steps)

    def _note_own(self, site: Site, history: History, last: Weights, trained: Weights, steps: int) -> None:
        """Remember what the site's own training did. Where its loss exploded, all of it counts as one step: it is no
        measure of honest training, and whoever wants room for other weights could choose such a learning rate."""
        trained, last = (_on(site.trainer.device, one) for one in (trained, last))
        if not _fits(trained, site.trainer) or not last:
            return
        tried = self.trials.try_weights(site, site.trainer, {**self._known(site, history), **trained})
        before = history.most("loss").get("mean", math.inf)
        exploded = not tried.loss <= EXPLODED * before  # as NaN has, too
        if not exploded:
            history.take_own(tried.found)
        found = {
            layer: value if math.isfinite(value) else 0.0 for layer, value in course.movement(trained, last).items()
        }
        moved = course.counted(found, 1 if exploded else steps)
        history.take_movement(moved, self._lr(site))

    def _own(self, site: Site, history: History) -> dict[str, float]:
        """How far the site's training moves the rows of each layer, at the learning rate of this round or the last."""
        return history.own(max(self._lr(site), self._lr(site, site.round - 1)))

    def _lr(self, site: Site, round: int | None = None) -> float:
        return max(site.trainer.optimizer.lr_in(site.round if round is None else round), 1e-30)

    def _by_sign(self, site: Site) -> bool:
        return getattr(site.trainer.optimizer, "name", "sgd") != "sgd"

    def _inspect(self, site: Site, parcel: Parcel, declared: Operation | None, *, sealed: bool) -> str:
        history = History(site.state)
        has_course = self.has_course and not sealed and not _only_encodes(declared)
        if parcel.kind == "weights" and history.has_passed(parcel.digest, has_course=has_course):
            works = sealed or not _only_scored(declared)
            return returning.looks_on(history.owed(), self.limits) if has_course and works else ""
        tensors = _on(site.trainer.device, parcel.tensors)
        refuse(open_figures(parcel.kind, tensors, self.limits), ParcelRejected)
        if parcel.kind != "weights":
            self._inspect_lengths(site, parcel, history)
        elif sealed or not _only_scored(declared):
            kept = sealed or declared is None or bool(declared.releases)
            self._inspect_weights(site, tensors, history, parcel.digest, has_course=has_course, kept=kept)
            if has_course and (words := returning.looks_on(history.owed(), self.limits)):
                return words
            if kept:
                history.take_passed(parcel.digest, has_course=has_course)
        return ""

    def _inspect_lengths(self, site: Site, parcel: Parcel, history: History) -> None:
        """Gradients and generators: how long they are beside those before; whether a gradient is of one image; how far
        a correction of the site's own gradients (SCAFFOLD's control) moves weights in a round."""
        tensors = orders.floating(parcel.tensors)
        own = site.trainer.model.state_dict() if parcel.kind == "gradients" else {}
        corrections = {name: tensor for name, tensor in tensors.items() if name in own}
        refuse(self._corrected(site, corrections, history), DataDependentRefusal)
        found = {name: float(t.double().norm()) for name, t in tensors.items() if name not in corrections}
        before = history.most(parcel.kind)
        refuse(lengths(found, before, self.limits), DataDependentRefusal)
        if parcel.kind == "gradients":
            longer = [name for name in found if found[name] > before.get(name, 0.0)]
            refuse(dominances({name: tensors[name] for name in longer}, self.limits), DataDependentRefusal)
        history.take_most(parcel.kind, found)

    def _corrected(self, site: Site, corrections: Weights, history: History) -> Iterator[Figure]:
        """How far a round's steps along a correction alone would move the weights that came."""
        last, own = history.last(), site.state.group("control")
        drift = {name: one - own[name] if name in own else one for name, one in corrections.items()}
        reach = self._lr(site) * self.steps(site)
        moved = course.stepped(last, drift, reach, by_sign=self._by_sign(site))
        found = course.movement(moved, last)
        self._rehearse_before(site, history, found)
        yield from course.moved(found, self._own(site, history), self.limits, " by the control variate")

    def _inspect_weights(
        self, site: Site, weights: Weights, history: History, digest: str, *, has_course: bool, kept: bool
    ) -> None:
        """Weights of an operation that releases nothing are not `kept`: it may be called as often as one likes, and
        the course could be walked to any weights by small steps."""
        trainer = site.trainer_for(weights)
        if not _fits(weights, trainer) or len(site.data.train) < FEWEST_IMAGES:
            return
        own_network = trainer is site.trainer and has_course
        if own_network and not history.last():
            self._begin(site, history)
            refuse(self._steps(site, {**weights, **history.last()}), ParcelRejected, SMALLER_RATE)
        missed = history.rounds_since(site.round) - 1 if own_network else 0
        words = f"; the site missed {missed} rounds before" if missed else ""
        moved = course.movement(weights, history.last() if own_network else {})
        if moved:
            self._rehearse_before(site, history, moved)
        rounds = self._rounds(site, history, moved, digest if kept else None)
        figures = self._figures(site, weights, history, moved, rounds, own_network=own_network, kept=kept)
        refuse(figures, DataDependentRefusal, words)
        if own_network and kept:
            self._take(site, history, weights, rounds, digest)

    def _rounds(self, site: Site, history: History, moved: Mapping[str, float], digest: str | None) -> int:
        """The rounds whose movement these weights may bring; without a digest no more than at once."""

        def may_return() -> bool:
            if digest is None or history.owed():
                return digest is not None
            most = self.limits.returns
            return Returns(site.folder).allows(digest, most) if site.secret else history.returns() < most

        gap = history.rounds_since(site.round)
        return returning.rounds_allowed(moved, self._own(site, history), self.limits, gap, may_return=may_return)

    def _take(self, site: Site, history: History, weights: Weights, rounds: int, digest: str) -> None:
        """Remember weights that passed, and what the site owes after them. A second arrival of a round pays nothing.
        Where the site looks on, it does not move the course either: nothing shows how many of them came."""
        if site.round <= history.last_round() and history.owed():
            return
        if site.round > history.last_round():
            owed = returning.owed_after(history.owed(), rounds, self.limits)
            returned = rounds > self.limits.at_once and not history.owed()
            if returned and site.secret:
                Returns(site.folder).note(digest)
            history.take_owed(owed, returned=returned)
        history.take(weights, site.round)

    def _begin(self, site: Site, history: History) -> None:
        """Remember the first weights, and what they do with the site's images."""
        first = self.spec.first_weights(site.name)
        if first is None:
            return
        tried = self.trials.try_weights(site, site.trainer, {**first, **site.state.group("local")})
        history.take(first, 0)
        history.take_beginning(tried.found)
        history.take_most("loss", {"mean": tried.loss})

    def _steps(self, site: Site, weights: Weights) -> Iterator[Figure]:
        """How far one step moves rows of the first weights, or the learning rate where that does not say how far.
        Whoever may choose any rate has room for any weights, and an honest study at it would be stopped later."""
        lr = site.trainer.optimizer.lr
        if not self._by_sign(site):
            yield Figure("sgd_rate", "the study", lr, self.limits.sgd_rate)
        else:
            everywhere = {name: torch.ones_like(one) for name, one in orders.floating(weights).items()}
            after = course.stepped(weights, everywhere, lr, by_sign=True)
            yield from course.steps(course.movement(after, weights), self.limits)

    def _rehearse_before(self, site: Site, history: History, found: Mapping[str, float]) -> None:
        """Where weights come that others have trained, before the site has trained itself (the first turn of a cycle,
        a round that it did not take part in): see what its own training does from the weights before."""
        if max(found.values(), default=0.0) <= self.limits.moved or history.most("own"):
            return
        steps = self.steps(site)
        trained = self.trials.rehearse(site, self._known(site, history), steps)
        self._note_own(site, history, history.last(), trained, steps)

    def _known(self, site: Site, history: History) -> dict[str, Tensor]:
        """Values of weights that do not arrive: as they arrived last, or the site's own part."""
        return {**history.last(), **site.trainer.initial_local, **site.state.group("local")}

    def _figures(
        self,
        site: Site,
        weights: Weights,
        history: History,
        moved: Mapping[str, float],
        rounds: int,
        *,
        own_network: bool,
        kept: bool,
    ) -> Iterator[Figure]:
        """Figures that look at the site's own training or images. Those of the course need a course."""
        last = history.last() if own_network else {}
        yield from course.moved(moved, self._own(site, history), self.limits, rounds=rounds)
        known = {**self._known(site, history), **weights} if own_network else weights
        tried = self.trials.try_weights(site, site.trainer_for(weights), known)
        # units of a dense layer align as honest training goes on; with a course, `moved` sees crafted ones
        returns = rounds > self.limits.at_once
        if (not last or returns) and len(tried.losses) >= units.ENOUGH_IMAGES:
            yield from units.graded(tried.found, history.most("graded") if own_network else {}, self.limits)
        if not own_network:
            return
        if last:
            yield from self._beside_history(tried, history)
        elif kept:
            history.take_beginning(tried.found)
        if kept:
            history.take_most("loss", {"mean": tried.loss})

    def _beside_history(self, tried: Tried, history: History) -> Iterator[Figure]:
        """What the weights do with the images, beside the first weights and the site's own training."""
        enough = len(tried.losses) >= units.ENOUGH_IMAGES
        yield from units.quiet(tried.found, history.quiet(), self.limits)
        if enough:
            yield from units.exposure(tried.found, history.most("exposed"), self.limits)
        before = history.most("loss").get("mean")
        if before is None:
            return
        yield Figure("loss", "images", tried.loss / max(before, 1e-12), self.limits.loss)
        if tried.loss > before and enough:
            share = float(tried.gradients.max() / tried.gradients.sum().clamp(min=1e-30))
            yield Figure("dominance", "images", share, self.limits.dominance)


def open_figures(kind: str, tensors: Weights, limits: Incoming) -> Iterator[Figure]:
    """Figures of what arrived alone: nobody's images are in them."""
    yield from orders.largest(tensors, limits)
    if kind == "weights":
        yield from orders.rows(tensors, limits)


def lengths(found: Mapping[str, float], before: Mapping[str, float], limits: Incoming) -> Iterator[Figure]:
    for name, length in found.items():
        if before.get(name):
            yield Figure("longer", name, length / before[name], limits.longer)


def dominances(gradients: Weights, limits: Incoming) -> Iterator[Figure]:
    """The share of one image in gradients [N, ...] of a batch's activations."""
    for name, gradient in gradients.items():
        if gradient.dim() > 1 and len(gradient) >= FEWEST_IMAGES:
            each = gradient.float().flatten(1).norm(dim=1)
            yield Figure("dominance", name, float(each.max() / each.sum().clamp(min=1e-30)), limits.dominance)


def refuse(figures: Iterable[Figure], error: type[Exception], cure: str = "") -> None:
    """Raise the error with the first alarm, if there is one."""
    for figure in figures:
        if figure.is_alarm:
            raise error(f"incoming check: {figure}{cure}")


def _only_scored(declared: Operation | None) -> bool:
    """Whether nothing but scores ever leaves of what is computed with the weights, or nothing as the run is over: they
    are not compared with a course, as those that a coordinator trains by itself have none, and as the weights that a
    round begins with are the ones that were scored."""
    if declared is None:
        return False
    return declared.address == KEPT or (bool(declared.releases) and set(declared.releases) <= set(SCORED))


def _only_encodes(declared: Operation | None) -> bool:
    """Whether latents of every image leave: the front was trained elsewhere, for as long as the study says."""
    return declared is not None and "latents" in declared.releases


def _on(device: torch.device, tensors: Weights) -> dict[str, Tensor]:
    """What arrived, on the device of the site's network: brought there once, all figures are computed there."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _fits(weights: Weights, trainer: TrainerLike) -> bool:
    own = trainer.model.state_dict()
    return all(name in own and own[name].shape == tensor.shape for name, tensor in weights.items())
