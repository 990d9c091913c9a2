"""Layers of the coordinator: what a site sent is validated before a method uses it, for a site may lie.

A reply that its operation cannot have released is a failure of that site: the site is named, and the round goes on
without it. What only one method knows of its replies is checked by `Method.check_reply`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import COORDINATOR, Call, Expected, Reply
from polyclinic.federation.ledger.keys import KEY_BYTES, OVERHEAD
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import Operation
from polyclinic.tasks.task import MOST_IMAGES

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import MethodLike
    from polyclinic.federation.federation import Federation

#: numbers in a parcel's metadata that methods count with, and the largest that is believed
COUNTS: Mapping[str, int] = {"samples": MOST_IMAGES, "steps": 10**6, "expected": MOST_IMAGES}
#: kinds that an operation cannot leave out; a site without images sends no metrics, for example
NEVER_LEFT_OUT = frozenset({"weights", "gradients", "activations", "latents"})
#: weights whose norm has become so many times as large were not trained: honest training is far below, even where it
#: diverges it ends in NaN or infinity, which no site lets out
LARGEST_GROWTH = 1000.0
#: root mean square that a tensor may come to whatever it was before: a bias, say, begins at zero
SMALL = 0.1


def own_name(federation: Federation, call: Call, reply: Reply) -> None:
    """The site that was asked has answered."""
    if reply.site != call.site:
        raise ParcelRejected(f"answered in the name of site '{reply.site}'")


def checked(federation: Federation, call: Call, reply: Reply) -> None:
    """What is added up is a row of whole numbers. Anything else has the form that is expected of its kind, the
    operation can have released it, and the method can use it."""
    if call.operation in federation.sums.covered:
        federation.sums.check(call, reply)
        return
    for parcel in reply.parcels:
        federation.expected.get(parcel.kind, Expected(parcel.kind)).check(parcel)
    federation.replies.check(federation, call, reply)


def checked_keys(federation: Federation, call: Call, reply: Reply) -> None:
    """The public key that a site gives is one, its own, and the one that was confirmed: with another it would open
    nothing, and every other site would refuse it."""
    if call.operation != "give_key":
        return
    found = [dict(parcel.tensors) for parcel in reply.parcels if parcel.kind == "keys"]
    key = found[0].get(call.site) if len(found) == 1 and len(found[0]) == 1 else None
    if key is None or key.dtype != torch.uint8 or tuple(key.shape) != (KEY_BYTES,):
        raise ParcelRejected(f"no public key of site '{call.site}', and of no other, came")
    if federation.keys and federation.keys.public(call.site) != key.numpy().tobytes():
        raise ParcelRejected(f"the public key that came is not the one that was confirmed for site '{call.site}'")


def head_of_ledger(federation: Federation, call: Call, reply: Reply) -> None:
    """The site's ledger goes on from the head that is known."""
    federation.heads.receive(call, reply)


def counted(federation: Federation, call: Call, reply: Reply) -> None:
    """Bytes and privacy of what came are written down."""
    for parcel in reply.parcels:
        federation.communication.came(call, parcel)
        federation.coverage.note(call.site, parcel)


