"""The autoencoder of a flow in latents: MONAI's AutoencoderKL, which a site trains on its images before the flow."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.extras import need
from polyclinic.generators.base import Progress
from polyclinic.training.generator_loop import Objective, Schedule, autocast, descend

if TYPE_CHECKING:
    from polyclinic.generators.flow.model import FlowModel

LATENT_CHANNELS = 4
HALVED = 4  # times that a latent's side is smaller
KL = 1e-6  #: weight of the distance between latents and noise
GROUPS = 8


class ImageAutoencoder(nn.Module):
    """Images [B, C, H, W] in [0, 1] to latents [B, 4, H / 4, W / 4] of about one in size, and back."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        need("monai", "generator.space: 'latents'")
        from monai.networks.nets import AutoencoderKL

        self.net = AutoencoderKL(
            spatial_dims=2,
            in_channels=channels,
            out_channels=channels,
            num_res_blocks=1,
            channels=[width, 2 * width, 2 * width],
            attention_levels=[False] * 3,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=GROUPS,
            with_encoder_nonlocal_attn=False,
            with_decoder_nonlocal_attn=False,
        )
        self.register_buffer("spread", torch.ones(()))

    def sides(self, size: int) -> tuple[int, int]:
        return (-(-size // HALVED),) * 2

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        height, width = images.shape[-2:]
        return self.net.encode(F.pad(2 * images - 1, (0, -width % HALVED, 0, -height % HALVED), mode="replicate"))

    def latents(self, images: Tensor) -> Tensor:
        return self.encode(images)[0] / self.get_buffer("spread")

    def decode(self, latents: Tensor) -> Tensor:
        return (self.net.decode(latents * self.get_buffer("spread")) + 1) / 2

    def fit(self, model: FlowModel, images: Tensor, rng: torch.Generator, steps: int, report: Progress) -> float:
        """Learn to encode and decode images uint8; the mean loss of the last pass."""
        self.train().requires_grad_(True)
        schedule = Schedule(
            max(1, steps // max(1, len(images) // model.settings.batch_size)),
            model.settings.batch_size,
            model.settings.lr,
        )

        def loss_of(batch: Tensor, noise: Tensor) -> tuple[Tensor, None]:
            with autocast(model.device, model.precision):
                mean, spread = self.encode(batch)
                made = (self.net.decode(mean + spread * noise[: len(mean)]) + 1) / 2
            mean, spread = mean.float(), spread.float()
            far = 0.5 * (mean.square() + spread.square() - 2 * spread.log() - 1).sum((1, 2, 3)).mean()
            return (made[..., : batch.shape[-2], : batch.shape[-1]].float() - batch).abs().mean() + KL * far, None

        def batch_of(index: Tensor) -> tuple[Tensor, Tensor]:
            shape = (len(index), LATENT_CHANNELS, *self.sides(images.shape[-1]))
            return model.to_unit(images[index.cpu()]), model.on_device(torch.randn(shape, generator=rng))

        objective = Objective(self.parameters(), batch_of, loss_of)
        loss = descend(objective, len(images), schedule, rng, partial(report, "autoencoder"))
        self.eval().requires_grad_(False)
        with torch.no_grad():
            some = [self.encode(model.to_unit(part))[0] for part in images[:1024].split(128)]
            self.get_buffer("spread").copy_(torch.cat(some).std().clamp(min=1e-3))
        return loss
