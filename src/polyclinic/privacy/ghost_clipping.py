"""Ghost clipping: the sum of clipped gradients of images, without storing the gradient of each image.

The gradient of one image w.r.t. the weights of a layer is a sum of outer products: what came into the layer times what
came back to its output, at every place of the image. The length of such a sum follows from two small matrices of inner
products (Goodfellow 2015; Li et al. 2022; Bu et al. 2022, "mixed ghost clipping"), and the sum over images, each
with its clipping factor, is one matrix product. One forward and one backward pass do, which need no gradients of
weights ("book-keeping", Bu et al. 2023).

Lengths and sums are computed in float32 from the same numbers, whatever the passes are computed in; so an image's share
of the sum is no longer than the clipping norm, up to float32's rounding.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: what Opacus adds to a length before it divides by it
TINY = 1e-6
#: units in the last place by which an inner product may be off
ROUNDING = 16
#: products of bfloat16 are fast on a GPU where a row of numbers begins at a multiple of 16 bytes
ALIGNED = 8


class NotFollowedError(Exception):
    """Ghost clipping cannot follow this network; gradients per image must be stored."""


@dataclass(frozen=True)
class Stored:
    """The gradients of a parameter for each image, [B, ...]. With `kernel`, see `Products`."""

    rows: Tensor
    kernel: tuple[int, ...] = ()


@dataclass(frozen=True)
class Products:
    """The gradient of image b is the sum over places t of left[b, g, t, :] times right[b, g, t, :], for each group g.

    left: [B, G, T, O]; right: [B, G, T, P]; the weight has G * O rows of P numbers. With the sides of a `kernel` these
    are by pixel first, then by channel: so they lie in a channels-last weight.
    """

    left: Tensor
    right: Tensor
    kernel: tuple[int, ...] = ()

    def squares(self) -> Tensor:
        """The squared length of each image's gradient, [B]."""
        gram = (product(self.left, self.left.mT) * product(self.right, self.right.mT)).flatten(1)
        # where places cancel out, rounding could hide a length: what rounding can be is added
        rounding = ROUNDING * torch.finfo(gram.dtype).eps
        return gram.sum(1).add(torch.linalg.vector_norm(gram, 1, 1), alpha=rounding)

    def total(self, factors: Tensor, without: Tensor, shape: torch.Size) -> Tensor:
        """The sum over images of their gradients, each with its factor, but for those images that are left out."""
        out = without[:, None, None, None]
        left = (_exact(self.left) * factors[:, None, None, None]).masked_fill_(out, 0.0)
        right = _exact(self.right).masked_fill(out, 0.0)
        return as_weight(_places(left).mT @ _places(right), shape, self.kernel)

    def stored(self) -> Stored:
        return Stored(product(self.left.mT, self.right), self.kernel)

    def cheaper(self) -> "Stored | Products":
        """Gradients per image where these take fewer numbers than the inner products of all places."""
        places, rows, columns = self.left.shape[2], self.left.shape[3], self.right.shape[3]
        return self if 2 * places**2 <= rows * columns else self.stored()


