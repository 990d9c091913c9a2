"""Layers of the coordinator: what a site sent is validated before a method uses it, for a site may lie; then it is
written down: bytes by site, direction and kind; what differential privacy covers; and how far each site's ledger is.

A reply that its operation cannot have released is a failure of that site: the site is named, and the round goes on
without it. What only one method knows of its replies is checked by `Method.check_reply`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import COORDINATOR, Call, Expected, Reply
from polyclinic.federation.layers.gate import BESIDE_A_MODEL, OF_A_MODEL, PER_IMAGE, PER_SITE
from polyclinic.federation.ledger import keys
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE, PUBLIC, ParcelRejected
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import Operation
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.tasks.task import MOST_IMAGES

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import MethodLike
    from polyclinic.federation.federation import Federation

#: numbers in a parcel's metadata that methods count with, and the largest that is believed
COUNTS = {"samples": MOST_IMAGES, "steps": 10**6, "expected": MOST_IMAGES, "loss": sys.float_info.max}
#: images of a site, for each that it says it trains on, at most
OTHER_SPLITS = 10
#: kinds that an operation cannot leave out; a site without images sends no metrics, for example
NEVER_LEFT_OUT = frozenset({"weights", "gradients", "activations", "latents"})
#: weights whose norm grew by more were not trained: honest training that diverges ends in NaN, which no site lets out
LARGEST_GROWTH = 1000.0
#: root mean square that a tensor may come to whatever it was before: a bias, say, begins at zero
SMALL = 0.1


def checked(federation: Federation, call: Call, reply: Reply) -> None:
    """The site that was asked has answered. What is added up is a row of whole numbers. Anything else has the form that
    is expected of its kind, the operation can have released it, and the method can use it."""
    if reply.site != call.site:
        raise ParcelRejected(f"answered in the name of site '{reply.site}'")
    if call.operation in federation.sums.covered:
        federation.sums.check(call, reply)
        return
    for parcel in reply.parcels:
        federation.expected.get(parcel.kind, Expected(parcel.kind)).check(parcel)
    federation.replies.check(federation, call, reply)


def checked_keys(federation: Federation, call: Call, reply: Reply) -> None:
    """The public key that a site gives is one, its own, and the confirmed one: with another nobody could open a box."""
    if call.operation != "give_key":
        return
    found = [dict(parcel.tensors) for parcel in reply.parcels if parcel.kind == "keys"]
    key = found[0].get(call.site) if len(found) == 1 and len(found[0]) == 1 else None
    if key is None or key.dtype != torch.uint8 or tuple(key.shape) != (keys.KEY_BYTES,):
        raise ParcelRejected(f"no public key of site '{call.site}', and of no other, came")
    if federation.keys and federation.keys.public(call.site) != key.numpy().tobytes():
        raise ParcelRejected(f"the public key that came is not the one that was confirmed for site '{call.site}'")


def written_down(federation: Federation, call: Call, reply: Reply) -> None:
    """The site's ledger goes on from the head that is known; bytes and privacy of what came are counted."""
    federation.heads.receive(call, reply)
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
        declared, opened = self._method.operation_named(call.operation) if self._method else None, []
        try:
            if declared is not None:
                _check_kinds(call.operation, declared, reply)
            for parcel in reply.parcels:
                _ = parcel.size  # ValueError for what no parcel can carry, such as NaN beside the tensors
                if parcel.kind == SEALED:
                    _check_box(call, parcel)
                    continue
                opened.append(parcel)
                if declared is not None:
                    if declared.partner == "sites":
                        raise ParcelRejected(f"'{call.operation}' hands on what is sealed, and {parcel.kind} came open")
                    numbers = sum(map(torch.Tensor.numel, parcel.tensors.values()))
                    words = declared.too_many(parcel.kind, numbers, federation.trainer)
                    if words or numbers > (most := self._most(federation, call.site, declared, parcel.kind, numbers)):
                        raise ParcelRejected(words or f"{parcel.kind}: {numbers} numbers, where at most {most} can be")
                self._check_counts(call, parcel)
                _check_tensors(parcel, call)
                if self._method and parcel.kind in ("labels", "masks"):
                    _check_targets(federation, parcel)
            if self._method and call.operation == "evaluate":
                self._check_scores(federation, call, opened)
            if self._method:
                self._method.check_reply(federation, call, reply)
        except (BadInput, WorkFailed) as error:  # what would have stopped the method is the failure of one site
            raise ParcelRejected(str(error)) from None
        except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:  # such as an odd dtype
            raise ParcelRejected(f"the reply cannot be checked ({type(error).__name__}: {error})") from None

    def _most(self, federation: Federation, site: str, declared: Operation, kind: str, numbers: int) -> int:
        """Numbers that a parcel of a kind can need, as far as the coordinator knows: those of its model, of as many
        images as the site can have beside those that it trains on, and of keys of all sites."""
        if kind in declared.most or numbers <= BESIDE_A_MODEL:
            return numbers
        if kind in PER_SITE:
            return (1 + len(federation.sites)) * PER_SITE[kind]
        if kind in OF_A_MODEL and kind != "generator" and not federation.backbones:
            return sum(map(torch.Tensor.numel, federation.trainer.model.state_dict().values())) + BESIDE_A_MODEL
        told = [count for name, count in self.said.items() if name.startswith(f"{site}/") and "/samples" in name]
        if kind in PER_IMAGE and told:
            return int(OTHER_SPLITS * max(told) * PER_IMAGE[kind] * math.prod(federation.image_shape[1:]))
        return numbers

    def disagree(self, sender: str, receiver: str) -> bool:
        """Note that a site cannot use what another one sealed, which nobody else can open; whether the receiver has
        disagreed with more sites than the sender."""
        self.said |= {f"{sender}/disagrees/{receiver}": 1.0, f"{receiver}/disagrees/{sender}": 1.0}
        both = (sum(name.startswith(f"{site}/disagrees/") for name in self.said) for site in (sender, receiver))
        return next(both) < next(both)

    def check_sum(self, federation: Federation, call: Call, reply: Reply) -> None:
        """ParcelRejected or WorkFailed for what cannot be the mean or sum of all: masks that do not cancel, say."""
        for parcel in reply.parcels:
            _check_tensors(parcel, call)
        if self._method:
            self._method.check_reply(federation, call, reply)

    def _check_counts(self, call: Call, parcel: Parcel) -> None:
        for name, most in COUNTS.items():
            if name in parcel.metadata:
                value = parcel.metadata[name]
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                least = -most if name == "loss" else int(name == "samples")
                if not is_number or not least <= value <= most:
                    raise ParcelRejected(f"{parcel.kind}: {name} = {value!r:.40} is no number up to {most}")
                about = f"{call.site}/{call.operation}/{name}"
                if name == "samples" and value != (before := self.said.setdefault(about, value)):
                    raise ParcelRejected(f"{parcel.kind}: {name} = {value}, and the site said {before} before")

    def _check_scores(self, federation: Federation, call: Call, parcels: list[Parcel]) -> None:
        """Sums of scores that no set of images can have, or that are of another number of images than before.

        A site has images of a split or none. One that sent scores cannot send nothing later, nor begin with scores
        later than most other sites: before, there may have been no model to score.
        """
        asked, trainer = f"/evaluate/{call.arguments.get('split', 'validation')}", federation.trainer
        about = f"{call.site}{asked}"
        # with noised scores a site's budget may come to its end
        if trainer.privacy is None or trainer.privacy.score_noise is None:
            came = bool(parcels)
            began = bool(self.said.setdefault(f"{about}/began", self.said.setdefault(f"{about}/first", float(came))))
            if began and not came:
                raise ParcelRejected("no scores came, and they did before")
            if came and not began:
                self.said[f"{about}/began"] = 1.0  # refused once, at most
                others = [value for name, value in self.said.items() if name.endswith(f"{asked}/first")]
                if 2 * sum(others) > len(others) - 1:
                    raise ParcelRejected("scores came, and none did before, when most other sites sent some")
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
            counts = [n for name, n in self.said.items() if name.startswith(f"{call.site}/") and "/samples" in name]
            if counts and images > 1000 * (max(counts) + 1):
                raise ParcelRejected(f"metrics: scores of {images:g} images, and the site trains on {max(counts):g}")
            before = self.said.setdefault(about, images)
            # a deployed site rounds its counts, by each class: they may differ a little from round to round
            if not before / 2 <= images <= 2 * max(before, 1):
                raise ParcelRejected(f"metrics: scores of {images:g} images, and they were of {before:g} before")


