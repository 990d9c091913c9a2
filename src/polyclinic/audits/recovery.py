"""Scores of reconstructions in an audit: images recovered and identified, beside the best guess without a parcel.

Two kinds of evidence, either is a leak:

1. An image is *recovered* if its reconstruction has at most half the squared error (3 dB better) of the best guess: the
   nearest held-out image, or the mean of all held-out images, whichever is closer.
2. Reconstructions *identify* the images that were used: minus the mean image, they correlate with the true image more
   than with all held-out ones, more often than by chance. That finds images which came back too bright or too noisy.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import binom, binomtest
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.attack import Verdict
from polyclinic.audits.attack import Seen
from polyclinic.audits.truth import Truth
from polyclinic.data.pixels import to_uint8
from polyclinic.metrics.images import MOST_DECIBELS, mean_squared_error, psnr_from_error, ssim, turned
from polyclinic.metrics.perceptual import Pixels, embed_all, squared_distances
from polyclinic.metrics.statistics.significance import chance_of_firsts, chance_of_sum
from polyclinic.randomness import torch_rng

RECOVERED = 0.5
#: squared error (30 dB) that counts as recovered where there are no held-out images: nobody guesses so well
WITHOUT_GUESS = 1e-3
SIGNIFICANT = 0.001  # many parcels are looked at

#: orientations that a study's augmentation may have shown an image in
ORIENTATIONS_OF = {(): (0,), ("flip",): (0, 4), ("turn",): (0, 1, 2, 3), ("flip", "turn"): tuple(range(8))}


@dataclass(frozen=True)
class Recovery:
    """Images [M, C, H, W] in [0, 1]: the true ones, what the attack found for each, and the guess; and [M] each:
    mean squared errors of the last two. `by_assignment`: which found image belongs to which true one was not known,
    and the pairing of least total error was taken, to the attacker's advantage."""

    truth: Tensor
    found: Tensor
    guess: Tensor
    error: Tensor
    guess_error: Tensor
    by_assignment: bool
    identified: "Identification"
    perceptual: dict[str, float | str] = field(default_factory=dict)
    shown: Tensor | None = None  #: bool [M]: the true images that may be drawn, where not all may
    rows: tuple[int, ...] = ()  #: [M]: which of the images that the attack returned each of `found` is
    where: str = ""  #: whose parcel it is: site, kind and round, for the picture
    compared: bool = True  #: whether there were held-out images to guess from

    @property
    def recovered(self) -> Tensor:
        """bool [M]. Without held-out images the guess is grey, and whatever looks like an image would beat it."""
        close = self.error < RECOVERED * self.guess_error
        return close if self.compared else close & (self.error < WITHOUT_GUESS)

    def verdict(self, level: float = SIGNIFICANT) -> Verdict:
        """`level`: at which p reconstructions are said to identify images."""
        count, total = int(self.recovered.sum()), len(self.error)
        ours, theirs = (float(_decibels(values).median()) for values in (self.error, self.guess_error))
        paired = ", each paired with the image it resembles most" if self.by_assignment else ""
        words = f"{count} of {total} images were recovered" if count else f"none of {total} images was recovered"
        because = (
            f"{words} (median PSNR {ours:.1f} dB{paired}; the best guess without the parcel, "
            f"{'from held-out images' if self.compared else 'plain grey'}, has {theirs:.1f} dB); "
            f"{self.identified.words(level)}"
        )
        return Verdict(count > 0 or self.identified.chance <= level, because, self.evidence())

    def evidence(self) -> dict[str, float | int | str]:
        similar = ssim(self.found, self.truth) if min(self.truth.shape[-2:]) >= 7 else self.error * torch.nan
        return {
            "images": len(self.error), "recovered": int(self.recovered.sum()),
            "psnr": float(_decibels(self.error).mean()), "psnr_best": float(_decibels(self.error).max()),
            "psnr_of_guess": float(_decibels(self.guess_error).mean()), "mse": float(self.error.mean()),
            "mse_of_guess": float(self.guess_error.mean()), "ssim": float(similar.mean()),
            "told": self.identified.count, "told_by_chance": self.identified.chance,
            "paired": "by least error" if self.by_assignment else "in order", **self.perceptual,
        }  # fmt: skip

    def draw(self, path: Path, each: int = 3) -> None:
        """Target beside reconstruction: the best, the median and the worst, and the guess below. No picture if none may
        be shown."""
        from polyclinic.data.plots import contact_sheet

        order = self.error.argsort()
        order = order if self.shown is None else order[self.shown[order]]
        if not len(order):
            return
        places, names = best_median_worst(len(order), each)
        order = order[places]
        rows = {"target": self.truth, "reconstruction": self.found}
        if self.shown is None:  # a guess may be another site's held-out image
            rows["guess"] = self.guess
        pictures = {name: to_uint8(images[order]) for name, images in rows.items()}
        values = _decibels(self.error[order]).tolist()
        captions = [f"{name}\n{value:.1f} dB" for name, value in zip(names, values, strict=True)]
        contact_sheet(pictures, path, captions, self._title(len(order), "guess" in rows))

    def _title(self, shown: int, guess: bool) -> str:
        where = f"{self.where}. " if self.where else ""
        chosen = "best, median and worst" if shown < len(self.error) else "all"
        words = "Guess: the nearest image that an attacker has without the parcel." if guess else ""
        told = int(self.recovered.sum())
        return f"{where}{shown} of {len(self.error)} reconstructions ({chosen}); {told} count as recovered. {words}"


