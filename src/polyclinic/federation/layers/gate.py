"""The gate: the only way out of a site.

Order of what happens to a parcel: policy, cohort, finite numbers, no raw images, encode, budgets, seal, write down.
"""

import contextlib
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.data.volumes.volume import pixels_of
from polyclinic.federation.call import GateRefused, GateRefusedData
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.federation.layers.cohort import count_patients
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.layers.raw_volumes import RawVolumes
from polyclinic.federation.layers.sealing import seal
from polyclinic.federation.ledger.budget import (
    SCORES,
    Budget,
    EpsilonLimit,
    OverBudget,
    OverBytes,
    Reserved,
    size_tells_something,
)
from polyclinic.federation.ledger.digest_threads import PAYS_FROM
from polyclinic.federation.ledger.keys import KEY_BYTES
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import SMALL, Parcels, Transaction
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import ADD_FINAL_SCORES, ADD_SCORES
from polyclinic.federation.sums.site_sums import BOX

#: kinds of an operation that releases something as large as the model, and at most numbers beside it
UPDATES = frozenset({"weights", "gradients", "statistics"})
#: bytes of a parcel's metadata as JSON: plain figures beside the tensors, or the layout of a sum
MOST_METADATA = 2**20
#: numbers for each pixel of each image of the site: of both orientations, by a network of 256 channels at full size
PER_IMAGE = {"latents": 512, "activations": 512, "labels": 1, "masks": 8, "codes": 1, "synthetic-images": 8}
#: kinds of which a site hands on what came, beside its own
HANDED_ON = frozenset({"codes", "labels", "masks"})
#: bytes for each site in keys and in shares; simulated sites pin no keys, and are at most so many
PER_SITE, SIMULATED_SITES = {"keys": KEY_BYTES, "shares": BOX}, 2**16
#: kinds that have no more numbers than the site's model, and few beside it
OF_A_MODEL, BESIDE_A_MODEL = frozenset({"weights", "gradients", "generator"}), 2**14


class Reservation(Layer):
    """What the work will cost is set aside before it begins; refused if nothing that it makes may leave."""

    def arriving(self, transaction: Transaction) -> None:
        call, trainer = transaction.call, transaction.site.trainer
        kinds = self.host.sums.kinds(call.operation, transaction.declared.releases)
        gate, size = self.sites.gates[call.site], model_bytes(trainer)
        transaction.held.enter_context(
            gate.reserved(call.round, call.operation, kinds, size, private=trainer.privacy is not None)
        )


class ThroughGate(Layer):
    """What leaves passes the site's gate, sealed if it is for another site."""

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        site, call = transaction.site, transaction.call
        transaction.outgoing = parcels
        for parcel in transaction.made:
            if words := self._too_large(transaction, parcel):
                raise GateRefusedData(f"site '{call.site}' kept back {parcel.kind} of '{call.operation}': {words}")
        added = call.operation in (ADD_SCORES, ADD_FINAL_SCORES)  # zeros, where too few patients would be behind them
        zeros = added and not any(bool(one.any()) for made in transaction.made for one in made.tensors.values())
        return self.sites.gates[call.site].release(
            parcels,
            round=call.round,
            operation=call.operation,
            to=call.to,
            seal=None if call.to == COORDINATOR else lambda parcel: seal(site, parcel, call),
            cohort=count_patients(self.spec, transaction) if self.spec.policy.min_cohort and not zeros else None,
            by_reference=self.host.by_reference,
        )

    def _too_large(self, transaction: Transaction, parcel: Parcel) -> str:
        """Why a parcel, as the operation made it, has more numbers than it can need."""
        site, kind, numbers = transaction.site, parcel.kind, sum(map(Tensor.numel, parcel.tensors.values()))
        declared = transaction.declared.most.get(kind)
        if len(json.dumps(dict(parcel.metadata), default=str)) > MOST_METADATA:
            return f"its metadata is longer than {MOST_METADATA} bytes"
        if kind in PER_SITE:
            most = (1 + (len(site.keys.pinned()) or SIMULATED_SITES)) * PER_SITE[kind]
        elif declared is not None and kind not in SMALL:
            most = declared(site.study.method, site) if callable(declared) else declared
        elif kind in PER_IMAGE:
            images = sum(len(part) for part in (site.data.train, site.data.validation, site.data.test))
            most = images * PER_IMAGE[kind] * pixels_of(site.data.train.images)
        elif kind in OF_A_MODEL and numbers > BESIDE_A_MODEL:
            most = sum(map(Tensor.numel, site.trainer.model.state_dict().values())) + BESIDE_A_MODEL
        else:
            return transaction.declared.too_many(kind, numbers, site.trainer)
        if kind in HANDED_ON:
            most += sum(t.numel() for p in transaction.received.values() if p.kind == kind for t in p.tensors.values())
        return f"{numbers} numbers, where at most {most} can be" if numbers > most else ""


