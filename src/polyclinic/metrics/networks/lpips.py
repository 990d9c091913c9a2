"""LPIPS v0.1 (Zhang et al. 2018): features of AlexNet or VGG16, with weights learned from human judgements.

Weights come as a safetensors file (`polyclinic weights get lpips-alex`) with convolutions `conv{i}.weight`,
`conv{i}.bias` in the order in which they run, and a weight per channel of each level, `lin{0..4}.weight` [1, C, 1, 1].
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polyclinic.errors import BadInput

# of the images in [-1, 1], as LPIPS takes them
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)

#: a convolution: channels in, channels out, kernel, stride, padding, whether max pooling (of this size) comes before
#: it, and whether its rectified output is a level
ALEXNET = (
    (3, 64, 11, 4, 2, 0, True),
    (64, 192, 5, 1, 2, 3, True),
    (192, 384, 3, 1, 1, 3, True),
    (384, 256, 3, 1, 1, 0, True),
    (256, 256, 3, 1, 1, 0, True),
)
VGG16 = (
    (3, 64, 3, 1, 1, 0, False),
    (64, 64, 3, 1, 1, 0, True),
    (64, 128, 3, 1, 1, 2, False),
    (128, 128, 3, 1, 1, 0, True),
    (128, 256, 3, 1, 1, 2, False),
    (256, 256, 3, 1, 1, 0, False),
    (256, 256, 3, 1, 1, 0, True),
    (256, 512, 3, 1, 1, 2, False),
    (512, 512, 3, 1, 1, 0, False),
    (512, 512, 3, 1, 1, 0, True),
    (512, 512, 3, 1, 1, 2, False),
    (512, 512, 3, 1, 1, 0, False),
    (512, 512, 3, 1, 1, 0, True),
)
#: names of weights, and what is built from them
NETWORKS = {"lpips-alex": ("LPIPS-AlexNet", ALEXNET), "lpips-vgg": ("LPIPS-VGG16", VGG16)}
#: sha256 over names and bytes of all tensors, in the order of their names
DIGESTS = {
    "lpips-alex": "41d77130bc3ada001de41c87c76b2acc2ec7ba67ad2e6d0e8c295b9ecadb5851",
    "lpips-vgg": "ace72fe5d6c547a93faf7caf01e8fe14336910e23794d19c223aeefbf95ff7c7",
}

Layers = tuple[tuple[int, int, int, int, int, int, bool], ...]


class Features(nn.Module):
    """The convolutions of a classifier. Images float [N, 3, H, W] in [0, 1]; `levels` gives five feature maps."""

    shift: Tensor
    scale: Tensor

    def __init__(self, name: str, layers: Layers) -> None:
        super().__init__()
        self.name, self.layers = name, layers
        for number, (channels, out, kernel, stride, padding, _, _) in enumerate(layers):
            self.add_module(f"conv{number}", nn.Conv2d(channels, out, kernel, stride, padding))
        self.register_buffer("shift", torch.tensor(SHIFT)[:, None, None], persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE)[:, None, None], persistent=False)

    def levels(self, images: Tensor) -> list[Tensor]:
        x = (images * 2 - 1 - self.shift) / self.scale
        found = []
        for number, (_, _, _, _, _, pool, is_level) in enumerate(self.layers):
            x = nn.functional.max_pool2d(x, pool, 2) if pool else x
            x = self.get_submodule(f"conv{number}")(x).relu()
            if is_level:
                found.append(x)
        return found


def shapes(layers: Layers) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a file of these weights holds."""
    found: dict[str, tuple[int, ...]] = {}
    levels = 0
    for number, (channels, out, kernel, _, _, _, is_level) in enumerate(layers):
        found[f"conv{number}.weight"] = (out, channels, kernel, kernel)
        found[f"conv{number}.bias"] = (out,)
        if is_level:
            found[f"lin{levels}.weight"] = (1, out, 1, 1)
            levels += 1
    return found


def check(tensors: Mapping[str, Tensor], weights: str, where: str) -> None:
    """Raise BadInput unless these are the tensors of the weights named (lpips-alex, lpips-vgg)."""
    wanted = shapes(NETWORKS[weights][1])
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != wanted:
        wrong = sorted(name for name in wanted | found if wanted.get(name) != found.get(name))
        raise BadInput(
            f"{where}: does not hold {weights} ({', '.join(wrong[:3])}); run polyclinic weights get {weights}"
        )
    if digest(tensors) != DIGESTS[weights]:
        raise BadInput(f"{where}: holds other numbers than {weights} has; run polyclinic weights get {weights}")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """A name for these numbers, wherever and in whichever order they lie."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().numpy().tobytes())
    return total.hexdigest()


def read(weights: str, file: Path) -> tuple[Features, list[Tensor]]:
    """The network of these weights, and for each level the weight of every channel, [C]."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: cannot be read ({error}); run polyclinic weights get {weights}") from None
    check(tensors, weights, str(file))
    network = Features(*NETWORKS[weights])
    network.load_state_dict({name: tensor for name, tensor in tensors.items() if name.startswith("conv")})
    per_channel = [tensors[f"lin{level}.weight"].flatten() for level in range(5)]
    return network.eval().requires_grad_(False), per_channel
