"""Private training at a site: its account, its draws, and the records of what it releases.

Written against a site's interface (`federation.site.Site`) and its trainer; the parts are those of `[privacy] on`.
Opacus is imported when it is needed: it takes a second, and most studies do without.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import SGD, Adam

from polyclinic.federation.layers.privacy import transcript_of
from polyclinic.json_types import JsonObject
from polyclinic.privacy import epsilon
from polyclinic.privacy.account import CODES, COUNTS, ONE_IMAGE, SEED, Account, covered_parts, names, record
from polyclinic.privacy.clipped_sums import MOST_ROWS, ClippedSums, PatientSums, Sums
from polyclinic.randomness import seed_of
from polyclinic.training import image_draws
from polyclinic.training.gpu.graphs import GraphedFunction
from polyclinic.training.private_units import Units, units_of

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike
    from polyclinic.federation.site import Site
    from polyclinic.privacy import dp_sgd
    from polyclinic.privacy.settings import Privacy
    from polyclinic.training.batches import ReplayedBatches
    from polyclinic.training.generator_loop import LearnPrivately, Schedule

#: the group of a site's state in which its account lies
STATE = "privacy"
#: what a trainer keeps the sums of clipped gradients under
CLIPPED_SUMS = "clipped sums"


def is_private(site: Site, part: str) -> bool:
    """Whether the study has the site train this part with differential privacy."""
    return site.trainer.privacy is not None and part in site.trainer.privacy.on


def account_of(site: Site) -> Account:
    """What the site has spent on its training images so far, whatever was trained."""
    privacy = _privacy(site)
    delta = min(privacy.delta_for(len(site.data.train)), site.max_delta)
    return Account.restored(site.state.group(STATE), delta, privacy.accountant)


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
    from polyclinic.privacy import dp_sgd

    privacy, account = _privacy(site), account_of(site)
    units = units_of(site, privacy.unit)
    rate = epsilon.sampling_rate_for(len(site.data.train), objective.batch_size)
    expected = rate * len(units) + objective.joined
    noise = privacy.noise_in_sum(expected)
    steps = account.steps_left(privacy.target_epsilon, noise, rate, steps)
    address = _address(site, account)
    _enter(site, account, noise, rate, steps)
    batches = _with_seeds(units, objective, _draw(site, units, rate, address), address)
    draw = dp_sgd.noise_from(site.trainer.device, *address, "noise")
    mean = dp_sgd.NoisyMean(noise, privacy.clip, expected, draw)
    some = itertools.islice(batches, steps)
    losses = losses_by_row(objective.module, objective.losses)
    clipped = objective.clipped or _new_sums(objective.module, privacy)
    dp_sgd.take_noisy_steps(objective.module, optimizer, losses, some, mean, correct, clipped)
    site.state.put(STATE, account.tensors())
    return steps


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


def _new_sums(module: nn.Module, privacy: Privacy) -> Sums:
    return PatientSums() if privacy.unit == "patient" else ClippedSums(module, privacy.clipping)


def _clipped_sums(site: Site) -> Sums:
    """What computes sums of clipped gradients of the trainer's network: made once, so that all sites share its graphs.

    Dropout by row draws its numbers outside a GPU, which no graph can do again.
    """
    kept, model = site.trainer.kept, site.trainer.model
    if _privacy(site).unit == "patient":
        return PatientSums()
    if CLIPPED_SUMS not in kept:
        drops = any(isinstance(layer, _DropoutNd) and layer.p > 0 for layer in model.modules())
        record = _record_steps if site.trainer.graphs and not drops else None
        kept[CLIPPED_SUMS] = ClippedSums(model, _privacy(site).clipping, record)
    return kept[CLIPPED_SUMS]


def _record_steps(function: Callable[..., list[Tensor]]) -> GraphedFunction:
    return GraphedFunction(function, "engine.graphs: a private training step")


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


def gradients(site: Site, sampling_rate: float) -> dict[str, Tensor]:
    """One private gradient of the trainer's network, by name; zero if the budget does not allow it any more.

    With a sampling rate of 1 all images take part, which no sampling makes more private.
    """
    from polyclinic.privacy import dp_sgd

    trainer, privacy, account = site.trainer, _privacy(site), account_of(site)
    units = units_of(site, privacy.unit)
    noise = privacy.noise_in_sum(sampling_rate * len(units))
    if not account.steps_left(privacy.target_epsilon, noise, sampling_rate, 1):
        return {name: torch.zeros_like(weight, device="cpu") for name, weight in trainer.model.named_parameters()}
    address = _address(site, account)
    _enter(site, account, noise, sampling_rate, 1)
    pieces = _pieces(site, units, next(_draw(site, units, sampling_rate, address)), address)
    draw = dp_sgd.noise_from(trainer.device, *address, "noise")
    mean = dp_sgd.NoisyMean(noise, privacy.clip, sampling_rate * len(units), draw)
    optimizer = SGD(trainer.model.parameters(), lr=0.0)
    clipped = _clipped_sums(site)
    with dp_sgd.private_gradients(trainer.model, optimizer, mean, clipped) as put_gradients:
        put_gradients(losses_by_row(trainer.model, _task_losses(trainer, clipped)), pieces)
        found = {n: p.grad.cpu().clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    site.state.put(STATE, account.tensors())
    return found


def _pieces(site: Site, units: Units, index: Tensor, address: image_draws.Address) -> Iterator[dp_sgd.Batch]:
    """One batch of the site's images in pieces, each with seeds behind it; a patient's images are in one piece."""
    if units.patients is None:
        parts: Iterable[Tensor] = index.split(MOST_ROWS)
    else:
        parts = (index[units.patients[index] == one] for one in units.patients[index].unique())
    for part in parts:
        seeds = image_draws.image_seeds(units.image_names, part, *address, 0)
        yield (*site.trainer.batch(site.data.train, part, seeds), seeds, *_owners(units, part, 0))


def clipping_norm(site: Site) -> float:
    """The longest contribution that one image, or one patient, may have to a private sum."""
    return _privacy(site).clip


def release_sum(
    site: Site,
    total: Callable[[Tensor, Tensor | None], Tensor],
    batch_size: int | None,
    *,
    share: float = 1.0,
) -> tuple[Tensor, float]:
    """A private sum over the site's training images, entered as one step, and how many images (or patients) it is of on
    average; zero if the budget does not allow it.

    `total(index, patients)` is the sum of the images at `index`, on the CPU; each image, or where `patients` [B] are
    given each patient, has at most length `privacy.clip` in it. `batch_size`: as many take part on average, each with
    the same chance; all if None. `share`: the part of the noise that this site adds, where several sites share the
    noise of their sum.
    """
    from polyclinic.privacy import dp_sgd

    privacy, account = _privacy(site), account_of(site)
    units = units_of(site, privacy.unit)
    rate = 1.0 if batch_size is None else epsilon.sampling_rate_for(len(units), batch_size)
    expected = rate * len(units)
    noise = privacy.noise_in_sum(expected)
    if not account.steps_left(privacy.target_epsilon, noise, rate, 1):
        return torch.zeros_like(total(torch.arange(0), None)), expected
    address = _address(site, account)
    _enter(site, account, noise, rate, 1)
    index = torch.arange(len(site.data.train)) if rate == 1 else next(_draw(site, units, rate, address))
    found = total(index, None if units.patients is None else units.patients[index])
    draw = dp_sgd.noise_from(torch.device("cpu"), *address, "noise")
    site.state.put(STATE, account.tensors())
    return found + share * noise * privacy.clip * draw(found), expected


def enter_release(site: Site, noise: float) -> image_draws.Address | None:
    """Enter one release of a noisy sum over all images of some kind, with so much noise for what one image adds; the
    address of its noise, or None if the budget does not allow it."""
    account = account_of(site)
    if not account.steps_left(_privacy(site).target_epsilon, noise, 1.0, 1):
        return None
    address = _address(site, account)
    _enter(site, account, noise, 1.0, 1)
    site.state.put(STATE, account.tensors())
    return address


# --- records ------------------------------------------------------------------------------------------


def record_of(site: Site, *parts: str, limits: Sequence[str] = ()) -> JsonObject | None:
    """The record of a parcel that holds these parts and nothing else; None if it is not covered.

    `limits`: what else it does not cover.
    """
    if site.trainer.privacy is None or not covered_parts(site.trainer.privacy.on, parts):
        return None
    codes = [CODES] if {"generator", "encoder"} & set(parts) else []
    return record_for(site, names(parts), [*codes, *limits])


def record_for(site: Site, covers: list[str], does_not_cover: list[str]) -> JsonObject:
    """The record of a parcel that covers this, with the limits of every private release at the site."""
    account = account_of(site)
    account.put_on_record()
    if site.secret:
        site.state.put(STATE, account.tensors())
    return record(account, covers, [*does_not_cover, *_limits(site)], unit=_privacy(site).unit)


def _limits(site: Site) -> list[str]:
    images = [] if _privacy(site).unit == "patient" else [ONE_IMAGE]
    return [*images, COUNTS] if site.secret else [*images, COUNTS, SEED]


def _privacy(site: Site) -> Privacy:
    assert site.trainer.privacy is not None, "ask is_private first"
    return site.trainer.privacy


def _address(site: Site, account: Account) -> tuple[str | int, ...]:
    """Never the same twice: noise that is used again can be taken off by subtraction. A deployed site, which may be put
    back, draws by all that it was asked."""
    where = (site.seed, site.secret, site.name, "privacy", site.round, account.steps)
    return (*where, transcript_of(site.state)) if site.secret else where


def _enter(site: Site, account: Account, noise: float, sampling_rate: float, steps: int) -> None:
    """Enter steps that are about to be taken, and name what comes out of them."""
    account.add(noise, sampling_rate, steps)
    if steps and site.secret:
        account.trained = seed_of(transcript_of(site.state), account.steps)