def model_bytes(trainer: TrainerLike) -> int:
    """The bytes of what a site shares of its model."""
    shared = {name: t for name, t in trainer.model.state_dict().items() if name not in trainer.local_names}
    return sum(tensor.numel() * tensor.element_size() for tensor in shared.values())


class Gate:
    """Guards one site: `release` returns the parcel once it may leave, with its line in the ledger."""

    def __init__(
        self,
        site: str,
        policy: Policy,
        ledger: Ledger,
        raw_images: "RawImages | RawVolumes",
        budget: Budget | None = None,
        target: EpsilonLimit | None = None,
    ) -> None:
        """`budget` is that of a deployed site, over all its runs; that of this run alone if not given, where the policy
        sets one. `target` is the study's own limit of epsilon, which a deployed site counts itself."""
        self.site = site
        self.policy = policy
        self.ledger = ledger
        self.raw_images = raw_images
        self.budget = budget
        self.target = target
        self._is_limited = budget is not None or target is not None

    def release(
        self,
        parcels: Sequence[Parcel],
        *,
        round: int,
        operation: str,
        to: str,
        seal: Callable[[Parcel], Parcel] | None = None,
        cohort: int | None = None,
        by_reference: bool = False,
    ) -> tuple[Parcel, ...]:
        """Check the parcels of one operation and write them down; GateRefused, and no line, if one may not leave.

        `cohort`: patients behind what is released, where that is known. `by_reference`: the parcels stay in this
        process, so that the lines of large ones may wait for digests that are computed beside other work.

        With `seal` they leave sealed. A line then has the bytes that travel, and the digest of what is inside: that of
        the box is another one each time it is made, and would tell nobody what left.
        """
        large = False
        for parcel in parcels:
            try:
                self._check_policy(parcel.kind)
                if cohort is not None and cohort < (wanted := self.policy.min_cohort):
                    raise GateRefused(f"fewer patients are behind it than the {wanted} that the site's policy wants")
                check_finite(parcel)
                self._check_raw(parcel)
                check_encodes(parcel)
                large |= parcel.layout.size >= PAYS_FROM
            except GateRefused as refusal:
                kept = f"site '{self.site}' kept back {parcel.kind} of '{operation}'"
                raise type(refusal)(f"{kept}: {refusal}") from None
        if by_reference and large and not seal and not self.budget:
            for parcel in parcels:
                self.ledger.append_soon(parcel.digest_soon, **_line(parcel, parcel.size, round, operation, to))
            return tuple(parcels)
        leaving = tuple([seal(parcel) for parcel in parcels] if seal else parcels)
        # no other run of this site may spend between the check and the charge
        with self.budget.locked() if self.budget else contextlib.nullcontext():
            self._check_budget(parcels, round, operation, to)
            for parcel, sent in zip(parcels, leaving, strict=True):  # before a byte leaves
                if self._is_limited and not self.ledger.has(round, operation, parcel.kind, parcel.digest, to):
                    if self.budget:
                        self.budget.spend(parcel.kind, sent.size, parcel.privacy)
                    if self.target:
                        self.target.spend(parcel.privacy)
                # a secret between two sites: who guesses it could confirm it
                salted = to != COORDINATOR and self.policy.deployed
                about = _line(parcel, sent.size, round, operation, to)
                self.ledger.append(parcel.digest, salted=salted, **about)
            self.ledger.commit()
        return leaving

    def _check_budget(self, parcels: Sequence[Parcel], round: int, operation: str, to: str) -> None:
        """GateRefused unless what is new of the parcels may leave together."""
        if not self._is_limited:
            return
        try:
            new = [p for p in parcels if not self.ledger.has(round, operation, p.kind, p.digest, to)]
            if self.budget:
                self.budget.check(new)
            if self.target:
                self.target.check(new)
        except OverBudget as refusal:
            tells = self.ledger.may_repeat(round, operation) or any(size_tells_something(p) for p in parcels)
            refused = GateRefusedData if tells and isinstance(refusal, OverBytes) else GateRefused
            raise refused(f"site '{self.site}' kept back what '{operation}' made: {refusal}") from None

    @contextlib.contextmanager
    def reserved(
        self, round: int, operation: str, kinds: Sequence[str], model_bytes: int, *, private: bool
    ) -> Iterator[None]:
        """While a deployed site does what an operation asks: its share of the budgets is set aside. GateRefused, before
        an image is looked at, if nothing that the operation releases may leave.

        Weights and gradients take `model_bytes`. What an interrupted run has released before costs nothing.
        """
        repeats = self.ledger.may_repeat(round, operation)
        size = model_bytes if kinds and set(kinds) <= UPDATES and not repeats else 0
        with contextlib.ExitStack() as held:
            try:
                if kinds and not set(kinds) & set(self.policy.kinds):
                    self._check_policy(kinds[0])
                if self.budget:
                    if kinds and not repeats:
                        self.budget.check_bytes(size)
                    wanted = Reserved(size, int(SCORES in kinds))
                    spends = private and not repeats and not set(kinds) <= {SCORES, *OF_NO_IMAGE}
                    held.enter_context(self.budget.reserved(wanted, private=spends))
            except (GateRefused, OverBudget) as refusal:
                raise GateRefused(f"site '{self.site}' kept back {kinds[0]} of '{operation}': {refusal}") from None
            yield

    def _check_policy(self, kind: str) -> None:
        """GateRefused for a kind that may not leave."""
        if kind == "real-images" and self.policy.deployed:
            raise GateRefused("real images never leave a deployed site, whatever its policy lists")
        if kind not in self.policy.kinds:
            where = "policy.toml of its kit" if self.policy.deployed else "policy.kinds of the study"
            allowed = ", ".join(self.policy.kinds)
            raise GateRefused(f"the site's policy does not let this kind out (it allows {allowed}); add it to {where}")

    def check_numbers(self, parcel: Parcel) -> None:
        """GateRefused for a parcel whose numbers may not leave, before they become whole numbers of a sum or are
        rounded, when nobody could see it."""
        check_finite(parcel)
        self._check_raw(parcel)

    def _check_raw(self, parcel: Parcel) -> None:
        if parcel.kind == "real-images":
            return
        for name, tensor in parcel.tensors.items():
            if self.raw_images.found_in(tensor):
                raise GateRefusedData(f"tensor '{name}' holds images of the site itself")


