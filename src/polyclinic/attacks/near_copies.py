"""Near copies: single synthetic images that are training images, shifted, mirrored, turned, brighter, blurred or noisy.

Each made image is compared with every training and held-out image by normalised correlation, which does not see
brightness and contrast, over shifts and orientations, in several *views*: as it is, against blurred references, with
both smoothed (for noisy copies), and one quarter at a time (for a patch of a training image in another one).

Had the generator never seen the training images, they could be exchanged with the held-out ones: the *gap* between the
best training image and the best held-out one would be as often below zero as above. The best of many is distributed
like a Gumbel variable, so the gap of two is logistic. Its scale comes from held-out images, each asked in the same way.
A copy has a gap that chance gives with a probability of `level` in the whole search, all made images and views counted.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from polyclinic.attacks.attack import Verdict
from polyclinic.attacks.copies import references
from polyclinic.data.pixels import to_uint8
from polyclinic.metrics.images import ORIENTATIONS, Images, as_unit, orientations_of, same_shape, turned
from polyclinic.progress import tell
from polyclinic.randomness import torch_rng

LEVEL = 0.001

SIDE = 32  #: px; larger images are averaged down
REACH = 8  #: shifts of up to a so many-th of the side
CLOSEST = 0.9995  #: correlations above it are rounding

Quarter = tuple[int, int] | None  #: (0 upper or 1 lower, 0 left or 1 right); None is the whole image


@dataclass(frozen=True)
class View:
    """`before` and `after`: smoothing of the made image and of the references, in px of a side of 32."""

    before: float = 0.0
    after: float = 0.0
    quarter: Quarter = None

    @property
    def blur(self) -> float:
        """What makes an image as blurred as the references, in px."""
        return math.sqrt(max(0.0, self.after**2 - self.before**2))


VIEWS = (
    *(View(*pair) for pair in ((0.0, 0.0), (0.0, 1.0), (0.0, 1.5), (1.0, 1.0), (2.0, 2.0))),
    *(View(quarter=place) for place in ((0, 0), (0, 1), (1, 0), (1, 1))),
)
# of |x| where x is logistic with scale 1
MEDIAN, NINTH_DECILE = math.log(3), math.log(19)


@dataclass(frozen=True)
class NearCopies:
    """What was found among M made images. `strength` [M]: the gap as a share of the limit, of the view in which it is
    largest: above 1 the image is a copy of the training image `index` [M], laid down in `orientation` [M]."""

    strength: Tensor
    index: Tensor
    orientation: Tensor
    level: float
    limits: tuple[float, ...]  #: of each view, in Fisher's form of a correlation

    @cached_property
    def is_copy(self) -> Tensor:
        return self.strength > 1

    def verdict(self) -> Verdict:
        """In words, with the figures."""
        count, total = int(self.is_copy.sum()), len(self.strength)
        best = int(self.strength.argmax())
        strongest, turn = float(self.strength[best]), int(self.orientation[best])
        words = f"none of {total} made images is a near copy (the nearest has {strongest:.0%} of the limit)"
        if count:
            how = f"{ORIENTATIONS[turn]} is" if turn else "is"
            which = f"{how} training image {int(self.index[best])}"
            words = (
                f"near copies of training images among {total} made ones: {count}, for instance number {best}, which "
                f"{which} or a part of it, up to shift, brightness, blur and noise"
            )
        seen = {"made": total, "copies": count, "strongest": strongest}
        return Verdict(count > 0, words, {**seen, "level": self.level, "views": len(self.limits)})


class CopyIndex:
    """Training and held-out images that many sets of images can be searched for in."""

    def __init__(self, training: Images, held_out: Images, *, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.training, self.held_out = references(training, held_out)
        small = torch.cat([_shrink(self.training), _shrink(self.held_out)]).to(self.device)
        self._references = [smooth(small, view.after) for view in VIEWS]

    @cached_property
    def scales(self) -> tuple[tuple[float, float, float], ...]:
        """Of each view: the scale of an honest gap, where its middle lies, and the largest of the held-out images'.

        They are asked as they are, and as blurred as the view's references: generators blur.
        """
        small, found = _shrink(self.held_out), []
        for number, view in enumerate(VIEWS):
            gaps = [self._match(smooth(small, blur), number, held_out=True)[0] for blur in sorted({0.0, view.blur})]
            middles = [float(gap.median()) for gap in gaps]
            scale = max(_scale(gap - middle) for gap, middle in zip(gaps, middles, strict=True))
            found.append((scale, max(middles), max(float(gap.max()) for gap in gaps)))
        return tuple(found)

    def limits(self, made: int, level: float = LEVEL) -> tuple[float, ...]:
        """Gaps that so many made images of an honest generator exceed with probability `level`; never below the largest
        gap of a held-out image, which is no copy."""
        tests = made * len(VIEWS)
        return tuple(max(middle + scale * math.log(tests / level), largest) for scale, middle, largest in self.scales)

    def search(self, made: Images, *, among: int | None = None, level: float = LEVEL) -> NearCopies:
        """Search for made images [M, C, H, W]. `among`: how many are searched in all, where these are some of them."""
        images = as_unit(made, "made images")
        same_shape(self.training, images, "made images")
        limits = self.limits(among or len(images), level)
        small = _shrink(images)
        found = [self._match(small, view) for view in range(len(VIEWS))]
        strengths = torch.stack([gap / limit for (gap, _), limit in zip(found, limits, strict=True)])
        view = strengths.argmax(0)
        rows = torch.arange(len(images))
        index = torch.stack([nearest for _, nearest in found])[view, rows]
        turns = torch.zeros(len(small), dtype=torch.int64)  # of each, in the view in which it was found
        for number in view.unique().tolist():
            those = view == number
            queries = smooth(small[those].to(self.device), VIEWS[number].before)
            partners = self._references[number][index[those].to(self.device)]
            turns[those] = best_orientations(queries, partners, VIEWS[number].quarter).cpu()
        return NearCopies(strengths.amax(0), index, turns, level, limits)

    def _match(self, small: Tensor, view: int, *, held_out: bool = False) -> tuple[Tensor, Tensor]:
        """Of each of Q images, [Q] each: by how much its best correlation with any training image, in Fisher's form
        (artanh), is above the best one with a held-out image; and which training image that is. `held_out`: the
        images are the held-out ones themselves, which may not be matched with themselves."""
        queries = smooth(small.to(self.device), VIEWS[view].before)
        best = correlations(queries, self._references[view], VIEWS[view].quarter)
        tell("search for near copies", view + 1, len(VIEWS))
        count = len(self.training)
        if held_out:
            best[:, count:].fill_diagonal_(-1)
        fisher = torch.atanh(best.clamp(-CLOSEST, CLOSEST)).cpu()
        values, index = fisher[:, :count].max(1)
        return values - fisher[:, count:].amax(1), index


def _scale(centred: Tensor) -> float:
    """The scale of a logistic variable from its absolute values: the larger of two estimates."""
    sizes = centred.abs()
    found = max(float(sizes.median()) / MEDIAN, float(sizes.quantile(0.9)) / NINTH_DECILE)
    return max(found, 1e-3)


def correlations(queries: Tensor, references: Tensor, quarter: Quarter = None) -> Tensor:
    """The best correlation [Q, R] over shifts and orientations of images [Q, C, h, w] with others. `quarter`: only that
    one of the turned query is looked at. All orientations are compared at once, by one product a shift."""
    reach = _reach(queries)
    turns = [turned(queries, turn) for turn in orientations_of(queries)]
    middles = torch.cat([_unit(_window(images, reach, (0, 0), quarter)) for images in turns])
    best = torch.full((len(middles), len(references)), -1.0, device=queries.device)
    for shift in _shifts(reach):
        found = middles @ _unit(_window(references, reach, shift, quarter)).T
        torch.maximum(best, found, out=best)
    return best.view(len(turns), len(queries), -1).amax(0)


def best_orientations(queries: Tensor, partners: Tensor, quarter: Quarter = None) -> Tensor:
    """Of each query [Q, C, h, w] the orientation [Q] in which it is most like its own partner, over all shifts."""
    reach = _reach(queries)
    turns = orientations_of(queries)
    middles = torch.stack([_unit(_window(turned(queries, turn), reach, (0, 0), quarter)) for turn in turns])
    windows = torch.stack([_unit(_window(partners, reach, shift, quarter)) for shift in _shifts(reach)])
    found = torch.einsum("tqd,sqd->tsq", middles, windows).amax(1)
    return torch.tensor(turns, device=queries.device)[found.argmax(0)]


def _reach(images: Tensor) -> list[int]:
    return [max(1, side // REACH) for side in images.shape[-2:]]


def _shifts(reach: list[int]) -> Iterator[tuple[int, int]]:
    for down in range(-reach[0], reach[0] + 1):
        for right in range(-reach[1], reach[1] + 1):
            yield down, right


def _window(images: Tensor, reach: list[int], shift: tuple[int, int], quarter: Quarter) -> Tensor:
    """What is left of images when `reach` is cut off on all sides, from a place shifted by `shift`; or a quarter."""
    sides = [side - 2 * cut for side, cut in zip(images.shape[-2:], reach, strict=True)]
    corner = [cut + moved for cut, moved in zip(reach, shift, strict=True)]
    if quarter is not None:
        corner = [start + part * (side - side // 2) for start, part, side in zip(corner, quarter, sides, strict=True)]
        sides = [side // 2 for side in sides]
    return images[..., corner[0] : corner[0] + sides[0], corner[1] : corner[1] + sides[1]]


def _unit(images: Tensor) -> Tensor:
    """Vectors [N, D] of mean 0 and length 1; an image without contrast becomes 0."""
    rows = images.flatten(1)
    return F.normalize(rows - rows.mean(1, keepdim=True), dim=1, eps=1e-4)


def _shrink(images: Tensor) -> Tensor:
    """Averaged down so that the shorter side has at most 32 px."""
    factor = SIDE / min(images.shape[-2:])
    if factor >= 1:
        return images
    height, width = (round(side * factor) for side in images.shape[-2:])
    return F.adaptive_avg_pool2d(images, (height, width))


def smooth(images: Tensor, deviation: float) -> Tensor:
    """Blurred by a Gaussian of so many px; edges are repeated."""
    if deviation <= 0:
        return images
    radius = min(max(1, math.ceil(3 * deviation)), min(images.shape[-2:]) - 1)
    kernel = torch.exp(-torch.arange(-radius, radius + 1.0, device=images.device).square() / (2 * deviation**2))
    kernel, channels = kernel / kernel.sum(), images.shape[1]
    padded = F.pad(images, (radius,) * 4, mode="replicate")
    rows = F.conv2d(padded, kernel.view(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)
    return F.conv2d(rows, kernel.view(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)


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
        found: dict[str, float | None] = {}
        for name, levels in self.found.items():
            reached = itertools.takewhile(lambda one: one[1] >= FOUND, sorted(levels.items()))
            found[name] = max((level for level, _ in reached), default=None)
        return found

    def __str__(self) -> str:
        seen = [LADDERS[name].words.format(level) for name, level in self.reach.items() if level is not None]
        ladders = [LADDERS[name] for name, top in self.reach.items() if top is None]
        unseen = [one.words.format(one.levels[0]) for one in ladders]
        words = f"a single copy is found if it is at most {', '.join(seen)}" if seen else "no single copy is found"
        return words + (f"; not if it is {', '.join(unseen)}" if unseen else "")


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
