"""Inception-v3 (Szegedy et al. 2016) as the Fréchet Inception Distance takes it (Heusel et al. 2017): FID's features.

FID is defined by the weights of one network, that of TensorFlow's model of December 2015. They are public as a file of
PyTorch, `pt_inception-2015-12-05-6726825d.pth`, with 1,008 classes. With other weights of the same network, such as
torchvision's with 1,000 classes, distances are others, and must not be called FID.

Layout of the file: `Conv2d_1a_3x3.conv.weight`, `Conv2d_1a_3x3.bn.running_mean`, `Mixed_5b.branch1x1.conv.weight`, ...,
`fc.weight` [1008, 2048]: names as in torchvision's network, without auxiliary outputs.
"""

import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.errors import BadInput

NAME = "inception-fid"
SUMMARY = "Inception-v3 of FID, 95 MB"
FILE = "pt_inception-2015-12-05-6726825d.pth"
WHERE = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{FILE}"
SHA256_BEGINS = "6726825d"
SIDE, WIDTH, CLASSES = 299, 2048, 1008
EPS = 1e-3

#: the first layers: name, channels in and out, kernel, stride, padding, and whether max pooling follows
STEM = (
    ("Conv2d_1a_3x3", 3, 32, 3, 2, 0, False), ("Conv2d_2a_3x3", 32, 32, 3, 1, 0, False),
    ("Conv2d_2b_3x3", 32, 64, 3, 1, 1, True), ("Conv2d_3b_1x1", 64, 80, 1, 1, 0, False),
    ("Conv2d_4a_3x3", 80, 192, 3, 1, 0, True),
)  # fmt: skip


