"""DP-SGD at a site: which images or patients a step takes, their random draws, noisy steps, gradients and sums.

Opacus is imported by `privacy.dp_sgd` when it is needed: it takes a second, and most studies do without.
"""

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import SGD, Adam

from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import TrainerLike
from polyclinic.federation.site import Site
from polyclinic.privacy import dp_sgd, epsilon
from polyclinic.privacy.clipped_sums import MOST_ROWS, ClippedSums, PatientSums, Sums
from polyclinic.privacy.settings import Privacy
from polyclinic.randomness import numpy_rng
from polyclinic.training import image_draws
from polyclinic.training.batches import ReplayedBatches
from polyclinic.training.generator_loop import LearnPrivately, Schedule
from polyclinic.training.gpu.graphs import GraphedFunction
from polyclinic.training.private import enter_steps, is_private, settings_of

#: what a trainer keeps the sums of clipped gradients under
CLIPPED_SUMS = "clipped sums"
#: steps that are drawn ahead for each image or patient
AHEAD = 16
#: what a site's cache keeps them under
CACHED = "private units"


@dataclass(frozen=True)
class Units:
    """`names` are the images or the patients by what their images hold, whoever else is there. `image_names` are those
    of the images; `patients` int64 [N] says whose each image is, and is None where images are the unit."""

    names: list[str]
    image_names: list[str]
    patients: Tensor | None = None

    def __len__(self) -> int:
        return len(self.names)

    def draw(self, sampling_rate: float, address: image_draws.Address, *, by_name: bool) -> Iterator[Tensor]:
        """Endless batches of indices of images, int64 [B]: each unit takes part with the same chance, B may be 0.

        By name, a unit's draws are its own; else they go by its place, and one unit less would change the others'.
        """
        by_place = dp_sgd.poisson(len(self), sampling_rate, numpy_rng(*address, "images"))
        for chosen in self._draw_by_name(sampling_rate, address) if by_name else by_place:
            yield chosen if self.patients is None else torch.isin(self.patients, chosen).nonzero().flatten()

    def _draw_by_name(self, sampling_rate: float, address: image_draws.Address) -> Iterator[Tensor]:
        streams = [numpy_rng(*address, "takes part", name) for name in self.names]
        while True:
            drawn = np.stack([rng.random(AHEAD) for rng in streams]) if streams else np.empty((0, AHEAD))
            for step in range(AHEAD):
                yield torch.from_numpy(np.flatnonzero(drawn[:, step] < sampling_rate))


def units_of(site: Site, unit: str) -> Units:
    """The units of a site's training images; BadInput where patients are to be protected and nobody knows them."""
    key = f"{CACHED} {unit}"
    if key not in site.cache:
        site.cache[key] = find_units(site.data.train, unit, site.name)
    return site.cache[key]


def find_units(images: ImageSet, unit: str, site: str) -> Units:
    """The units of some images of a site."""
    known = image_draws.image_names(images)
    if unit == "image":
        return Units(once_each(known), known)
    if images.cases is None:
        raise BadInput(
            f"privacy.unit: nobody knows which images of site '{site}' are of one patient; name patients in its data, "
            "or set privacy.unit = 'image'"
        )
    found, patients = np.unique(images.cases, return_inverse=True)
    own: list[list[str]] = [[] for _ in found]
    for name, patient in zip(known, patients.tolist(), strict=True):
        own[patient].append(name)
    names = [hashlib.sha256(" ".join(sorted(one)).encode()).hexdigest() for one in own]
    return Units(once_each(names), known, torch.from_numpy(patients.astype(np.int64)))


def once_each(names: Sequence[str]) -> list[str]:
    """The names, those that come again with a number: two equal images must not always take part together."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} {seen[name]}")
    return found


# --- steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrivateObjective:
    """What private steps lower, and on which batches.

    `fetch(index, seeds)` gives the batch of some of the site's training images, `batch_size` of them on average, each
    with a seed for its random draws, and `losses(*batch)` the loss of each row. `join` may put rows behind the batches
    that the guarantee need not be about, such as replayed images; `joined` is how many such rows a batch has on
    average, wherever they come from. `clipped` computes the sums of clipped gradients, where it is kept for the module.
    """

    module: nn.Module
    losses: dp_sgd.Losses
    fetch: Callable[[Tensor, Tensor], dp_sgd.Batch]
    batch_size: int
    join: Callable[[Iterator[dp_sgd.Batch]], Iterator[dp_sgd.Batch]] = iter
    joined: int = 0
    clipped: Sums | None = None


def take_private_steps(
    site: Site,
    objective: PrivateObjective,
    steps: int,
    optimizer: torch.optim.Optimizer,
    *,
    correct: Callable[[nn.Module], None] | None = None,
) -> int:
    """Up to `steps` private steps on the site's training images, as the target epsilon allows; how many were taken."""
    privacy, module = settings_of(site), objective.module
    units = units_of(site, privacy.unit)
    rate = epsilon.sampling_rate_for(len(site.data.train), objective.batch_size)
    expected = rate * len(units) + objective.joined
    noise = privacy.noise_in_sum(expected)
    steps, address = enter_steps(site, noise, rate, steps)
    batches = itertools.islice(_with_seeds(units, objective, _draw(site, units, rate, address), address), steps)
    drawn = dp_sgd.noise_from(site.trainer.device, *address, "noise")
    mean = dp_sgd.NoisyMean(noise, privacy.max_grad_norm, expected, drawn)
    losses, clipped = losses_by_row(module, objective.losses), objective.clipped
    if clipped is None:
        clipped = sums_for(module, privacy)
    dp_sgd.take_noisy_steps(module, optimizer, losses, batches, mean, correct, clipped)
    return steps


