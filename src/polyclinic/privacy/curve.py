"""Epsilon against epochs for several numbers of images (Qu et al. 2022, Fig. 7), delta = 1 / number of images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyclinic.privacy.epsilon import Accountant, compute_epsilon, default_delta, sampling_rate_for, steps_in

SIZES = (500, 1144, 2000, 5000, 10000)
POINTS = {"rdp": 60, "prv": 8}  # PRV takes seconds for each


def curves(
    sizes: Sequence[int], *, epochs: int, batch_size: int, noise: float, accountant: Accountant = "rdp"
) -> dict[int, list[tuple[float, float]]]:
    """(epochs, epsilon) along each curve, by number of images."""
    count = min(POINTS[accountant], epochs)
    ends = sorted({1.0, *(epochs * number / count for number in range(1, count + 1))})
    return {size: [(end, _epsilon(size, end, batch_size, noise, accountant)) for end in ends] for size in sizes}


def _epsilon(size: int, epochs: float, batch_size: int, noise: float, accountant: Accountant) -> float:
    rate, steps = sampling_rate_for(size, batch_size), steps_in(epochs, size, batch_size)
    return compute_epsilon(rate, noise, steps, default_delta(size), accountant)


def draw(
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
