"""Networks of volumes: MONAI's DynUNet (that of nnU-Net) and SegResNet, as stages that can be cut."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.errors import BadInput
from polyclinic.extras import need
from polyclinic.models.backbone import GROUPS, Backbone
from polyclinic.models.topology import topology

#: what MONAI calls the norms of `model.norm`
NORMS = {"batch": "batch", "instance": ("instance", {"affine": True}), "group": ("group", {"num_groups": GROUPS // 2})}


class VolumeNetwork(Backbone):
    """A network of volumes [B, channels, X, Y, Z]; what `[model.arguments]` says stands in `arguments`."""

    dense: ClassVar[bool] = True
    volumes: ClassVar[bool] = True
    norm_layers: ClassVar[bool | None] = True
    #: names of `[model.arguments]`, and what was given
    takes: ClassVar[tuple[str, ...]] = ()
    arguments: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def with_arguments(cls, arguments: Mapping[str, Any]) -> type[Self]:
        """The same network with these arguments; BadInput for one that it does not take."""
        if unknown := [name for name in arguments if name not in cls.takes]:
            raise BadInput(f"model.arguments.{unknown[0]}: {cls.name} takes {', '.join(cls.takes)}")
        return _with_arguments(cls, json.dumps(dict(arguments), sort_keys=True))  # type: ignore[arg-type]

    def keep(self, network: nn.Module, names: Sequence[str]) -> None:
        """Take over these children of MONAI's network; activations then do not write over what they are given."""
        for name in names:
            self.add_module(name, network.get_submodule(name))
        for layer in self.modules():
            if getattr(layer, "inplace", False):
                layer.inplace = False  # type: ignore[assignment]

    @classmethod
    def norm_named(cls, norm: str) -> Any:
        if norm not in NORMS:
            raise BadInput(f"model.norm: '{norm}' needs public weights, which {cls.name} has not; choose 'instance'")
        return NORMS[norm]


@functools.lru_cache(maxsize=32)
def _with_arguments(kind: type[VolumeNetwork], arguments: str) -> Any:
    return type(kind.__name__, (kind,), {"arguments": json.loads(arguments), "__module__": kind.__module__})


class DynUNet(VolumeNetwork):
    """nnU-Net's U-Net. Cut `block1` lies after the first two convolutions, whose output is all that the rest needs."""

    name: ClassVar[str] = "dynunet"
    summary: ClassVar[str] = "nnU-Net's U-Net (MONAI's DynUNet), stages by nnU-Net's rules: volumes"
    takes: ClassVar[tuple[str, ...]] = ("kernels", "strides", "filters", "spacing", "deep_supervision", "residual")
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "block1": ("input_block",),
        "rest": ("downsamples", "bottleneck", "upsamples", "output_block", "deep_supervision_heads"),
    }

    def __init__(self, channels: int, outputs: int, size: Any, norm: str) -> None:
        need("monai", "model.backbone: 'dynunet'")
        from monai.networks.nets import DynUNet as Network

        super().__init__(channels, outputs, size, norm)
        usual, given = topology(size, self.arguments.get("spacing")), self.arguments
        strides = given.get("strides", usual.strides)
        heads = int(given.get("deep_supervision", 0))
        if not 0 <= heads < max(len(strides) - 1, 1):
            raise BadInput(f"model.arguments.deep_supervision: must be from 0 to {len(strides) - 2}, not {heads}")
        try:
            network = Network(
                spatial_dims=len(size),
                in_channels=channels,
                out_channels=outputs,
                kernel_size=given.get("kernels", usual.kernels[: len(strides)]),
                strides=strides,
                upsample_kernel_size=strides[1:],
                filters=given.get("filters", usual.filters[: len(strides)]),
                norm_name=self.norm_named(norm),
                deep_supervision=heads > 0,
                deep_supr_num=max(heads, 1),
                res_block=bool(given.get("residual", False)),
            )
        except (ValueError, TypeError, IndexError) as error:
            raise BadInput(f"model.arguments: {' '.join(str(error).split())}; see docs/volumes.md") from None
        _check_size(size, strides)
        if not heads:
            network.deep_supervision_heads = nn.ModuleList()
        self.keep(network, [name for names in self.stages.values() for name in names])

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        return self.get_submodule("input_block")(x) if stage == "block1" else self._encode_and_decode(x)

    def _encode_and_decode(self, features: Tensor) -> Tensor:
        skips = [features]
        for down in self._list("downsamples"):
            skips.append(down(skips[-1]))
        x, maps = self.get_submodule("bottleneck")(skips[-1]), []
        for up, skip in zip(self._list("upsamples"), reversed(skips), strict=True):
            x = up(x, skip)
            maps.append(x)
        output: Tensor = self.get_submodule("output_block")(x)
        heads = self._list("deep_supervision_heads")
        if not (self.training and heads):
            return output
        coarse = [head(x) for head, x in zip(heads, reversed(maps[:-1]), strict=False)]
        return torch.stack([output, *(F.interpolate(one, output.shape[2:]) for one in coarse)], 1)

    def _list(self, name: str) -> Sequence[nn.Module]:
        return list(self.get_submodule(name).children())


class SegResNet(VolumeNetwork):
    """Residual U-Net of Myronenko (2018), without transposed convolutions, which gradients per image cannot follow."""

    name: ClassVar[str] = "segresnet"
    summary: ClassVar[str] = "residual U-Net (MONAI's SegResNet): volumes, also with differential privacy"
    takes: ClassVar[tuple[str, ...]] = ("init_filters", "blocks_down", "blocks_up")
    stages: ClassVar[dict[str, tuple[str, ...]]] = {
        "block1": ("convInit",),
        "rest": ("down_layers", "up_samples", "up_layers", "conv_final"),
    }

    def __init__(self, channels: int, outputs: int, size: Any, norm: str) -> None:
        need("monai", "model.backbone: 'segresnet'")
        from monai.networks.nets import SegResNet as Network

        super().__init__(channels, outputs, size, norm)
        given = {"init_filters": 16, **self.arguments}
        try:
            network = Network(
                len(size), in_channels=channels, out_channels=outputs, norm=self.norm_named(norm), **given
            )
        except (ValueError, TypeError) as error:
            raise BadInput(f"model.arguments: {' '.join(str(error).split())}; see docs/volumes.md") from None
        _check_size(size, [(2,) * len(size)] * (len(network.down_layers) - 1))
        self.keep(network, [name for names in self.stages.values() for name in names])

    def run_stage(self, stage: str, x: Tensor) -> Tensor:
        if stage == "block1":
            return self.get_submodule("convInit")(x)
        downs, ups, layers = (
            list(self.get_submodule(name).children()) for name in ("down_layers", "up_samples", "up_layers")
        )
        skips = []
        for down in downs:
            x = down(x)
            skips.append(x)
        for up, layer, skip in zip(ups, layers, reversed(skips[:-1]), strict=True):
            x = layer(up(x) + skip)
        return self.get_submodule("conv_final")(x)


def _check_size(size: Sequence[int], strides: Sequence[Sequence[int] | int]) -> None:
    """BadInput where a side of a patch cannot be halved as often as the network does."""
    for axis, side in enumerate(size):
        by = 1
        for stride in strides:
            by *= stride if isinstance(stride, int) else stride[axis]
        if side % by:
            raise BadInput(
                f"data.size: {side} voxels are halved to parts; take multiples of {by} along axis {axis + 1}"
            )
