"""DP-SGD (Abadi et al. 2016; Qu et al. 2022, Algorithm 3) for any network with a loss per image.

Every image takes part in a step with the same small probability; its gradient is clipped to length `clip`; the
clipped gradients are summed, Gaussian noise of standard deviation `noise` times `clip` is added, and the sum is
divided by the *expected* number of images, since the true one is private. `clipped_sums` computes the sum. What
happens to the weights afterwards (momentum, weight decay, averages) costs no privacy.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import SGD

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.privacy.clipped_sums import Batch, ClippedSums, Clipping, Losses, Sums
from polyclinic.privacy.ghost_clipping import laid_out_as
from polyclinic.randomness import device_rng, numpy_rng, seeded
from polyclinic.registry import reason

# --- obstacles ------------------------------------------------------------------------------------------------


#: layers of other packages that drop whole paths
DROPS_BY_PLACE = ("StochasticDepth", "DropPath")
BATCH_NORM = (
    "model.norm: batch norm mixes the images of a batch and keeps statistics of them without noise; "
    "set model.norm = 'group' under differential privacy"
)


def obstacles(network: nn.Module) -> list[str]:
    """A sentence for each kind of layer that stands in the way; none if it can be trained."""
    reasons = (_reason(layer) for layer in network.modules())
    return list(dict.fromkeys(reason for reason in reasons if reason))


def _reason(layer: nn.Module) -> str | None:
    if isinstance(layer, _BatchNorm):
        return BATCH_NORM
    if isinstance(layer, _NormBase) and layer.track_running_stats:
        return (
            "model.norm: instance norm with running statistics keeps numbers of real images without noise; "
            "set model.norm = 'group' under differential privacy"
        )
    if getattr(layer, "learning", None) == "ema":
        return (
            "generator.codebook: moving averages put real images into the codebook without clipping or noise; "
            "set generator.codebook = 'gradient' under differential privacy"
        )
    hooks = layer._forward_pre_hooks.values()
    if isinstance(layer, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks):
        return (
            "privacy.on: spectral norm divides weights by a number that moves at every pass, outside clipping and "
            "noise; switch it off under differential privacy"
        )
    if getattr(layer, "mixes_samples", False):
        return (
            f"privacy.on: {type(layer).__name__} computes statistics over the images of a batch, so that one image "
            "changes the gradients of all; switch it off under differential privacy"
        )
    if isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout) or type(layer).__name__ in DROPS_BY_PLACE:
        return (
            f"privacy.on: {type(layer).__name__} drops by an image's place in the batch, so that one image less "
            "changes the gradients of others; use torch.nn.Dropout under differential privacy"
        )
    if getattr(layer, "inplace", False):
        return (
            f"privacy.on: {type(layer).__name__} works in place, which gradients per image cannot follow; "
            "build it with inplace=False"
        )
    return None


@torch.no_grad()
def mixes_samples(network: nn.Module, inputs: Tensor, tolerance: float = 1e-4) -> bool:
    """True where the output for some of `inputs` [B, ...] depends on the others: try it on noise, B of 4 or more.

    Finds minibatch statistics that no list of layers knows. The network's own buffers are left as they were.
    """
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    half = len(inputs) // 2
    together, alone = network(inputs)[:half], network(inputs[:half])
    for name, buffer in network.named_buffers():
        buffer.copy_(before[name])
    return not torch.allclose(together, alone, rtol=tolerance, atol=tolerance * float(alone.abs().max()))


# --- noisy steps ----------------------------------------------------------------------------------------------


class Noise(Protocol):
    """Draws a standard normal tensor like the one given."""

    def __call__(self, like: Tensor, /) -> Tensor: ...


def noise_from(device: torch.device, *address: str | int) -> Noise:
    """Noise from a generator with this address.

    On the CPU it is NumPy's PCG64: torch's mt19937 is linear, and whoever knows some of its numbers can work out all
    the others.
    """
    if device.type == "cpu":
        rng = numpy_rng(*address)
        return lambda like: torch.from_numpy(rng.standard_normal(tuple(like.shape), dtype=np.float32)).to(like.dtype)
    generator = device_rng(device, *address)
    return lambda like: torch.randn(like.shape, generator=generator, device=device, dtype=like.dtype)


def poisson(images: int, sampling_rate: float, rng: np.random.Generator) -> Iterator[Tensor]:
    """Endless batches of indices, int64 [B], into which every image comes with the same chance; B may be 0."""
    while True:
        yield torch.from_numpy(np.flatnonzero(rng.random(images) < sampling_rate))


@dataclass(frozen=True)
class NoisyMean:
    """The clipped, noisy mean of the gradients of a batch's rows: each clipped to length `clip`, summed, with Gaussian
    noise of standard deviation `noise` times `clip`, and divided by `expected`, the rows that a batch has on
    average."""

    noise: float
    clip: float
    expected: float
    draw: Noise

    def of(self, totals: list[Tensor]) -> list[Tensor]:
        """The noisy means from the sums of the parameters' clipped gradients."""
        if self.noise:
            # all noise in one draw: a GPU takes as long for many small ones
            drawn = self.draw(totals[0].new_empty(sum(one.numel() for one in totals)))
            noise = [n.view(t.shape) for n, t in zip(drawn.split([t.numel() for t in totals]), totals, strict=True)]
            torch._foreach_mul_(noise, self.noise * self.clip)
            totals = list(torch._foreach_add(totals, noise))
        return list(torch._foreach_div(totals, self.expected))


