"""How much of a site's images a reconstruction gives back: beside the best guess that needs no parcel at all.

That guess is, for each true image, the nearest held-out image or the mean of all held-out images, whichever is closer.
An image counts as recovered if its reconstruction has at most half the guess' squared error (3 dB better).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyclinic.attacks import scoring
from polyclinic.attacks.image_sets import turned
from polyclinic.attacks.neighbours import squared_distances
from polyclinic.attacks.verdict import Verdict

RECOVERED = 0.5

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

    @property
    def recovered(self) -> Tensor:
        return self.error < RECOVERED * self.guess_error

    def verdict(self) -> Verdict:
        count, total = int(self.recovered.sum()), len(self.error)
        ours, theirs = (float(_psnr(values).median()) for values in (self.error, self.guess_error))
        paired = ", each paired with the image it resembles most" if self.by_assignment else ""
        words = f"{count} of {total} images were recovered" if count else f"none of {total} images was recovered"
        because = (
            f"{words} (median PSNR {ours:.1f} dB{paired}; the best guess without the parcel, from held-out images, "
            f"has {theirs:.1f} dB)"
        )
        return Verdict(count > 0, because, self.evidence())

    def evidence(self) -> dict[str, float | int | str]:
        similar = scoring.ssim(self.found, self.truth) if min(self.truth.shape[-2:]) >= 7 else self.error * torch.nan
        return {
            "images": len(self.error),
            "recovered": int(self.recovered.sum()),
            "psnr": float(_psnr(self.error).mean()),
            "psnr_best": float(_psnr(self.error).max()),
            "psnr_of_guess": float(_psnr(self.guess_error).mean()),
            "mse": float(self.error.mean()),
            "mse_of_guess": float(self.guess_error.mean()),
            "ssim": float(similar.mean()),
            "paired": "by least error" if self.by_assignment else "in order",
        }

    def draw(self, path: Path, shown: int = 8) -> None:
        """Target beside reconstruction, the best ones first, and the guess below."""
        from polyclinic.generators.sheet import contact_sheet

        order = self.error.argsort()[:shown]
        rows = {"target": self.truth, "reconstruction": self.found, "guess": self.guess}
        pictures = {name: (images[order] * 255).round().to(torch.uint8) for name, images in rows.items()}
        contact_sheet(pictures, path, [f"{value:.1f} dB" for value in _psnr(self.error[order])])


def recovery(
    found: Tensor,
    candidates: Tensor,
    held_out: Tensor,
    *,
    in_order: bool,
    augmentation: tuple[str, ...] = (),
) -> Recovery:
    """Score found images [M, C, H, W] against the true ones [N, C, H, W], N >= M, all in [0, 1].

    In order, found image i is true image i. Otherwise M of the candidates are chosen so that the total error is least.
    A study that augments may have used an image mirrored or turned: the orientation of least error counts.
    """
    found = found.float().nan_to_num(0.5).clamp(0, 1)
    errors, which = _errors(found, candidates, ORIENTATIONS_OF[tuple(sorted(augmentation))])
    rows = torch.arange(len(found)) if in_order else _assigned(errors)
    truth = torch.stack([turned(candidates[i], int(which[m, i])) for m, i in enumerate(rows.tolist())])
    guess = best_guess(truth, held_out)
    error, guess_error = (scoring.mean_squared_error(images, truth) for images in (found, guess))
    return Recovery(truth, found, guess, error, guess_error, by_assignment=not in_order)


def best_guess(truth: Tensor, held_out: Tensor) -> Tensor:
    """For each true image the closest that one has without the parcel: a held-out image, or their mean."""
    if not len(held_out):
        return torch.full_like(truth, 0.5)
    choices = torch.cat([held_out, held_out.mean(0, keepdim=True)])
    return choices[squared_distances(truth.flatten(1), choices.flatten(1)).argmin(1)]


def _errors(found: Tensor, candidates: Tensor, orientations: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Squared errors [M, N] over the allowed orientations of the candidates, and which orientation is best."""
    tables = [squared_distances(found.flatten(1), turned(candidates, o).flatten(1)) for o in orientations]
    best = torch.stack(tables).min(0)
    return best.values, torch.tensor(orientations)[best.indices]


def _assigned(errors: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(errors.numpy())[1])


def _psnr(error: Tensor) -> Tensor:
    return -10 * torch.log10(error.clamp(min=1e-12))
