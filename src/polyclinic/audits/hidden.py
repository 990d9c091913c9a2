"""What a parcel may hold besides what its operation gives: a search for images in its numbers, and a linear read-out.

The search lays every training image along the parcel's numbers, one tensor after the other, in eight orientations, at
full and half size, at every place and every few strides; signs, brightness and contrast do not count, nor what all
images have in common. So that a long parcel takes seconds, places are first found where much of what is there can be
said with the principal components of images; only these are compared image by image. An image was found where it fits
far better than every held-out one does.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from scipy.fft import next_fast_len
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.attack import Capability, Verdict
from polyclinic.audits.attack import Finding, Seen
from polyclinic.audits.recovery import pick_out
from polyclinic.audits.truth import Truth
from polyclinic.data.pixels import to_uint8
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.images import orientations_of, turned

SEARCH, READ_OUT = "image-search", "linear-read-out"
THREAT = "The attacker has the parcel, and looks for images in it without knowing how they were put there."
PAIRS = "The attacker has the parcel, and knows the images behind a few of its rows."
FITS = 0.8  #: correlation with a training image, without what all images have in common
CLOSER = 0.25  #: and a training image that is so much nearer than the nearest held-out one (of 1 - correlation)
STRIDES = (1, 2, 3, 4)
COMPONENTS, PLACES, NEAR = 12, 64, 16  #: of images; places that are compared image by image, one of so many
FEWEST_PIXELS = 64
LONGEST, CLOSELY = 2**20, 2**23  #: numbers that are searched, and of a parcel that is looked at closely
KNOWN = 30  #: pairs of the read-out
RIDGES = (1e-3, 1e-1, 10.0)


def hidden_images(seen: Seen, truth: Truth, why: str, again: Mapping[str, Tensor]) -> list[Finding]:
    """What is found in a parcel. `why` it may hold other things than its operation gives, and the tensors that this
    gives; only then last bits, wider strides and known pairs are tried, which are no part of the threat model."""
    found = [search_images(seen, truth, signals(seen.parcel, bool(why), again), STRIDES if why else STRIDES[:1])]
    if why or Capability.PAIRED_LATENTS in seen.tools.threat.granted:
        found += [read_out(seen, truth, name, rows) for name, rows in seen.parcel.tensors.items()]
    return [one for one in found if one is not None]


# --- search ---------------------------------------------------------------------------------------------


def signals(parcel: Parcel, closely: bool, again: Mapping[str, Tensor]) -> list[Tensor]:
    """Rows of numbers to search: all of a parcel; and where it is looked at closely, what differs from what it should
    be, and the last bytes and last bits of each number."""
    tensors = [tensor.detach().cpu() for tensor in parcel.tensors.values() if tensor.numel()]
    if not tensors:
        return []
    rows = [torch.cat([_scaled(tensor.flatten()) for tensor in tensors])]
    if closely:
        sent = parcel.tensors
        fits = {name: one for name, one in again.items() if name in sent and one.shape == sent[name].shape}
        apart = [(parcel.tensors[name].double() - one.double()).flatten() for name, one in fits.items()]
        last = torch.cat([_bytes(tensor) for tensor in tensors])
        bits = last[: len(last) // 8 * 8].view(-1, 8) & 1
        places = 2 ** torch.arange(8)
        rows += [_scaled(one) for one in apart if bool((one != 0).any())]
        sums = [(bits * some).sum(1) for some in (places, places.flip(0))]
        rows += [one.float() for one in (last, *sums, last & 1)]
    return [row[: CLOSELY if closely else LONGEST] for row in rows]


def _scaled(row: Tensor) -> Tensor:
    """Numbers as float32; a tensor with one huge number must not drown the others."""
    row = row.double().nan_to_num(0.0, 0.0, 0.0)
    return (row / row.abs().max().clamp(min=1e-300)).float()


def _bytes(tensor: Tensor) -> Tensor:
    """The lowest byte of each number, int64."""
    flat = tensor.contiguous().flatten()
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    return flat.view(torch.uint8).view(len(flat), -1)[:, 0].to(torch.int64)


def search_images(seen: Seen, truth: Truth, rows: list[Tensor], strides: tuple[int, ...]) -> Finding | None:
    """The place where a training image fits best, if it fits far better than held-out ones."""
    held_out = truth.held_out(seen.tools.effort.candidates)[0]
    if not rows or len(held_out) < 2 or not len(truth.data.train):
        return None
    members = truth.members(len(truth.data.train))[0]
    for size in (1, 2):
        shape = _planes(members[:1], size).shape[1:]
        if shape.numel() < FEWEST_PIXELS:
            break
        templates = Templates(*(_planes(images, size) for images in (members, held_out)))
        for row in rows:
            for stride, phase in [(every, first) for every in strides for first in range(every)]:
                if best := templates.best_fit(row[phase::stride]):
                    return _found(seen, members, *best)
    return None


def _planes(images: Tensor, size: int) -> Tensor:
    """One channel [N, h, w] of images, averaged down by `size`."""
    return F.avg_pool2d(images[:, images.shape[1] // 2 :][:, :1].float() / 255, size)[:, 0]


class Templates:
    """Training and held-out images [N, h, w] to lay along rows of numbers, and what is common to all [2, P]."""

    def __init__(self, own: Tensor, others: Tensor) -> None:
        flat, self.own, self.shape = torch.cat([own, others]).flatten(1), len(own), own.shape[1:]
        self.common = torch.linalg.qr(torch.stack([torch.ones(flat.shape[1]), others.flatten(1).mean(0)], 1))[0].T
        self.apart = F.normalize(self.without_common(flat, self.common), dim=1)
        self.axes = torch.linalg.svd(self.apart[: 4 * PLACES], full_matrices=False)[2][:COMPONENTS]

    @staticmethod
    def without_common(rows: Tensor, common: Tensor) -> Tensor:
        return rows - rows @ common.T @ common

    def best_fit(self, row: Tensor) -> tuple[int, float, float, Tensor] | None:
        """Training image, how well it fits, how well the best held-out image fits there, and what is there; None where
        no training image fits far better than held-out ones."""
        count = self.shape.numel()
        if len(row) < count:
            return None
        best: tuple[int, float, float, Tensor] | None = None
        pixels = torch.arange(count).view(1, 1, *self.shape)
        for turn in orientations_of(pixels):
            moved = turned(pixels, turn).flatten()
            apart, axes, common = (rows[:, moved] for rows in (self.apart, self.axes, self.common))
            windows = row[_likely_places(row, axes, common)[:, None] + torch.arange(count)]
            fits = (F.normalize(self.without_common(windows, common), dim=1) @ apart.T).abs()
            value, place = fits[:, : self.own].max(1).values.max(0)
            against = float(fits[place, self.own :].max())
            if value >= FITS and 1 - value <= CLOSER * (1 - against) and (best is None or value > best[1]):
                shown = torch.empty(count)
                shown[moved] = windows[place]
                which = int(fits[place, : self.own].argmax())
                best = which, float(value), against, shown.view(1, 1, *self.shape)
        return best


def _likely_places(row: Tensor, axes: Tensor, common: Tensor) -> Tensor:
    """Places where the components explain most of what is there, once what all images have in common is taken off: the
    best of each few places, as its neighbours are nearly as good."""
    pixels, count = axes.shape[1], len(row) - axes.shape[1] + 1
    length = next_fast_len(len(row), real=True)
    spectrum = torch.fft.rfft(row, length)

    def energy(templates: Tensor) -> Tensor:
        moved = torch.fft.irfft(spectrum * torch.fft.rfft(templates, length).conj(), length)[:, :count]
        return moved.square().sum(0)

    sums = F.pad(row.double().square().cumsum(0), (1, 0))
    left = (sums[pixels:] - sums[:-pixels]).float() - energy(common)
    share = energy(axes) / left.clamp(min=1e-4 * float(left.max().clamp(min=1e-30)))
    top = F.pad(share, (0, -count % NEAR), value=-1.0).view(-1, NEAR).max(1)
    chosen = top.values.topk(min(PLACES, len(top.values))).indices
    return (chosen * NEAR + top.indices[chosen]).clamp(max=count - 1)


def _found(seen: Seen, members: Tensor, which: int, value: float, against: float, shown: Tensor) -> Finding:
    words = (
        f"training image {which} lies in the parcel's numbers (correlation {value:.2f} beyond what all images have in "
        f"common; the best held-out image has {against:.2f} there)"
    )
    figures: dict[str, float | int | str] = {"recovered": 1, "image": which, "correlation": value, "held_out": against}
    target = F.interpolate(members[which : which + 1, :1].float(), shown.shape[-2:]).to(torch.uint8)
    draw = partial(_draw, target, shown, f"{seen.where}, {SEARCH}")
    return Finding(SEARCH, THREAT, Verdict(True, words, figures), draw=draw if seen.sites == 1 else None)


def _draw(target: Tensor, shown: Tensor, where: str, path: Path) -> None:
    from polyclinic.data.plots import contact_sheet

    shown = shown - shown.mean()
    shown = 0.5 + shown / shown.abs().max().clamp(min=1e-30) / 2
    contact_sheet({"target": target, "in the parcel": to_uint8(shown)}, path, [""], f"{where}. The sign may be turned")


# --- read-out -------------------------------------------------------------------------------------------


def read_out(seen: Seen, truth: Truth, name: str, tensor: Tensor) -> Finding | None:
    """Images told by ridge regression from a few rows whose images are known, for a tensor with a row for each image
    that was used, or for each training image."""
    orders = {len(truth.used): truth.used, len(truth.data.train): torch.arange(len(truth.data.train))}
    count = len(tensor) if tensor.dim() > 1 else 0
    known = min(KNOWN, count // 2)
    if count not in orders or known < 4:
        return None
    images, others = truth.images(orders[count]), truth.held_out(seen.tools.effort.candidates)[0].float() / 255
    rows = F.normalize(_scaled(tensor.flatten(1)).double() - _scaled(tensor.flatten(1)).double().mean(0), dim=1)
    made = ridge(rows[:known], images[:known].flatten(1).double(), rows[known:]).view_as(images[known:])
    told = pick_out(made.float(), images[known:], others)
    if told.chance > seen.tools.level / len(seen.parcel.tensors):
        return None
    words = f"{known} known pairs read the other rows of '{name}': {told}"
    figures: dict[str, float | int | str] = {
        "recovered": told.right, "images": told.images, "picked": told.share, "picked_by_chance": told.chance,
    }  # fmt: skip
    return Finding(READ_OUT, PAIRS, Verdict(True, words, figures))


def ridge(rows: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
    """Targets of further rows, by the penalty that leaves out one of the known pairs best."""
    mean = targets.mean(0)
    products, apart = rows @ rows.T, targets - mean
    best: tuple[float, Tensor] | None = None
    for penalty in RIDGES:
        inverse = torch.linalg.inv(products + penalty * products.diagonal().mean() * torch.eye(len(rows)).double())
        weights = inverse @ apart
        missed = float((weights / inverse.diagonal()[:, None]).square().sum())  # leave-one-out, in closed form
        if best is None or missed < best[0]:
            best = missed, mean + asked @ rows.T @ weights
    assert best is not None, "there are penalties"
    return best[1]
