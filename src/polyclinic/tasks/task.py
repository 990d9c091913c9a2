"""A task: the `[task]` table of a study; what the head gives, what the loss is, and metrics that add.

Scores leave a site coarse (a deployed site), or with noise (differential privacy). Coarse: the cells of a histogram
have fixed edges, cover the whole axis, and hold `least` images or more; counts are 0, or `least` and more, in steps; a
mean of numbers that one image can change by no more than `bound / images` is rounded to steps of at least that size.
Noised: one image adds a vector of at most length 1 to what noise falls on; all that is done afterwards looks at none.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.metrics.statistics.disclosure import step_above
from polyclinic.settings import Settings

Sums = dict[str, Tensor]

#: what one image may add to a sum of scores: far above any loss or squared error, even of training that diverges
LARGEST_SUM = 1e12
#: the largest number of images that a site is believed to have scored
MOST_IMAGES = 10**8
#: sums that count something
WHOLE = ("count", "cases")


@dataclass(frozen=True)
class Target:
    """Public facts about the labels; the fields mean what they mean in `Dataset`."""

    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None
    #: structures of masks of volumes, each with its values
    structures: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Task(Settings):
    """One subclass per task. It holds configuration only: what depends on the data comes as a Target.

    Training:    loss(output, targets(labels, masks), target)
    Evaluation:  observe each batch, take the site's sums, add the sites' sums, finish once.
    """

    name: str = Field(description="what is learned: classification, regression or segmentation")

    #: whose labels it takes: a source or a method that can do that task can do this one
    like: ClassVar[Literal["classification", "regression", "segmentation"]]
    metric: ClassVar[str]  #: the metric by which models are selected, a key of `finish`
    better: ClassVar[Literal["higher", "lower"]]
    #: metrics that `finish` gives besides and a round may be selected by, with the direction that is better
    more_metrics: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"loss": "lower"}
    dense: ClassVar[bool] = False  #: needs a backbone that gives a map, not a vector
    volumes: ClassVar[bool] = False  #: whether its examples are volumes, and not images

    @abstractmethod
    def outputs(self, target: Target) -> int:
        """Number of units or channels of the network's head."""

    @abstractmethod
    def targets(self, labels: Tensor, masks: Tensor | None = None) -> Tensor:
        """Targets of the loss of a batch, from labels [B] and masks uint8 [B, H, W]."""

    @abstractmethod
    def losses(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """The loss of each image, [B], from the network's output and `targets(...)` of the batch."""

    def mixable(self, targets: Tensor, target: Target) -> Tensor:
        """`targets(...)` as numbers of which a weighted mean makes sense (mixup): here, as they are."""
        return targets

    @classmethod
    def direction(cls, metric: str) -> Literal["higher", "lower"]:
        """The better direction of a metric; KeyError for one that no round can be selected by."""
        return {**cls.more_metrics, cls.metric: cls.better}[metric]

    def rank(self, metrics: Mapping[str, float], metric: str | None = None) -> tuple[float, float] | None:
        """Rank of a model by one of its metrics (the task's own if none is named), larger being better; the loss
        decides between equals. None if the data do not define the metric."""
        name = metric or self.metric
        if name not in metrics:
            return None
        sign = 1 if self.direction(name) == "higher" else -1
        return sign * metrics[name], -metrics.get("loss", 0.0)

    def loss(self, output: Tensor, targets: Tensor, target: Target, weights: Tensor | None = None) -> Tensor:
        """The mean loss of a batch; with `weights` [B], one for each image, the weighted mean.

        For a weight per class, pass `class_weights[labels]`.
        """
        losses = self.losses(output, targets, target)
        return losses.mean() if weights is None else (weights * losses).sum() / weights.sum()

    def predictions(self, output: Tensor, target: Target) -> Tensor:
        """The network's output as what users read: probabilities of classes [B, C], of the mask [B, H, W], values [B].

        A regression whose network gives scaled values overrides it.
        """
        if self.like == "regression":
            return output.squeeze(1)
        return output.sigmoid()[:, 0] if self.dense else output.softmax(1)

    @abstractmethod
    def observe(self, output: Tensor, targets: Tensor, target: Target) -> Tensor:
        """The few facts of each image that metrics need, float64 [B, d] on the CPU. They stay at the site."""

    @abstractmethod
    def sums(self, observations: Tensor, labels: Tensor, cases: Tensor | None, target: Target) -> Sums:
        """A site's share of the metrics, from all its observations [N, d] and labels [N].

        `cases` int64 [N] says which images belong to one patient, or None: every image is a case of its own.
        """

    @staticmethod
    def add(a: Sums, b: Sums) -> Sums:
        """The sums of two sites together."""
        return {name: a[name] + b[name] for name in a if name in b}

    def bounds(self, target: Target) -> dict[str, tuple[float, str]]:
        """For every sum that a deployed site may release coarsely: the largest share of one image (or case) in it,
        which `bounded` keeps to, and the name of the count that its mean is over. Other sums do not leave."""
        return {}

    def bounded(self, observations: Tensor, target: Target) -> Tensor:
        """Observations of which no image's share in a sum is larger than `bounds` says."""
        return observations

    def coarse(self, sums: Sums, least: int, target: Target) -> Sums:
        """The sums as a deployed site releases them, so that nothing is told about `least` patients or fewer. A
        sum without a bound becomes 0.

        Figures that are no sums over counted images, such as an AUC, are cut off at -1 and 1, and rounded as if `least`
        images were behind them.
        """
        if "count" not in sums:
            return {name: round_mean(value, least, 1.0) for name, value in sums.items()}
        known = self.bounds(target)
        found = {name: round_counts(sum_, least) for name, sum_ in sums.items() if not sum_.is_floating_point()}
        for name in sums.keys() - found.keys():
            bound, count = known.get(name, (0.0, "count"))
            images, told = int(sums[count]), found.get(count, torch.tensor(0))
            mean = round_mean(sums[name] / max(images, 1), images, bound) if bound else torch.tensor(0.0)
            found[name] = mean.double() * told
        return {name: found[name] for name in sums}

    def summable(self, sums: Sums, largest: float) -> Sums:
        """The sums as they are added up in a secure sum: of numbers within `largest`, and where a table is of single
        images nearly, in few cells."""
        return {n: one.clamp(-largest, largest) if one.is_floating_point() else one for n, one in sums.items()}

    def opened(self, sums: Sums) -> Sums:
        """The sum of what `summable` gave, as `finish` takes it."""
        return sums

    @property
    def can_be_noised(self) -> bool:
        """True where `noised` knows all sums of the task."""
        return False

    def near(self, observations: Tensor, targets: Tensor, target: Target) -> Tensor:
        """Observations of which no image's share in a sum is larger than `noised` assumes."""
        return observations

    def noised(self, sums: Sums, noise: "AddNoise", target: Target) -> Sums:
        """The sums with noise, for differential privacy of the scored images (`privacy.score_noise`), from observations
        that went through `near`. How many images were scored counts as public."""
        raise BadInput(f"privacy.score_noise: scores of '{self.name}' cannot be noised; leave it out")

    def check_sums(self, sums: Sums, target: Target) -> None:
        """ValueError for sums that no site can have, whatever its images are. Whoever sent them may lie."""
        for name, value in sums.items():
            no_number = value.is_complex() or value.dtype == torch.bool
            negative = not no_number and not value.is_floating_point() and bool((value < 0).any())
            if no_number or negative or not bool(torch.isfinite(value).all()):
                raise ValueError(f"the sum '{name}' is negative, not finite or no number")
        images = int(sums["count"]) if "count" in sums and sums["count"].numel() == 1 else 1
        for name, value in sums.items():
            if value.is_floating_point() and bool((value.abs() > LARGEST_SUM * max(images, 1)).any()):
                raise ValueError(f"the sum '{name}' is beyond all bounds")
        for name in WHOLE:
            if name in sums and (sums[name].numel() != 1 or sums[name].is_floating_point()):
                raise ValueError(f"'{name}' is no whole number")
        if "count" in sums and int(sums["count"]) > MOST_IMAGES:
            raise ValueError(f"scores of {int(sums['count'])} images; the limit is {MOST_IMAGES}")

    def check_own_sums(self, sums: Sums, names: Iterable[str]) -> None:
        """ValueError unless the sums that the task itself makes are there, one number each, and none is negative. A
        task that is built on this one may have others besides."""
        for name in names:
            if name not in sums or sums[name].numel() != 1 or bool((sums[name] < 0).any()):
                raise ValueError(f"the sum '{name}' is missing, is no single number, or is negative")
            if name not in WHOLE and sums[name].dtype not in (torch.float32, torch.float64):
                raise ValueError(f"the sum '{name}' was cut off to few digits")

    @abstractmethod
    def finish(self, sums: Sums) -> dict[str, float]:
        """The metrics; those that the data cannot define (e.g. the AUC of a single class) are left out."""


# --- released scores ----------------------------------------------------------------------------------------


def round_counts(counts: Tensor, least: int) -> Tensor:
    """Counts in steps of half of `least`; those below `least` become 0 or `least`, the nearer one. Halves go up."""
    step = max(1, least // 2)
    rounded = (counts + step // 2) // step * step
    small = torch.where(2 * counts >= least, least, 0)
    return torch.where(counts < least, small, rounded).to(counts.dtype)


def round_mean(mean: Tensor, images: int, bound: float) -> Tensor:
    """A mean over so many images, each of which adds between -bound and bound, cut off there and rounded to a multiple
    of a step: 1, 2 or 5 times a power of ten, and no smaller than what one image can change."""
    step = step_above(bound / max(images, 1))
    return (mean.double().clamp(-bound, bound) / step).round() * step


def merge_small(counts: Tensor, least: int, width: int = 1, tail: int = 0) -> Tensor:
    """A histogram [K], float64, whose cells hold `least` images or more each, in counts as `round_counts` has them.

    The first and the last `tail` bins are counted in the bins next to them. The others are taken `width` at a time, and
    neighbours are put together, from the lowest on, until they hold `least`; what is left at the end joins the last
    cell. Cells cover the whole axis: whether bins at its ends or between images are empty is not told, so that nobody
    sees how far from all others an image lies. Fewer than `least` in all become none. The images of a cell are spread
    evenly over its bins.
    """
    inner = counts[tail : len(counts) - tail].clone()
    inner[0] += counts[:tail].sum()
    inner[-1] += counts[len(counts) - tail :].sum()
    spread = torch.zeros(len(counts), dtype=torch.float64)
    for first, last, images in _cells(inner.reshape(-1, width).sum(1).tolist(), least):
        told = float(round_counts(torch.tensor(images), least))
        spread[tail + first * width : tail + last * width] = told / ((last - first) * width)
    return spread


def _cells(counts: list[int], least: int) -> list[tuple[int, int, int]]:
    """(first bin, bin after the last one, images) of cells with `least` images or more, without gaps between them."""
    cells, first, images = [], 0, 0
    for place, count in enumerate(counts, 1):
        images += count
        if images >= least:
            cells.append((first, place, images))
            first, images = place, 0
    if not cells:
        return []
    begun, _, before = cells.pop()
    return [*cells, (begun, len(counts), before + images)]


#: standard normal numbers times the noise of the study, in the shape of a tensor
AddNoise = Callable[[Tensor], Tensor]


def with_noise(sums: Tensor, length: float, noise: AddNoise) -> Tensor:
    """Sums to which one image adds at most `length`, with noise in proportion to it, float64."""
    return sums.double() + length * noise(sums.double())


def nearest_counts(values: Tensor, total: float) -> Tensor:
    """The numbers nearest to `values` [K] that are not negative and add up to `total` (projection on a simplex).

    To cut off negative numbers alone would make the sum too large, the more so the more cells are empty.
    """
    if total <= 0:
        return torch.zeros_like(values)
    sorted_, places = values.sort(descending=True).values, torch.arange(1, len(values) + 1)
    shifts = (sorted_.cumsum(0) - total) / places
    last = int((sorted_ > shifts).nonzero().max())
    return (values - shifts[last]).clamp(min=0)


def whole_counts(values: Tensor, total: int) -> Tensor:
    """Counts, int64, near to `values` [K] that add up to `total`: the largest rests are rounded up."""
    counts = values.floor().long()
    rests = (values - counts).argsort(descending=True, stable=True)
    counts[rests[: total - int(counts.sum())]] += 1
    return counts
