"""The kinds of parcel, and what each one holds in one sentence."""

from typing import Annotated

from pydantic import AfterValidator

from polyclinic.registry import Registry
from polyclinic.settings import no_such_choice


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
#: the words of a sentence for a kind whose name says too little
KINDS_IN_WORDS = {
    "weights": "weights of a model",
    "gradients": "gradients (the change that its images ask of a model)",
    "activations": "activations (what a part of a model makes of its images)",
    "latents": "latents (compressed images)",
    "codes": "codes (compressed images)",
    "generator": "a generator (a model that draws images like its own)",
    "synthetic-images": "synthetic images",
    "statistics": "statistics",
    "metrics": "scores",
    "keys": "public keys",
    "masked": "numbers under masks, of which only the sum over all sites can be read",
    "shares": "shares of the secrets behind these masks",
    "labels": "labels of real images",
    "masks": "masks of real images",
    "real-images": "REAL IMAGES",
}
#: kinds from which whoever gets them rebuilds images of single patients, or has them as they are
DANGEROUS = ("real-images", "labels", "masks", "latents", "activations", "codes", "gradients")
#: kinds that hold nothing of images: they need no privacy, and no cohort
OF_NO_IMAGE = frozenset({"keys", "shares"})
#: not a kind of its own: the form in which a parcel of any kind goes from site to site (`layers/sealing.py`)
SEALED = "sealed"
#: metadata that tells no more than sizes, which count as public
PUBLIC = frozenset({"samples", "steps"})


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