def sums_for(module: nn.Module, privacy: Privacy) -> Sums:
    """What computes sums of clipped gradients of a module, of images or of patients."""
    return PatientSums() if privacy.unit == "patient" else ClippedSums(module, privacy.clipping)


def _draw(site: Site, units: Units, rate: float, address: image_draws.Address) -> Iterator[Tensor]:
    """Batches of images. Those of a simulated site go by place, as they always did; patients have names everywhere."""
    return units.draw(rate, address, by_name=bool(site.secret) or units.patients is not None)


def _with_seeds(
    units: Units, objective: PrivateObjective, indices: Iterator[Tensor], address: image_draws.Address
) -> Iterator[dp_sgd.Batch]:
    """The batches with a seed for each row behind them, int64 [B]: an image's own, or by place for what joined it; and
    behind the seeds whose row it is, where patients are the unit."""
    drawn = deque[tuple[Tensor, Tensor]]()

    def fetched() -> Iterator[dp_sgd.Batch]:
        for step, index in enumerate(indices):
            seeds = image_draws.image_seeds(units.image_names, index, *address, step)
            drawn.append((index, seeds))
            yield objective.fetch(index, seeds)

    for step, batch in enumerate(objective.join(fetched())):
        index, seeds = drawn.popleft()
        count = len(batch[0]) - len(seeds)
        joined = image_draws.joined_seeds(count, *address, step)
        yield (*batch, torch.cat([seeds, joined]), *_owners(units, index, count))


def _owners(units: Units, index: Tensor, joined: int) -> tuple[Tensor, ...]:
    """Whose each row of a batch is, where patients are the unit; a row that joined it is nobody else's."""
    if units.patients is None:
        return ()
    return (torch.cat([units.patients[index], len(units) + torch.arange(joined)]),)


def losses_by_row(module: nn.Module, losses: dp_sgd.Losses) -> dp_sgd.Losses:
    """The losses of a batch that has seeds behind it, with dropout by these."""

    def of_rows(*rows: Tensor) -> Tensor:
        with image_draws.dropout_by_row(module, rows[-1]):
            return losses(*rows[:-1])

    return of_rows


def train(
    site: Site,
    steps: int,
    optimizer: torch.optim.Optimizer,
    *,
    correct: Callable[[nn.Module], None] | None = None,
    replayed: ReplayedBatches | None = None,
) -> int:
    """Private steps of the trainer's network on the task; how many were taken.

    `replayed` images join each batch, and the guarantee is not about them.
    """
    trainer, part, clipped = site.trainer, site.data.train, _clipped_sums(site)
    objective = PrivateObjective(
        trainer.model,
        _task_losses(trainer, clipped),
        lambda index, seeds: trainer.batch(part, index, seeds),
        trainer.optimizer.batch_size,
        replayed.join if replayed else iter,  # type: ignore[arg-type]
        replayed.size if replayed else 0,
        clipped,
    )
    return take_private_steps(site, objective, steps, optimizer, correct=correct)


def _clipped_sums(site: Site) -> Sums:
    """What computes sums of clipped gradients of the trainer's network: made once, so that all sites share its graphs.

    Dropout by row draws its numbers outside a GPU, which no graph can do again.
    """
    kept, model = site.trainer.kept, site.trainer.model
    if settings_of(site).unit == "patient":
        return PatientSums()
    if CLIPPED_SUMS not in kept:
        drops = any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules())

        def record(function: Callable[..., list[Tensor]]) -> GraphedFunction:
            return GraphedFunction(function, "engine.graphs: a private training step")

        recorded = site.trainer.graphs and not drops
        kept[CLIPPED_SUMS] = ClippedSums(model, settings_of(site).clipping, record if recorded else None)
    return kept[CLIPPED_SUMS]


