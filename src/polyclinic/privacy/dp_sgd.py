"""DP-SGD (Abadi et al. 2016; Qu et al. 2022, Algorithm 3) for any network with a loss per image.

Every image takes part in a step with the same small probability; its gradient is clipped to length `clip`; the
clipped gradients are summed, Gaussian noise of standard deviation `noise` times `clip` is added, and the sum is
divided by the *expected* number of images, since the true one is private. Opacus gives the gradients per image and
the clipping. What happens to the weights afterwards (momentum, weight decay, averages) costs no privacy.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.privacy.obstacles import obstacles
from polyclinic.randomness import device_rng, numpy_rng, seeded
from polyclinic.registry import reason

#: tensors [B, ...] of one batch, for instance images and targets; B may be 0
Batch = tuple[Tensor, ...]
#: the loss of each row of a batch, [B]
Losses = Callable[..., Tensor]

#: bytes that gradients per image may take at a time; a larger batch goes through in pieces
PIECE_BYTES = 2**30
MOST_ROWS = 256


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
    """How the gradients of a batch's rows become one: each clipped to length `clip`, summed, with Gaussian noise of
    standard deviation `noise` times `clip`, and divided by `expected`, the rows that a batch has on average."""

    noise: float
    clip: float
    expected: float
    draw: Noise


def take_noisy_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Losses,
    batches: Iterable[Batch],
    mean: NoisyMean,
    correct: Callable[[nn.Module], None] | None = None,
) -> None:
    """Take a noisy step for each batch with `optimizer`, which holds the parameters of `module`.

    `losses(*batch)` gives the loss of each row. `correct` may change the noisy gradients, by anything but images. No
    loss is returned: it would tell about the images.
    """
    with private_gradients(module, optimizer, mean) as put_gradients:
        for batch in batches:
            put_gradients(losses, [batch])
            if correct is not None:
                correct(module)
            optimizer.step()


@contextlib.contextmanager
def private_gradients(
    module: nn.Module, optimizer: torch.optim.Optimizer, mean: NoisyMean
) -> Iterator[Callable[[Losses, Iterable[Batch]], None]]:
    """A function that puts the clipped, noisy mean gradient of one batch into `.grad` of every parameter.

    The batch may come in pieces. Afterwards the module is as it was, but for its weights.
    """
    for obstacle in obstacles(module):
        raise BadInput(obstacle)
    noisy = NoisyOptimizer(optimizer, mean)
    module.train()
    try:
        with _nothing_else_changes(module), _gradients_per_image(module):
            yield lambda losses, pieces: _put_gradients(noisy, losses, pieces)
    finally:
        for parameter in noisy.params:
            del parameter.summed_grad
            parameter.grad = None


def try_gradients(module: nn.Module, images: Tensor) -> str | None:
    """Why gradients per image of an unknown network fail or are wrong, tried on images [B, ...]; None if they do not.

    Their sum, without clipping and noise, must be the gradient of the sum.
    """
    optimizer = torch.optim.SGD([weight for weight in module.parameters() if weight.requires_grad], lr=0.0)
    try:
        with seeded(0, "trial"):
            gradients = torch.autograd.grad(
                _plain_losses(module.train(), images).sum(), optimizer.param_groups[0]["params"], allow_unused=True
            )
        total = NoisyMean(noise=0.0, clip=math.inf, expected=1.0, draw=torch.zeros_like)
        with seeded(0, "trial"), private_gradients(module, optimizer, total) as put_gradients:
            put_gradients(lambda batch: _plain_losses(module, batch), [(images,)])
            found = [weight.grad.clone() for weight in optimizer.param_groups[0]["params"]]
    except Exception as error:  # whatever torch and Opacus say about layers that they cannot follow
        return reason(error)
    wanted = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(found, gradients, strict=True)]
    right = all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    return None if right else "their sum is not the gradient of the sum"


def _plain_losses(module: nn.Module, images: Tensor) -> Tensor:
    return module(images).flatten(1).square().mean(1)


class NoisyOptimizer(DPOptimizer):
    """Opacus' clipping, with noise from a generator of ours. It is asked for gradients only, never for steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, mean: NoisyMean) -> None:
        # zero times infinity is no number, and no gradient is longer than the largest one
        bound = min(mean.clip, torch.finfo(torch.float32).max)
        super().__init__(
            optimizer,
            noise_multiplier=mean.noise,
            max_grad_norm=bound,
            expected_batch_size=mean.expected,
        )
        self.draw = mean.draw

    def add_noise(self) -> None:
        deviation = self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            total: Any = parameter.summed_grad
            noise = deviation * self.draw(total) if deviation else torch.zeros_like(total)
            parameter.grad = (total + noise).view_as(parameter)


def _put_gradients(noisy: NoisyOptimizer, losses: Losses, pieces: Iterable[Batch]) -> None:
    noisy.zero_grad(set_to_none=True)
    rows = _rows_at_a_time(noisy)
    for batch in pieces:
        for piece in zip(*(tensor.split(rows) for tensor in batch), strict=True):
            if len(piece[0]):
                _backward(losses, piece)
                _clip_and_add(noisy, len(piece[0]), last=False)
    # an empty piece at the end brings the noise; so an empty batch gets its noise as well
    _clip_and_add(noisy, 0, last=True)


def _backward(losses: Losses, piece: Batch) -> None:
    found = losses(*piece)
    if found.shape != (len(piece[0]),):
        raise ValueError(f"losses gave {tuple(found.shape)} for {len(piece[0])} rows; give one loss a row")
    found.sum().backward()


def _clip_and_add(noisy: NoisyOptimizer, rows: int, *, last: bool) -> None:
    for parameter in noisy.params:
        if parameter.grad_sample is None:  # it took no part in the loss, or the piece is empty
            parameter.grad_sample = parameter.new_zeros((rows, *parameter.shape))
    _drop_non_finite(noisy)
    noisy.signal_skip_step(not last)
    noisy.pre_step()
    if not last:
        noisy.zero_grad(set_to_none=True)


def _drop_non_finite(noisy: NoisyOptimizer) -> None:
    """An image whose gradient is not finite counts as one without a gradient: NaN has no length to clip, and a parcel
    that is refused for it would tell that the image is there. Nothing counts such images, for the same reason."""
    finite = torch.stack([one.grad_sample.flatten(1).isfinite().all(1) for one in noisy.params]).all(0)
    if not bool(finite.all()):
        for parameter in noisy.params:
            parameter.grad_sample[~finite] = 0.0


def _rows_at_a_time(noisy: NoisyOptimizer) -> int:
    weights = sum(parameter.numel() * parameter.element_size() for parameter in noisy.params)
    return max(1, min(MOST_ROWS, PIECE_BYTES // max(1, weights)))


@contextlib.contextmanager
def _gradients_per_image(module: nn.Module) -> Iterator[None]:
    hooked = GradSampleModule(module, loss_reduction="sum")
    hooked.forbid_grad_accumulation()
    try:
        with warnings.catch_warnings():
            # the first layer's input is an image, which needs no gradient
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            yield
    finally:
        hooked.to_standard_module()


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
