"""DP-SGD of a coordinator on latents that sites have sent, one latent for each of their training images.

The guarantee is about the model that comes out, for those who see that model and no latents. All latents are sampled
together, so every site's image takes part with the same chance. Each site has an account: what it spent before, on the
encoder, and these steps.
"""

import itertools
import secrets
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import COORDINATOR
from polyclinic.federation.federation import Federation
from polyclinic.json_types import JsonObject
from polyclinic.models import Backbone
from polyclinic.privacy import dp_sgd, epsilon
from polyclinic.privacy.account import CODES, COUNTS, ONE_IMAGE, RELEASES, SEED, SEES_LATENTS, Account, record
from polyclinic.privacy.clipped_sums import ClippedSums
from polyclinic.privacy.epsilon import Mechanism
from polyclinic.randomness import numpy_rng
from polyclinic.training import image_draws
from polyclinic.training.private_steps import losses_by_row


def open_accounts(federation: Federation, counts: Mapping[str, int]) -> JsonObject:
    """What is kept between rounds, in plain values: each site's images and mechanisms so far, and a secret.

    A simulation draws its noise from the seed, so that it can be repeated; the sites of a deployed study know its seed.
    """
    spent = {site: _spent(federation, site) for site in counts}
    secret = "" if federation.engine.simulation else secrets.token_hex(32)
    return {"images": dict(counts), "spent": spent, "secret": secret}


def train(
    federation: Federation,
    kept: JsonObject,
    primary: Backbone,
    latents: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
) -> JsonObject:
    """One round of private steps on (latents, targets), as many as every site's target epsilon allows; the new `kept`.

    Each site's record goes into the result. Arithmetic is float32, whatever the study computes in.
    """
    trainer, privacy = federation.trainer, federation.trainer.privacy
    assert privacy is not None, "the study has the table wherever the primary is private"
    accounts: dict[str, Account] = {}
    for site, images in kept["images"].items():
        history = [Mechanism(noise, rate, int(steps)) for noise, rate, steps in kept["spent"][site]]
        accounts[site] = Account(privacy.delta_for(images), privacy.accountant, history)
    (inputs, targets), total = latents, len(latents[0])
    size = min(trainer.optimizer.batch_size, total)
    rate = epsilon.sampling_rate_for(total, size)
    noise, wanted = privacy.noise_in_sum(rate * total), total // size
    left = {site: one.steps_left(privacy.target_epsilon, noise, rate, wanted) for site, one in accounts.items()}
    steps = min(left.values())
    if not steps and federation.round == 1:
        site = next(site for site, count in left.items() if not count)
        raise WorkFailed(
            f"privacy.target_epsilon: nothing of site '{site}' is left for the primary model after the encoder; raise "
            "it, or lower method.encoder_passes"
        )
    address = (federation.seed, kept["secret"], COORDINATOR, "privacy", federation.round)
    for account in accounts.values():
        account.add(noise, rate, steps)
    draw = dp_sgd.noise_from(trainer.device, *address, "noise")
    mean = dp_sgd.NoisyMean(noise, privacy.max_grad_norm, rate * total, draw)
    indices = dp_sgd.poisson(total, rate, numpy_rng(*address, "images"))
    batches = _batches(inputs, targets, itertools.islice(indices, steps), trainer.device, address)

    def losses(batch: Tensor, wanted: Tensor) -> Tensor:
        return trainer.task.losses(primary(batch), wanted, trainer.target)

    clipped = ClippedSums(primary, privacy.clipping)
    dp_sgd.take_noisy_steps(primary, optimizer, losses_by_row(primary, losses), batches, mean, clipped=clipped)
    limits = [SEES_LATENTS, CODES, ONE_IMAGE, COUNTS, *([SEED] if federation.engine.simulation else [])]
    for site, account in accounts.items():
        federation.coverage.add(site, record(account, [RELEASES["primary"]], limits))
    return {**kept, "spent": {site: [list(one) for one in account.history] for site, account in accounts.items()}}


def _batches(
    latents: Tensor, targets: Tensor, indices: Iterator[Tensor], device: torch.device, address: image_draws.Address
) -> Iterator[dp_sgd.Batch]:
    """Latents and targets on the device, with a seed for each row's dropout behind them."""
    for step, index in enumerate(indices):
        some, wanted = latents[index], targets[index]
        names = image_draws.row_names(some.numpy(), wanted.numpy())
        seeds = image_draws.image_seeds(names, torch.arange(len(index)), *address, step)
        yield some.to(device).float(), wanted.to(device), seeds


def _spent(federation: Federation, site: str) -> list[list[float]]:
    """The mechanisms in the record of what the site released before: of the encoder, at the site that trained it."""
    mechanisms = federation.coverage.records.get(site, {}).get("mechanisms", [])
    try:
        return [[float(one["noise"]), float(one["sampling_rate"]), int(one["steps"])] for one in mechanisms]
    except (KeyError, TypeError, ValueError):
        raise WorkFailed(f"site '{site}' sent a privacy record whose mechanisms cannot be read") from None