def as_weight(numbers: Tensor, shape: torch.Size | tuple[int, ...], kernel: tuple[int, ...]) -> Tensor:
    """Numbers as they are computed, in the shape of a weight; with a `kernel`, see `Products`."""
    by_pixel = (*shape[: -len(kernel) - 1], *kernel, shape[-len(kernel) - 1])
    return numbers.reshape(by_pixel).movedim(-1, -len(kernel) - 1)


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, [B, G, ., .]. In float32, also of numbers in bfloat16: products of two of those are exact there."""
    if left.dtype != torch.bfloat16:
        return left @ right
    if not left.is_cuda:
        return left.float() @ right.float()
    made = torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out_dtype=torch.float32)
    return made.unflatten(0, left.shape[:2])


def _as_followed(layer: nn.Module, came: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers that a rule takes: in bfloat16 where a layer has computed in it, and a GPU multiplies those exactly and
    faster. What came in was rounded to it (autocast) before it was multiplied."""
    short = back.is_cuda and back.dtype == torch.bfloat16
    if short and type(layer) is nn.Conv2d and not torch.are_deterministic_algorithms_enabled():
        seen = math.prod(layer.kernel_size) * layer.in_channels // layer.groups
        if seen % ALIGNED == 0 and (layer.out_channels // layer.groups) % ALIGNED == 0:
            return came.bfloat16(), back
    return _exact(came), _exact(back)


def _exact(one: Tensor) -> Tensor:
    """In float32, or float64 where the network computes in it; whole numbers as they are."""
    return one if not one.is_floating_point() else one.to(torch.promote_types(one.dtype, torch.float32))


def _places(one: Tensor) -> Tensor:
    """[B, G, T, N] as [G, B * T, N]."""
    return one.transpose(0, 1).flatten(1, 2)


Gradient = Stored | Products
#: a layer, what came in and what came back, both [B, ...] in float32, to the gradients of its own parameters by name
Rule = Callable[[Any, Tensor, Tensor], dict[str, Gradient]]


def _convolution(layer: nn.Conv2d, came: Tensor, back: Tensor) -> dict[str, Gradient]:
    weight = outer_products(layer, came, back).cheaper()
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": Stored(_exact(back).sum((2, 3)))}


def outer_products(layer: nn.Conv2d, came: Tensor, back: Tensor) -> Products:
    """The gradients of a convolution's weight for each image."""
    left = back.unflatten(1, (layer.groups, -1)).flatten(3).mT
    return Products(left, _patches(layer, came), layer.kernel_size)


def _transposed_convolution(layer: nn.ConvTranspose2d, came: Tensor, back: Tensor) -> dict[str, Gradient]:
    """It is a convolution from its output to its input, read backwards."""
    left = came.unflatten(1, (layer.groups, -1)).flatten(3).mT
    weight = Products(left, _patches(layer, back), layer.kernel_size).cheaper()
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": Stored(back.sum((2, 3)))}


def _patches(layer: nn.Conv2d | nn.ConvTranspose2d, images: Tensor) -> Tensor:
    """The patches that a kernel sees at each place: images [B, C, H, W] to [B, groups, T, kernel * C / groups]."""
    if isinstance(layer, nn.ConvTranspose2d):
        down, right = (int(one) for one in layer.padding)
        images = F.pad(images, (right, right, down, down))
    else:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        images = F.pad(images, layer._reversed_padding_repeated_twice, mode)
    for axis in (2, 3):
        kernel, stride, spread = layer.kernel_size[axis - 2], layer.stride[axis - 2], layer.dilation[axis - 2]
        images = images.unfold(axis, (kernel - 1) * spread + 1, stride)[..., ::spread]
    grouped = images.unflatten(1, (layer.groups, -1))  # [B, G, C / G, H', W', kernel, kernel]
    return grouped.permute(0, 1, 3, 4, 5, 6, 2).flatten(4).flatten(2, 3)


def _linear(layer: nn.Linear, came: Tensor, back: Tensor) -> dict[str, Gradient]:
    left, right = (one.flatten(1, -2) if one.dim() > 2 else one[:, None] for one in (back, came))
    return {"weight": Products(left[:, None], right[:, None]).cheaper(), "bias": Stored(left.sum(1))}


def _group_norm(layer: nn.GroupNorm, came: Tensor, back: Tensor) -> dict[str, Gradient]:
    scaled = F.group_norm(came, layer.num_groups, eps=layer.eps) * back
    return {"weight": Stored(scaled.flatten(2).sum(2)), "bias": Stored(back.flatten(2).sum(2))}


def _layer_norm(layer: nn.LayerNorm, came: Tensor, back: Tensor) -> dict[str, Gradient]:
    scaled = F.layer_norm(came, layer.normalized_shape, eps=layer.eps) * back
    between = tuple(range(1, back.dim() - len(layer.normalized_shape)))
    summed = (one.sum(between) if between else one for one in (scaled, back))
    return dict(zip(("weight", "bias"), map(Stored, summed), strict=True))


def _embedding(layer: nn.Embedding, came: Tensor, back: Tensor) -> dict[str, Gradient]:
    """Codes [B] or [B, ...], and what came back for each."""
    places = came.reshape(len(came), 1, -1)
    chosen = F.one_hot(places, layer.num_embeddings).to(back.dtype)
    return {"weight": Products(chosen, back.reshape(*places.shape, -1)).cheaper()}


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: _convolution, nn.ConvTranspose2d: _transposed_convolution, nn.Linear: _linear,
    nn.GroupNorm: _group_norm, nn.LayerNorm: _layer_norm, nn.Embedding: _embedding,
}  # fmt: skip


def can_follow(module: nn.Module) -> bool:
    """True where every trained parameter belongs to one layer, and ghost clipping has a rule for that layer."""
    layers = _trained_layers(module)
    owned = [id(one) for layer in layers for one in layer.parameters(recurse=False)]
    if any(isinstance(one, nn.Embedding) and (one.padding_idx, one.max_norm) != (None, None) for one in layers):
        return False
    return len(owned) == len(set(owned)) and all(type(layer) in RULES for layer in layers)


def _trained_layers(module: nn.Module) -> list[nn.Module]:
    return [one for one in module.modules() if any(p.requires_grad for p in one.parameters(recurse=False))]