class Unit(nn.Module):
    """Convolution, batch norm, ReLU. Sides are kept by padding unless there is a stride."""

    def __init__(self, channels: int, out: int, kernel: int | tuple[int, int] = 1, stride: int = 1) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if stride > 1 else (sides[0] // 2, sides[1] // 2)
        self.conv = nn.Conv2d(channels, out, sides, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


#: a layer: its name, channels out, kernel, stride; a list of layers that all take the same input ends a branch
Layer = tuple[Any, ...]
Branch = Sequence[Layer | list[Layer]]
ROW, COLUMN = (1, 7), (7, 1)


class Mixed(nn.Module):
    """Branches side by side, whose channels are put together; the last one pools ("reduce": and has no layer)."""

    def __init__(self, channels: int, branches: Sequence[Branch], pool: str, pooled: int = 0) -> None:
        super().__init__()
        self.pool = pool
        self.branches: list[list[list[str]]] = []
        for branch in branches:
            inputs = channels
            steps = [step if isinstance(step, list) else [step] for step in branch]
            for step in steps:
                for name, out, *rest in step:
                    self.add_module(name, Unit(inputs, out, *rest))
                inputs = step[0][1]
            self.branches.append([[layer[0] for layer in step] for step in steps])
        if pooled:
            self.branch_pool = Unit(channels, pooled)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for branch in self.branches:
            h = x
            for names in branch:
                h = torch.cat([self.get_submodule(name)(h) for name in names], 1)
            found.append(h)
        if self.pool == "reduce":
            return torch.cat([*found, F.max_pool2d(x, 3, 2)], 1)
        # pixels beyond the border do not count: TensorFlow's average
        average = self.pool == "average"
        pooled = F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) if average else F.max_pool2d(x, 3, 1, 1)
        return torch.cat([*found, self.branch_pool(pooled)], 1)


def _chain(name: str, *layers: tuple[Any, ...]) -> Branch:
    """A branch of numbered layers."""
    return [(f"{name}_{number}", *layer) for number, layer in enumerate(layers, start=1)]


def mixed_a(channels: int, pooled: int) -> Mixed:
    double = _chain("branch3x3dbl", (64,), (96, 3), (96, 3))
    return Mixed(channels, [[("branch1x1", 64)], _chain("branch5x5", (48,), (64, 5)), double], "average", pooled)


def mixed_b(channels: int) -> Mixed:
    double = _chain("branch3x3dbl", (64,), (96, 3), (96, 3, 2))
    return Mixed(channels, [[("branch3x3", 384, 3, 2)], double], "reduce")


def mixed_c(channels: int, narrow: int) -> Mixed:
    single = _chain("branch7x7", (narrow,), (narrow, ROW), (192, COLUMN))
    double = _chain("branch7x7dbl", (narrow,), (narrow, COLUMN), (narrow, ROW), (narrow, COLUMN), (192, ROW))
    return Mixed(channels, [[("branch1x1", 192)], single, double], "average", 192)


def mixed_d(channels: int) -> Mixed:
    large = _chain("branch7x7x3", (192,), (192, ROW), (192, COLUMN), (192, 3, 2))
    return Mixed(channels, [_chain("branch3x3", (192,), (320, 3, 2)), large], "reduce")


def mixed_e(channels: int, pool: str) -> Mixed:
    single: Branch = [("branch3x3_1", 384), [("branch3x3_2a", 384, (1, 3)), ("branch3x3_2b", 384, (3, 1))]]
    split: list[Layer] = [("branch3x3dbl_3a", 384, (1, 3)), ("branch3x3dbl_3b", 384, (3, 1))]
    double: Branch = [("branch3x3dbl_1", 448), ("branch3x3dbl_2", 384, 3), split]
    return Mixed(channels, [[("branch1x1", 320)], single, double], pool, 192)


class FIDInception(nn.Module):
    """Images float [N, 3, 299, 299] in [0, 1] to the vectors [N, 2048] that FID compares."""

    name = "Inception"

    def __init__(self) -> None:
        super().__init__()
        for name, channels, out, kernel, stride, padding, _ in STEM:
            layer = Unit(channels, out, kernel, stride)
            layer.conv.padding = (padding, padding)
            self.add_module(name, layer)
        blocks = {
            "Mixed_5b": mixed_a(192, 32),
            "Mixed_5c": mixed_a(256, 64),
            "Mixed_5d": mixed_a(288, 64),
            "Mixed_6a": mixed_b(288),
            "Mixed_6b": mixed_c(768, 128),
            "Mixed_6c": mixed_c(768, 160),
            "Mixed_6d": mixed_c(768, 160),
            "Mixed_6e": mixed_c(768, 192),
            "Mixed_7a": mixed_d(768),
            "Mixed_7b": mixed_e(1280, "average"),
            "Mixed_7c": mixed_e(2048, "max"),  # not the published network's: so FID's has it
        }
        self.blocks = tuple(blocks)
        for name, block in blocks.items():
            self.add_module(name, block)

    def forward(self, images: Tensor) -> Tensor:
        x = images * 2 - 1
        for name, *_, pools in STEM:
            x = self.get_submodule(name)(x)
            x = F.max_pool2d(x, 3, 2) if pools else x
        for name in self.blocks:
            x = self.get_submodule(name)(x)
        return x.mean((2, 3))


# --- its weights ----------------------------------------------------------------------------------------


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a file with FID's weights, .pth or .safetensors; BadInput where it holds others."""
    cure = f"give {FILE}, from {WHERE}"
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(file)
        elif hashlib.sha256(file.read_bytes()).hexdigest().startswith(SHA256_BEGINS):
            # weights_only: an unpickler that can make tensors and nothing else
            tensors = dict(torch.load(file, map_location="cpu", weights_only=True))
        else:
            raise BadInput(f"{file}: is not the file of FID's weights; {cure}")
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise BadInput(f"{file}: cannot be read ({error}); {cure}") from None
    # all tensors of the network, and a last layer of FID's 1,008 classes
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in FIDInception().state_dict().items()}
    wanted |= {"fc.weight": (CLASSES, WIDTH)}
    wanted = {name: shape for name, shape in wanted.items() if not name.endswith("num_batches_tracked")}
    wrong = [name for name, shape in wanted.items() if name not in tensors or tuple(tensors[name].shape) != shape]
    if wrong == ["fc.weight"]:
        raise BadInput(f"{file}: holds Inception-v3 of other classes than FID's 1,008, which gives no FID; {cure}")
    if wrong:
        raise BadInput(f"{file}: does not hold FID's Inception-v3 ({', '.join(wrong[:3])}); {cure}")
    return tensors


def fid_inception(file: Path, device: str | torch.device = "cpu") -> FIDInception:
    """The network with the weights of a file, in evaluation mode and not to be trained."""
    tensors, network = read_weights(file), FIDInception()
    own = network.state_dict()
    network.load_state_dict({**own, **{name: tensor for name, tensor in tensors.items() if name in own}})
    return network.to(device).eval().requires_grad_(False)
