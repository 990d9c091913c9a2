"""About how much memory a GPU needs to train a network of volumes, before it is tried."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from polyclinic import models
from polyclinic.data.volumes.source import OfVolumes
from polyclinic.runner.run.machine import precision_of
from polyclinic.study import Study
from polyclinic.tasks import Target

#: bytes of a weight with its gradient and two moments; and what torch, its kernels and the patches take
OF_A_WEIGHT, ALWAYS = 16, 1.0e9
#: what is kept besides the outputs of layers, so that nnU-Net's network takes what its rule of thumb says
BESIDES = 1.3


def training_gigabytes(build: Callable[[], nn.Module], patch: Sequence[int], *, half: bool) -> tuple[float, float]:
    """GB that a network needs, and those for each patch [C, X, Y, Z] that it gets at once; `half`: mixed precision."""
    with torch.device("meta"):
        network, numbers = build().train(), 0

        def count(module: nn.Module, given: object, output: object) -> None:
            nonlocal numbers
            numbers += output.numel() if isinstance(output, Tensor) else 0

        for layer in network.modules():
            if not list(layer.children()):
                layer.register_forward_hook(count)
        network(torch.empty(1, *patch))
    weights = sum(one.numel() for one in network.parameters())
    return (weights * OF_A_WEIGHT + ALWAYS) / 1e9, numbers * (2 if half else 4) * BESIDES / 1e9


def memory_sentence(study: Study, free: float = math.inf) -> str:
    """What training on a GPU needs, and the cure where fewer GB are free; "" for images."""
    data = study.data
    if not isinstance(data, OfVolumes):
        return ""
    patch, target = (len(data.channels), *data.size), Target(structures=tuple(data.structures.items()))
    shape = {"channels": patch[0], "outputs": study.task.outputs(target), "size": data.size}
    more = {"norm": study.model.norm, "arguments": study.model.arguments}
    build = partial(models.build, study.model.backbone, **shape, **more)  # type: ignore[arg-type]
    always, each = training_gigabytes(build, patch, half=precision_of(study.engine.precision, "cuda") != "fp32")
    batch = max(study.optimizer.batch_size, *study.optimizer.batch_sizes.values(), 1)
    parts = getattr(study.task, "accumulate", 1)
    at_once, most = -(-batch // parts), int((free - always) / each) if free < math.inf else batch
    said = f"training on a GPU needs about {always + at_once * each:.0f} GB, for {at_once} patches at once"
    if at_once <= most:
        return said
    cure = f"set task.accumulate = {-(-batch // most)}: the same steps" if most > 0 else "make data.size smaller"
    return f"{said}, and {free:.0f} GB are free; {cure}"
