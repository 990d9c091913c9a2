"""A site's budget of bytes, epsilon and scores over all its runs, counted from its ledgers.

A study may limit its own epsilon, too (`EpsilonLimit`). A site's state knows what it spent, but the coordinator may put
a run back to an earlier state, or to none. The ledger is not put back.
"""

import contextlib
import copy
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from polyclinic.data.parts import ImageSet
from polyclinic.federation.ledger.kinds import OF_NO_IMAGE, PUBLIC
from polyclinic.federation.ledger.ledger import AnchorFile, verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.files import atomic_write, lock
from polyclinic.privacy.epsilon import Mechanism, group_epsilon

FOLDER = "reserved"
#: held while private work is done: its epsilon is known afterwards, so that all that is left is set aside for it
EPSILON_LOCK = ".epsilon.lock"


class Reserved(NamedTuple):
    """Bytes and parcels of scores."""

    bytes: int = 0
    scores: int = 0


class Reservations:
    """What the runs of one site have set aside, a file in the kit for each run that works now."""

    def __init__(self, runs: Path, run: str) -> None:
        self._folder, self._run = runs.parent / FOLDER, run

    def _lock(self, run: str) -> Path:
        return self._folder / f".{run}.lock"

    @contextlib.contextmanager
    def hold(self, wanted: Reserved) -> Iterator[None]:
        """Set this aside while something is done."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self._folder / f"{self._run}.json"
        with lock(self._lock(self._run)):
            atomic_write(file, json.dumps(wanted), private=True)
            try:
                yield
            finally:
                file.unlink(missing_ok=True)

    def of_others(self) -> Reserved:
        """What other runs have set aside that are still at work."""
        found = Reserved()
        for file in sorted(self._folder.glob("*.json")):
            if file.stem == self._run:
                continue
            try:
                with lock(self._lock(file.stem), wait=0):
                    pass  # nobody works there any more
            except TimeoutError:
                with contextlib.suppress(FileNotFoundError):  # its work has ended just now, and is in its ledger
                    more = Reserved(*json.loads(file.read_text()))
                    found = Reserved(found.bytes + more.bytes, found.scores + more.scores)
        return found


#: held while a budget is checked and charged, by one run of the site at a time
LOCK = ".budget.lock"
#: the kind of parcel that scores leave in
SCORES = "metrics"


class OverBudget(Exception):  # noqa: N818
    """A parcel that the site's budget does not cover; says which one."""


class OverBytes(OverBudget):
    """More bytes than the site's budget has left. Never says how many: a size can depend on the site's images."""

    def __init__(self, most: int) -> None:
        super().__init__(f"more bytes would have left this site than the {most} that its policy allows (max_bytes)")


@dataclass
class Spent:
    """What ledger lines add up to.

    A record has what its run spent up to then. One that does not follow the record before it (it names another one, or
    has fewer steps) comes from a run that was put back: both then count, by plain addition, which may be more than they
    cost, and is never less.
    """

    bytes: int = 0
    scores: int = 0
    closed: float = 0.0
    open: float = 0.0
    steps: int = 0
    trained: int | None = None

    @property
    def epsilon(self) -> float:
        return self.closed + self.open

    def add(self, kind: str, size: int, record: Mapping[str, Any] | None, epsilon: float) -> None:
        """One parcel; `epsilon` is what the site says its record costs."""
        self.bytes += size
        self.scores += kind == SCORES
        if record is None:
            return
        # about the training of the record before it, or about what was made of that
        follows = self.trained in (None, record.get("trained", 0), record.get("after", 0))
        if not follows or record["steps"] < self.steps:
            self.closed, self.open = self.closed + self.open, 0.0
        self.open, self.steps, self.trained = max(self.open, epsilon), record["steps"], record.get("trained", 0)


