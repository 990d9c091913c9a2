"""Initial images and labels of a search, drawn for each target on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from polyclinic.errors import BadInput

Scheme = Literal["uniform", "transformed-gaussian", "normal", "given"]
#: what is scaled to [0, 1] at once: an image, or each of its channels
Scaling = Literal["image", "channel"]


def draw(scheme: str, count: int, shape: tuple[int, ...], rng: torch.Generator, scaling: Scaling = "image") -> Tensor:
    """[count, *shape]: images, or the labels of images. Of U(0, 1) ("uniform") or N(0, 1), then each scaled to [0, 1]
    by itself (images by channel if asked for); "normal" is N(0, 1) as it is (DLG)."""
    sampled = torch.rand if scheme == "uniform" else torch.randn
    made = [sampled(shape, generator=rng) for _ in range(count)]
    return torch.stack(made if scheme == "normal" else [_scale(one, scaling) for one in made])


def _scale(values: Tensor, scaling: Scaling) -> Tensor:
    """Moved and stretched so that the smallest value is 0 and the largest 1: of an image [C, H, W], or of each of its
    channels; labels have none."""
    if scaling == "channel" and values.dim() == 3:
        return torch.stack([_scale(channel, "image") for channel in values])
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)


def last_linear(model: nn.Module) -> str:
    """The name of the last linear layer, which gives the logits."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    if not names:
        raise BadInput(
            "attack.label: the network has no linear layer to read labels from; use label = 'joint' or 'known'"
        )
    return names[-1]


def label_by_sign(gradients: Mapping[str, Tensor], layer: str) -> Tensor:
    """iDLG: the class [N] of the one image behind each gradient.

    The gradient of a logit is p - 1 for the image's class and p for the others, so of the bias only one entry is
    negative. Without a bias the rows of the weight say the same, as long as features are not negative (after ReLU or
    sigmoid).
    """
    bias = gradients.get(f"{layer}.bias")
    slopes = gradients[f"{layer}.weight"].sum(-1) if bias is None else bias
    return slopes.argmin(-1)


def counts(gradients: Mapping[str, Tensor], model: nn.Module, layer: str, batch_size: int) -> Tensor:
    """How many of the images behind each gradient are of each class, int64 [N, K].

    The bias' gradient of class k is (sum over images of p_k - n_k) / B. The unknown p come from the network itself: the
    weight's gradient of class k divided by the bias' is a mean of features, mostly of images of class k, and the last
    layer turns it into the probabilities P_k of such an image. What is left is linear in the counts n:
    sum over k of n_k (P_k - e_k) = B · gradient of the bias. (As Ma et al. 2023 propose.)
    """
    weight, bias = gradients[f"{layer}.weight"].double(), gradients.get(f"{layer}.bias")
    if bias is None:
        raise BadInput("attack.label: counts need a bias in the last layer; use label = 'joint' or 'known'")
    bias = bias.double()
    features = weight / torch.where(bias.abs() > 0, bias, 1.0)[..., None]
    own_weight, own_bias = (model.get_parameter(f"{layer}.{part}").to(weight) for part in ("weight", "bias"))
    probabilities = (features @ own_weight.T + own_bias).softmax(-1)
    classes = bias.shape[-1]
    system = probabilities.mT - torch.eye(classes).to(weight)
    ones = torch.ones(*system.shape[:-2], 1, classes).to(weight)
    total = torch.full((*bias.shape[:-1], 1), float(batch_size)).to(weight)
    right = torch.cat((batch_size * bias, total), -1)[..., None]
    solved = torch.linalg.lstsq(torch.cat((system, ones), -2), right).solution[..., 0]
    return torch.stack([_whole(row, batch_size) for row in solved])


def _whole(shares: Tensor, total: int) -> Tensor:
    """The whole numbers nearest to `shares` [K] that are not negative and sum to `total`: largest remainders."""
    shares = shares.nan_to_num(0.0).clamp(min=0)
    shares = shares * (total / shares.sum()) if shares.sum() > 0 else torch.full_like(shares, total / len(shares))
    whole = shares.floor()
    missing = total - int(whole.sum())
    if missing > 0:
        whole[(shares - whole).topk(missing).indices] += 1
    return whole.long()


def as_labels(class_counts: Tensor) -> Tensor:
    """Counts [N, K], each row of the same sum B, as labels [N, B] in ascending order."""
    classes = torch.arange(class_counts.shape[-1], device=class_counts.device)
    return torch.stack([classes.repeat_interleave(row) for row in class_counts])
