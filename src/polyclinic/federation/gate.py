"""The gate: the only way out of a site.

Order of what happens to a parcel: policy, finite numbers, no raw images, encode, count, write down.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.federation.ledger import Ledger
from polyclinic.federation.parcel import KINDS, Parcel
from polyclinic.settings import Settings

#: kinds a deployed site lets out unless its own policy says otherwise
DEFAULT_KINDS = tuple(kind for kind in KINDS if kind not in ("real-images", "labels", "masks"))


class GateRefused(Exception):  # noqa: N818
    """A parcel that may not leave. Says which site, operation and kind, and why."""


class Policy(Settings):
    """What a site lets out. `deployed` is true at a real institution and cannot be set by a study."""

    kinds: tuple[str, ...] = Field(DEFAULT_KINDS, description="kinds of parcel that may leave this site")
    deployed: bool = Field(False, description="true at a real institution, where pooling images is never allowed")


class RawImages:
    """Recognises a site's own images in a tensor, as they are or scaled to [0, 1].

    It finds whole images of the site's own shape, whatever the parcel calls them. It does not find images
    that were cropped, resized, blurred or hidden in other numbers: against those stand policy and audit.
    """

    def __init__(self, images: np.ndarray) -> None:
        self._images = images
        self._known: set[bytes] | None = None

    def found_in(self, tensor: Tensor) -> bool:
        """True if any image-shaped row of `tensor` is one of the site's images."""
        shape = self._images.shape[1:]
        if tensor.ndim < 3 or tuple(tensor.shape[-3:]) != shape or tensor.is_complex():
            return False
        rows = tensor.detach().cpu().reshape(-1, *shape)
        return any(digest in self.known for digest in map(_digest, _as_bytes(rows)))

    @property
    def known(self) -> set[bytes]:
        if self._known is None:
            self._known = {_digest(image) for image in self._images}
        return self._known


def _digest(image: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest()


def _as_bytes(rows: Tensor) -> np.ndarray:
    """Rows as the uint8 images they would be on disk: bytes already, or floats scaled to [0, 1]."""
    if rows.dtype == torch.uint8:
        return rows.numpy()
    values = rows.double()
    scale = 255.0 if values.numel() and float(values.max()) <= 1.0 else 1.0
    return (values * scale).round().clamp(0, 255).to(torch.uint8).numpy()


class Gate:
    """Guards one site: `release` returns the parcel once it may leave, with its line in the ledger."""

    def __init__(self, site: str, policy: Policy, ledger: Ledger, raw_images: RawImages) -> None:
        self.site = site
        self.policy = policy
        self.ledger = ledger
        self.raw_images = raw_images

    def release(self, parcel: Parcel, *, round: int, operation: str, to: str, simulation_only: bool = False) -> Parcel:
        """Check the parcel, count its bytes, write it down; GateRefused if it may not leave."""
        try:
            self._check_policy(parcel.kind, simulation_only)
            check_finite(parcel)
            self._check_raw(parcel)
        except GateRefused as refusal:
            raise GateRefused(f"site '{self.site}' kept back {parcel.kind} of '{operation}': {refusal}") from None
        self.ledger.append(
            round=round,
            operation=operation,
            kind=parcel.kind,
            bytes=len(parcel.encoded),
            digest=parcel.digest,
            to=to,
        )
        return parcel

    def _check_policy(self, kind: str, simulation_only: bool) -> None:
        if simulation_only and self.policy.deployed:
            raise GateRefused("it pools images, which exists in simulation only")
        if kind not in self.policy.kinds:
            allowed = ", ".join(self.policy.kinds)
            raise GateRefused(f"the site's policy does not let this kind out (it allows {allowed})")

    def _check_raw(self, parcel: Parcel) -> None:
        if parcel.kind == "real-images":
            return
        for name, tensor in parcel.tensors.items():
            if self.raw_images.found_in(tensor):
                raise GateRefused(f"tensor '{name}' holds images of the site itself")


def check_finite(parcel: Parcel) -> None:
    """GateRefused if any tensor or number of the parcel is NaN or infinite."""
    for name, tensor in parcel.tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise GateRefused(f"tensor '{name}' holds NaN or infinity; lower optimizer.lr or check the images")
    for name, value in parcel.metadata.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise GateRefused(f"'{name}' is {value}; lower optimizer.lr or check the images")