def _task_losses(trainer: TrainerLike, clipped: Sums) -> dp_sgd.Losses:
    """The loss of each image. Passes have the study's precision where lengths of gradients are exact all the same: a
    length that was rounded to bfloat16 would bound nothing."""

    def losses(images: Tensor, targets: Tensor) -> Tensor:
        output = trainer.forward(images) if clipped.ghost else trainer.model(images)
        return trainer.task.losses(output.float(), targets, trainer.target)

    return losses


def learners(site: Site, *parts: str) -> dict[str, LearnPrivately]:
    """For a generator: how those of its parts learn that the study has learn with differential privacy."""

    def learn(
        module: nn.Module,
        losses: dp_sgd.Losses,
        batch_of: Callable[[Tensor, Tensor], dp_sgd.Batch],
        schedule: Schedule,
        joined: int,
    ) -> None:
        optimizer = Adam([one for one in module.parameters() if one.requires_grad], schedule.lr)
        wanted = max(1, len(site.data.train) // schedule.batch_size)
        objective = PrivateObjective(module, losses, batch_of, schedule.batch_size, joined=joined)
        for epoch in range(schedule.epochs):
            optimizer.param_groups[0]["lr"] = schedule.lr_in(epoch)
            if take_private_steps(site, objective, wanted, optimizer) < wanted:
                return

    return {part: learn for part in parts if is_private(site, part)}


# --- one gradient, one sum ------------------------------------------------------------------------


def gradients(site: Site, sampling_rate: float) -> dict[str, Tensor]:
    """One private gradient of the trainer's network, by name; zero if the budget does not allow it any more.

    With a sampling rate of 1 all images take part, which no sampling makes more private.
    """
    trainer, model, privacy = site.trainer, site.trainer.model, settings_of(site)
    units = units_of(site, privacy.unit)
    expected = sampling_rate * len(units)
    noise = privacy.noise_in_sum(expected)
    allowed, address = enter_steps(site, noise, sampling_rate, 1)
    if not allowed:
        return {name: torch.zeros_like(weight, device="cpu") for name, weight in model.named_parameters()}
    pieces = _pieces(site, units, next(_draw(site, units, sampling_rate, address)), address)
    mean = dp_sgd.NoisyMean(
        noise, privacy.max_grad_norm, expected, dp_sgd.noise_from(trainer.device, *address, "noise")
    )
    clipped = _clipped_sums(site)
    with dp_sgd.private_gradients(model, SGD(model.parameters(), lr=0.0), mean, clipped) as put_gradients:
        put_gradients(losses_by_row(model, _task_losses(trainer, clipped)), pieces)
        return {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}


def _pieces(site: Site, units: Units, index: Tensor, address: image_draws.Address) -> Iterator[dp_sgd.Batch]:
    """One batch of the site's images in pieces, each with seeds behind it; a patient's images are in one piece."""
    if units.patients is None:
        parts: Iterable[Tensor] = index.split(MOST_ROWS)
    else:
        parts = (index[units.patients[index] == one] for one in units.patients[index].unique())
    for part in parts:
        seeds = image_draws.image_seeds(units.image_names, part, *address, 0)
        yield (*site.trainer.batch(site.data.train, part, seeds), seeds, *_owners(units, part, 0))


def release_sum(
    site: Site,
    total: Callable[[Tensor, Tensor | None], Tensor],
    batch_size: int | None,
    *,
    share: float = 1.0,
    noise: float | None = None,
) -> tuple[Tensor, float]:
    """A private sum over the site's training images, entered as one step, and how many images (or patients) it is of on
    average; zero if the budget does not allow it.

    `total(index, patients)` is the sum of the images at `index`, on the CPU; each image, or where `patients` [B] are
    given each patient, has at most length `privacy.max_grad_norm` in it. `batch_size`: as many take part on average,
    each with the same chance; all if None. `share`: the part of the noise that this site adds, where several sites
    share the noise of their sum. `noise`: another noise multiplier than the study's.
    """
    privacy = settings_of(site)
    units = units_of(site, privacy.unit)
    rate = 1.0 if batch_size is None else epsilon.sampling_rate_for(len(units), batch_size)
    expected = rate * len(units)
    noise = privacy.noise_in_sum(expected) if noise is None else noise
    allowed, address = enter_steps(site, noise, rate, 1)
    if not allowed:
        return torch.zeros_like(total(torch.arange(0), None)), expected
    index = torch.arange(len(site.data.train)) if rate == 1 else next(_draw(site, units, rate, address))
    found = total(index, None if units.patients is None else units.patients[index])
    draw = dp_sgd.noise_from(torch.device("cpu"), *address, "noise")
    return found + share * noise * privacy.max_grad_norm * draw(found), expected