class GhostClipping:
    """Gives sums of clipped gradients of `module`, while its passes are followed."""

    def __init__(self, module: nn.Module) -> None:
        self.layers = _trained_layers(module)
        self._seen: dict[nn.Module, tuple[Tensor, Tensor, int]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        hooks = [layer.register_forward_hook(self._see) for layer in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _see(self, layer: nn.Module, came: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            if layer in self._seen:
                raise NotFollowedError(f"{type(layer).__name__} runs twice in a pass")
            self._seen[layer] = (came[0].detach(), output, output._version)

    def bytes_of(self, losses: Callable[[], Tensor]) -> int:
        """Roughly the most bytes that a pass takes: what comes in, what comes back, and what kernels see."""
        with self._pass(losses) as found:
            passed = self._passed(len(found))
            return 4 * sum(3 * output.numel() + _seen_by(layer, came, output) for layer, came, output in passed)

    def clipped_sums(
        self, losses: Callable[[], Tensor], clip: float, parameters: list[nn.Parameter], counted: Tensor | None = None
    ) -> list[Tensor]:
        """For each of the parameters, the sum over rows of their gradients, each row's clipped to `clip`.

        `losses()` runs the network and gives the loss of each row, [B]. Only rows that are `counted`, bool [B], take
        part. A row whose gradient is not finite counts as one without a gradient.
        """
        found = self._gradients(losses)
        gradients = {one: found[one] for one in parameters if one in found}
        products = {one: grad for one, grad in gradients.items() if isinstance(grad, Products)}
        stored = {one: grad for one, grad in gradients.items() if isinstance(grad, Stored)}
        if not gradients:
            return [torch.zeros_like(one) for one in parameters]
        # one row for each image: many small parameters cost no more than one large
        rows = torch.cat([grad.rows.flatten(1) for grad in stored.values()], 1) if stored else None
        squares = [one.squares() for one in products.values()]
        squares += [] if rows is None else [rows.square().sum(1)]
        factors, without = _factors(torch.stack(squares).sum(0), clip, counted)
        totals = {one: grad.total(factors, without, one.shape) for one, grad in products.items()}
        if rows is not None:
            summed = factors @ rows.masked_fill_(without[:, None], 0.0)
            pieces = summed.split([one.numel() for one in stored])
            totals |= {
                one: as_weight(piece, one.shape, grad.kernel)
                for (one, grad), piece in zip(stored.items(), pieces, strict=True)
            }
        return [laid_out_as(one, totals[one]) if one in totals else torch.zeros_like(one) for one in parameters]

    @contextmanager
    def _pass(self, losses: Callable[[], Tensor]) -> Iterator[Tensor]:
        """A while in which what came into the layers and out of them is there; gives the losses."""
        self._seen.clear()
        try:
            yield losses()
        finally:
            self._seen.clear()

    def _passed(self, rows: int) -> list[tuple[nn.Module, Tensor, Tensor]]:
        for layer, (came, output, version) in self._seen.items():
            if output._version != version:
                raise NotFollowedError(f"the output of {type(layer).__name__} is changed in place")
            if len(came) != rows or len(output) != rows:
                raise NotFollowedError(f"{type(layer).__name__} does not get a row for each image")
        return [(layer, came, output) for layer, (came, output, _) in self._seen.items()]

    def _gradients(self, losses: Callable[[], Tensor]) -> dict[nn.Parameter, Gradient]:
        """The gradients of each parameter that takes part in the loss."""
        found: dict[nn.Parameter, Gradient] = {}
        with self._pass(losses) as of_rows:
            passed = self._passed(len(of_rows))
            backs = torch.autograd.grad(of_rows.sum(), [output for _, _, output in passed], allow_unused=True)
            with torch.no_grad(), torch.autocast(of_rows.device.type, enabled=False):
                for (layer, came, _), back in zip(passed, backs, strict=True):
                    if back is not None:
                        of_layer = RULES[type(layer)](layer, *_as_followed(layer, came, back))
                        found |= {one: of_layer[name] for name, one in layer.named_parameters(recurse=False)}
        return found


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, lying in memory as its parameter does: fused optimisers want that."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def _factors(squares: Tensor, clip: float, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """By what each row's gradient is multiplied, [B], and which rows are left out, bool [B]: those that do not count,
    or have no finite gradient."""
    without = squares.isfinite().logical_not_() if counted is None else (squares.isfinite() & counted).logical_not_()
    return (clip / (squares.sqrt() + TINY)).clamp(max=1.0).masked_fill_(without, 0.0), without


def _seen_by(layer: nn.Module, came: Tensor, output: Tensor) -> int:
    """Count of numbers that the kernels of a layer see, at all places together."""
    if not isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return came.numel()
    images = output if isinstance(layer, nn.ConvTranspose2d) else came
    return images.numel() * math.prod(layer.kernel_size) // math.prod(layer.stride)