@dataclass(frozen=True)
class Price:
    """What a record costs at this site: epsilon counted anew, at the site's own delta, for an image or for a patient.

    A study that sets a large delta would else have a small epsilon. `images` is the most that a patient has; None
    where a patient is to be protected, and nobody knows which images are whose. A record about patients (`unit`) is
    taken as it is, one about images by group privacy.
    """

    delta: float = 1.0
    accountants: tuple[str, ...] = ("rdp", "prv")
    images: int | None = 1

    def __call__(self, record: Mapping[str, Any]) -> float:
        if "mechanisms" not in record:
            return math.inf if record["epsilon"] is None else record["epsilon"]
        if record["accountant"] not in self.accountants:
            accepted = ", ".join(self.accountants)
            raise OverBudget(f"the site's policy accepts the accountants {accepted}, not '{record['accountant']}'")
        by_patient = record.get("unit") == "patient"
        if self.images is None and not by_patient:
            raise OverBudget(
                "the site's policy has unit = 'patient', and its images name no patients; set `patient` in "
                "site.toml, or unit = 'image' in policy.toml"
            )
        known = [Mechanism(**one) for one in record["mechanisms"]]
        images = 1 if by_patient or self.images is None else self.images
        return group_epsilon(known, min(self.delta, record["delta"]), images, record["accountant"])


def price_at(policy: Policy, train: ImageSet) -> Price:
    """What a site counts for a record of differential privacy."""
    most = None if train.cases is None else int(np.unique(train.cases, return_counts=True)[1].max(initial=1))
    return Price(policy.delta_for(len(train)), policy.accountants, most if policy.unit == "patient" else 1)


class Budget:
    """What may leave a site in all, as its policy says. The runs of a deployed site lie side by side and share it."""

    def __init__(
        self,
        policy: Policy,
        ledger: Path,
        runs: Path | None = None,
        price: Price | None = None,
        anchors: Path | None = None,
    ) -> None:
        """`ledger` is that of this run; `runs` is the folder with all runs of a deployed site, and `anchors` the one
        with the anchors of their ledgers; `price(record)` is the epsilon that the site counts for a record."""
        self._policy, self._ledger, self._runs, self._anchors = policy, ledger, runs, anchors
        self._price_of = price or Price()
        self._here = self._spent(ledger) if policy.is_limited else Spent()
        self._reservations = Reservations(runs, ledger.parent.parent.name) if runs is not None else None
        self._known: dict[Path, tuple[tuple[int, int], Spent]] = {}  # other runs' ledgers, by size and time

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While a budget is checked and charged: no other run of the site may spend meanwhile."""
        if self._runs is None:
            yield
            return
        with lock(self._runs / LOCK):
            yield

    @contextlib.contextmanager
    def reserved(self, wanted: Reserved, *, private: bool) -> Iterator[None]:
        """While a piece of work is done: what it will spend is set aside from what other runs may spend. OverBudget,
        before the work, if there is not as much left. `private`: it spends epsilon, too."""
        if self._reservations is None or not self._policy.is_limited:
            yield
            return
        most = self._policy.max_epsilon if private else None
        with contextlib.ExitStack() as held:
            if most is not None and self._runs is not None:  # no other run does private work meanwhile
                held.enter_context(lock(self._runs / EPSILON_LOCK))
            with self.locked():
                if wanted.bytes:
                    self.check_bytes(wanted.bytes)
                if wanted.scores:
                    self.check_scores(wanted.scores)
                # what this run has spent may leave again, in another parcel
                spent = sum(run.epsilon for run in self._other_runs())
                if most is not None and spent >= most:
                    raise OverBudget(
                        f"epsilon {spent:.4g} is spent by other runs, and the site's policy allows {most:g}"
                    )
                held.enter_context(self._reservations.hold(wanted))
            yield

    def check(self, parcels: Sequence[Parcel]) -> None:
        """OverBudget unless these parcels, none of which has left before, may leave together."""
        if not self._policy.is_limited or not parcels:
            return
        after, most = copy.copy(self._here), self._policy.max_epsilon
        for parcel in parcels:
            after.add(parcel.kind, parcel.size, parcel.privacy, self._price(parcel.privacy))
        self.check_bytes(after.bytes - self._here.bytes)
        if most is not None:
            if any(parcel.privacy is None and tells_something(parcel) for parcel in parcels):
                raise OverBudget(
                    "the site's policy has an epsilon budget, and differential privacy does not cover this"
                )
            total = after.epsilon + sum(run.epsilon for run in self._other_runs())
            if total > most:
                raise OverBudget(f"epsilon {total:.4g} would be spent, and the site's policy allows {most:g}")
        self.check_scores(after.scores - self._here.scores)

    def check_bytes(self, more: int) -> None:
        """OverBytes if the site may not release so many bytes more: asked before the work, so that the answer does not
        depend on an image."""
        most = self._policy.max_bytes
        if most is not None and self._spent_of("bytes") + more > most:
            raise OverBytes(most)

    def check_scores(self, more: int) -> None:
        """OverBudget if the site may not release so many scores more."""
        most = self._policy.max_scores
        if most is not None and (total := self._spent_of("scores") + more) > most:
            raise OverBudget(f"{total} scores would have left this site, and its policy allows {most} (max_scores)")

    def _spent_of(self, what: Literal["bytes", "scores"]) -> int:
        """What this run and others have released, and what others have set aside for what they are doing now."""
        reserved = self._reservations.of_others() if self._reservations else Reserved()
        return sum(getattr(one, what) for one in (self._here, *self._other_runs(), reserved))

    def spend(self, kind: str, size: int, record: Mapping[str, Any] | None) -> None:
        """A parcel of this size is about to leave."""
        self._here.add(kind, size, record, self._price(record))

    def _price(self, record: Mapping[str, Any] | None) -> float:
        return 0.0 if record is None or self._policy.max_epsilon is None else self._price_of(record)

    def _spent(self, ledger: Path) -> Spent:
        spent = Spent()
        for line in verify(ledger, torn=True) if ledger.exists() else []:
            spent.add(line["kind"], line["bytes"], line["privacy"], self._price(line["privacy"]))
        return spent

    def _other_runs(self) -> list[Spent]:
        """What the site's other ledgers say, under whatever name they were written; read again where they changed.

        LedgerBroken if one is gone or cut short: what it had charged must not be forgotten.
        """
        paths = [] if self._runs is None else sorted(self._runs.glob("*/ledger/*.jsonl"))
        stats = {path: path.stat() for path in paths if path != self._ledger}
        found = {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}
        for anchor in [] if self._anchors is None else sorted(self._anchors.glob("*.json")):
            self._refuse_missing(anchor, found)
        for path, stamp in found.items():
            if self._known.get(path, (None,))[0] != stamp:
                self._known[path] = (stamp, self._spent(path))
        return [spent for _, spent in self._known.values()]

    def _refuse_missing(self, anchor: Path, found: Mapping[Path, tuple[int, int]]) -> None:
        """LedgerBroken unless the ledgers of an anchor's run have all that it has seen."""
        assert self._runs is not None
        folder = self._runs / anchor.stem / "ledger"
        paths = [path for path in found if path.parent == folder]
        if folder == self._ledger.parent or any(self._known.get(path, (None,))[0] == found[path] for path in paths):
            return  # that of this run was checked when it was opened, and one that did not change since, then
        digests = [line["digest_of_line"] for path in paths for line in verify(path, torn=True)]
        AnchorFile(anchor).check(paths[0] if paths else folder, digests)


