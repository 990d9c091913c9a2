"""Fingerprint of volumes: spacings, extents, intensities and voxels of structures over all sites, and nnU-Net's plan.

A site tells counts on fixed grids, of one case of each patient. The cases are first put into groups of neighbours, of
no fewer patients than the policy's `min_cohort`, and each counts where its group has its middle: no bin holds fewer,
and no extreme value leaves. Intensities that fewer patients have are left out.
With `federation.sum = "secure"` the coordinator learns the sums over all sites only.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.data.volumes.volume import Volume
from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.method import Federation, Method, Site, Traits, Weights, all_sites, operation
from polyclinic.models.volume_plan import plan_of
from polyclinic.questions.statistics import people_of

#: steps between the bins of spacings and extents, in millimetres, and their number; a bin is called by its middle
SPACING, SPACINGS = 0.01, 2000
EXTENT, EXTENTS = 2.0, 1000
#: steps of intensities, the lowest, and the number of bins; those outside are in the outer ones
INTENSITY, LOWEST, INTENSITIES = 8.0, -1024.0, 640
#: a case's voxels inside structures are counted in so many parts
PARTS = 1000
AXES = "xyz"


class FingerprintVolumes(Method):
    name: Literal["fingerprint"] = "fingerprint"
    fraction: float = all_sites()
    rounds: int = Field(1, ge=1, le=1, description="one round: each site is asked once")

    summary: ClassVar[str] = "nothing is trained: the sites tell spacings, extents and intensities of volumes"
    no_privacy: ClassVar[str] = "tells counts, which no noise covers; take the table [privacy] out"
    traits: ClassVar[Traits] = Traits(trains="nothing", private_networks=())
    SUMMED: ClassVar[dict[str, str]] = {"survey": "sum"}

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            told = [reply.parcel("statistics").tensors for reply in federation.ask_all("survey")]
            total = {name: sum(one[name].numpy() for one in told) for name in told[0]}
            federation.report("inspect", summary_of(total, federation))
        return state.weights

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "survey":
            channels, structures = federation.image_shape[0], len(federation.trainer.target.structures)
            sent = reply.parcel("statistics").tensors
            found = {name: t.numel() for name, t in sent.items() if t.dtype == torch.int64 and t.dim() == 1}
            if found != _sizes(channels, structures) or any(bool((t < 0).any()) for t in sent.values()):
                raise ParcelRejected("statistics: these are no counts of volumes")

    @operation("statistics")
    def survey(self, site: Site) -> Parcel:
        """Counts of training cases by spacing and extent, and of voxels inside structures by intensity."""
        structures = [list(values) for _, values in site.trainer.target.structures]
        return Parcel("statistics", counts_of(site.data.train, structures, max(site.min_cohort, 1)))


def _sizes(channels: int, structures: int) -> dict[str, int]:
    spatial = {f"{what} {axis}": n for axis in AXES for what, n in (("spacing", SPACINGS), ("extent", EXTENTS))}
    return {**spatial, **{f"intensity {c}": INTENSITIES for c in range(channels)}, "voxels": structures + 1, "cases": 1}


def counts_of(part: ImageSet, structures: list[list[int]], least: int) -> dict[str, Tensor]:
    """What a site tells of a part; nothing but zeros where it has fewer than `least` patients."""
    first = np.unique(people_of(part), return_index=True)[1]
    volumes: list[Volume] = list(part.images[np.sort(first)]) if len(first) >= least else []
    channels = len(part.images[0].image) if len(part.images) else 0
    found = {name: np.zeros(size, np.int64) for name, size in _sizes(channels, len(structures)).items()}
    facts = {
        "spacing": (np.array([volume.origin["spacing"] for volume in volumes]), SPACING, SPACINGS),
        "extent": (np.array([_extent(volume) for volume in volumes]), EXTENT, EXTENTS),
    }
    for what, (values, step, bins) in facts.items():
        for axis, letter in enumerate(AXES if volumes else ""):
            middle = grouped(values[:, axis], least)
            np.add.at(found[f"{what} {letter}"], np.clip(np.rint(middle / step).astype(int), 0, bins - 1), 1)
    people = {name: np.zeros_like(one) for name, one in found.items() if name.startswith("intensity")}
    for volume in volumes:
        mask = np.asarray(volume.mask)
        for channel, image in enumerate(volume.image):
            inside = np.asarray(image[mask > 0], np.float32)
            bins = np.clip((inside - LOWEST) / INTENSITY, 0, INTENSITIES - 1).astype(int)
            share = np.bincount(bins, minlength=INTENSITIES) * (PARTS / max(len(bins), 1))
            found[f"intensity {channel}"] += np.rint(share).astype(np.int64)
            people[f"intensity {channel}"] += share > 0
        inside_of = [np.isin(mask, values).mean() for values in structures]
        found["voxels"] += np.rint(np.array([(mask == 0).mean(), *inside_of]) * PARTS**2).astype(np.int64)
    for name, some in people.items():
        found[name][some < least] = 0
    found["cases"][0] = len(volumes)
    return {name: torch.from_numpy(one) for name, one in found.items()}


def _extent(volume: Volume) -> list[float]:
    """Millimetres of a prepared case along each axis: what is empty is cut off."""
    return [n * apart for n, apart in zip(volume.image.shape[1:], volume.spacing, strict=True)]


def grouped(values: np.ndarray, least: int) -> np.ndarray:
    """Values in the same number, each the (lower) middle of its group of at least `least` neighbours."""
    ordered = np.sort(values)
    groups = np.array_split(ordered, max(1, len(ordered) // least))
    return (
        np.concatenate([np.full(len(group), group[(len(group) - 1) // 2]) for group in groups])
        if len(ordered)
        else ordered
    )


def summary_of(total: Mapping[str, Any], federation: Federation) -> dict[str, Any]:
    """The fingerprint in words of a study: medians, percentiles, shares of voxels, and the plan that follows."""
    cases = int(total["cases"][0])
    if not cases:
        raise WorkFailed("fingerprint: no site has as many patients as its policy wants (min_cohort); nothing was told")
    grids = {"spacing": SPACING * np.arange(SPACINGS), "extent": EXTENT * np.arange(EXTENTS)}
    spacings, extents = (
        np.stack([np.repeat(grid, total[f"{what} {axis}"]) for axis in AXES], 1) for what, grid in grids.items()
    )
    plan = plan_of(np.maximum(spacings, SPACING), np.maximum(extents, EXTENT))
    levels = LOWEST + INTENSITY * (np.arange(INTENSITIES) + 0.5)
    channels = range(federation.image_shape[0])
    names = ["background", *(name for name, _ in federation.trainer.target.structures)]
    return {
        "cases": cases,
        "median_spacing": np.median(spacings, axis=0).round(4).tolist(),
        "median_extent": np.median(extents, axis=0).tolist(),
        "intensities": [_intensities(levels, total[f"intensity {channel}"]) for channel in channels],
        "voxels": dict(zip(names, (total["voxels"] / (cases * PARTS**2)).round(6).tolist(), strict=True)),
        "gigabytes": round(plan.gigabytes, 1),
        "plan": plan.as_tables(),
    }


def _intensities(levels: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Percentiles, mean and deviation inside structures, for `preparation.intensities`."""
    weights = counts / max(counts.sum(), 1)
    places = [min(int(np.searchsorted(weights.cumsum(), q)), len(levels) - 1) for q in (0.005, 0.995)]
    low, high = (float(levels[place]) for place in places)
    clipped = np.clip(levels, low, high)
    mean = float((clipped * weights).sum())
    deviation = float(np.sqrt(max(((clipped - mean) ** 2 * weights).sum(), 1e-6)))
    return {"low": low, "high": high, "mean": round(mean, 2), "deviation": round(deviation, 3)}
