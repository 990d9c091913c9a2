"""Scores of reconstructions (MSE, PSNR, SSIM): the only module of `attacks` that receives ground truth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyclinic.data.pixels import to_uint8
from polyclinic.data.plots import contact_sheet
from polyclinic.errors import BadInput
from polyclinic.metrics.images import mean_squared_error, psnr, ssim
from polyclinic.metrics.perceptual import Distance
from polyclinic.palette import FAINT, LIGHT

FAILED = 2.0  # the papers' bound: a mean squared error of 2 is no image in [0, 1]


@dataclass(frozen=True)
class Score:
    """Per image, all [M]: errors and similarity, NaN where a reconstruction is not finite; who did not converge."""

    mse: Tensor
    psnr: Tensor
    ssim: Tensor
    non_converging: Tensor
    by_assignment: bool  #: images of a batch were paired with the truth by least error, their order being lost
    perceptual: Tensor | None = None  #: where a perceptual distance was given
    features: str = ""  #: what that was measured with

    def summary(self) -> dict[str, float | int | bool]:
        """Means over the images that converged (NaN if none did), as the papers give them, and how many did not."""
        good = ~self.non_converging
        figures = {"mse": self.mse, "psnr": self.psnr, "ssim": self.ssim}
        if self.perceptual is not None:
            figures[self.features] = self.perceptual
        means = {name: float(values[good].mean()) for name, values in figures.items()}
        counts = {"images": len(self.mse), "non_converging": int(self.non_converging.sum())}
        median = float(self.mse.nan_to_num(torch.inf).median())
        return {**means, "median_mse": median, **counts, "by_assignment": self.by_assignment}

    def __str__(self) -> str:
        found = self.summary()
        paired = ", images of a batch paired with the truth by least error" if self.by_assignment else ""
        return (
            f"{found['images'] - found['non_converging']} of {found['images']} images converged: "
            f"MSE {found['mse']:.2e}, PSNR {found['psnr']:.1f} dB, SSIM {found['ssim']:.3f}"
            f"{f', {self.features} {found[self.features]:.3f}' if self.features else ''}{paired}"
        )


@dataclass(frozen=True)
class TrajectoryScore:
    """Per image and kept step: mse [M, K] and ssim [M, K]; [M]: who did not converge, by the last step."""

    steps: tuple[int, ...]
    mse: Tensor
    ssim: Tensor
    non_converging: Tensor

    def means(self) -> dict[str, Tensor]:
        """[K] each: means over the images that converged (NaN if none did)."""
        good = ~self.non_converging
        return {"mse": self.mse[good].mean(0), "ssim": self.ssim[good].mean(0)}


def score_trajectory(images: Tensor, steps: Sequence[int], truth: Tensor) -> TrajectoryScore:
    """Score images [N, K, B, C, H, W], kept at K steps of which the first is the start, against [N, B, C, H, W].

    Images of a batch are paired with the truth as they lie at the last step.
    """
    if truth.shape[1] > 1:
        order = [assignment(f, t) for f, t in zip(images[:, -1], truth, strict=True)]
        images = torch.stack([rows[:, o] for rows, o in zip(images, order, strict=True)])
    kept = [images[:, k].flatten(0, 1)[:, None] for k in range(len(steps))]
    scores = [score(found, truth.flatten(0, 1)[:, None], kept[0]) for found in kept]
    columns = {name: torch.stack([getattr(one, name) for one in scores], 1) for name in ("mse", "ssim")}
    return TrajectoryScore(tuple(steps), columns["mse"], columns["ssim"], scores[-1].non_converging)


def score(found: Tensor, truth: Tensor, start: Tensor, *, window: int = 7, distance: Distance | None = None) -> Score:
    """Score reconstructions [N, B, C, H, W] against the truth, both in [0, 1]; `distance`: a perceptual one as well.

    An image did not converge if its error is not below that of the start [N, B, C, H, W] (paired in the same way), or
    at 2 or above, or not finite.
    """
    if found.dim() != 5 or found.shape != truth.shape or found.shape != start.shape:
        shapes = ", ".join(str(tuple(images.shape)) for images in (found, truth, start))
        raise BadInput(
            f"score: found images, truth and start have the shapes {shapes}; give all as [N, B, C, H, W], B being the "
            "images behind one parcel (images[:, None] where it is one)"
        )
    several = truth.shape[1] > 1
    if several:
        order = [assignment(f, t) for f, t in zip(found, truth, strict=True)]
        found, start = (torch.stack([s[o] for s, o in zip(of, order, strict=True)]) for of in (found, start))
    found, truth, start = (images.flatten(0, 1) for images in (found, truth, start))
    error, before = mean_squared_error(found, truth), mean_squared_error(start, truth)
    error = torch.where(error.isfinite(), error, torch.nan)
    failed = non_converging(error, before)
    figures = psnr(found, truth), ssim(found, truth, window=window)
    ratio, similarity = (torch.where(error.isnan(), error, one) for one in figures)
    if distance is None:
        return Score(error, ratio, similarity, failed, several)
    # what lies outside [0, 1] is no picture that a network has ever seen
    pairs = zip(found.nan_to_num(0.5).clamp(0, 1).float().split(64), truth.float().split(64), strict=True)
    with torch.no_grad():
        away = torch.cat([distance(one, other) for one, other in pairs]).to(error)
    far = torch.where(error.isnan(), error, away)
    return Score(error, ratio, similarity, failed, several, far, distance.name)


def non_converging(error: Tensor, before: Tensor) -> Tensor:
    """Who did not converge, by the papers' rule: an error that is not finite, not below that of the start, or 2 and
    above."""
    return ~(error < torch.minimum(before, torch.full_like(before, FAILED)))


def assignment(found: Tensor, truth: Tensor) -> Tensor:
    """Which of the found images [B, ...] belongs to each true one, int64 [B]: the pairing of least total error."""
    from scipy.optimize import linear_sum_assignment

    errors = (truth.double().flatten(1)[:, None] - found.double().flatten(1)[None]).square().mean(2).cpu()
    worst = float(errors[errors.isfinite()].max()) if bool(errors.isfinite().any()) else 0.0
    _, order = linear_sum_assignment(errors.nan_to_num(worst + 1, posinf=worst + 1).numpy())
    return torch.from_numpy(order).to(found.device)


@dataclass(frozen=True)
class Identified:
    """How many of `of` images an attack has identified, their mean PSNR in dB (NaN for none), and `by_chance`: how
    many of the same number of images that the site never had the same rule names."""

    images: int
    of: int
    psnr: float
    by_chance: int

    def __str__(self) -> str:
        return f"{self.images} of {self.of} images identified at {self.psnr:.1f} dB ({self.by_chance} by chance)"


def identified(found: Tensor, truth: Tensor, others: Tensor, *, least: float = 20.0) -> Identified:
    """Compare found images [K, C, H, W] with those of the site [N, C, H, W] and N or more that it never had.

    A found image names the nearest of all these; it counts if their PSNR is `least` dB or more.
    """
    others = others[: len(truth)]
    if len(others) < len(truth):
        raise BadInput(f"identified: {len(truth)} images of the site need as many others; {len(others)} were given")
    best = torch.full((len(truth) * 2,), -torch.inf, dtype=torch.float64)
    candidates = torch.cat([truth, others])
    for image in found:
        ratio = psnr(image.expand_as(candidates), candidates)
        nearest = int(ratio.argmax())
        best[nearest] = max(best[nearest], ratio[nearest])
    named = best >= least
    right = named[: len(truth)]
    mean = float(best[: len(truth)][right].mean())
    return Identified(int(right.sum()), len(truth), mean, int(named[len(truth) :].sum()))


def draw_images(
    path: Path, rows: Mapping[str, Tensor], steps: Sequence[int], truth: Tensor | None = None, where: str = ""
) -> None:
    """A row of images [K, C, H, W] for each name, one for each of `steps`; the true image [C, H, W] (or one for each
    row, [R, C, H, W]) ends each row. What lies outside [0, 1] is cut off. `where` says whose they are."""
    captions = [f"step {step}" for step in steps]
    shown = {name: images.float().nan_to_num(0.5).clamp(0, 1).cpu() for name, images in rows.items()}
    for name, images in shown.items():
        if len(images) != len(steps):
            raise BadInput(f"trajectory: '{name}' has {len(images)} images for {len(steps)} steps; give one for each")
    if truth is not None:
        captions.append("true image")
        true = truth.expand(len(shown), *truth.shape[-3:]).cpu()
        shown = {name: torch.cat((shown[name], true[i : i + 1])) for i, name in enumerate(shown)}
    title = "Reconstructions through the steps of the search" + (", and the true images" if truth is not None else "")
    title = f"{where}. {title}" if where else title
    contact_sheet({name: to_uint8(images) for name, images in shown.items()}, path, captions, title)


def draw_curves(
    path: Path, scores: Mapping[str, TrajectoryScore], *, baseline: Mapping[str, float] | None = None, title: str = ""
) -> None:
    """Mean squared error (logarithmic) and SSIM against the steps, a line for each name; means over the images that
    converged.

    `baseline`: "mse" and "ssim" of an attack that returns another image at random, drawn as dotted lines.
    """
    from matplotlib.figure import Figure  # here: every user of attacks would pay for it

    figure = Figure(figsize=(9.6, 3.6), layout="constrained", facecolor="white")
    both = figure.subplots(1, 2)
    for place, (name, score) in enumerate(scores.items()):
        means, failed = score.means(), int(score.non_converging.sum())
        label = f"{name} ({failed} failed)" if failed else name
        for axes, key in zip(both, ("mse", "ssim"), strict=True):
            axes.plot(score.steps, means[key].tolist(), color=LIGHT.colour(place), label=label, linewidth=1.6)
    for axes, key, words in zip(both, ("mse", "ssim"), ("mean squared error", "SSIM"), strict=True):
        if baseline is not None:
            axes.axhline(baseline[key], color=FAINT, linestyle=":", label="another image at random")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(True, color=LIGHT.grid, linewidth=0.6)
        axes.set_xlabel("step")
        axes.set_ylabel(words)
    both[0].set_yscale("log")
    both[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120)
