"""How much of a rare sub-group a site of FELICIA would make if all discriminators were perfect.

    python benchmarks/felicia_balance.py [--quick] [--json FILE]

Two sub-groups, two sites: the first has a share of the rare one, the second half and half. Generators decide only how
much of either they make; every discriminator knows what is real, what is made and by whom. Both sites follow the
gradient of their loss until it is zero. Networks have to find the sub-group first, and are not perfect.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARES = (0.02, 0.05, 0.1)
LAMBDAS = (0.0, 1.0, 3.0, 10.0, 100.0)
FAIR = 0.5
STEPS, RATE = 200_000, 2e-4

#: what a generator pays for an image of a sub-group, where so much of it is one's own (real, or made by this site) and
#: so much another's
Price = Callable[[float, float], float]


def log(real: float, made: float) -> float:
    """-log D, as GANs are trained."""
    return -math.log(real / (real + made))


def log_as_written(real: float, made: float) -> float:
    """log(1 - D), as the formula has it (`saturating`)."""
    return math.log(made / (real + made))


def other(made: float, others: float) -> float:
    """The cross-entropy of being taken for the other site, as PrivGAN's code has it."""
    return -math.log(others / (made + others))


def away(made: float, others: float) -> float:
    """log D_p of the site itself, as Eq. 6 has it."""
    return math.log(made / (made + others))


LOSSES: dict[str, Price] = {"log": log, "log, as written": log_as_written}
TOWARDS: dict[str, Price] = {"other": other, "away": away}


def balance(loss: Price, share: float, weight: float, central: Price = other) -> tuple[float, float]:
    """The share of the rare sub-group among what either site makes in the end."""
    made = [share, FAIR]
    for _ in range(STEPS):
        slopes = [
            _more(loss, own, made[k]) + weight * _more(central, made[k], made[1 - k])
            for k, own in enumerate((share, FAIR))
        ]
        moved = [min(max(q - RATE * s * q * (1 - q), 1e-6), 1 - 1e-6) for q, s in zip(made, slopes, strict=True)]
        if max(abs(new - old) for new, old in zip(moved, made, strict=True)) < 1e-9:
            break
        made = moved
    return made[0], made[1]


def _more(price: Price, a: float, b: float) -> float:
    """What making more of the rare sub-group costs: its price less that of the usual one, while judges stand still."""
    return price(a, b) - price(1 - a, 1 - b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the rarest sub-group only, and small lambdas")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--shares", type=float, nargs="+")
    options = parser.parse_args()
    weights = LAMBDAS[:3] if options.quick else LAMBDAS
    shares = options.shares or (SHARES[:1] if options.quick else SHARES)
    figures = {"benchmark": "felicia_balance", "quick": options.quick, "rows": _rows(shares, weights)}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def _rows(shares: tuple[float, ...], weights: tuple[float, ...]) -> list[dict[str, Any]]:
    print("| loss | towards | share of the rare sub-group | " + " | ".join(f"lambda {w:g}" for w in weights) + " |")
    print("|---" * (len(weights) + 3) + "|")
    rows: list[dict[str, Any]] = []
    for name, loss in LOSSES.items():
        for towards, central in TOWARDS.items():
            for share in shares:
                made = [round(balance(loss, share, weight, central)[0], 4) for weight in weights]
                print(f"| {name} | {towards} | {share:g} | " + " | ".join(f"{q:.2f}" for q in made) + " |", flush=True)
                rows.append({"loss": name, "towards": towards, "share": share, "lambdas": list(weights), "made": made})
    return rows


if __name__ == "__main__":
    main()
