"""The networks of a flow: MONAI's diffusion U-Net for images and maps, a small network for vectors of features.

Both take noisy inputs, times from 0 to `TIMES` (all noise), and a condition [B, 1 + A]: a label, and how the image was
augmented. They give velocities.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.extras import need
from polyclinic.generators.base import LabelEmbedding
from polyclinic.tasks import Target

TIMES = 1000
GROUPS = 8
WAVES_OF_TIME = 32
#: hidden numbers of the network for vectors, for each channel of the U-Net
WIDER = 8


class Condition(nn.Module):
    """Conditions [B, 1 + A] to vectors [B, width]."""

    def __init__(self, target: Target, augmented: int, width: int) -> None:
        super().__init__()
        self.label = LabelEmbedding(target, width)
        self.augmentation = nn.Linear(augmented, width) if augmented else None

    def forward(self, condition: Tensor) -> Tensor:
        found = self.label(condition[:, 0])
        return found if self.augmentation is None else found + self.augmentation(condition[:, 1:])


class ImageFlow(nn.Module):
    """Images or maps [B, C, H, W] of any size: sides are filled up to what the levels halve."""

    def __init__(self, channels: int, condition: tuple[Target, int], width: int, levels: int, blocks: int) -> None:
        super().__init__()
        need("monai", "generator.name: 'flow'")
        from monai.networks.nets import DiffusionModelUNet

        self.multiple = 2 ** (levels - 1)
        self.unet = DiffusionModelUNet(
            spatial_dims=2,
            in_channels=channels,
            out_channels=channels,
            num_res_blocks=blocks,
            channels=[width, *[2 * width] * (levels - 1)],
            attention_levels=[False] * (levels - 1) + [True],
            norm_num_groups=GROUPS,
            num_head_channels=2 * width if levels > 1 else width,
            num_class_embeds=1,  # whose place is taken by ours, which knows values as well
            use_flash_attention=True,
        )
        self.unet.class_embedding = Condition(*condition, 4 * width)  # type: ignore[assignment]

    def forward(self, x: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, -width % self.multiple, 0, -height % self.multiple), mode="replicate")
        return self.unet(padded, times, class_labels=condition)[..., :height, :width]


class FeatureFlow(nn.Module):
    """Vectors [B, D, 1, 1], or K noisy ones of each image [B, K, D] with times [B, K]."""

    def __init__(self, numbers: int, condition: tuple[Target, int], width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(numbers, width)
        self.time = nn.Linear(2 * WAVES_OF_TIME, width)
        self.condition = Condition(*condition, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks + 1))
        self.inner = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.last = nn.Linear(width, numbers)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        rows = x.flatten(1) if x.dim() == 4 else x
        known = self.condition(condition)
        given = self.time(waves(times).to(rows.dtype)) + (known if rows.dim() == 2 else known[:, None])
        h = self.first(rows)
        for norm, inner, outer in zip(self.norms, self.inner, self.outer, strict=False):
            h = h + outer(F.silu(inner(F.silu(norm(h) + given))))
        return self.last(F.silu(self.norms[-1](h))).reshape(x.shape)


def waves(times: Tensor) -> Tensor:
    """Sines and cosines of times [...], [..., 2 * WAVES_OF_TIME], from slow to fast."""
    rates = torch.exp(torch.arange(WAVES_OF_TIME, device=times.device) * (math.log(WAVES_OF_TIME) / WAVES_OF_TIME))
    angle = times[..., None] / TIMES * (2 * math.pi) * rates / 2
    return torch.cat([angle.sin(), angle.cos()], -1)


# --- augmentation, which the network is told ----------------------------------------------------------

#: numbers that say how an image was changed: mirrored, turned, larger, moved down, moved right; all 0: not at all
CHANGES = 5
#: the share of images that stay as they are, and the reach of turn (radians), size and place
UNCHANGED, TURN, SIZE, PLACE = 0.3, 0.15, 0.1, 0.1


def changed(images: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Images [B, C, H, W] mirrored, turned, resized and moved, and how, [B, CHANGES] from -1 to 1; `draws` [B, 6] are
    uniform in [0, 1)."""
    how = torch.cat([(draws[:, :1] < 0.5).to(draws), 2 * draws[:, 1:CHANGES] - 1], 1)
    how = how * (draws[:, CHANGES:] >= UNCHANGED)
    turn, size = TURN * how[:, 1], 1 + SIZE * how[:, 2]
    side = 1 - 2 * how[:, 0]
    rows = [
        torch.stack([side * turn.cos() * size, -turn.sin() * size, 2 * PLACE * how[:, 3]], 1),
        torch.stack([side * turn.sin() * size, turn.cos() * size, 2 * PLACE * how[:, 4]], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False), how
