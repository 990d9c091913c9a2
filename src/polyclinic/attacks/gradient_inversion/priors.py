"""Priors of gradient inversion: what images of this kind look like, and the batch-norm statistics that were sent.

- `GaussianPrior`: the mean and the principal components of public images, as a linear generator with noise. Its penalty
  pulls an image as far as the Wiener denoiser of these images does; nothing is trained. (Geiping et al. 2020 and others
  have total variation in its place; generators and denoisers as priors: Jeon et al. 2021.)
- `BatchNormPrior`: the mean and variance of every batch-norm layer's input must be those that the site computed. Yin et
  al. 2021 (GradInversion) take running statistics; where a site sends them after one step, those of its very batch
  follow from them.

A prior takes images [N, B, C, H, W] to a penalty [N]; `select_rows` is the same for some of the targets only, `to` on a
device, as a CUDA graph can copy nothing from the CPU in each step.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

COMPONENTS = 48  #: of public images, at most
LEAST = 1e-6  #: variance that counts as none
UNEXPLAINED = 0.05  #: share of a pixel's variance that the axes never explain: the attacked image is another one


@dataclass(frozen=True)
class GaussianPrior:
    """Mean [D], axes [K, D], variances [K] along them, and `rest`: the variance of a pixel that they do not explain."""

    mean: Tensor
    axes: Tensor
    variances: Tensor
    rest: float

    @classmethod
    def of(cls, images: Tensor) -> "GaussianPrior":
        """From public images [M, C, H, W] in [0, 1]: axes from one half; how much they explain, from the other."""
        rows = images.flatten(1).float()
        mean = rows.mean(0)
        first, second = rows[::2] - mean, rows[1::2] - mean
        _, sizes, axes = torch.linalg.svd(first, full_matrices=False)
        count = max(1, min(COMPONENTS, len(first) // 2))
        axes = axes[:count]
        rest = (second - second @ axes.T @ axes).square().mean()
        least = max(LEAST, UNEXPLAINED * float(second.square().mean()))
        return cls(mean, axes, sizes[:count].square() / len(first), max(float(rest), least))

    def __call__(self, images: Tensor) -> Tensor:
        """About 1 or less for images like the public ones, larger for others: the mean square in deviations."""
        rows = images.flatten(2) - self.mean
        along = rows @ self.axes.T
        inside = (along.square() / (self.variances + self.rest)).sum(-1)
        outside = (rows.square().sum(-1) - along.square().sum(-1)).clamp(min=0) / self.rest
        return ((inside + outside) / rows.shape[-1]).mean(1)

    def select_rows(self, rows: Tensor) -> "GaussianPrior":
        return self

    def to(self, device: str, dtype: torch.dtype) -> "GaussianPrior":
        mean, axes, variances = (part.to(device, dtype) for part in (self.mean, self.axes, self.variances))
        return GaussianPrior(mean, axes, variances, self.rest)


class BatchNormPrior:
    """Statistics of the inputs of batch-norm layers, by layer: means [N, C] and variances [N, C] of N targets."""

    def __init__(self, model: nn.Module, statistics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.model, self.statistics = _by_batches(model), dict(statistics)

    def __call__(self, images: Tensor) -> Tensor:
        """How far the images' own statistics are from those, in units of the layer's variance."""
        found = []
        for row, some in enumerate(images):
            inputs, parts = inputs_of_layers(self.model, list(self.statistics), some), []
            for name, (means, variances) in self.statistics.items():
                values, mean, variance = inputs[name], means[row], variances[row].clamp(min=LEAST)
                over = [dim for dim in range(values.dim()) if dim != 1]
                apart = (values.mean(over) - mean).square() / variance
                parts.append((apart + (values.var(over, correction=0) / variance - 1).square()).mean())
            found.append(torch.stack(parts).mean())
        return torch.stack(found)

    def select_rows(self, rows: Tensor) -> "BatchNormPrior":
        chosen = {name: (means[rows], spread[rows]) for name, (means, spread) in self.statistics.items()}
        return BatchNormPrior(self.model, chosen)

    def to(self, device: str, dtype: torch.dtype) -> "BatchNormPrior":
        there = {name: (one.to(device, dtype), two.to(device, dtype)) for name, (one, two) in self.statistics.items()}
        return BatchNormPrior(self.model.to(device, dtype), there)


def _by_batches(model: nn.Module) -> nn.Module:
    """A copy that normalises by its batch and remembers nothing."""
    network = copy.deepcopy(model).train().requires_grad_(False)
    for layer in network.modules():
        if isinstance(layer, _BatchNorm):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return network


def batch_statistics(
    model: nn.Module, after: Mapping[str, Tensor], images: Tensor
) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Mean and variance [1, C] of every batch-norm layer's input in the one batch between the model's running
    statistics and those that were sent after it; None where a layer's were not sent.

    `images` [B, C, H, W] of the batch's shape say how many values each mean is over.
    """
    before, found = model.state_dict(), {}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    with torch.no_grad():
        inputs = inputs_of_layers(_by_batches(model), list(layers), images)
    for name, layer in layers.items():
        names = f"{name}.running_mean", f"{name}.running_var"
        if layer.momentum is None or not set(names) <= after.keys():
            return None
        share, count = layer.momentum, inputs[name].numel() // inputs[name].shape[1]
        was, now = ({key: one[key].double().cpu() for key in names} for one in (before, after))
        mean, unbiased = ((now[key] - (1 - share) * was[key]) / share for key in names)
        found[name] = (mean[None].float(), (unbiased * (count - 1) / max(count, 1))[None].clamp(min=0).float())
    return found or None


Prior = GaussianPrior | BatchNormPrior


def inputs_of_layers(model: nn.Module, names: Sequence[str], images: Tensor) -> dict[str, Tensor]:
    """What enters some layers of a network, by their names, when images [N, C, H, W] pass through it."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0]}))
        for name in names
    ]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs
