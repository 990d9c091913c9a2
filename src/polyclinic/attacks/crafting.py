"""Networks with chosen weights: a convolutional front that lets the image through, and its inverse.

A crafted linear layer gives back its own input. Before it lie convolutions and pooling. `open_front` makes each channel
a shifted copy of the image, so that pooling and strides lose as little as possible; `invert_front` finds the
image behind the layer's input.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from polyclinic.attacks.gradient_inversion.priors import inputs_of_layers
from polyclinic.errors import BadInput
from polyclinic.randomness import torch_rng

Update = Mapping[str, Tensor]

TANH_SCALE = 0.25  #: of the first convolution where tanh follows, which is nearly linear up to there
LINEARISATIONS = 8
CG_STEPS = 12
RIDGE = 1e-6
ENOUGH = 1e-5  #: of the inputs' length: a front that is linear needs no further step
LEAST_BIAS = 1e-4  #: of the largest: rows below it hold no image
SAME = 1e-2  #: of an input's length: nearer ones are of one image
AT_ONCE = 32  #: images that go through a front at a time, so that memory does not grow with their number


def difference(before: Update, after: Update) -> dict[str, Tensor]:
    """[before - after]: of weights, a gradient times the learning rate if a site took one step; or of two updates."""
    return {name: before[name] - after[name] for name in after if before[name].is_floating_point()}


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear layers of a network and their names, in order."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def dense_layer(model: nn.Module) -> tuple[str, nn.Linear]:
    """The linear layer that sees the whole image, place by place; BadInput where the network has none."""
    layers = linear_layers(model)
    pooled = any(isinstance(layer, nn.AdaptiveAvgPool2d) for layer in model.modules())
    if pooled or len(layers) < 2 or layers[0][1].bias is None:
        raise BadInput(
            "attack: the network has no linear layer with a bias, before its last one, that sees the places of an "
            "image (means over the image come first); use 'fishing', which needs the last layer only"
        )
    return layers[0]


def activation(model: nn.Module) -> type[nn.Module]:
    """The first non-linear function of a network: nn.ReLU or nn.Tanh."""
    for layer in model.modules():
        if isinstance(layer, nn.ReLU | nn.Tanh):
            return type(layer)
    raise BadInput("attack: the network has neither ReLU nor tanh; choose another backbone")


def input_of(model: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """The function from images [N, C, H, W] to what enters the layer `name`, [N, in]."""
    return lambda images: inputs_of_layers(model, [name], images)[name]


@torch.no_grad()
def open_front(model: nn.Module) -> nn.Module:
    """A copy whose convolutions pass on shifted copies of the image. Images are taken to be in [0, 1]."""
    model = copy.deepcopy(model)
    used = 0  # channels of the present layer that differ from each other
    rng = torch_rng(0, "crafting", "front")
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.AvgPool2d | nn.MaxPool2d)]
    for convolution, after in zip(layers, [*layers[1:], None], strict=True):
        if not isinstance(convolution, nn.Conv2d):
            continue
        pooling = None if isinstance(after, nn.Conv2d) else after
        weight = convolution.weight.zero_()
        bias = torch.zeros(len(weight)) if convolution.bias is None else convolution.bias.zero_()
        is_first, used = not used, used or weight.shape[1]
        shifts = _shifts(convolution, pooling)
        scale = TANH_SCALE if is_first and activation(model) is nn.Tanh else 1.0
        for channel in range(len(weight)):
            row, column = shifts[channel // used % len(shifts)]
            weight[channel, channel % used, row, column] = scale
        copies = min(len(weight), used * len(shifts))
        if isinstance(pooling, nn.MaxPool2d):
            # random mixtures of pixels in [0, 1]: a maximum tells little of a place, many of them tell it all
            drawn = torch.randn(weight[copies:, :used].shape, generator=rng)
            drawn = drawn / drawn.abs().sum((1, 2, 3), keepdim=True).clamp(min=1e-6)
            weight[copies:, :used] = drawn
            bias[copies:] = -drawn.clamp(max=0).sum((1, 2, 3))
        used = copies
    return model


def _shifts(convolution: nn.Conv2d, pooling: nn.Module | None) -> list[tuple[int, int]]:
    """Places in the kernel: one for each pixel of a step of the output, so that a step loses none of them.

    Without padding they lie far apart: the image's border is seen, too.
    """
    side = convolution.kernel_size[0]
    step = convolution.stride[0] * (int(pooling.stride) if pooling is not None else 1)  # type: ignore[arg-type]
    begin = max(0, (side - step) // 2)
    places = [begin + shift for shift in range(step)]
    if convolution.padding[0] == 0 and step < side - 1:
        places = [0, side - 1 - (step == 2 and side % 2)]  # at an even distance, steps of 2 see the same pixels
    return [(row, column) for row in places for column in places]


@torch.no_grad()
def values_of(front: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """What `front` makes of images [N, C, H, W], [N, F], a few at a time."""
    return torch.cat([front(some) for some in images.split(AT_ONCE)])


def invert_front(front: Callable[[Tensor], Tensor], inputs: Tensor, public: Tensor) -> Tensor:
    """Images [N, C, H, W] in [0, 1] whose `front` is nearest to `inputs` [N, F], by Gauss-Newton steps.

    They start from what a linear decoder makes of the inputs, fitted to the attacker's own images `public`
    [M, C, H, W]: it fills in what the front does not tell.
    """
    decode = _decoder(values_of(front, public), public)
    return torch.cat([_gauss_newton(front, some, decode(some)) for some in inputs.split(AT_ONCE)])


@torch.no_grad()
def _gauss_newton(front: Callable[[Tensor], Tensor], inputs: Tensor, images: Tensor) -> Tensor:
    """Images nearer to `inputs` than those that the search starts from.

    Without `no_grad` every product would keep its graph for the network's weights: gigabytes for nothing.
    """
    for _ in range(LINEARISATIONS):
        values, pull_back = torch.func.vjp(front, images)  # type: ignore[misc]
        values = values.detach()
        if float((inputs - values).norm()) <= ENOUGH * float(inputs.norm()):
            break

        def normal(step: Tensor, at: Tensor = images, back: Callable[[Tensor], tuple[Tensor]] = pull_back) -> Tensor:
            _, change = torch.func.jvp(front, (at,), (step,))  # type: ignore[misc]
            return back(change)[0] + RIDGE * step

        images = (images + _conjugate_gradients(normal, pull_back(inputs - values)[0])).clamp(0, 1)
    return images.detach()


@torch.no_grad()
def _decoder(known: Tensor, public: Tensor) -> Callable[[Tensor], Tensor]:
    """Ridge regression from what a front gives, [M, F] for the images `public`, to images; in its dual form, which is a
    system of M equations."""
    mean, mean_image = known.mean(0), public.mean(0)
    centred = known - mean
    products = centred @ centred.T
    products += 1e-3 * products.diagonal().mean() * torch.eye(len(known)).to(products)

    def decode(inputs: Tensor) -> Tensor:
        weights = torch.linalg.solve(products, centred @ (inputs - mean).T)  # [M, N]
        change = weights.T @ (public - mean_image).flatten(1)
        return (mean_image + change.unflatten(1, mean_image.shape)).clamp(0, 1)

    return torch.no_grad()(decode)


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], right: Tensor) -> Tensor:
    """The solution of apply(x) = right for each of N images at once, [N, C, H, W]."""

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum((1, 2, 3), keepdim=True)

    found, residual = torch.zeros_like(right), right
    direction, size = residual, dot(residual, residual)
    tiny = torch.finfo(right.dtype).tiny
    for _ in range(CG_STEPS):
        applied = apply(direction)
        length = size / dot(direction, applied).clamp(min=tiny)
        found, residual = found + length * direction, residual - length * applied
        size, before = dot(residual, residual), size
        direction = residual + size / before.clamp(min=tiny) * direction
    return found


def images_of_rows(crafted: nn.Module, layer: str, weight: Tensor, bias: Tensor, public: Tensor) -> Tensor:
    """The images [K, C, H, W] that rows of the gradient of a crafted layer hold, each once."""
    inputs = without_repeats(inputs_of_rows(weight, bias))
    return invert_front(input_of(crafted, layer), inputs, public)


def inputs_of_rows(weight: Tensor, bias: Tensor) -> Tensor:
    """The layer inputs [K, in] that rows of a gradient hold, weight [R, in] over bias [R]."""
    size = bias.abs()
    kept = (size > LEAST_BIAS * size.max()) & weight.isfinite().all(1) & size.isfinite()
    return weight[kept] / bias[kept, None]


def without_repeats(inputs: Tensor) -> Tensor:
    """Layer inputs [K, in] without those that are nearly equal to an earlier one: several rows hold one image."""
    distance = torch.cdist(inputs, inputs) / inputs.norm(dim=1).clamp(min=1e-12)
    repeated = (distance < SAME).triu(1).any(0)
    return inputs[~repeated]
