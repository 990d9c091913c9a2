"""The kinds of parcel, what each one holds in one sentence; and what a receiver accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from polyclinic.registry import Registry
from polyclinic.settings import no_such_choice

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyclinic.federation.ledger.parcel import Parcel


class Kind:
    """One subclass per kind. A kind of a plug-in leaves a site only where the site's policy names it."""


#: a further kind is one line here, or a class of a plug-in
_BUILTIN = {
    "weights": "Parameters and buffers of a network, or some of them.",
    "gradients": "Gradients of the loss with respect to the parameters.",
    "activations": "What a layer gave for a batch that is being trained on (split learning).",
    "latents": "What a layer gave for images, computed once.",
    "codes": "Discrete codes of images, which a decoder turns back into images.",
    "generator": "Parameters of a generator or of its prior.",
    "synthetic-images": "Images that a generator made.",
    "statistics": "Counts, means and other numbers over many images.",
    "metrics": "Sums that the sites' scores are computed from.",
    "labels": "Labels of images.",
    "masks": "Segmentation masks of images.",
    "real-images": "Images of patients; no deployed site lets them out.",
    "keys": "Public keys with which sites encrypt what they send each other.",
    "masked": "Whole numbers under masks of a secure sum; only the sum of all sites can be read.",
    "shares": "Shares of the secrets behind the masks of a secure sum, sealed for single sites or told at its end.",
}
KINDS: Registry[type[Kind]] = Registry(
    "polyclinic.kinds", {name: type(name, (Kind,), {"__doc__": text}) for name, text in _BUILTIN.items()}, base=Kind
)
#: kinds that hold nothing of images: they need no privacy, and no cohort
OF_NO_IMAGE = frozenset({"keys", "shares"})


def check_kind(name: str) -> str:
    """The same name; ValueError if it is no kind of parcel."""
    if name not in KINDS:
        raise ValueError(no_such_choice(name, list(KINDS)))
    return name


#: names of kinds, as a policy lists them
KindNames = tuple[Annotated[str, AfterValidator(check_kind)], ...]


class ParcelRejected(Exception):  # noqa: N818
    """Bytes or tensors that are not what the receiver expects. Says what was wrong with which tensor."""


#: bytes of the tensors of all parcels of one message, once they are read
MESSAGE_LIMIT = 4 * 2**30


@dataclass(frozen=True)
class Expected:
    """What a receiver accepts: a kind, and where it knows them, every tensor's dtype and shape.

    With `tensors` given, a parcel must hold exactly those names (a part of them with `partial`). Without it
    any names and shapes pass, up to `max_bytes` in all.
    """

    kind: str
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
    partial: bool = False
    max_bytes: int = MESSAGE_LIMIT

    @classmethod
    def like(cls, kind: str, tensors: Mapping[str, Tensor], *, partial: bool = False) -> Expected:
        """The same names, dtypes and shapes as `tensors`."""
        return cls(kind, {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}, partial)

    def check(self, parcel: Parcel) -> None:
        """Raise ParcelRejected unless the parcel is what is expected."""
        if parcel.kind != self.kind:
            raise ParcelRejected(f"a parcel of kind '{parcel.kind}' came where '{self.kind}' was expected")
        if parcel.tensor_bytes > self.max_bytes:
            raise ParcelRejected(f"a parcel of {parcel.tensor_bytes} bytes is above the limit of {self.max_bytes}")
        if self.tensors is not None:
            self._check_tensors(self.tensors, parcel)

    def _check_tensors(self, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], parcel: Parcel) -> None:
        tensors = parcel.tensors
        if not (tensors.keys() <= expected.keys() if self.partial else tensors.keys() == expected.keys()):
            unknown = sorted(set(tensors) - set(expected))
            missing = [] if self.partial else sorted(set(expected) - set(tensors))
            raise ParcelRejected(f"{self.kind}: unexpected tensors {unknown[:3]}, missing tensors {missing[:3]}")
        for name, dtype, shape in parcel.layout.shapes:
            if (dtype, shape) != expected[name]:
                found, wanted = f"{dtype} {tuple(shape)}", "{} {}".format(*expected[name])
                raise ParcelRejected(f"{self.kind}: tensor '{name}' is {found}, expected {wanted}")


@dataclass(frozen=True)
class OneOf(Expected):
    """A parcel that is any of several: weights of one of the networks that a study's sites have."""

    choices: tuple[Expected, ...] = ()

    def check(self, parcel: Parcel) -> None:
        refusals = []
        for choice in self.choices:
            try:
                return choice.check(parcel)
            except ParcelRejected as refusal:
                refusals.append(refusal)
        raise refusals[0]
