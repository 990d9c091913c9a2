"""The sum that a site takes part in: what it remembers from one step to the next, does once, and agrees to.

What a deployed site does once in a sum is written down outside its state, which a coordinator may put back. Simulated
sites, whose secrets follow from the study's seed, are in one hand and write nothing. Before a site gives a share, it
wants the signatures of as many members as open the sum under the same set of sites (the consistency check of Bonawitz
et al. 2017): so a coordinator cannot tell some sites that one answered and others that it dropped out.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from pydantic import Field

from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.keys import signer_of
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.notes import Notes
from polyclinic.federation.site import Site
from polyclinic.federation.sums.arithmetic import Context
from polyclinic.settings import Settings

#: where a site's state keeps it
STATE = "sum"
Step = Literal["keys", "shares", "ready", "added", "agreed", "opened"]
#: what nobody else may know; at a deployed site it lies in memory only, and a sum ends with the process
SECRETS = ("mask_key", "own_seed", "held")


class OpenSum(Settings):
    """A sum at a site. Bytes are hex digits. What is secret is gone once the sum is opened."""

    run: str
    round: int
    operation: str
    step: Step
    #: the private mask key, and the seed of the site's own mask
    mask_key: str = ""
    own_seed: str = ""
    #: public mask keys by site, and those of them that take part
    keys: dict[str, str] = Field(default_factory=dict)
    members: tuple[str, ...] = ()
    #: how many sites must be left
    threshold: int = 0
    #: of each member: the share of its mask key, and that of its own seed
    held: dict[str, tuple[str, str]] = Field(default_factory=dict)
    question: str = ""
    #: those whose answers came, as the site signed
    answered: tuple[str, ...] = ()
    #: names the secrets of this sum, where they lie in memory
    label: str = ""
    #: members that answer and do not lie, at least
    honest: int = 0

    @property
    def private_key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(self.mask_key))

    def context(self, *, of_all: bool = False) -> Context:
        """What the masks are for; before it is known who takes part, `of_all` that gave a key."""
        keys = {site: bytes.fromhex(key) for site, key in self.keys.items()}
        return Context(self.run, self.round, self.operation, keys, tuple(keys) if of_all else self.members)

    def place(self, site: str) -> int:
        """Where a site's shares lie, from 1."""
        return sorted(self.keys).index(site) + 1


def keep(site: Site, found: OpenSum) -> None:
    """Remember a sum in the site's state. The state is written to disk, and no secret of a deployed site is."""
    content = found.model_dump(mode="json")
    if site.secret:
        site.sum_secrets = {found.label: {name: content.pop(name) for name in SECRETS}}
    text = json.dumps(content).encode()
    site.state[STATE] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())


def known(site: Site) -> OpenSum | None:
    """The sum that the site remembers, with its secrets if they are still there; None if there was none."""
    if STATE not in site.state:
        return None
    found = OpenSum.model_validate_json(site.state[STATE].numpy().tobytes())
    return changed(found, site.sum_secrets.get(found.label, {})) if site.secret else found


def at_step(site: Site, operation: str, *steps: Step) -> OpenSum:
    """The sum of this round and operation; ParcelRejected unless it stands at one of these steps."""
    found = known(site)
    if found is None or (found.round, found.operation) != (site.round, operation):
        raise ParcelRejected(f"no sum of '{operation}' has begun in round {site.round}")
    if found.step not in steps:
        raise ParcelRejected(f"the sum of '{operation}' in round {site.round} is past this step ({found.step})")
    if not found.mask_key:
        raise ParcelRejected(
            f"the secrets of the sum of '{operation}' were in the memory of a process that has ended; the site drops "
            "out of this sum"
        )
    return found


def honest_sites(site: Site) -> int:
    """How many honest sites are in the secure sum that the site takes part in, at least; ParcelRejected where there is
    none, as then nothing but the site's own noise protects its answer."""
    found = known(site)
    if found is None or found.round != site.round or found.step != "ready":
        raise ParcelRejected("noise is shared in a secure sum only, and none has begun; set federation.sum = 'secure'")
    if found.honest < 1:  # all sites must add as much noise as the record of each says
        raise ParcelRejected(
            "the site's policy expects more lying sites than federation.liars: the shared noise would be too small; "
            "raise federation.liars"
        )
    return found.honest


def changed(found: OpenSum, changes: Mapping[str, object]) -> OpenSum:
    return OpenSum(**{**found.model_dump(), **changes})


#: in a deployed site's folder: with whom it shared the secrets of a sum, what it answered, and what it helped to open
DONE = "sums.json"


def note_shared(site: Site, found: OpenSum) -> None:
    """A mask key and a seed are shared in one set of keys. In two, the sites of one could tell the mask key and
    those of the other the seed, which together open this site's answer."""
    own = found.keys[site.name]
    _note(site, found, f"shared {own}", _digest(found.keys), "has its secrets shared with other sites")


def note_masked(site: Site, found: OpenSum, question: str, numbers: np.ndarray) -> None:
    """One answer goes under one seed. The difference of two rows under the same masks is that of the answers, and
    a seed that opens one row opens the other."""
    if not site.secret:  # a digest of millions of numbers takes a while
        return
    key = f"masked {hashlib.sha256(bytes.fromhex(found.own_seed)).hexdigest()}"
    now = _digest(found.context().sum_id, question, hashlib.sha256(numbers.data).hexdigest())
    _note(site, found, key, now, "was answered before, in other company or with other numbers")


def note_agreed(site: Site, found: OpenSum, answered: Iterable[str]) -> None:
    """A site agrees to one set of sites, and opens the sum of that one: no second one of a round's answers in another
    company, or to another question."""
    now = _digest(sorted(found.members), sorted(answered), found.question)
    words = "was opened before, of other sites or for another question"
    _note(site, found, f"{found.round} {found.operation}", now, words)


def _note(site: Site, found: OpenSum, key: str, now: str, words: str) -> None:
    """GateRefused where the site did otherwise before."""
    if not site.secret:
        return
    if Notes.at(site.folder / DONE).first(key, now) != now:
        raise GateRefused(
            f"the sum of '{found.operation}' in round {found.round} {words}; submit the study as a new run"
        )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


SIGNATURE_BYTES = 64


def signature_of(site: Site, found: OpenSum, answered: Iterable[str]) -> bytes:
    """The site's word that these sites answered the question that it was asked, in this sum."""
    return site.keys.signing_key(site.name).sign(_text(found, answered))


def check_agreement(site: Site, found: OpenSum, answered: Iterable[str], signatures: object) -> None:
    """ParcelRejected unless enough of the members signed that these sites answered."""
    text, given = _text(found, answered), signatures if isinstance(signatures, Mapping) else {}
    # the newest key alone: one of before a rotation may be in other hands
    signed = sum(
        signer_of(site.keys.verifying_keys(one)[-1:], text, given.get(one)) is not None for one in found.members
    )
    if signed < found.threshold:
        raise ParcelRejected(
            f"{signed} of the {found.threshold} sites that are needed have signed who answered; the coordinator told "
            "sites different things, or some of them left"
        )


def _text(found: OpenSum, answered: Iterable[str]) -> bytes:
    agreed = json.dumps([found.context().sum_id, found.question, sorted(answered)])
    return b"polyclinic sum agreed 1 " + hashlib.sha256(agreed.encode()).digest()
