"""Patches of volumes out of latents and activations: a linear decoder, and a search for what it makes in the volumes.

The decoder gives each voxel from the latents around it. It is solved for in closed form from other people's volumes and
the encoder that the site was sent. What it makes of a parcel is looked for in the site's training volumes, and in
volumes that were held out: so it need not be known where a patch was cut.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.decoders import LearnedDecoder
from polyclinic.attacks.latent_inversion import read_latents
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.attack_cases import plain, trainer_of
from polyclinic.audits.attack_latents import UNKNOWN, encoder_is_known, front_of
from polyclinic.audits.hidden import CLOSER, FITS
from polyclinic.audits.hidden_volumes import VOLUMES, evenly, fits_in
from polyclinic.audits.truth import Truth, truth_of_held_out
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.randomness import torch_rng

NAME = "patch-decoder"
AROUND, FEWER, MOST_NUMBERS = 5, 3, 2000  #: latents along each axis from which a voxel is told; fewer of many channels
SAMPLES = 30_000  #: voxels that the decoder is solved from
RIDGE = 1e-4
ROWS = 8  #: patches that are looked for
NOISE = 0.25  #: of the planted latents, in deviations of their channels


class PatchDecoderAttack(Attack):
    """Decodes patches of volumes from latents or activations, and looks for them in the site's volumes."""

    kinds: ClassVar[tuple[str, ...]] = ("activations", "latents")
    questions: ClassVar[tuple[str, ...]] = ("images",)
    volumes: ClassVar[bool] = True

    def attack(self, seen: Seen, truth: Truth) -> Results:
        settings = LearnedDecoder()
        if not encoder_is_known(seen):
            return [NotTried(NAME, UNKNOWN)]
        if refused := not_granted(NAME, settings.needs, seen):
            return [refused]
        own, others = volumes_of(seen, truth)
        latents = read_latents(seen.parcel)
        if len(own) < 2 or len(others) < 2 or latents.dim() != 5:
            return [NotTried(NAME, "there are fewer than two held-out volumes for the attacker, or to compare with")]
        kernel = solve_decoder(seen, own)
        made = decode(latents[evenly(len(latents), ROWS)], kernel)
        fits, against = (
            fits_in(list(made), part.take(evenly(len(part), VOLUMES))) for part in (truth.data.train, others)
        )
        found = [fit >= FITS and 1 - fit <= CLOSER * (1 - other) for fit, other in zip(fits, against, strict=True)]
        best = max(range(len(fits)), key=lambda n: fits[n] - against[n])
        words = (
            f"{sum(found)} of {len(fits)} decoded patches fit a training volume far better than any held-out one; the "
            f"best has a correlation of {fits[best]:.2f} there and of {against[best]:.2f} with held-out volumes"
        )
        evidence: dict[str, float | int | str] = {"recovered": sum(found), "images": len(fits)}
        evidence |= {"correlation": fits[best], "held_out": against[best]}
        return [Finding(NAME, str(settings), Verdict(any(found), words, evidence))]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """Latents that the same operation makes of held-out volumes, with some noise."""
        other = truth_of_held_out(truth, len(truth.data.train)) if seen.kind == "latents" else None
        if other is None or not encoder_is_known(seen):
            return []

        def change(data: SiteData) -> SiteData:
            return replace(data, train=other.data.train)

        made = [one for one in seen.again(change) if one.kind == seen.kind]
        if not made:
            return []
        clean = read_latents(made[0])
        noise = torch.randn(clean.shape, generator=torch_rng(seen.tools.seed, "audit", "planted latents"))
        noisy = clean + NOISE * clean.std((0, 2, 3, 4), keepdim=True) * noise
        parcel = Parcel(seen.kind, {seen.kind: noisy}, dict(seen.parcel.metadata))
        words = f"latents of patches of {len(other.data.train)} held-out volumes, with noise of {NOISE:g} deviations"
        return [seen.planted("noisy latents", words, other, parcel)]


def volumes_of(seen: Seen, truth: Truth) -> tuple[ImageSet, ImageSet]:
    """The attacker's own volumes, and held-out ones to compare with: halves of what the site held out."""
    outside = truth.outside
    rows = torch.arange(len(outside)).numpy()
    return outside.take(rows[::2]), outside.take(rows[1::2])


@torch.no_grad()
def solve_decoder(seen: Seen, part: ImageSet) -> Tensor:
    """The kernel [1, C, k, k, k] that gives the first channel of patches from their latents, by ridge regression."""
    trainer = plain(trainer_of(seen))
    front, sums, around = front_of(seen)[0].to(trainer.device).eval(), torch.zeros(()), FEWER
    each = max(1, SAMPLES // max(1, len(part) * trainer.task.patches))
    rng = torch_rng(seen.tools.seed, "audit", "voxels of own patches")
    for patches, _ in trainer.examples(part, torch_rng(seen.tools.seed, "audit", "own patches")):
        latents = normalised(front(patches).float().cpu())
        sides: Any = tuple(latents.shape[2:])
        wanted = F.adaptive_avg_pool3d(patches[:, :1].float().cpu(), sides)[:, 0]
        around = AROUND if latents.shape[1] * AROUND**3 <= MOST_NUMBERS else FEWER
        wide = F.pad(latents, [around // 2] * 6)
        for axis in (2, 3, 4):
            wide = wide.unfold(axis, around, 1)
        places = [torch.randint(n, (each * len(patches),), generator=rng) for n in (len(patches), *sides)]
        row, x, y, z = places
        given = wide[row, :, x, y, z].flatten(1)
        given = torch.cat([given, torch.ones(len(given), 1)], 1).double()
        sums = sums + given.T @ torch.cat([given, wanted[row, x, y, z][:, None].double()], 1)
    products, cross = sums[:, :-1], sums[:, -1]
    penalty = RIDGE * products.diagonal().mean() * torch.eye(len(products), dtype=products.dtype)
    weights = torch.linalg.solve(products + penalty, cross)[:-1].float()
    return weights.view(1, -1, around, around, around)


def decode(latents: Tensor, kernel: Tensor) -> Tensor:
    """Patches [N, X, Y, Z], up to a constant, of latents [N, C, X, Y, Z]."""
    return F.conv3d(normalised(latents.float()), kernel, padding=kernel.shape[-1] // 2)[:, 0]


def normalised(latents: Tensor) -> Tensor:
    """Latents whose channels have mean 0 and deviation 1 in each patch: noise and half precision change little."""
    deviation, mean = torch.std_mean(latents, (2, 3, 4), keepdim=True)
    return (latents - mean) / deviation.clamp(min=1e-6)
