"""Epsilon from both sides: a site's private training with canaries, beside what its accountant says.

The real code draws, clips, adds noise and accounts. Canaries join the site's images: rows whose loss lies along a
coordinate of their own, so that the attacker (who sees every noisy gradient: white box) reads a lower bound off one
run. Beside the bound stand checks of what the accountant takes for granted. A lower bound above the upper one, or a
check that a right mechanism fails once in a hundred audits, is an alarm: some mistake leaks more than epsilon says.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD

from polyclinic.attacks.canaries import (
    LEVEL,
    Check,
    check_bound,
    check_noise,
    check_reuse,
    check_sampling,
    gaussian_bound,
    likelihoods,
    lower_bound,
)
from polyclinic.audits.references import PLAIN
from polyclinic.data.parts import ImageSet
from polyclinic.federation.host import SiteHost
from polyclinic.federation.site import Site
from polyclinic.json_types import JsonObject
from polyclinic.methods.private_head import clipped_sum
from polyclinic.privacy.account import certainty_in_words
from polyclinic.privacy.epsilon import gaussian_epsilon
from polyclinic.randomness import numpy_rng
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import threads
from polyclinic.training import image_draws, private, private_steps

CANARIES = 2000  #: half of them in
LOUD = 1e4  #: length of a canary's gradient before it is clipped, in clipping norms
MOST_STEPS = 200
TRIED, AMONG = 4, 16  #: rows that are left out, among so many, to see how much one changes


@dataclass(frozen=True)
class Canaries:
    """Canaries behind so many images of the site: `members` [I] of `count` are in."""

    images: int
    members: np.ndarray
    count: int

    def of(self, index: Tensor, length: float) -> Tensor:
        """Rows [B, M]: a canary's coordinate is `length`; zeros for an image of the site."""
        chosen, rows = torch.zeros(len(index), self.count), (index >= self.images).nonzero().flatten()
        chosen[rows, torch.from_numpy(self.members)[index[rows] - self.images]] = length
        return chosen

    def taken(self, batches: list[Tensor]) -> np.ndarray:
        """Which canaries took part in each step, bool [T, M]."""
        return torch.stack([self.of(index, 1.0).any(0) for index in batches]).numpy()


@dataclass(frozen=True)
class Seen:
    """What the attacker sees of canaries [T, M] in clipping norms, and what the site knows of them."""

    released: np.ndarray
    taken: np.ndarray
    checks: tuple[Check, ...] = ()


def audit_epsilon(assembly: Assembly, site: str, canaries: int = CANARIES) -> JsonObject:
    """What audit.json says of epsilon."""
    privacy, study = assembly.study.privacy, assembly.study
    if privacy is None:
        return {"alarm": None, "words": "not tested: the study has no differential privacy"}
    if "classifier" not in privacy.on:
        words = f"not tested: canaries are for the classifier, and {privacy.on[0]} is private here"
        return {"alarm": None, "words": words}
    is_head = study.method.traits.trains == "private head"
    inside = numpy_rng(study.seed, "canaries").permutation(canaries) < canaries // 2
    opened = assembly.open_images()(site)
    delta = privacy.delta_for(len(opened.train))  # not that of more images
    plain = study.with_settings({**PLAIN, "privacy.target_epsilon": None, "privacy.delta": delta})
    with tempfile.TemporaryDirectory() as folder, threads(study.engine.threads):
        spec = replace(
            replace(assembly, study=plain).host_spec(),
            archive=None, policy=assembly._simulated_policy(), folder=Path(folder),
        )  # fmt: skip
        members = np.flatnonzero(inside)
        data = replace(opened, train=with_canaries(opened.train, len(members), study.seed))
        place = SiteHost(replace(spec, open_data=lambda name: data)).sites.get(site)
        steps = min(MOST_STEPS, _steps_of(place, study, len(opened.train)))
        full = is_head and getattr(study.method, "batch", "") == "full"
        size = None if full else study.optimizer.at_site(site).batch_size
        if is_head:
            seen = _sums(place, size, Canaries(len(opened.train), members, canaries), steps)
        else:
            seen = _training(place, Canaries(len(opened.train), members, canaries), steps)
        account = private.account_of(place)
    return judge(seen, inside, account, steps)


def judge(seen: Seen, inside: np.ndarray, account: Any, steps: int) -> JsonObject:
    """The bounds of both sides, the checks, and whether they agree."""
    if not account.history:
        return {"alarm": True, "words": f"{steps} steps were taken, and nobody charged any", "steps": steps}
    (mechanism, *others) = account.history
    noise, rate, upper = mechanism.noise, mechanism.sampling_rate, account.epsilon
    scores = likelihoods(seen.released, noise, rate)
    lower = lower_bound(scores[inside], scores[~inside], account.delta)
    modelled = gaussian_bound(scores[inside], scores[~inside], lambda shift: gaussian_epsilon(shift, account.delta))
    checks = [
        check_noise(seen.released[:, ~inside], noise), check_reuse(seen.released[:, ~inside]),
        check_sampling(seen.taken[:, inside], rate), *seen.checks,
        check_bound("steps that nobody charged", len(seen.released) - account.steps, 0),
    ]  # fmt: skip
    failed = [one for one in checks if one.chance < LEVEL / len(checks)]
    alarm = lower > upper or bool(failed)
    words = f"epsilon is between {lower:.2f} (canaries, {len(inside)} in one run) and {upper:.2f} (the accountant)"
    if lower > upper:
        words = (
            f"canaries show an epsilon of {lower:.2f} at least, and the accountant says {upper:.2f}: there is a mistake"
        )
    elif failed:
        words = f"{failed[0].name}: {failed[0].words}; what the accountant takes for granted does not hold"
    return {
        "alarm": alarm, "words": words, "upper": round(upper, 4), "lower": round(lower, 4),
        "lower_of_a_gaussian_model": round(modelled, 4), "delta": account.delta, "steps": steps,
        "of_the_run": bool(others) or steps < MOST_STEPS, "canaries": len(inside),
        "checks": [vars(one) for one in checks], "certainty": certainty_in_words(upper, account.delta),
    }  # fmt: skip


