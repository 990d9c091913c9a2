"""`nnUNetPlans.json`, read and written: a group brings the plan that it has."""

import json
from pathlib import Path
from typing import Any

from polyclinic.errors import BadInput
from polyclinic.models.topology import Topology
from polyclinic.models.volume_plan import VolumePlan

CONFIGURATION = "3d_fullres"
#: nnU-Net's network that `dynunet` is
NETWORK = "dynamic_network_architectures.architectures.unet.PlainConvUNet"


def read_plans(path: Path) -> VolumePlan:
    """The plan of the configuration 3d_fullres; BadInput for a network that we do not have, such as ResEnc's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content["configurations"][CONFIGURATION]
        # nnU-Net's axes go from the head down, and may be turned once more
        forward = content.get("transpose_forward", [0, 1, 2])
        order = [forward.index(axis) for axis in (2, 1, 0)]
        architecture = found.get("architecture", {})
        name = str(architecture.get("network_class_name", found.get("UNet_class_name", NETWORK)))
        if name.rpartition(".")[2] != "PlainConvUNet":
            raise BadInput(
                f"{path}: plans the network {name.rpartition('.')[2]}, which is not here; plan a PlainConvUNet"
            )
        kwargs = architecture.get("arch_kwargs", found)
        kernels = kwargs.get("kernel_sizes", kwargs.get("conv_kernel_sizes"))
        strides = kwargs.get("strides", kwargs.get("pool_op_kernel_sizes"))
        first, most = found.get("UNet_base_num_features", 32), found.get("unet_max_num_features", 320)
        filters = kwargs.get("features_per_stage", [min(first * 2**stage, most) for stage in range(len(strides))])
        turned = [tuple(tuple(int(one[axis]) for axis in order) for one in some) for some in (kernels, strides)]
        stages = Topology(turned[0], turned[1], tuple(map(int, filters)))
        spacing, size = ([found[field][axis] for axis in order] for field in ("spacing", "patch_size"))
        return VolumePlan(tuple(map(float, spacing)), tuple(map(int, size)), int(found["batch_size"]), stages)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{path}: is no nnUNetPlans.json with a {CONFIGURATION} ({reason}); name another file") from None


def write_plans(plan: VolumePlan, path: Path) -> None:
    """The same under nnU-Net's names, in the order of its axes: z, y, x."""
    stages = len(plan.stages.strides)
    kwargs: dict[str, Any] = {
        "n_stages": stages,
        "features_per_stage": list(plan.stages.filters),
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": [list(one[::-1]) for one in plan.stages.kernels],
        "strides": [list(one[::-1]) for one in plan.stages.strides],
        "n_conv_per_stage": [2] * stages,
        "n_conv_per_stage_decoder": [2] * (stages - 1),
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "nonlin": "torch.nn.LeakyReLU",
    }
    configuration = {
        "spacing": list(plan.spacing[::-1]),
        "patch_size": list(plan.size[::-1]),
        "batch_size": plan.batch_size,
        "architecture": {"network_class_name": NETWORK, "arch_kwargs": kwargs},
    }
    content = {"transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2]}
    path.write_text(json.dumps({**content, "configurations": {CONFIGURATION: configuration}}, indent=1), "utf-8")
