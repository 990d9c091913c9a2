"""Statistics before training: how many images, patients and labels the sites have, of which sizes, spacings and
intensities, and how they differ.

Nothing is trained. A site tells counts, in steps; those of fewer patients than its policy's `min_cohort` are left out,
and so are others of the same table from which these would follow. With `federation.sum = "secure"` the coordinator
learns the totals over all sites only.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.method import Federation, Method, Site, Traits, Weights, all_sites, operation
from polyclinic.metrics.statistics.disclosure import told_cells
from polyclinic.questions.statistics import people_of
from polyclinic.tasks.task import round_counts

#: bins of values and of intensities
BINS = 16
#: splits that are counted; a site does not open its test images for it
SPLITS = ("train", "validation")
#: edges between bins of the longer side of an image, in pixels, and of the distance of its pixels, in millimetres
SIDES = (64, 128, 256, 384, 512, 768, 1024, 2048)
SPACINGS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0)
#: KS from which sites are said to differ
DIFFERENT = 0.5
#: in a table of counts: not told
SUPPRESSED = -1


class InspectSites(Method):
    name: Literal["inspect"] = "inspect"
    fraction: float = all_sites()
    rounds: int = Field(1, ge=1, le=1, description="one round: each site is asked once")

    summary: ClassVar[str] = "nothing is trained: the sites tell counts of images, patients and labels"
    no_privacy: ClassVar[str] = "tells counts, which no noise covers; take the table [privacy] out"
    traits: ClassVar[Traits] = Traits(trains="nothing", private_networks=(), label_sets=True)
    SUMMED: ClassVar[dict[str, str]] = {"survey": "sum"}

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            told = {reply.site: tables(reply.parcel("statistics").tensors) for reply in federation.ask_all("survey")}
            federation.report("inspect", about_sites(told, federation))
        return state.weights

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation != "survey":
            return
        bins = len(federation.trainer.target.classes) or BINS
        wanted = {"splits": len(SPLITS), "patients": 1, "labels": bins, "intensities": BINS, "missing": 1}
        wanted |= {"sides": len(SIDES) + 1, "spacings": len(SPACINGS) + 2}
        wanted |= {f"{name} told": size for name, size in wanted.items()}
        sent = reply.parcel("statistics").tensors
        found = {name: t.numel() for name, t in sent.items() if t.dtype == torch.int64 and t.dim() == 1}
        if found != wanted or any(bool((t < 0).any()) for t in sent.values()):
            raise ParcelRejected("statistics: these are no counts of images, patients and labels")

    @operation("statistics")
    def survey(self, site: Site) -> Parcel:
        """Counts of the site's images by split, of patients, labels, mean intensities, sizes, spacings, and of missing
        columns."""
        train, least = site.data.train, site.min_cohort
        missing = np.zeros(len(train), bool) if train.columns is None else (np.asarray(train.columns) == "").any(1)
        intensities = np.array([float(np.asarray(image).mean()) for image in train.images])
        splits = [people_of(getattr(site.data, name)) for name in SPLITS]
        counts = {
            "splits": Counted(torch.tensor([len(one) for one in splits]), splits),
            "patients": Counted(torch.tensor([len(np.unique(splits[0]))]), splits[:1]),
            "labels": _counted(*label_bins_of(train.labels, site.trainer.target), train),
            "intensities": _counted(in_bins(intensities, 0, 255), BINS, train),
            "sides": _counted(side_bins(train), len(SIDES) + 1, train),
            "spacings": _counted(spacing_bins(train), len(SPACINGS) + 2, train),
            "missing": _counted(np.where(missing, 0, 1), 2, train),
        }
        tensors: dict[str, Tensor] = {}
        for name, one in counts.items():
            tensors[name], tensors[f"{name} told"] = suppressed(one, least)
        for name in ("missing", "missing told"):  # the other cell is there for its complement, and all the rest
            tensors[name] = tensors[name][:1]
        return Parcel("statistics", tensors)


class Counted(NamedTuple):
    """Images in each cell of a table, int64 [cells], and whose they are."""

    images: Tensor
    people: Sequence[np.ndarray]


def _counted(bins: np.ndarray, size: int, part: ImageSet) -> Counted:
    """The images in each bin, by the bin of each image."""
    people = [people_of(part)[bins == number] for number in range(size)]
    return Counted(torch.tensor([len(one) for one in people]), people)


def label_bins_of(labels: np.ndarray, target: Any) -> tuple[np.ndarray, int]:
    """The class of each image, or the bin of its value between the study's bounds, and how many there are."""
    if target.classes:
        return np.asarray(labels, np.int64), len(target.classes)
    low, high = target.label_range or (float(np.min(labels)), float(np.max(labels)))
    return in_bins(np.asarray(labels, float), low, high), BINS