def _line(parcel: Parcel, size: int, round: int, operation: str, to: str) -> dict[str, Any]:
    """What a line of the ledger says of a parcel, but for its digest; also the secure sum that it belongs to, which the
    site itself has written on it."""
    privacy = None if parcel.privacy is None else dict(parcel.privacy)
    of_sum = parcel.metadata.get("sum") if parcel.kind in ("masked", "shares") else None
    about = {"round": round, "operation": operation, "kind": parcel.kind, "bytes": size, "to": to}
    return {**about, "privacy": privacy, "sum": of_sum, "wire": parcel.wire}


def check_finite(parcel: Parcel) -> None:
    """GateRefusedData if any tensor or number of the parcel is NaN or infinite."""
    norms = parcel.norms
    for name, tensor in parcel.tensors.items():
        # a finite norm has finite terms; one that is not may have overflowed, or is not known
        may_be_infinite = tensor.is_floating_point() or tensor.is_complex()
        if may_be_infinite and not math.isfinite(norms.get(name, math.inf)):
            # torch tells NaN from numbers in no float of one byte
            values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
            # a finite sum has finite terms, and is faster; one that is not may have overflowed
            if (not values.is_complex() and math.isfinite(values.sum())) or bool(torch.isfinite(values).all()):
                continue
            raise GateRefusedData(f"tensor '{name}' holds NaN or infinity; lower optimizer.lr or check the images")
    for name, value in parcel.metadata.items():
        for number in _floats(value):
            if not math.isfinite(number):
                raise GateRefusedData(f"'{name}' is {number}; lower optimizer.lr or check the images")


def _floats(value: Any) -> Iterator[float]:
    """The floats of a plain JSON value, those inside lists and tables too."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floats(item)


def check_encodes(parcel: Parcel) -> None:
    """GateRefused if the parcel has no encoding: metadata that is not plain JSON, say."""
    try:
        _ = parcel.size
    except (TypeError, ValueError, SafetensorError) as error:
        raise GateRefused(f"it cannot be encoded: {error}") from error


class RawImages:
    """Recognises a site's own images in a tensor: as bytes, or as numbers in [0, 1] or [0, 255].

    It finds whole images, whatever the parcel calls them, in a batch, flattened, or without a channel axis of
    length one. It does not find images that were cropped, flipped, resized, blurred or hidden in other numbers:
    against those stand policy and audit.
    """

    def __init__(self, *images: np.ndarray) -> None:
        """`images`: uint8 [N, C, H, W], all of one shape, perhaps in several arrays."""
        self._images = images
        self._shape = images[0].shape[1:]

    def found_in(self, tensor: Tensor) -> bool:
        """True if any row of `tensor` is one of the site's images."""
        size = math.prod(self._shape)
        fits = size in itertools.accumulate(reversed(tensor.shape), operator.mul)  # the last axes make up an image
        if not fits or tensor.is_complex() or not tensor.numel():
            return False
        rows = tensor.detach().cpu().reshape(-1, size)
        return any(digest in self._known for digest in map(_digest, _as_bytes(rows)))

    @cached_property
    def _known(self) -> set[bytes]:
        # an image of one colour shows nobody, and would be found in any row of zeros
        return {_digest(image) for images in self._images for image in images if image.min() < image.max()}


def _digest(image: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()


def _as_bytes(rows: Tensor) -> np.ndarray:
    """Rows [N, D] as the uint8 images they would be on disk: a row without a number above 1 is one in [0, 1]."""
    if rows.dtype == torch.uint8:
        return rows.numpy()
    values = rows.double()
    scale = torch.where(values.amax(1, keepdim=True) <= 1, 255.0, 1.0)
    return (values * scale).round().clamp(0, 255).to(torch.uint8).numpy()