def _check_box(call: Call, parcel: Parcel) -> None:
    """ParcelRejected for what is no sealed box, or is said to be another site's: its failure would be that one's."""
    if call.to == COORDINATOR:
        raise ParcelRejected("a sealed parcel came, and nothing was to be sealed")
    said, box = parcel.metadata, parcel.tensors.get("box", torch.empty(0))
    if len(parcel.tensors) > 1 or box.dtype != torch.uint8 or box.dim() != 1 or len(box) <= keys.OVERHEAD:
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
    missing = sorted(NEVER_LEFT_OUT & set(declared.releases) - set(kinds))
    if missing and declared.partner != "sites":
        raise ParcelRejected(f"no parcel of kind '{missing[0]}' came for '{name}'")


def _check_tensors(parcel: Parcel, call: Call) -> None:
    """ParcelRejected for numbers that are not finite, and for weights that are far larger than those that were sent."""
    norms, sent = parcel.norms, call.parcels.get(parcel.kind.replace("-", "_"))
    before = sent.norms if parcel.kind == "weights" and sent is not None else {}
    for name, norm in norms.items():
        if not norm < math.inf:  # NaN too
            raise ParcelRejected(f"{parcel.kind}: tensor '{name}' holds NaN, infinity or numbers beyond all bounds")
        if name in before and norm > LARGEST_GROWTH * (before[name] + SMALL * math.sqrt(parcel.tensors[name].numel())):
            raise ParcelRejected(
                f"weights: the norm of tensor '{name}' is {norm:.3g}, more than {LARGEST_GROWTH:g} times what the site "
                f"was sent ({before[name]:.3g})"
            )