def take_noisy_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Losses,
    batches: Iterable[Batch],
    mean: NoisyMean,
    correct: Callable[[nn.Module], None] | None = None,
    clipped: Sums | None = None,
) -> None:
    """Take a noisy step for each batch with `optimizer`, which holds the parameters of `module`.

    `losses(*batch)` gives the loss of each row. `correct` may change the noisy gradients, by anything but images.
    `clipped` says how sums of clipped gradients are computed, by ghost clipping if not given. No loss is returned: it
    would tell about the images.
    """
    with private_gradients(module, optimizer, mean, clipped) as put_gradients:
        for batch in batches:
            put_gradients(losses, [batch])
            if correct is not None:
                correct(module)
            optimizer.step()


@contextlib.contextmanager
def private_gradients(
    module: nn.Module, optimizer: torch.optim.Optimizer, mean: NoisyMean, clipped: Sums | None = None
) -> Iterator[Callable[[Losses, Iterable[Batch]], None]]:
    """A function that puts the clipped, noisy mean gradient of one batch into `.grad` of every parameter.

    The batch may come in pieces. Afterwards the module is as it was, but for its weights.
    """
    for obstacle in obstacles(module):
        raise BadInput(obstacle)
    clipped = clipped or ClippedSums(module)
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    module.train()

    def put_gradients(losses: Losses, pieces: Iterable[Batch]) -> None:
        totals = clipped.total(losses, pieces, mean.clip, parameters)
        for parameter, gradient in zip(parameters, mean.of(totals), strict=True):
            parameter.grad = laid_out_as(parameter, gradient)

    try:
        with _nothing_else_changes(module), clipped.following():
            yield put_gradients
    finally:
        for parameter in parameters:
            parameter.grad = None


def try_gradients(module: nn.Module, images: Tensor, clipping: Clipping = "ghost") -> str | None:
    """The reason why gradients per image of an unknown network fail or are wrong, tried on images [B, ...]; None if
    they do not.

    Their sum, without clipping and noise, must be the gradient of the sum.
    """
    optimizer = SGD([weight for weight in module.parameters() if weight.requires_grad], lr=0.0)
    try:
        with seeded(0, "trial"):
            gradients = torch.autograd.grad(
                _plain_losses(module.train(), images).sum(), optimizer.param_groups[0]["params"], allow_unused=True
            )
        total = NoisyMean(noise=0.0, clip=math.inf, expected=1.0, draw=torch.zeros_like)
        with private_gradients(module, optimizer, total, ClippedSums(module, clipping)) as put_gradients:
            # the first time, one image more goes through to see what it takes, and dropout draws for it
            for _ in ("first", "again"):
                with seeded(0, "trial"):
                    put_gradients(lambda batch: _plain_losses(module, batch), [(images,)])
            found = [weight.grad.clone() for weight in optimizer.param_groups[0]["params"]]
    except Exception as error:  # whatever torch and Opacus say about layers that they cannot follow
        return reason(error)
    wanted = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(found, gradients, strict=True)]
    right = all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    return None if right else "their sum is not the gradient of the sum"


def _plain_losses(module: nn.Module, images: Tensor) -> Tensor:
    return module(images).flatten(1).square().mean(1)


@contextlib.contextmanager
def _nothing_else_changes(module: nn.Module) -> Iterator[None]:
    """WorkFailed if training changed a number that gets no noise: a buffer, or weights that take no gradient."""
    watched = dict(module.named_buffers())
    watched |= {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}
    before = {name: tensor.detach().clone() for name, tensor in watched.items()}
    yield
    for name, tensor in watched.items():
        if not torch.equal(before[name], tensor):
            raise WorkFailed(f"'{name}' changed in private training without clipping or noise: it must not be released")
