"""Planted copies: training images changed more and more, to see where the search for near copies stops finding them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyclinic.attacks.near_copies import LEVEL, CopyIndex, smooth
from polyclinic.data.pixels import to_uint8
from polyclinic.randomness import torch_rng

#: share of planted copies that must be found at a level, and at all levels below it
FOUND = 0.8
PLANTED = 12  #: copies of each change and level

#: change(images [N, C, H, W] in [0, 1], level, others, rng): sides are counted as 1
Change = Callable[[Tensor, float, Tensor, torch.Generator], Tensor]


def shift(images: Tensor, level: float, others: Tensor, rng: torch.Generator) -> Tensor:
    """Down and to the right by a share of the side; edges are repeated."""
    for dim in (-2, -1):
        size = images.shape[dim]
        places = (torch.arange(size) - round(level * size)).clamp(min=0)
        images = images.index_select(dim, places)
    return images


def brighten(images: Tensor, level: float, others: Tensor, rng: torch.Generator) -> Tensor:
    return (images + level).clamp(0, 1)


def blur(images: Tensor, level: float, others: Tensor, rng: torch.Generator) -> Tensor:
    return smooth(images, level * min(images.shape[-2:]))


def add_noise(images: Tensor, level: float, others: Tensor, rng: torch.Generator) -> Tensor:
    return (images + level * torch.randn(images.shape, generator=rng)).clamp(0, 1)


def mix(images: Tensor, level: float, others: Tensor, rng: torch.Generator) -> Tensor:
    """With another image, of which there is a share of `level`."""
    return (1 - level) * images + level * others[torch.randint(len(others), (len(images),), generator=rng)]


def mirror(images: Tensor, level: float, others: Tensor, rng: torch.Generator) -> Tensor:
    """Left and right; there is only one level."""
    return images.flip(-1)


def paste_over(images: Tensor, level: float, others: Tensor, rng: torch.Generator) -> Tensor:
    """All but the upper left corner is another image's; `level` is the share of each side that is not the corner's."""
    changed = others[torch.randint(len(others), (len(images),), generator=rng)].clone()
    height, width = (round((1 - level) * side) for side in images.shape[-2:])
    changed[..., :height, :width] = images[..., :height, :width]
    return changed


@dataclass(frozen=True)
class Ladder:
    """A change, in words with its unit, and the levels that are tried."""

    change: Change
    words: str
    levels: tuple[float, ...]


LADDERS: Mapping[str, Ladder] = {
    "mirrored": Ladder(mirror, "mirrored", (1.0,)),
    "shifted": Ladder(shift, "shifted by {:.0%} of the side", (0.03, 0.06, 0.09, 0.12, 0.15)),
    "brighter": Ladder(brighten, "brighter by {:.1f} of the range", (0.1, 0.2, 0.3, 0.4)),
    "blurred": Ladder(blur, "blurred over {:.1%} of the side", (0.01, 0.02, 0.03, 0.045, 0.06)),
    "noisy": Ladder(add_noise, "with noise of {:.2f}", (0.02, 0.05, 0.1, 0.2)),
    "mixed": Ladder(mix, "mixed with {:.0%} of another image", (0.1, 0.2, 0.3, 0.4)),
    "pasted": Ladder(paste_over, "replaced by another image but for a corner, {:.0%} of each side", (0.2, 0.35, 0.5)),
}
#: the weakest copy that "withstood" excludes: all of these at once
WEAKEST = {"shifted": 0.03, "brighter": 0.1, "blurred": 0.01, "noisy": 0.02}
WEAKEST_WORDS = "one training image, shifted by 3 %, brighter by 0.1, blurred over 1 % of the side, with noise of 0.02"


def weakest_copies(images: Tensor, seed: int = 0) -> Tensor:
    """Images [N, C, H, W] in [0, 1] changed in all the ways of `WEAKEST`, as uint8."""
    rng = torch_rng(seed, "planted copies", "weakest")
    for name, level in WEAKEST.items():
        images = LADDERS[name].change(images, level, images, rng)
    return to_uint8(images)


@dataclass(frozen=True)
class SearchPower:
    """`found`: by change and level the share of planted copies that a search finds. `weakest`: of the weakest."""

    found: dict[str, dict[float, float]]
    weakest: float

    @property
    def reach(self) -> dict[str, float | None]:
        """By change the highest level that is found, with all below it; None where not even the lowest is."""
        return {name: _highest(levels) for name, levels in self.found.items()}

    def __str__(self) -> str:
        seen = [LADDERS[name].words.format(level) for name, level in self.reach.items() if level is not None]
        unseen = [
            LADDERS[name].words.format(LADDERS[name].levels[0]) for name, top in self.reach.items() if top is None
        ]
        words = f"a single copy is found if it is at most {', '.join(seen)}" if seen else "no single copy is found"
        return words + (f"; not if it is {', '.join(unseen)}" if unseen else "")


def _highest(levels: Mapping[float, float]) -> float | None:
    best = None
    for level, share in sorted(levels.items()):
        if share < FOUND:
            break
        best = level
    return best


def search_power(
    index: CopyIndex, made: int, *, seed: int = 0, level: float = LEVEL, planted: int = PLANTED
) -> SearchPower:
    """Plant changed training images, each as the only copy among `made` images, and count those that are found."""
    rng = torch_rng(seed, "planted copies", "which")
    chosen = index.training[torch.randperm(len(index.training), generator=rng)[:planted]]
    steps = [(name, value) for name, ladder in LADDERS.items() for value in ladder.levels]
    changed = [LADDERS[name].change(chosen, value, index.held_out, rng) for name, value in steps]
    copies = torch.cat([*(to_uint8(images) for images in changed), weakest_copies(chosen, seed)])
    hits = index.search(copies, among=made, level=level).is_copy.view(-1, len(chosen)).double().mean(1).tolist()
    found: dict[str, dict[float, float]] = {}
    for (name, value), share in zip(steps, hits, strict=False):
        found.setdefault(name, {})[value] = share
    return SearchPower(found, hits[-1])
