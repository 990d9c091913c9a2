"""How much of a rare sub-group FELICIA's owner would make if all discriminators were perfect.

    python benchmarks/felicia_balance.py

Two sub-groups, two owners: the first has a share of the rare one, the second half and half. Generators decide only how
much of either they make; every discriminator knows what is real, what is made and by whom. Both owners follow the slope
of what they pay until it is level. Networks have to find the sub-group first, and their discriminators are not perfect.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

SHARES = (0.02, 0.05, 0.1)
LAMBDAS = (0.0, 1.0, 3.0, 10.0, 100.0)
FAIR = 0.5
STEPS, RATE = 200_000, 2e-4


def log(real: float, made: float) -> float:
    """What a generator pays for an image of a sub-group, -log D, as GANs are trained."""
    return -math.log(real / (real + made))


def log_as_written(real: float, made: float) -> float:
    """log(1 - D), as the formula has it (`saturating`)."""
    return math.log(made / (real + made))


LOSSES: dict[str, Callable[[float, float], float]] = {"log": log, "log, as written": log_as_written}


def balance(loss: Callable[[float, float], float], share: float, weight: float) -> tuple[float, float]:
    """The share of the rare sub-group among what either owner makes in the end."""
    made = [share, FAIR]
    for _ in range(STEPS):
        slopes = [_slope(loss, own, made[k], made[1 - k], weight) for k, own in enumerate((share, FAIR))]
        moved = [min(max(q - RATE * s * q * (1 - q), 1e-6), 1 - 1e-6) for q, s in zip(made, slopes, strict=True)]
        if max(abs(new - old) for new, old in zip(moved, made, strict=True)) < 1e-9:
            break
        made = moved
    return made[0], made[1]


def _slope(loss: Callable[[float, float], float], real: float, made: float, others: float, weight: float) -> float:
    """What making more of the rare sub-group costs: at one's own discriminator, and at the central one, which a
    generator pays the cross-entropy of being taken for the other owner (`towards = "other"`)."""
    own = loss(real, made) - loss(1 - real, 1 - made)
    rare, usual = others / (made + others), (1 - others) / (2 - made - others)
    return own + weight * (math.log(usual) - math.log(rare))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    options = parser.parse_args()
    print("| loss | share of the rare sub-group | " + " | ".join(f"lambda {weight:g}" for weight in LAMBDAS) + " |")
    print("|---" * (len(LAMBDAS) + 2) + "|")
    for name, loss in LOSSES.items():
        for share in options.shares:
            cells = [f"{balance(loss, share, weight)[0]:.2f}" for weight in LAMBDAS]
            print(f"| {name} | {share:g} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
