"""The kinds of parcel: what each one holds, in one sentence."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from polyclinic.registry import Registry
from polyclinic.settings import no_such_choice


class Kind:
    """One subclass per kind. A kind of a plug-in leaves a site only where the site's policy names it."""


class Weights(Kind):
    """Parameters and buffers of a network, or some of them."""


class Gradients(Kind):
    """Gradients of the loss with respect to the parameters."""


class Activations(Kind):
    """What a layer gave for a batch that is being trained on (split learning)."""


class Latents(Kind):
    """What a layer gave for images, computed once."""


class Codes(Kind):
    """Discrete codes of images, which a decoder turns back into images."""


class GeneratorWeights(Kind):
    """Parameters of a generator or of its prior."""


class SyntheticImages(Kind):
    """Images that a generator made."""


class Statistics(Kind):
    """Counts, means and other numbers over many images."""


class Metrics(Kind):
    """Sums that the sites' scores are computed from."""


class Labels(Kind):
    """Labels of images."""


class Masks(Kind):
    """Segmentation masks of images."""


class RealImages(Kind):
    """Images of patients; no deployed site lets them out."""


class Keys(Kind):
    """Public keys with which sites encrypt what they send each other."""


class Masked(Kind):
    """Whole numbers under masks of a secure sum; only the sum of all sites can be read."""


class Shares(Kind):
    """Shares of the secrets behind the masks of a secure sum, sealed for single sites or told at its end."""


#: a further kind is one class and one line here, or a plug-in
KINDS: Registry[type[Kind]] = Registry(
    "polyclinic.kinds",
    {
        "weights": Weights,
        "gradients": Gradients,
        "activations": Activations,
        "latents": Latents,
        "codes": Codes,
        "generator": GeneratorWeights,
        "synthetic-images": SyntheticImages,
        "statistics": Statistics,
        "metrics": Metrics,
        "labels": Labels,
        "masks": Masks,
        "real-images": RealImages,
        "keys": Keys,
        "masked": Masked,
        "shares": Shares,
    },
    base=Kind,
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
