"""What a deployed site does once in a sum, written down outside its state, which a coordinator may put back.

Simulated sites, whose secrets follow from the study's seed, are in one hand and write nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from polyclinic.federation.refusals import GateRefused
from polyclinic.federation.summing.open_sum import OpenSum
from polyclinic.files import atomic_write

if TYPE_CHECKING:
    from polyclinic.federation.site import Site

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
    path = site.folder / DONE
    done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if done.setdefault(key, now) != now:
        raise GateRefused(
            f"the sum of '{found.operation}' in round {found.round} {words}; submit the study as a new run"
        )
    atomic_write(path, json.dumps(done), private=True, durable=True)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
