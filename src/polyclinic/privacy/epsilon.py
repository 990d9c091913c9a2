"""Privacy accounting of DP-SGD: epsilon of a number of noisy steps, and the steps or the noise that an epsilon allows.

One step is a Poisson-sampled Gaussian mechanism: every image takes part with probability `sampling_rate`, and
Gaussian noise of `noise` times the clipping norm is added to the sum. Two neighbouring datasets differ by one
image that is there or is not. Every epsilon is an upper bound: RDP (Mironov 2017), or PRV (Gopi et al. 2021),
which is tighter and takes seconds. Both come from Opacus. Where every image takes part in every step, PRV is the exact
epsilon of Gaussian noise (Balle and Wang 2018), at once.
"""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from polyclinic.errors import BadInput

Accountant = Literal["rdp", "prv"]

#: Opacus' orders, a few closer to 1 for weak guarantees and a few large ones for strong guarantees
ORDERS = (1.01, 1.02, 1.05, *(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
MOST_STEPS = 10**8  # a search for steps ends there
MOST_NOISE = 1e6  # and one for noise there
LEAST_NOISE = 1e-100  # the square of much less is no number any more, and Opacus' sums of such do not end
NO_PRIVACY = 100.0  # above this epsilon PRV would take minutes, to say what nobody needs to know
PRECISION = 1e-3  # of a noise that was searched for, as a share of it
FINEST = 1e4  # it is a multiple of one over this


class Mechanism(NamedTuple):
    """`steps` compositions of the Poisson-subsampled Gaussian mechanism."""

    noise: float
    sampling_rate: float
    steps: int


def compute_epsilon(
    sampling_rate: float, noise: float, steps: int, delta: float, accountant: Accountant = "rdp"
) -> float:
    """The epsilon, at `delta`, of so many steps; infinite without noise, or with next to none."""
    return composed_epsilon([Mechanism(noise, sampling_rate, steps)], delta, accountant)


def composed_epsilon(history: Iterable[Mechanism], delta: float, accountant: Accountant = "rdp") -> float:
    """The epsilon, at `delta`, of several mechanisms on the same images, one after the other."""
    known = tuple(Mechanism(*one) for one in history)
    for one in known:
        _check(one, delta)
    known = tuple(one for one in known if one.steps)
    if not known:
        return 0.0
    if any(one.noise < LEAST_NOISE for one in known):
        return math.inf
    return _prv(known, delta) if accountant == "prv" else _rdp(known, delta)


def group_epsilon(history: Iterable[Mechanism], delta: float, images: int, accountant: Accountant = "rdp") -> float:
    """The epsilon, at `delta`, for a patient with so many images: group privacy (Dwork and Roth 2014, Theorem 2.2).

    What is (e, d) for one image is (k e, d (exp(k e) - 1) / (exp(e) - 1)) for k of them: d is made smaller until that
    is at most `delta`. Infinite where no d is small enough.
    """
    known = tuple(history)
    if images <= 1:
        return composed_epsilon(known, delta, accountant)
    single = delta / images
    while single > 1e-300:
        one = composed_epsilon(known, single, accountant)
        if one == 0:
            return 0.0
        # the exponents are below 0, so that nothing overflows, also where `one` is infinite
        allowed = delta * math.exp((1 - images) * one) * math.expm1(-one) / math.expm1(-images * one)
        if single <= allowed:
            return images * one
        single = allowed / 2
    return math.inf


def steps_for(
    epsilon: float,
    sampling_rate: float,
    noise: float,
    delta: float,
    accountant: Accountant = "rdp",
    *,
    after: Iterable[Mechanism] = (),
) -> int:
    """The most steps that do not spend more than `epsilon`, counting what was spent before (`after`); perhaps 0."""
    before = tuple(after)

    def allowed(steps: int) -> bool:
        return composed_epsilon([*before, Mechanism(noise, sampling_rate, steps)], delta, accountant) <= epsilon

    least, most = 0, 1
    while most < MOST_STEPS and allowed(most):
        least, most = most, 2 * most
    while most - least > 1:  # `least` is allowed, `most` may not be
        middle = (least + most) // 2
        least, most = (middle, most) if allowed(middle) else (least, middle)
    return least


def noise_for(epsilon: float, sampling_rate: float, steps: int, delta: float, accountant: Accountant = "rdp") -> float:
    """A noise with which so many steps spend no more than `epsilon`: the smallest one, to a thousandth of it."""

    def enough(noise: float) -> bool:
        return compute_epsilon(sampling_rate, noise, steps, delta, accountant) <= epsilon

    # PRV never needs more noise than RDP does, and seldom much less
    most = noise_for(epsilon, sampling_rate, steps, delta) if accountant == "prv" else 1.0
    while not enough(most):
        most *= 2
        if most > MOST_NOISE:
            raise BadInput(f"epsilon {epsilon:g}: no noise reaches it at delta {delta:g}; allow more, or fewer steps")
    while most * FINEST > 1 and enough(most / 2):
        most /= 2
    least = most / 2
    while most - least > PRECISION * most:
        middle = (least + most) / 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return math.ceil(most * FINEST) / FINEST  # a number to write down, never a little too small


def steps_in(epochs: float, samples: int, batch_size: int) -> int:
    """Steps in which every image takes part `epochs` times on average."""
    return math.ceil(epochs / sampling_rate_for(samples, batch_size) - 1e-9)


def sampling_rate_for(samples: int, batch_size: int) -> float:
    """The chance of an image to take part in a step, so that `batch_size` of them do on average."""
    if samples < 1 or batch_size < 1:
        raise BadInput(f"samples {samples}, batch size {batch_size}: both must be at least 1")
    return min(1.0, batch_size / samples)


def default_delta(images: int) -> float:
    """The delta for so many training images where none is given: one over their number, and below 1."""
    return 1 / max(images, 2)


def _check(one: Mechanism, delta: float) -> None:
    if not 0 < one.sampling_rate <= 1:
        raise BadInput(f"sampling rate {one.sampling_rate:g}: must be above 0 and at most 1")
    if not (one.noise >= 0 and math.isfinite(one.noise)):
        raise BadInput(f"noise {one.noise:g}: must be 0 or more")
    if one.steps < 0:
        raise BadInput(f"steps {one.steps}: must be 0 or more")
    if not 0 < delta < 1:
        raise BadInput(f"delta {delta:g}: must be between 0 and 1, and is best below 1 / number of images")


# --- Opacus -------------------------------------------------------------------------------------------


def _rdp(history: tuple[Mechanism, ...], delta: float) -> float:
    from opacus.accountants.analysis.rdp import get_privacy_spent

    total = sum(one.steps * _rdp_of_a_step(one.noise, one.sampling_rate) for one in history)
    with _quiet():
        epsilon, _ = get_privacy_spent(orders=list(ORDERS), rdp=total, delta=delta)
    return max(0.0, float(epsilon))


@lru_cache(maxsize=1024)
def _rdp_of_a_step(noise: float, sampling_rate: float) -> np.ndarray:
    """The Rényi divergence of one step at every order; rounding may leave a tiny one below 0."""
    from opacus.accountants.analysis.rdp import compute_rdp

    return np.maximum(compute_rdp(q=sampling_rate, noise_multiplier=noise, steps=1, orders=list(ORDERS)), 0.0)


@lru_cache(maxsize=1024)
def _prv(history: tuple[Mechanism, ...], delta: float) -> float:
    """The epsilon of PRV; RDP's bound, which holds as well, where there is next to no privacy or numbers overflow."""
    from opacus.accountants import PRVAccountant

    bound = _rdp(history, delta)
    if not 0 < bound < NO_PRIVACY:
        return bound
    if all(one.sampling_rate == 1 for one in history):
        return min(bound, gaussian_epsilon(math.sqrt(sum(one.steps / one.noise**2 for one in history)), delta))
    accountant = PRVAccountant()
    accountant.history = [tuple(one) for one in history]
    with _quiet(), contextlib.suppress(ValueError, RuntimeError, FloatingPointError, MemoryError):
        error = min(0.01, 0.004 * bound)  # its result is above the truth by no more than about twice this
        found = float(accountant.get_epsilon(delta, eps_error=error))
        if math.isfinite(found):
            return max(0.0, min(bound, found))
    return bound


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Epsilon of Gaussian noise of deviation 1 on what one image moves by `shift`: several such mechanisms are one,
    whose square is the sum of theirs. Rounded upwards (Balle and Wang 2018, Theorem 8)."""
    from scipy.special import log_ndtr  # here: every process of a run would pay for it

    def is_enough(epsilon: float) -> bool:
        more, less = (log_ndtr(sign * shift / 2 - epsilon / shift) for sign in (1, -1))
        return math.exp(more) - math.exp(epsilon + less) <= delta

    least, most = 0.0, NO_PRIVACY  # where 0 is enough, it ends there
    while most - least > 1e-6 * most:
        middle = (least + most) / 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return most


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Opacus warns where a bound could be tighter with more orders; the bound holds all the same."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


# --- curves ---------------------------------------------------------------------------------------------------


SIZES = (500, 1144, 2000, 5000, 10000)
POINTS = {"rdp": 60, "prv": 8}  # PRV takes seconds for each


def curves(
    sizes: Sequence[int], *, epochs: int, batch_size: int, noise: float, accountant: Accountant = "rdp"
) -> dict[int, list[tuple[float, float]]]:
    """(epochs, epsilon) along each curve, by number of images."""
    count = min(POINTS[accountant], epochs)
    ends = sorted({1.0, *(epochs * number / count for number in range(1, count + 1))})
    found: dict[int, list[tuple[float, float]]] = {}
    for size in sizes:
        rate, delta = sampling_rate_for(size, batch_size), default_delta(size)
        steps = [steps_in(end, size, batch_size) for end in ends]
        spent = [compute_epsilon(rate, noise, one, delta, accountant) for one in steps]
        found[size] = list(zip(ends, spent, strict=True))
    return found


def draw_curves(
    path: Path, sizes: Sequence[int], *, epochs: int, batch_size: int, noise: float, accountant: Accountant
) -> None:
    """A picture of the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = curves(sizes, epochs=epochs, batch_size=batch_size, noise=noise, accountant=accountant)
    figure, axis = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
    colours = pyplot.get_cmap("viridis_r")
    for number, (size, points) in enumerate(sorted(found.items())):
        colour = colours((number + 0.7) / len(found))
        label = f"{size:,} (δ = {default_delta(size):.1e})"
        axis.plot(*zip(*points, strict=True), color=colour, linewidth=2, label=label)
    axis.set(xlabel="epochs", ylabel="ε (an upper bound)", xlim=(0, epochs), ylim=(0, None))
    axis.set_title(f"DP-SGD: noise {noise:g}, batches of {batch_size}, {accountant.upper()} accountant", fontsize=11)
    axis.legend(title="training images", frameon=False)
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
