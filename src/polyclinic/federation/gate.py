"""The gate: the only way out of a site.

Order of what happens to a parcel: policy, cohort, finite numbers, no raw images, encode, budgets, seal, write down.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError
from torch import Tensor

from polyclinic.federation.budget import Budget, OverBudget
from polyclinic.federation.ledger import Ledger
from polyclinic.federation.parcel import KINDS, Parcel
from polyclinic.settings import Settings

#: kinds a deployed site lets out unless its own policy says otherwise
DEFAULT_KINDS = tuple(kind for kind in KINDS if kind not in ("real-images", "labels", "masks"))


class GateRefused(Exception):  # noqa: N818
    """A parcel that may not leave. Says which site, operation and kind, and why."""


class Policy(Settings):
    """What a site lets out. `deployed` is true at a real institution and cannot be set by a study."""

    kinds: tuple[Literal[*KINDS], ...] = Field(  # type: ignore[valid-type]
        DEFAULT_KINDS, description="kinds of parcel that may leave this site"
    )
    max_bytes: int | None = Field(None, ge=0, description="bytes that may leave this site, over all its runs together")
    max_epsilon: float | None = Field(
        None,
        gt=0,
        description="epsilon that may be spent, over all runs together; what differential privacy does not cover stays",
    )
    min_cohort: int = Field(
        0, ge=0, description="fewest patients (images, where patients are unknown) that anything may be computed from"
    )
    deployed: bool = Field(False, description="true at a real institution, where pooling images is never allowed")


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
        if tensor.is_complex() or not tensor.numel() or not self._has_rows(tuple(tensor.shape)):
            return False
        rows = tensor.detach().cpu().reshape(-1, math.prod(self._shape))
        return any(digest in self._known for digest in map(_digest, _as_bytes(rows)))

    def _has_rows(self, shape: tuple[int, ...]) -> bool:
        """Whether the last axes of a tensor make up an image."""
        return any(math.prod(shape[axis:]) == math.prod(self._shape) for axis in range(len(shape)))

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


class Gate:
    """Guards one site: `release` returns the parcel once it may leave, with its line in the ledger."""

    def __init__(
        self, site: str, policy: Policy, ledger: Ledger, raw_images: RawImages, earlier: Sequence[Path] = ()
    ) -> None:
        """`earlier`: ledgers of the site's other runs, which count in its budgets."""
        self.site = site
        self.policy = policy
        self.ledger = ledger
        self.raw_images = raw_images
        self.budget = Budget(ledger.path, earlier, bytes=policy.max_bytes, epsilon=policy.max_epsilon)

    def release(
        self,
        parcels: Sequence[Parcel],
        *,
        round: int,
        operation: str,
        to: str,
        simulation_only: bool = False,
        seal: Callable[[Parcel], Parcel] | None = None,
        cohort: int | None = None,
    ) -> tuple[Parcel, ...]:
        """Check the parcels of one operation and write them down; GateRefused, and no line, if one may not leave.

        `cohort`: patients behind what is released, where that is known.

        With `seal` they leave sealed. A line then has the bytes that travel, and the digest of what is inside: that of
        the box is another one each time it is made, and would tell nobody what left.
        """
        for parcel in parcels:
            try:
                self._check_policy(parcel.kind, simulation_only)
                self._check_cohort(cohort)
                check_finite(parcel)
                self._check_raw(parcel)
                check_encodes(parcel)
            except GateRefused as refusal:
                raise GateRefused(f"site '{self.site}' kept back {parcel.kind} of '{operation}': {refusal}") from None
        try:
            self.budget.check([p for p in parcels if not self.ledger.has(round, operation, p.kind, p.digest, to)])
        except OverBudget as refusal:
            raise GateRefused(f"site '{self.site}' kept back what '{operation}' made: {refusal}") from None
        leaving = tuple(seal(parcel) if seal else parcel for parcel in parcels)
        for parcel, sent in zip(parcels, leaving, strict=True):
            if not self.ledger.has(round, operation, parcel.kind, parcel.digest, to):
                self.budget.spend(len(sent.encoded), parcel.privacy)
            self.ledger.append(
                round=round,
                operation=operation,
                kind=parcel.kind,
                bytes=len(sent.encoded),
                digest=parcel.digest,
                to=to,
                privacy=None if parcel.privacy is None else dict(parcel.privacy),
            )
        return leaving

    def _check_policy(self, kind: str, simulation_only: bool) -> None:
        if simulation_only and self.policy.deployed:
            raise GateRefused("it pools images, which exists in simulation only")
        if kind not in self.policy.kinds:
            allowed = ", ".join(self.policy.kinds)
            raise GateRefused(f"the site's policy does not let this kind out (it allows {allowed})")

    def _check_cohort(self, cohort: int | None) -> None:
        if cohort is not None and cohort < self.policy.min_cohort:
            raise GateRefused(f"{cohort} patients are behind it, and the site's policy wants {self.policy.min_cohort}")

    def _check_raw(self, parcel: Parcel) -> None:
        if parcel.kind == "real-images":
            return
        for name, tensor in parcel.tensors.items():
            if self.raw_images.found_in(tensor):
                raise GateRefused(f"tensor '{name}' holds images of the site itself")


def check_finite(parcel: Parcel) -> None:
    """GateRefused if any tensor or number of the parcel is NaN or infinite."""
    for name, tensor in parcel.tensors.items():
        if not _is_finite(tensor):
            raise GateRefused(f"tensor '{name}' holds NaN or infinity; lower optimizer.lr or check the images")
    for name, value in parcel.metadata.items():
        for number in _floats(value):
            if not math.isfinite(number):
                raise GateRefused(f"'{name}' is {number}; lower optimizer.lr or check the images")


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return True
    # torch tells NaN from numbers in no float of one byte
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return bool(torch.isfinite(values).all())


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
        _ = parcel.encoded
    except (TypeError, ValueError, SafetensorError) as error:
        raise GateRefused(f"it cannot be encoded: {error}") from error
