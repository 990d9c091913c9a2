"""A site's privacy account, and what ledger lines and results say about it: epsilon, what that covers and what not.

A guarantee is about the training images of a site: what was released tells little about any single one of them. It
holds for what came out of private training and for whatever is computed from that; not for anything that was computed
from real images on another way, such as codes, latents, batch-norm statistics or an EMA codebook.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.privacy.epsilon import Accountant, Mechanism, composed_epsilon, steps_for


@dataclass
class Account:
    """`history` in the order of the steps; those of one kind in a row are one mechanism.

    A deployed site may be put back and trained again, for which its budget must pay twice. So every training has a name
    (`trained`, an integer), and a record says of which one it is, and which one the record before it was of (`after`).
    """

    delta: float
    accountant: Accountant = "rdp"
    history: list[Mechanism] = field(default_factory=list)
    trained: int = 0
    recorded: int = 0
    after: int = 0

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.history)

    @property
    def epsilon(self) -> float:
        """The epsilon that has been spent so far."""
        return composed_epsilon(self.history, self.delta, self.accountant)

    def add(self, noise: float, sampling_rate: float, steps: int) -> None:
        """Enter steps that were taken (or are about to be: entered too early is safe, too late is not)."""
        if not steps:
            return
        last = self.history[-1] if self.history else None
        if last is not None and (last.noise, last.sampling_rate) == (noise, sampling_rate):
            self.history[-1] = last._replace(steps=last.steps + steps)
        else:
            self.history.append(Mechanism(noise, sampling_rate, steps))

    def steps_left(self, target: float | None, noise: float, sampling_rate: float, wanted: int) -> int:
        """Number of the `wanted` steps that may still be taken without passing the target epsilon."""
        after = [*self.history, Mechanism(noise, sampling_rate, wanted)]
        if target is None or composed_epsilon(after, self.delta, self.accountant) <= target:
            return wanted
        return steps_for(target, sampling_rate, noise, self.delta, self.accountant, after=self.history)

    def put_on_record(self) -> None:
        """Something of the latest training is about to be released, with a record."""
        if self.trained != self.recorded:
            self.recorded, self.after = self.trained, self.recorded

    # --- in a site's state ------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """As a site keeps it. history float64 [mechanisms, 3]: noise, sampling rate, steps; names int64 [3]."""
        names = torch.tensor([self.trained, self.recorded, self.after])
        return {"history": torch.tensor(self.history, dtype=torch.float64).reshape(-1, 3), "names": names}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], delta: float, accountant: Accountant) -> "Account":
        """The account whose `tensors` a site has kept; an empty one if it has none."""
        rows = tensors["history"].tolist() if "history" in tensors else []
        history = [Mechanism(noise, rate, int(steps)) for noise, rate, steps in rows]
        names = tensors["names"].tolist() if "names" in tensors else (0, 0, 0)
        return cls(delta, accountant, history, *names)


def certainty_in_words(epsilon: float, delta: float) -> str:
    """What epsilon means for one image or patient (Bayes' rule from even odds)."""
    share = 100 / (1 + math.exp(-min(epsilon, 700.0)))
    becomes = f"becomes at most {math.ceil(share)} % sure" if share <= 99 else "may become all but certain"
    return f"an attacker who is 50 % sure that somebody took part {becomes} (but for a chance of {delta:.2g})"


PER_SITE = ("epsilon", "delta", "steps", "sampling_rate")

# --- records --------------------------------------------------------------------------------------------------


EVERYTHING = "everything released"

HELD_OUT = "validation and test images, whose scores are released as they are"
SCORED_COUNTS = "how many validation and test images a site has, which counts as public"
ONE_IMAGE = "a patient with several images: epsilon is for one image and its label"
COUNTS = "how many training images a site has, which counts as public"
CODES = "codes or latents computed from real images, even with a private encoder"
SEES_LATENTS = "the coordinator, and whoever else sees latents: noise is added when it trains the primary model on them"
SAMPLED = "images sampled through generator and prior"
SEED = "anyone who knows the study's seed, from which a simulated site draws its noise"

#: what each part's release is called
RELEASES = {
    "classifier": "weights of the classifier", "encoder": "weights of the encoder",
    "primary": "weights of the primary model, which the coordinator trains on latents",
    "generator": "weights of the generator", "prior": "weights of the prior",
}  # fmt: skip

#: why a parcel without a record of its own is not covered, by its kind
UNCOVERED = {
    "weights": "weights that were trained without differential privacy",
    "gradients": "gradients without clipping and noise",
    "activations": "activations computed from real images",
    "latents": "latents computed from real images",
    "codes": "codes computed from real images",
    "generator": "a generator or prior that was trained without differential privacy",
    "synthetic-images": "images sampled from a generator or prior that was trained without differential privacy",
    "statistics": "statistics computed from real images",
    "masked": "a sum of all sites' updates, each under masks, that were made without differential privacy",
    "metrics": "metrics of training images, or of a model that was trained without differential privacy",
    "labels": "labels of real images",
    "masks": "masks of real images",
    "real-images": "real images",
}


def record(
    account: Account, covers: Sequence[str], does_not_cover: Sequence[str], *, unit: str = "image"
) -> JsonObject:
    """The `privacy` of a ledger line: what the site has spent in all up to now, and what that says about a parcel.

    `noise` and `sampling_rate` are those of the latest steps; `mechanisms` has all of them. `trained` names what a
    deployed site has trained, `after` what the record before this one was about; 0 where nothing has a name. `unit` is
    there where epsilon is for a patient with all images, and not for one image.
    """
    latest = account.history[-1] if account.history else None
    return {
        "epsilon": account.epsilon, "delta": account.delta, "accountant": account.accountant, "steps": account.steps,
        "sampling_rate": latest.sampling_rate if latest else None, "noise": latest.noise if latest else None,
        "mechanisms": [one._asdict() for one in account.history], "trained": account.recorded, "after": account.after,
        "covers": list(covers), "does_not_cover": list(does_not_cover), **({"unit": unit} if unit != "image" else {}),
    }  # fmt: skip


def names(parts: Sequence[str]) -> list[str]:
    """The names of what a covered parcel with these parts covers: images can be sampled only through generator and
    prior."""
    sampled = [SAMPLED] if {"generator", "prior"} <= set(parts) else []
    return [RELEASES[part] for part in parts] + sampled


def covered_parts(on: Iterable[str], trained: Iterable[str]) -> bool:
    """True where a parcel of these parts, and of nothing else that has seen real images, is covered.

    A prior learns codes, which depend on the whole generator: it is covered only together with it.
    """
    private, needed = set(on), set(trained)
    return needed | ({"generator"} if "prior" in needed else set()) <= private


def summary(records: Mapping[str, JsonMapping], uncovered: Iterable[str]) -> JsonObject | None:
    """The `privacy` of a result: that of the site that spent most; None if no site kept an account.

    `records`: each site's last record, its `covers` and `does_not_cover` those of all its parcels together;
    `uncovered`: kinds of parcel that some site released without a record.
    """
    if not records:
        return None
    worst = max(records, key=lambda site: records[site]["epsilon"])
    missing = [UNCOVERED.get(kind, f"{kind} without a privacy record") for kind in sorted(set(uncovered))]
    covers = list(dict.fromkeys(text for one in records.values() for text in one["covers"]))
    limits = list(dict.fromkeys(text for one in records.values() for text in one["does_not_cover"]))
    return {
        **records[worst],
        "site": worst,
        "covers": covers if missing else [EVERYTHING],
        "does_not_cover": [*missing, *limits],
        "per_site": {site: {name: one[name] for name in PER_SITE} for site, one in records.items()},
    }
