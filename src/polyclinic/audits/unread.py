"""Tensors of a parcel that no attack reads: whatever a method puts beside the ones that are known leaves a gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from polyclinic.audits.attack_synthetic import load_generator, model_of_codes
from polyclinic.audits.sum_layouts import names_of_sums
from polyclinic.audits.views import EVERY_QUESTION, NotTried, Seen
from polyclinic.federation.ledger.parcel import Parcel

METRICS = frozenset({"histograms", "confusion"})
FEW = 8  #: numbers that a tensor of metrics may have without being looked at: a mean, a count
FEW_IN_ALL = 64  #: numbers of all such tensors together: images can be cut into small pieces
#: what attacks read of parcels whose tensors have fixed names
READ = {
    "synthetic-images": frozenset({"images", "labels", "masks"}),
    "activations": frozenset({"activations"}),
    "latents": frozenset({"latents", "low", "step", "flipped_latents", "flipped_low", "flipped_step"}),
}


def unread_names(seen: Seen) -> list[str]:
    """Names of tensors in a parcel that are neither of the study's network or generator nor of sums that are known
    here."""
    sent = seen.parcel.tensors
    if seen.kind in ("weights", "gradients"):
        known = set(seen.network.state_dict())
    elif seen.kind == "statistics":
        known = names_of_sums(seen.parcel) or set(sent)  # sums that are not known at all have a gap of their own
    elif seen.kind == "metrics":
        known = {*METRICS, *_small(sent)}
    elif seen.kind == "generator":
        model = load_generator(seen, {})
        known = set(sent) if isinstance(model, NotTried) else set(model.state())
    elif seen.kind == "codes":
        coded = model_of_codes(seen)
        known = set(sent) if isinstance(coded, NotTried) else {f"{seen.site}/{one}" for one in coded.codebook_sizes}
    else:
        known = set(READ.get(seen.kind, sent))
    return sorted(set(sent) - known)


def _small(sent: Mapping[str, Tensor]) -> set[str]:
    small = {name: tensor.numel() for name, tensor in sent.items() if name not in METRICS and tensor.numel() <= FEW}
    return set(small) if sum(small.values()) <= FEW_IN_ALL else set()


def without_unread(seen: Seen) -> tuple[Seen, list[NotTried]]:
    """What attacks can read of a parcel, and the gap that the rest leaves in every question."""
    names = unread_names(seen)
    if not names:
        return seen, []
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (", ..." if len(names) > 3 else "")
    rest = {name: tensor for name, tensor in seen.parcel.tensors.items() if name not in names}
    parcel = Parcel(seen.kind, rest, seen.parcel.metadata)
    together = tuple(parcel if one is seen.parcel else one for one in seen.together)
    gap = NotTried("every attack", f"the parcel holds {shown}, which no attack reads", EVERY_QUESTION)
    return replace(seen, parcel=parcel, together=together), [gap]
