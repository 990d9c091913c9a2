"""Analytic gradient inversion: images from the gradients of a first linear layer, labels from the last one's.

The gradient of a linear layer's weight is the outer product of the gradient of its bias and its input (Phong et al.
2018). Where the first layer of a network is linear and has a bias, one image behind a gradient lies open.

Several images behind a layer with ReLU, in the spirit of SPEAR (Dimitrov et al. 2024): the gradient of the weight is L
X, where L [out, B] holds the gradient of each unit for each image and X [B, in] the images. Its rank is the number of
images B, and ReLU makes L sparse: a unit that an image does not reach has no gradient. Every column of L lies in the
column space of the gradient, of dimension B. A vector of that space that is zero at B - 1 rows drawn at random is
unique; where these rows were zeros of one column of L, it is that column, and has many more zeros. The bias' gradient,
the sum of the columns, gives their lengths. With L, the images are a linear system. The number of draws grows as 2^B:
this is for small batches.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import AttackSettings, Capability
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng


@dataclass(frozen=True)
class ExactInput:
    """`inputs` [N, in] of a linear layer, and `residual` [N]: the share of the gradient that they do not explain.

    A residual near 0 says that the gradient has rank one. One image gives that; but so do several whose outputs have
    proportional gradients, as two of one class at a layer that starts from zero: `inputs` is then their weighted mean.
    A gradient of zero explains nothing: its residual is 1.
    """

    inputs: Tensor
    residual: Tensor


class AnalyticInversion(AttackSettings):
    """`AnalyticInversion().run(gradients, model, image_shape)`, gradients [N, ...] by the names of parameters."""

    name: Literal["analytic-inversion"] = "analytic-inversion"
    kind: Literal["gradients", "weights"] = "gradients"

    reads: ClassVar[tuple[str, ...]] = ("gradients", "weights")

    @property
    def needs(self) -> frozenset[Capability]:
        return frozenset({Capability(self.kind), Capability.ARCHITECTURE})

    assumptions: ClassVar[str] = (
        "one image is behind the update, and the network begins with a linear layer with a bias"
    )

    def fits(self, model: nn.Module, image_shape: tuple[int, ...]) -> bool:
        """Whether the first layer of `model` with weights takes all pixels of an image."""
        found = first_layer(model)
        return found is not None and found[1].in_features == math.prod(image_shape)

    def run(self, gradients: Mapping[str, Tensor], model: nn.Module, image_shape: tuple[int, ...]) -> ExactInput:
        """The image behind each of N gradients. A difference of weights does as well: its length does not matter."""
        if not self.fits(model, image_shape):
            raise BadInput(
                "attack: analytic inversion needs a first layer that is linear with a bias, over all pixels; use "
                "gradient inversion"
            )
        name = first_layer(model)[0]  # type: ignore[index]
        prefix = f"{name}." if name else ""
        return input_of_linear(gradients[f"{prefix}weight"], gradients[f"{prefix}bias"])


def first_layer(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The first layer with weights and its name, if it is linear and has a bias."""
    layers = ((name, one) for name, one in model.named_modules() if next(one.parameters(False), None) is not None)
    name, layer = next(layers, ("", nn.Identity()))
    return (name, layer) if isinstance(layer, nn.Linear) and layer.bias is not None else None


def input_of_linear(weight: Tensor, bias: Tensor) -> ExactInput:
    """The input of a linear layer from the gradients of its weight [N, out, in] and bias [N, out].

    This is the least-squares solution over all rows, so that noise on single rows averages out. Rows without a signal
    (a dead unit) do not count.
    """
    power = (bias * bias).sum(-1, keepdim=True)
    inputs = torch.einsum("noi,no->ni", weight, bias) / power.clamp(min=torch.finfo(bias.dtype).tiny)
    unexplained = weight - bias[..., None] * inputs[:, None]
    total = (weight * weight).sum((1, 2))
    share = (unexplained * unexplained).sum((1, 2)) / total.clamp(min=torch.finfo(weight.dtype).tiny)
    return ExactInput(inputs, torch.where(total > 0, share, 1.0))


