"""Absence: a site that comes back after missed rounds; how far weights may have moved, and how long it looks on.

One arrival may move weights as far as `at_once` rounds do. After a longer absence honest training may have exchanged
every row, and no distance tells it from crafted weights. Then the site takes the weights as the course, but owes the
rounds above `at_once`. Each later round with an arrival pays `at_once` rounds less those that the weights may move by
in it, and at least one round: a site that is drawn seldom would look on for ever. Only the first arrival of a round
moves the course. Until nothing is owed, the site looks at what arrives and releases nothing. So whatever a coordinator
pretends, no release is at weights farther away than `at_once` rounds for each round with an arrival, and one more for
each in which the site looked on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from polyclinic.federation.layers import movement
from polyclinic.federation.policy import Incoming
from polyclinic.files import atomic_write

#: in a deployed site's folder: the weights after which the site came back by itself
RETURNED = "returned.json"


def rounds_allowed(
    moved: Mapping[str, float],
    own: Mapping[str, float],
    limits: Incoming,
    gap: int,
    *,
    may_return: Callable[[], bool],
) -> int:
    """The rounds whose movement weights may bring that arrive `gap` rounds after those before.

    As many as are needed by the plain limit: the site's own training, which nobody else knows, must not show in how
    long it looks on. More than `at_once` only where its own training does not explain the movement.
    """
    few, farthest = min(gap, limits.at_once), max(moved.values(), default=0.0)
    if not math.isfinite(farthest):
        return few
    needed = max(1, math.ceil(farthest / limits.moved))
    enough = not any(figure.is_alarm for figure in movement.moved(moved, own, limits, rounds=few))
    return min(needed, few if enough or few == gap or not may_return() else gap)


def owed_after(owed: int, rounds: int, limits: Incoming) -> int:
    """The rounds that a site owes after another arrival, of weights that may move by so many rounds."""
    paid = limits.at_once - rounds
    return max(0, owed - (max(paid, 1) if owed and paid >= 0 else paid))


def looks_on(owed: int, limits: Incoming) -> str:
    """What a site that owes rounds says; nothing where it owes none. The number holds if weights move as in one round
    from each arrival to the next; where they move farther, it takes up to `at_once` - 1 times as long."""
    more = math.ceil(owed / (limits.at_once - 1))
    words = f"{more} more round{'s' if more > 1 else ''}, or longer"
    return f"incoming check: the site missed rounds and looks on for {words}" if owed else ""


class Returns:
    """The digests of weights with which a deployed site came back by itself, in a file that nobody puts back: each time
    the coordinator learns whether the weights had moved farther than `at_once` rounds of the site's training."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / RETURNED

    def allows(self, digest: str, most: int) -> bool:
        """Whether the site may come back with these weights: with these it has before, or not so often yet."""
        known = self._known()
        return digest in known or len(known) < most

    def note(self, digest: str) -> None:
        """The site comes back with these weights; on disk when this returns."""
        known = self._known()
        if digest not in known:
            atomic_write(self.path, json.dumps([*known, digest]), private=True, durable=True)

    def _known(self) -> list[str]:
        return list(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.exists() else []