def _check_targets(federation: Federation, parcel: Parcel) -> None:
    task, target = federation.trainer.task, federation.trainer.target
    for name, values in parcel.tensors.items():
        if values.numel() == 0:
            continue
        low, high = (float(one) for one in values.aminmax())
        if parcel.kind == "masks":
            most = max((value for _, some in target.structures for value in some), default=1)
            if not 0 <= low <= high <= most:
                words = "0 and 1" if most == 1 else f"0 to {most}"
                raise ParcelRejected(f"masks: tensor '{name}' has values from {low:g} to {high:g}; masks have {words}")
        known = not values.is_floating_point() and 0 <= low <= high < len(target.classes)
        if parcel.kind == "labels" and task.like == "classification" and not known:
            raise ParcelRejected(f"labels: tensor '{name}' names other classes than 0 to {len(target.classes) - 1}")


SENT, RECEIVED = "sent", "received"
#: what a record of differential privacy holds, at least
RECORD: Mapping[str, Any] = dict.fromkeys(("epsilon", "delta", "steps"), (int, float)) | dict.fromkeys(
    ("covers", "does_not_cover"), list
)


class Communication:
    """What crossed the border of each site, in bytes. `sent` left a site, `received` came to it."""

    def __init__(self, rows: Sequence[Sequence[Any]] = (), held: Mapping[str, str] | None = None) -> None:
        """`rows` and `held` are those of a checkpoint."""
        self._bytes: Counter[tuple[str, str, str, str]] = Counter()
        for *key, count in rows:
            self._bytes[tuple(key)] = count
        #: what sites received, and digests of weights, computed beside training: counted when somebody asks
        self._uncounted: list[tuple[tuple[str, str, str, str], int, Any]] = []
        self.held = dict(held or {})  # digest of the weights each site received last

    def going(self, calls: Iterable[Call]) -> None:
        """Note what the sites are sent."""
        for call in calls:
            for parcel in call.parcels.values():
                digest = parcel.digest_soon if parcel.kind == "weights" else None
                key = (call.site, RECEIVED, parcel.content, call.operation)
                self._uncounted.append((key, parcel.size, digest))

    def came(self, call: Call, parcel: Parcel) -> None:
        """Count what a site has sent in answer to a call."""
        self._bytes[call.site, SENT, parcel.content, call.operation] += parcel.size

    def rows(self) -> list[list]:
        """All bytes up to now, by site, direction, kind and operation."""
        for key, size, digest in self._uncounted:
            if digest:
                if self.held.get(key[0]) == digest.result():
                    continue  # weights that a site received last time need not travel again
                self.held[key[0]] = digest.result()
            self._bytes[key] += size
        self._uncounted.clear()
        return [[*key, count] for key, count in sorted(self._bytes.items())]

    @property
    def total(self) -> int:
        self.rows()
        return self._bytes.total()

    def summary(self, sites: tuple[str, ...]) -> JsonObject:
        """The `communication` table of a result. `per_site` and `by_kind` each add up to `total_bytes`."""
        by: list[Counter[str]] = [Counter() for _ in range(4)]
        for *key, count in self.rows():
            for sums, name in zip(by, key, strict=True):
                sums[name] += count
        per_site, directions, kinds, operations = (dict(sorted(sums.items())) for sums in by)
        return {
            "total_bytes": self.total,
            "sent_bytes": directions.get(SENT, 0),
            "received_bytes": directions.get(RECEIVED, 0),
            "by_kind": kinds,
            "by_operation": operations,
            "per_site": dict.fromkeys(sites, 0) | per_site,
        }


class Coverage:
    """`records`: each site's last record, with what all its parcels together cover; `uncovered`: kinds without one."""

    def __init__(self, plain: JsonMapping | None = None) -> None:
        self.records: dict[str, JsonObject] = dict((plain or {}).get("records", {}))
        self.uncovered: set[str] = set((plain or {}).get("uncovered", ()))

    def plain(self) -> JsonObject:
        """What a checkpoint keeps."""
        return {"records": self.records, "uncovered": sorted(self.uncovered)}

    def add(self, site: str, record: JsonMapping) -> None:
        """A record about this site's images: of a parcel, or of what a coordinator trained on what it had sent."""
        before, joined = self.records.get(site, {}), {}
        for name in ("covers", "does_not_cover"):
            joined[name] = list(dict.fromkeys(map(str, [*before.get(name, []), *record[name]])))
        self.records[site] = {**record, **joined}

    def note(self, site: str, parcel: Parcel) -> None:
        """A site released this parcel."""
        said = parcel.privacy  # it comes from outside, and may be no record at all
        if said is not None and all(isinstance(said.get(name), of) for name, of in RECORD.items()):
            self.add(site, said)
        elif parcel.content not in OF_NO_IMAGE and (parcel.tensors or parcel.metadata.keys() - PUBLIC):
            self.uncovered.add(parcel.content)