def in_bins(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The one of BINS equal bins between two bounds in which each value lies; those outside are in the outer ones."""
    return np.clip(((values - low) / max(high - low, 1e-12) * BINS).astype(int), 0, BINS - 1)


def side_bins(part: ImageSet) -> np.ndarray:
    """The bin of the longer side of each image, as its file has it; as prepared where it comes from no file."""
    if part.geometry is None:
        return np.full(len(part), np.searchsorted(SIDES, part.images.shape[-1], side="right"))
    return np.searchsorted(SIDES, np.asarray(part.geometry)[:, :2].max(1), side="right")


def spacing_bins(part: ImageSet) -> np.ndarray:
    """The bin of the larger of the two distances between pixels; the last bin where nobody says."""
    unknown = len(SPACINGS) + 1
    if part.geometry is None:
        return np.full(len(part), unknown)
    found = np.asarray(part.geometry)[:, 2:].max(1)
    return np.where(np.isfinite(found), np.searchsorted(SPACINGS, found, side="right"), unknown)


def suppressed(counted: Counted, least: int) -> tuple[Tensor, Tensor]:
    """Counts, 0 where they are not told, and 1 where they are. Those of fewer than `least` patients are not told, nor
    others from which these would follow (`told_cells`). Counts are told in steps, as in coarse scores: two questions
    that differ by a hair could be subtracted."""
    told = torch.from_numpy(told_cells(counted.people, least))
    return torch.where(told, round_counts(counted.images, max(least, 1)), 0), told.long()


def tables(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Counts by table, -1 for one that no site told."""
    names = [name for name in tensors if not name.endswith(" told")]
    return {name: torch.where(tensors[f"{name} told"] > 0, tensors[name], SUPPRESSED).tolist() for name in names}


def about_sites(told: Mapping[str, Mapping[str, list[int]]], federation: Federation) -> dict[str, Any]:
    """Counts that the coordinator learns, and what follows for the choice of a method."""
    target = federation.trainer.target
    each = {site: dict(one) for site, one in told.items()}
    distances = _pairwise(each, "labels")
    mean = sum(distances.values()) / len(distances) if distances else None
    columns = {name: [one[name] for one in each.values()] for name in next(iter(each.values()), {})}
    total = {name: np.maximum(rows, 0).sum(0).tolist() for name, rows in columns.items()}
    return {
        "per_site": each if len(each) > 1 or federation.sums.settings.sum != "secure" else {},
        "total": total,
        "classes": list(target.classes),
        "bounds": list(target.label_range) if target.label_range else None,
        "sides": list(SIDES),
        "spacings": list(SPACINGS),
        "pairwise_ks": distances,
        "ks": {name: _pairwise(each, name) for name in ("intensities", "sides", "spacings")},
        "mean_ks": mean,
        "guidance": guidance(each, mean, has_labels=len(target.classes) != 1),
    }


def _pairwise(each: Mapping[str, Mapping[str, list[int]]], table: str) -> dict[str, float]:
    """KS between the histograms of each pair of sites."""
    pairs = itertools.combinations(each, 2)
    return {f"{a} and {b}": round(histogram_ks(each[a][table], each[b][table]), 4) for a, b in pairs}


def histogram_ks(one: list[int], other: list[int]) -> float:
    """The largest gap between two cumulative histograms; what is not told counts as nothing."""
    shares = [np.cumsum(np.maximum(some, 0)) / max(1, np.maximum(some, 0).sum()) for some in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def guidance(
    each: Mapping[str, Mapping[str, list[int]]], mean_ks: float | None, *, has_labels: bool = True
) -> list[str]:
    """Advice on training together, and with which method, by what was measured (docs/choose.md)."""
    words = []
    if not has_labels:  # masks only
        pass
    elif mean_ks is None:
        words.append("How the sites differ is not known from totals; ask with federation.sum = 'float' for that.")
    elif mean_ks < 0.2:
        words.append(f"Labels are alike (mean KS {mean_ks:.2f}): fedavg and its relatives are a good choice.")
    else:
        words.append(
            f"Labels differ (mean KS {mean_ks:.2f}): plain averaging loses much at KS 0.97; try analytic or "
            "gaussian-heads (one round, only sums leave), or fedreplay where latents may leave (docs/choose.md)."
        )
    for name, what in (("intensities", "Intensities"), ("sides", "Sizes of images"), ("spacings", "Pixel spacings")):
        largest = max(_pairwise(each, name).items(), key=lambda one: one[1], default=("", 0.0))
        if largest[1] >= DIFFERENT:
            words.append(f"{what} differ most between {largest[0]} (KS {largest[1]:.2f}); look at how they were made.")
    small = [site for site, one in each.items() if 0 <= one["splits"][0] < 100]
    if small and len(each) > 1:
        words.append(f"Fewer than 100 training images: {', '.join(small)}; these sites gain most from the others.")
    absent = [site for site, one in each.items() if any(count == 0 for count in one["labels"])]
    if absent and len(each) > 1:
        words.append(f"Some labels do not occur at {', '.join(absent)}; a model trained there alone cannot know them.")
    return words