class ReplyCheck:
    """Remembers what each site said of itself, so that it cannot say another thing later."""

    def __init__(self, method: MethodLike | None, said: Mapping[str, float] | None = None) -> None:
        self._method = method
        self.said = dict(said or {})

    def check(self, federation: Federation, call: Call, reply: Reply) -> None:
        """ParcelRejected for a reply that cannot be what the operation releases."""
        try:
            self._check(federation, call, reply)
        except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:  # such as an odd dtype
            raise ParcelRejected(f"the reply cannot be checked ({type(error).__name__}: {error})") from None

    def _check(self, federation: Federation, call: Call, reply: Reply) -> None:
        declared = self._method.operation_named(call.operation) if self._method else None
        if declared is not None:
            _check_kinds(call.operation, declared, reply)
        opened = [parcel for parcel in reply.parcels if parcel.kind != SEALED]
        if call.to == COORDINATOR and len(opened) < len(reply.parcels):
            raise ParcelRejected("a sealed parcel came, and nothing was to be sealed")
        for parcel in reply.parcels:
            _ = parcel.size  # ValueError for what no parcel can carry, such as NaN beside the tensors
        if declared is not None and declared.partner == "sites" and opened:
            raise ParcelRejected(f"'{call.operation}' hands on what is sealed, and {opened[0].kind} came open")
        for parcel in reply.parcels:
            if parcel.kind == SEALED:
                _check_box(call, parcel)
        for parcel in opened:
            numbers = sum(tensor.numel() for tensor in parcel.tensors.values())
            if declared is not None and (words := declared.too_many(parcel.kind, numbers, federation.trainer)):
                raise ParcelRejected(words)
            self._check_counts(call, parcel)
            _check_tensors(parcel, call)
            if self._method and parcel.kind in ("labels", "masks"):
                _check_targets(federation, parcel)
        if self._method and call.operation == "evaluate":
            self._check_scores(federation, call, opened)
        self._check_use(federation, call, reply)

    def check_sum(self, federation: Federation, call: Call, reply: Reply) -> None:
        """ParcelRejected for the mean or sum of all sites that cannot be one: masks that do not cancel, for example."""
        for parcel in reply.parcels:
            _check_tensors(parcel, call)
        self._check_use(federation, call, reply)

    def _check_use(self, federation: Federation, call: Call, reply: Reply) -> None:
        if self._method:
            try:
                self._method.check_reply(federation, call, reply)
            except WorkFailed as error:  # what the method would have stopped for is the failure of one site
                raise ParcelRejected(str(error)) from None

    def _check_counts(self, call: Call, parcel: Parcel) -> None:
        for name, most in COUNTS.items():
            if name in parcel.metadata:
                value = parcel.metadata[name]
                if not _is_number(value) or not 0 <= value <= most or (name == "samples" and not value):
                    raise ParcelRejected(f"{parcel.kind}: {name} = {_short(value)} is no number up to {most}")
                about = f"{call.site}/{call.operation}/{name}"
                if name == "samples" and value != (before := self.said.setdefault(about, value)):
                    raise ParcelRejected(f"{parcel.kind}: {name} = {value}, and the site said {before} before")
        if "loss" in parcel.metadata:
            loss = parcel.metadata["loss"]
            if not _is_number(loss) or not abs(loss) < math.inf:
                raise ParcelRejected(f"{parcel.kind}: loss = {_short(loss)} is no finite number")

    def _check_scores(self, federation: Federation, call: Call, parcels: list[Parcel]) -> None:
        """Sums of scores that no set of images can have, or that are of another number of images than before."""
        asked, trainer = f"/evaluate/{call.arguments.get('split', 'validation')}", federation.trainer
        about = f"{call.site}{asked}"
        # with noised scores a site's budget may come to its end
        if trainer.privacy is None or trainer.privacy.score_noise is None:
            self._check_whether_scored(call.site, asked, bool(parcels))
        for parcel in parcels:
            if not parcel.tensors:  # scores that a site keeps back
                continue
            try:
                trainer.task.check_sums(dict(parcel.tensors), trainer.target)
            except ValueError as error:
                raise ParcelRejected(f"metrics: {error}") from None
            if "count" not in parcel.tensors:
                continue
            # the confusion matrix of a deployed site is rounded cell by cell, from nothing to twice as many images
            sums = parcel.tensors
            images = float(sums["histograms"][:, 1].sum()) if "histograms" in sums else int(sums["count"])
            counts = [
                said for name, said in self.said.items() if name.startswith(f"{call.site}/") and "/samples" in name
            ]
            if counts and images > 1000 * (max(counts) + 1):
                raise ParcelRejected(f"metrics: scores of {images:g} images, and the site trains on {max(counts):g}")
            before = self.said.setdefault(about, images)
            # a deployed site rounds its counts, by each class: they may differ a little from round to round
            if not before / 2 <= images <= 2 * max(before, 1):
                raise ParcelRejected(f"metrics: scores of {images:g} images, and they were of {before:g} before")

    def _check_whether_scored(self, site: str, asked: str, came: bool) -> None:
        """A site has images of a split or none. One that sent scores cannot send nothing later, nor begin with scores
        later than most other sites: before, there may have been no model to score."""
        first = self.said.setdefault(f"{site}{asked}/first", float(came))
        began = bool(self.said.setdefault(f"{site}{asked}/began", first))
        if came == began:
            return
        if began:
            raise ParcelRejected("no scores came, and they did before")
        self.said[f"{site}{asked}/began"] = float(came)  # refused once, at most
        others = [value for about, value in self.said.items() if about.endswith(f"{asked}/first")]
        if 2 * sum(others) > len(others) - 1:
            raise ParcelRejected("scores came, and none did before, when most other sites sent some")