def best_median_worst(count: int, each: int) -> tuple[list[int], list[str]]:
    """Places in an order of `count`, the best first: `each` of the best, the median and the worst, or all."""
    if count <= 3 * each:
        return list(range(count)), ["best" if n == 0 else "worst" if n == count - 1 else "" for n in range(count)]
    middle = (count - each) // 2
    places = [*range(each), *range(middle, middle + each), *range(count - each, count)]
    return places, [name for name in ("best", "median", "worst") for _ in range(each)]


def recovery(
    found: Tensor,
    candidates: Tensor,
    held_out: Tensor,
    *,
    in_order: bool,
    augmentation: tuple[str, ...] = (),
    own: Tensor | None = None,
) -> Recovery:
    """Score found images [M, C, H, W] against the true ones [N, C, H, W], all in [0, 1].

    In order (N >= M), found image i is true image i. Otherwise they are paired so that the total error is least.
    A study that augments may have used an image mirrored or turned: the orientation of least error counts. `own`
    bool [N]: the true images that may be drawn, where some are another site's.
    """
    broken = ~found.isfinite().flatten(1).all(1)
    found = found.float().nan_to_num(0.5).clamp(0, 1)
    found[broken] = 0.5  # no image came back; grey points to none of the true ones
    orientations = ORIENTATIONS_OF[tuple(sorted({"flip", "turn"} & set(augmentation)))]
    tables = [squared_distances(found.flatten(1), turned(candidates, o).flatten(1)) for o in orientations]
    best = torch.stack(tables).min(0)  # [M, N] over the allowed orientations of the candidates
    errors, which = best.values, torch.tensor(orientations)[best.indices]
    if in_order:
        rows = index = list(range(len(found)))
    else:
        rows, index = (places.tolist() for places in linear_sum_assignment(errors.numpy()))
    truth = torch.stack([turned(candidates[i], int(which[m, i])) for m, i in zip(rows, index, strict=True)])
    found = found[rows]
    guess = best_guess(truth, held_out)
    error, guess_error = (mean_squared_error(images, truth) for images in (found, guess))
    if in_order:
        identified = identify_in_order(found, truth, held_out)
    else:
        identified = identify_unordered(found, candidates, held_out)
    return Recovery(
        truth,
        found,
        guess,
        error.masked_fill(broken[rows], 1.0),
        guess_error,
        by_assignment=not in_order,
        identified=identified,
        shown=None if own is None else own[torch.tensor(index)],
        rows=tuple(rows),
        compared=bool(len(held_out)),
    )


def score_unordered(seen: Seen, truth: Truth, found: Tensor, attack: str) -> Recovery:
    """Images [M, C, H, W] that an attack found in an update, beside those that it was made of, in any order."""
    result = recovery(
        found,
        truth.images(truth.used),
        truth.held_out(seen.tools.effort.candidates)[0].float() / 255,
        in_order=False,
        augmentation=seen.tools.assembly.study.optimizer.augment,
        own=truth.used < truth.own if seen.sites > 1 else None,
    )
    return _of_parcel(result, seen, attack)


def score_in_order(
    seen: Seen, truth: Truth, found: Tensor, attack: str, *, used: Tensor | None = None, held_out: Tensor | None = None
) -> Recovery:
    """Images that an attack found in latents or codes, which keep the order of the site's images. `used`: indices of
    these; `held_out`: images [M, C, H, W] to compare with, where some are the attacker's."""
    tools, mixed = seen.tools, seen.kind == "activations"
    if used is None:
        used = truth.batches[0] if mixed else truth.used
    if held_out is None:
        held_out = truth.held_out(tools.effort.candidates)[0].float() / 255
    augmentation = tools.assembly.study.optimizer.augment if mixed else ()
    count = min(len(found), len(used))
    result = recovery(found[:count], truth.images(used[:count]), held_out, in_order=True, augmentation=augmentation)
    return _of_parcel(result, seen, attack)


def _of_parcel(result: Recovery, seen: Seen, attack: str) -> Recovery:
    """The same with whose parcel it is, and, where the audit asks a network as well as pixels, how far reconstructions
    and guesses are from the true images for it."""
    result, distance = replace(result, where=f"{seen.where}, {attack}"), seen.tools.distance
    if isinstance(distance, Pixels) or result.truth.shape[1] not in (1, 3):
        return result
    every = (result.truth, result.found, result.guess)
    truth, *others = (embed_all(images, distance, device=seen.tools.device) for images in every)
    far = [float((truth - other).square().sum(1).mean()) for other in others]
    told: dict[str, float | str] = {"features": distance.name, "distance": far[0], "distance_of_guess": far[1]}
    return replace(result, perceptual=told)


