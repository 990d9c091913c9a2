"""A site's privacy account: what it has spent, the records of its releases, and scores with noise of their own.

Written against a site's interface (`federation.site.Site`) and its trainer; the parts are those of `[privacy] on`.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.federation.layers.leaving import transcript_of
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.site import Site
from polyclinic.json_types import JsonObject
from polyclinic.privacy import account as accounts
from polyclinic.privacy.account import Account
from polyclinic.privacy.dp_sgd import noise_from
from polyclinic.privacy.settings import Privacy
from polyclinic.randomness import seed_of
from polyclinic.training.image_draws import Address

#: the group of a site's state in which its account lies
STATE = "privacy"


def is_private(site: Site, part: str) -> bool:
    """Whether the study has the site train this part with differential privacy."""
    return site.trainer.privacy is not None and part in site.trainer.privacy.on


def settings_of(site: Site) -> Privacy:
    assert site.trainer.privacy is not None, "ask is_private first"
    return site.trainer.privacy


def account_of(site: Site) -> Account:
    """What the site has spent on its training images so far, whatever was trained."""
    privacy = settings_of(site)
    images = len(site.data.train)
    # a deployed site counts at its own delta, whatever the study says
    delta = min(privacy.delta_for(images), site.policy.delta_for(images) if site.secret else 1.0)
    return Account.restored(site.state.group(STATE), delta, privacy.accountant)


def enter_steps(site: Site, noise: float, sampling_rate: float, wanted: int) -> tuple[int, Address]:
    """Enter steps that are about to be taken, as many of the wanted ones as the target epsilon allows; how many, and
    the address of their random numbers.

    No address comes twice: noise that is used again can be taken off by subtraction. A deployed site, which may be put
    back, draws by all that it was asked.
    """
    account = account_of(site)
    steps = account.steps_left(settings_of(site).target_epsilon, noise, sampling_rate, wanted)
    address: Address = (site.seed, site.secret, site.name, "privacy", site.round, account.steps)
    if site.secret:
        address = (*address, transcript_of(site.state))
    if steps:
        account.add(noise, sampling_rate, steps)
        if site.secret:  # the name of what comes out of them
            account.trained = seed_of(transcript_of(site.state), account.steps)
        site.state.put(STATE, account.tensors())
    return steps, address


# --- records --------------------------------------------------------------------------------------


def record_of(site: Site, *parts: str, limits: Sequence[str] = ()) -> JsonObject | None:
    """The record of a parcel that holds these parts and nothing else; None if it is not covered.

    `limits`: what else it does not cover.
    """
    if site.trainer.privacy is None or not accounts.covered_parts(site.trainer.privacy.on, parts):
        return None
    codes = [accounts.CODES] if {"generator", "encoder"} & set(parts) else []
    return record_for(site, accounts.names(parts), [*codes, *limits])


def record_for(site: Site, covers: list[str], does_not_cover: list[str]) -> JsonObject:
    """The record of a parcel that covers this, with the limits of every private release at the site."""
    account, unit = account_of(site), settings_of(site).unit
    account.put_on_record()
    if site.secret:
        site.state.put(STATE, account.tensors())
    limits = [*([] if unit == "patient" else [accounts.ONE_IMAGE]), accounts.COUNTS]
    seed = [] if site.secret else [accounts.SEED]
    return accounts.record(account, covers, [*does_not_cover, *limits, *seed], unit=unit)


# --- scores ---------------------------------------------------------------------------------------
# Noised scores are entered in the account of the training steps, as if they were of the same images. Validation and
# test images take part in no step, so that this counts too much rather than too little.


def scored_images(site: Site, split: str) -> ImageSet:
    """The images of a split that are scored: all; or the first one of each patient, where noise must hide a patient."""
    part: ImageSet = getattr(site.data, split)
    privacy = settings_of(site)
    if privacy.score_noise is None or privacy.unit == "image" or part.cases is None:
        return part
    rows = np.sort(np.unique(part.cases, return_index=True)[1])
    arrays = {one.name: getattr(part, one.name) for one in fields(part)}
    return replace(part, **{name: array[rows] for name, array in arrays.items() if isinstance(array, np.ndarray)})


def release_scores(site: Site, split: str, sums: dict[str, Tensor]) -> Parcel | None:
    """Sums of scores as they leave: as they are, or with noise; None if the budget does not allow them any more.

    Exact scores of training images, or of a model without privacy, have no record. A private model's scores on other
    images tell no more about its training images than the model does.
    """
    if site.trainer.privacy is None:
        return Parcel("metrics", sums)
    noise = settings_of(site).score_noise
    if noise is not None:
        allowed, address = enter_steps(site, noise, 1.0, 1)
        if not allowed:
            return None
        draw = noise_from(torch.device("cpu"), *address, "scores")
        sums = site.trainer.task.noised(sums, lambda like: noise * draw(like), site.trainer.target)
        record = record_for(site, ["noised scores"], [accounts.SCORED_COUNTS])
    elif split == "train" or not is_private(site, "classifier"):
        record = None
    else:
        record = record_for(site, ["scores on validation and test images"], [accounts.HELD_OUT])
    return Parcel("metrics", sums, privacy=record)
