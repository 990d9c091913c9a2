"""Which ways of computing a step pay: measured once, then chosen by shapes and settings, never by a clock.

On a GPU, measured with `python benchmarks/steps.py` on an NVIDIA H200 (torch 2.11, bfloat16, 2026-11-16): milliseconds
of one step, Adam included.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Shape(NamedTuple):
    """A network and its batches."""

    backbone: str
    size: int
    batch: int


#: a step of one network: eager with a fused optimiser, and recorded as a CUDA graph with one
RECORDED: dict[Shape, tuple[float, float]] = {
    Shape("small-cnn", 32, 32): (2.788, 0.285),
    Shape("lenet5", 32, 8): (2.585, 0.247),
    Shape("resnet18", 64, 32): (8.696, 1.599),
    Shape("resnet18", 224, 32): (10.909, 3.923),
    Shape("resnet34", 256, 32): (20.728, 6.985),
    Shape("resnet50", 224, 32): (32.612, 9.457),
    Shape("unet", 64, 16): (17.073, 2.827),
}


def recording_pays() -> bool:
    """Whether a step is faster as a CUDA graph, for whatever shape: every measured one is."""
    return all(recorded < eager for eager, recorded in RECORDED.values())


class Compiled(NamedTuple):
    """A step on a CPU: milliseconds as it is and compiled, and seconds of compilation, which a process spends once."""

    plain: float
    compiled: float
    seconds: float


#: measured with `python benchmarks/compiled.py` in one thread of a CPU (torch 2.13, 2026-11-18), without a cache
COMPILED: dict[Shape, Compiled] = {
    Shape("small-cnn", 32, 32): Compiled(36.960, 24.183, 33.9),
    Shape("lenet5", 32, 8): Compiled(2.121, 2.042, 33.2),
    Shape("resnet18", 64, 32): Compiled(377.793, 385.231, 53.7),
}
#: two runs of the benchmark differ by about as much
LEAST_GAIN = 1.1


def steps_for_compiling(shape: Shape) -> int | None:
    """The steps of one process from which on compiling has paid on a CPU; None where it was not measured, or is hardly
    faster."""
    known = COMPILED.get(shape)
    if known is None or known.plain < LEAST_GAIN * known.compiled:
        return None
    return math.ceil(1000 * known.seconds / (known.plain - known.compiled))


#: steps of which the batches are put on the GPU together (`epochs`), and bytes that their images may take there: both
#: bound memory. Tables of 4 to 32 steps were measured (`benchmarks/epochs.py`); a table of 2**27 bytes holds the 32
#: batches of the small networks, and 6 batches of 32 images of 224 px
MOST_STEPS, TABLE_BYTES = 32, 2**27


def steps_in_table(image_bytes: int) -> int:
    """Steps of which the batches are put on the GPU together, by the bytes of the images of one, as float32."""
    return max(1, min(MOST_STEPS, TABLE_BYTES // image_bytes))


#: bytes of a batch of images up to which a pass of evaluation is recorded: with more the GPU, and not Python, takes the
#: time, and a graph would hold on to much memory
EVALUATION_BYTES = 2**26


def recording_evaluation_pays(image_bytes: int) -> bool:
    """Whether a pass of evaluation over so many bytes of images, as float32, is worth a graph."""
    return image_bytes <= EVALUATION_BYTES


#: a step of several networks: in graphs one after the other, and stacked
STACKED: dict[tuple[Shape, int], tuple[float, float]] = {
    (Shape("small-cnn", 32, 32), 4): (1.110, 1.410),
    (Shape("small-cnn", 32, 32), 16): (4.436, 2.798),
    (Shape("small-cnn", 32, 32), 64): (17.762, 8.191),
    (Shape("lenet5", 32, 8), 16): (3.443, 0.590),
    (Shape("lenet5", 32, 8), 64): (13.884, 6.620),
    (Shape("resnet18", 64, 32), 4): (6.406, 6.088),
    (Shape("resnet18", 64, 32), 16): (25.665, 18.469),
}
#: what was measured: from so many networks on all were faster in a stack, the largest with so many weights, on batches
#: of so many pixels in all
FEWEST_NETWORKS, MOST_WEIGHTS, MOST_PIXELS = 16, 12_000_000, 2**21


def stacking_pays(weights: int, networks: int, pixels: int) -> bool:
    """Whether networks are faster in a stack than in graphs one after the other. `weights` of one network, `pixels` of
    all batches of a step; what is larger than anything measured is not stacked."""
    return networks >= FEWEST_NETWORKS and weights <= MOST_WEIGHTS and pixels <= MOST_PIXELS


#: measured on the same machine (`python benchmarks/gan_steps.py --few --members 9`): nine DCGANs of 32 px take 53.9
#: steps a second, each recorded, one after the other, and 189.7 as one recorded stack; fewer or larger ones are not
#: stacked by themselves, as nobody has measured them
FEWEST_GANS, LARGEST_GAN_SIDE = 9, 32


def stacking_gans_pays(gans: int, side: int) -> bool:
    """Whether GANs of so many sites, for images of this side, are faster in a stack than each in a graph."""
    return gans >= FEWEST_GANS and side <= LARGEST_GAN_SIDE