def best_guess(truth: Tensor, held_out: Tensor) -> Tensor:
    """For each true image the closest that one has without the parcel: a held-out image, or their mean."""
    if not len(held_out):
        return torch.full_like(truth, 0.5)
    choices = torch.cat([held_out, held_out.mean(0, keepdim=True)])
    return choices[squared_distances(truth.flatten(1), choices.flatten(1)).argmin(1)]


def _decibels(error: Tensor) -> Tensor:
    return psnr_from_error(error, most=MOST_DECIBELS)


# --- which images were used ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Identification:
    """How many of `total` reconstructions point to a true image more than to all of `others` held-out ones, how often
    chance does that, and the smallest chance that these numbers of images could show at all (`reach`)."""

    count: int
    total: int
    chance: float
    others: int = 0
    reach: float = 1.0

    def words(self, level: float = SIGNIFICANT) -> str:
        if self.total == 0:
            return "there are no held-out images to compare with"
        by_chance = f"which chance does in {self.chance:.2g} of cases" if self.chance < 1 else "as chance has it"
        pointing = f"{self.count} of {self.total} point to a true image more than to {self.others} held-out ones"
        few = f" (too few images to tell: not below {self.reach:.2g})" if self.reach > level else ""
        return f"{pointing}, {by_chance}{few}"


def identify_in_order(found: Tensor, truth: Tensor, held_out: Tensor) -> Identification:
    """Each found image against its own true image and all held-out ones."""
    if not len(held_out):
        return Identification(0, 0, 1.0)
    mean = held_out.mean(0)
    found = without_grey(found, mean)
    own = correlations(found - mean, truth - mean).diagonal()
    others = correlations(found - mean, held_out - mean).amax(1)
    count = int((own > others).sum())
    chance, reach = (chance_of_firsts(told, len(found), len(held_out)) for told in (count, len(found)))
    return Identification(count, len(found), chance, len(held_out), reach)


def identify_unordered(found: Tensor, candidates: Tensor, held_out: Tensor) -> Identification:
    """Found images of unknown order against candidates and all held-out images; of the candidates, as many as these.

    They share both sets, so chance is how often a random exchange of candidates and held-out images tells as many.
    """
    kept = min(len(candidates), len(held_out))
    if not kept:
        return Identification(0, 0, 1.0)
    rng = torch_rng("audit", "told apart")
    candidates = candidates[torch.randperm(len(candidates), generator=rng)[:kept]]
    mean = held_out.mean(0)
    closest = correlations(without_grey(found, mean) - mean, torch.cat([candidates, held_out]) - mean).max(1)
    nearest = closest.indices[closest.values > 0]  # what is like no image points to none
    pointed, times = nearest.unique(return_counts=True)
    count = int(times[pointed < kept].sum())
    chance = chance_of_sum(times.tolist(), kept, kept + len(held_out), count)
    best = min(len(found), kept)
    reach = chance_of_sum([1] * best, kept, kept + len(held_out), best)
    return Identification(count, len(found), chance, len(held_out), reach)


def without_grey(found: Tensor, mean: Tensor) -> Tensor:
    """Images without any contrast are taken for the mean image, so that they point to nothing."""
    flat = found.flatten(1).std(1) < 1e-6
    return torch.where(flat.view(-1, 1, 1, 1), mean, found)


def correlations(first: Tensor, second: Tensor) -> Tensor:
    """[N, M] between images [N, C, H, W] and [M, C, H, W]; brightness and contrast do not count."""
    flat = [images.float().flatten(1) for images in (first, second)]
    unit = [F.normalize(rows - rows.mean(1, keepdim=True), dim=1) for rows in flat]
    return unit[0] @ unit[1].T


@dataclass(frozen=True)
class PickedOut:
    """How many of `images` reconstructions point to the right one of `among` images; by chance it is one in `among`."""

    right: int
    images: int
    among: int

    @property
    def share(self) -> float:
        return self.right / self.images if self.images else float("nan")

    @property
    def chance(self) -> float:
        """How often as many are right by chance."""
        return float(binom.sf(self.right - 1, self.images, 1 / max(self.among, 1)))

    def __str__(self) -> str:
        found = binomtest(self.right, self.images).proportion_ci(method="wilson")
        return f"{self.share:.1%} ({found.low:.1%} to {found.high:.1%}) point to the right one of {self.among} images"


def pick_out(found: Tensor, truth: Tensor, others: Tensor) -> PickedOut:
    """Ask of each found image [N, C, H, W] which of the true images [N, ...] and of others [M, ...] it shows.

    It is the one with the largest correlation after the mean of all is subtracted."""
    candidates = torch.cat([truth, others]).float()
    mean = candidates.mean(0)
    nearest = correlations(found.float() - mean, candidates - mean).argmax(1)
    return PickedOut(int((nearest == torch.arange(len(found))).sum()), len(found), len(candidates))