def with_canaries(train: ImageSet, count: int, seed: int) -> ImageSet:
    """Training images with so many pictures of noise behind them, each of a patient of its own."""
    rows = train.take(np.concatenate([np.arange(len(train)), np.zeros(count, np.int64)]))
    rng = numpy_rng(seed, "canaries", "pictures")
    rows.images[len(train) :] = rng.integers(0, 256, rows.images[len(train) :].shape, dtype=np.uint8)
    if rows.cases is not None:
        rows.cases[len(train) :] = rows.cases.max() + 1 + np.arange(count)
    return rows


def _steps_of(site: Site, study: Any, images: int) -> int:
    """Private steps of a site in a whole run."""
    if study.method.traits.trains == "private head":
        return int(study.method.rounds)
    each = getattr(study.method, "local_steps", None)
    passes = getattr(study.method, "local_epochs", None) or 1
    return int(study.method.rounds * (each or passes * max(1, images // site.trainer.optimizer.batch_size)))


# --- DP-SGD -----------------------------------------------------------------------------------------------------


class WithCanaries(nn.Module):
    """A network with a coordinate for each canary beside its weights."""

    def __init__(self, network: nn.Module, canaries: int) -> None:
        super().__init__()
        self.network, self.canaries = network, nn.Linear(canaries, 1, bias=False)


def _training(site: Site, canaries: Canaries, steps: int) -> Seen:
    """Private steps of the site's network on its task, as `private_steps.train` takes them."""
    trainer, part, clip = site.trainer, site.data.train, private.settings_of(site).max_grad_norm
    module = WithCanaries(trainer.model, canaries.count).to(trainer.device)
    batches: list[Tensor] = []

    def fetch(index: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
        batches.append(index)
        return (*trainer.batch(part, index, draws), canaries.of(index, LOUD * clip).to(trainer.device))

    def losses(pictures: Tensor, targets: Tensor, chosen: Tensor) -> Tensor:
        own = module.canaries(chosen)[:, 0]
        of_task = trainer.task.losses(module.network(pictures).float(), targets, trainer.target)
        return torch.where(chosen.any(1), own, of_task)

    size = max(1, round(min(1.0, trainer.optimizer.batch_size / canaries.images) * len(part)))
    objective = private_steps.PrivateObjective(module, losses, fetch, size)
    optimizer, seen = SGD(module.parameters(), lr=0.01), []

    def note(module: Any) -> None:
        seen.append(module.canaries.weight.grad[0].detach().cpu().double().numpy().copy())

    private_steps.take_private_steps(site, objective, steps, optimizer, correct=note)
    units = private_steps.units_of(site, private.settings_of(site).unit)
    expected, taken = min(1.0, size / len(part)) * len(units), canaries.taken(batches)
    return Seen(np.stack(seen) * expected / clip, taken, (_one_less(site, objective, losses, clip),))


def _one_less(site: Site, objective: Any, losses: Callable[..., Tensor], clip: float) -> Check:
    """How much the sum of clipped gradients changes where one unit is left out: no more than one clipping norm, or
    units see each other (batch norm, clipping by batch, augmentation by place)."""
    privacy = private.settings_of(site)
    units, sums = private_steps.units_of(site, privacy.unit), private_steps.sums_for(objective.module, privacy)
    whose = torch.arange(len(site.data.train)) if units.patients is None else units.patients
    some = torch.cat([whose[-1:], whose.unique()[: AMONG - 1]])  # a canary, which is loud, and images
    among = torch.isin(whose, some).nonzero().flatten()
    weights, by_row = list(objective.module.parameters()), private_steps.losses_by_row(objective.module, losses)

    def total(index: Tensor) -> Tensor:
        draws = image_draws.image_seeds(units.image_names, index, site.seed, "one less", 0)
        owners = () if units.patients is None else (units.patients[index],)
        batch = (*objective.fetch(index, draws), draws, *owners)
        with sums.following():
            return torch.cat([one.flatten() for one in sums.total(by_row, [batch], clip, weights)])

    objective.module.train()
    whole = total(among)
    lengths = [float((whole - total(among[whose[among] != one])).norm()) for one in some[:TRIED]]
    return check_bound("change by one image or patient, in clipping norms", max(lengths) / clip, 1.0)


# --- private sums -----------------------------------------------------------------------------------------------


def _sums(site: Site, batch_size: int | None, canaries: Canaries, steps: int) -> Seen:
    """Noisy sums of a private head: drawn, bounded and made noisy as its gradients are."""
    clip, rows = private.settings_of(site).max_grad_norm, len(site.data.train)
    batches: list[Tensor] = []

    def bounded(index: Tensor, patients: Tensor | None) -> Tensor:
        return clipped_sum(torch.ones(len(index), 1), canaries.of(index, LOUD * clip), clip, patients)

    def total(index: Tensor, patients: Tensor | None) -> Tensor:
        batches.append(index)
        return bounded(index, patients)

    size = None if batch_size is None else max(1, round(batch_size / canaries.images * rows))
    released = [private_steps.release_sum(site, total, size)[0][0].double().numpy() / clip for _ in range(steps)]
    longest = max(float(bounded(torch.tensor([row]), None).norm()) for row in range(rows - TRIED, rows))
    checks = (check_bound("length of one row, in clipping norms", longest / clip, 1.0),)
    return Seen(np.stack(released), canaries.taken(batches), checks)