# --- several images -------------------------------------------------------------------------------


RANK = 1e-4  #: singular values below this share of the largest are rounding (float32)
ZERO = 1e-3  #: of a column's largest entry: smaller ones are zeros
MOST = 12  #: images, at most
DRAWS, AT_ONCE = 8192, 512  #: of rows that shall be zero


@dataclass(frozen=True)
class ExactBatch:
    """`images` [B, in], and the `agreement`: for how many pairs of unit and image the gradient is zero just where ReLU
    is, near 1 if the images are exact. (Any vectors of the right space explain the gradient; that is no proof.)"""

    images: Tensor
    agreement: float


@torch.no_grad()
def exact_batch(layer: nn.Linear, weight: Tensor, bias: Tensor) -> ExactBatch | None:
    """The inputs behind the gradients of a layer's weight [out, in] and bias [out]; None where it fails.

    It fails with more than MOST images, with fewer units than images, and where images share their units.
    """
    weight, bias = weight.double(), bias.double()
    left, sizes, _ = torch.linalg.svd(weight, full_matrices=False)
    rank = int((sizes > RANK * sizes[0]).sum()) if float(sizes[0]) > 0 else 0
    alive = weight.abs().amax(1) > 0  # a unit that no image reaches is a zero of every column, and tells nothing
    if not 0 < rank <= min(MOST, int(alive.sum()) - 1):
        return None
    columns = _sparse_columns(left[alive, :rank], DRAWS)
    if columns.shape[1] < rank:
        return None
    # the bias' gradient gives the columns' lengths, and with them the images are a linear system
    lengths = torch.linalg.lstsq(columns, bias[alive][:, None]).solution[:, 0]
    if float(lengths.abs().min()) < 1e-9 * float(lengths.abs().max()):
        return None
    gradients = columns * lengths
    images = torch.linalg.lstsq(gradients, weight[alive]).solution
    reached = layer.weight.double()[alive] @ images.T + layer.bias.double()[alive, None] > 0
    has_gradient = gradients.abs() > ZERO * gradients.abs().amax(0)
    return ExactBatch(images.float(), float((reached == has_gradient).double().mean()))


def _sparse_columns(basis: Tensor, draws: int) -> Tensor:
    """As many independent vectors [out, B] of the space as it has dimensions, those with the most zeros first."""
    rows, rank = basis.shape
    if rank == 1:
        return basis
    rng = torch_rng(0, "exact batch", rows, rank)
    found = []
    for _ in range(max(1, draws // AT_ONCE)):
        places = torch.stack([torch.randperm(rows, generator=rng)[: rank - 1] for _ in range(AT_ONCE)])
        null = torch.linalg.svd(basis[places])[2][:, -1]  # [AT_ONCE, rank]: zero at these rows
        found.append(null @ basis.T)
    vectors = torch.cat(found)
    vectors = vectors / vectors.abs().amax(1, keepdim=True).clamp(min=1e-300)
    zeros = (vectors.abs() < ZERO).sum(1)
    few = zeros <= rank - 1  # no more zeros than were asked for: no column of L
    order = zeros.masked_fill(few, -1).argsort(descending=True, stable=True)[: int((~few).sum())]
    unit = vectors[order] / vectors[order].norm(dim=1, keepdim=True).clamp(min=1e-300)
    left = torch.arange(len(unit))
    chosen: list[Tensor] = []
    for _ in range(20 * rank):
        if not len(left) or len(chosen) == rank:
            break
        vector = unit[left[0]]
        left = left[(unit[left] @ vector).abs() < 0.999]  # a column is drawn many times
        if chosen:
            known = torch.stack(chosen, 1)
            rest = vector - known @ torch.linalg.lstsq(known, vector[:, None]).solution[:, 0]
            if float(rest.norm()) < 1e-2 * float(vector.norm()):
                continue  # a combination of earlier ones
        chosen.append(vector)
    return torch.stack(chosen, 1) if chosen else torch.zeros(0, 0)


# --- labels ---------------------------------------------------------------------------------------


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