def size_tells_something(parcel: Parcel) -> bool:
    """Whether a parcel's size depends on more than shapes: on what compresses well, or on the digits of a number."""
    return bool(parcel.compressed or parcel.wire != "exact" or parcel.metadata.keys() - PUBLIC)


def tells_something(parcel: Parcel) -> bool:
    """Whether a parcel holds more than sizes, which count as public."""
    return parcel.kind not in OF_NO_IMAGE and bool(parcel.tensors or parcel.metadata.keys() - PUBLIC)


#: a share of the target by which sums of floats may differ
ROUNDING = 1e-6


class EpsilonLimit:
    """What a run has spent of `privacy.target_epsilon` of its study, for one image."""

    def __init__(self, epsilon: float, ledger: Path, price: Price) -> None:
        """`ledger` is that of the run; `price` is what the site counts for a record."""
        self.epsilon = epsilon
        self._price = dataclasses.replace(price, accountants=("rdp", "prv"), images=1)
        self._spent = Spent()
        for line in verify(ledger, torn=True) if ledger.exists() else []:
            self.spend(line["privacy"])

    def check(self, parcels: Iterable[Parcel]) -> None:
        """OverBudget unless these parcels, none of which has left before, stay within the target together."""
        after = copy.copy(self._spent)
        for parcel in parcels:
            self.spend(parcel.privacy, after)
        if after.epsilon > self.epsilon * (1 + ROUNDING):
            raise OverBudget(
                f"this run would have spent epsilon {after.epsilon:.4g}, and its study sets privacy.target_epsilon = "
                f"{self.epsilon:g}"
            )

    def spend(self, record: Mapping[str, Any] | None, spent: Spent | None = None) -> None:
        """A parcel with this record is about to leave; added to `spent`, if given."""
        if record is not None:
            (spent or self._spent).add("", 0, record, self._price(record))