def _check_box(call: Call, parcel: Parcel) -> None:
    """ParcelRejected for what is no sealed box, or is said to be another site's: its failure would be that one's."""
    box, said = parcel.tensors.get("box"), parcel.metadata
    if box is None or len(parcel.tensors) > 1 or box.dtype != torch.uint8 or box.dim() != 1 or len(box) <= OVERHEAD:
        raise ParcelRejected("what came sealed is no box")
    if (said.get("from"), said.get("operation")) != (call.site, call.operation):
        raise ParcelRejected("what came sealed does not say that this site sealed it for this")


def _check_kinds(name: str, declared: Operation, reply: Reply) -> None:
    kinds = [parcel.content for parcel in reply.parcels]
    for kind in kinds:
        if kind not in declared.releases:
            raise ParcelRejected(f"a parcel of kind '{kind}' came, which '{name}' does not release")
        if kinds.count(kind) > 1:
            raise ParcelRejected(f"two parcels of kind '{kind}' came for '{name}'")
    if declared.partner != "sites":
        missing = sorted(NEVER_LEFT_OUT & set(declared.releases) - set(kinds))
        if missing:
            raise ParcelRejected(f"no parcel of kind '{missing[0]}' came for '{name}'")


def _check_tensors(parcel: Parcel, call: Call) -> None:
    """ParcelRejected for numbers that are not finite, and for weights that are far larger than those that were sent."""
    norms, sent = parcel.norms, call.parcels.get(parcel.kind.replace("-", "_"))
    before = sent.norms if parcel.kind == "weights" and sent is not None else {}
    for name, norm in norms.items():
        if not norm < math.inf:  # NaN too
            raise ParcelRejected(f"{parcel.kind}: tensor '{name}' holds NaN, infinity or numbers beyond all bounds")
        if name in before and norm > LARGEST_GROWTH * before[name]:
            limit = LARGEST_GROWTH * (before[name] + SMALL * math.sqrt(parcel.tensors[name].numel()))
            if norm > limit:
                raise ParcelRejected(
                    f"weights: the norm of tensor '{name}' is {norm:.3g}, more than {LARGEST_GROWTH:g} times what the "
                    f"site was sent ({before[name]:.3g})"
                )


def _check_targets(federation: Federation, parcel: Parcel) -> None:
    task, target = federation.trainer.task, federation.trainer.target
    for name, values in parcel.tensors.items():
        if values.numel() == 0:
            continue
        low, high = (float(one) for one in values.aminmax())
        if parcel.kind == "masks":
            if not 0 <= low <= high <= 1:
                raise ParcelRejected(f"masks: tensor '{name}' has values from {low:g} to {high:g}; masks have 0 and 1")
        elif task.like == "classification" and (
            values.is_floating_point() or not 0 <= low <= high < len(target.classes)
        ):
            raise ParcelRejected(f"labels: tensor '{name}' names other classes than 0 to {len(target.classes) - 1}")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of more than 20 digits"
    return text if len(text) <= 40 else text[:40] + "..."
