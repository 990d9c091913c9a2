"""The order of calls to a deployed site: an operation once a round, and scores of weights that are trained next.

A coordinator that could have weights of its choice trained or scored as often as it likes would find out about single
patients. The ledger counts, and a file of the site has the weights that were scored; no coordinator can put them back.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyclinic.federation.call import Call, GateRefused
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.layers.sealing import asked_in_state
from polyclinic.federation.ledger.appended import Notes
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Operation
from polyclinic.federation.transaction import Parcels, Transaction

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import MethodLike
    from polyclinic.federation.host import SiteHost
    from polyclinic.federation.site import Site

#: in a deployed site's folder: the digests of the weights that it scored
SCORED = "scored.json"
#: and those of the calls that it answered
ANSWERED = "answered.json"
#: calls, over a whole run, that may be answered though the same operation was answered in the same round: after
#: interruptions
ALL_REPEATS = 12
#: rounds, beside those for which a site is not chosen, that may be left out after scores
LEFT_OUT = 3
#: the operation that scores a model
EVALUATE = "evaluate"


class CallOrder(Layer):
    """What came must be a step of the method's own course, whatever else the coordinator would like to know."""

    def __init__(self, host: SiteHost) -> None:
        super().__init__(host)
        self.course = course_of(self.spec.method)
        #: operations whose mean is the next model: each round begins with the weights that were scored before it
        self._begin = {name for name, how in host.sums.summed.items() if how == "mean"}

    def arriving(self, transaction: Transaction) -> None:
        site, call, declared = transaction.site, transaction.call, transaction.declared
        ledger, scored = self.sites.ledgers[call.site], ScoredWeights.at(site.folder / SCORED)
        transaction.asked = "" if declared.repeats else digest_of_call(site, call)
        answered, put_back = AnsweredCalls.at(site.folder / ANSWERED), call.site in self.sites.put_back
        check_once(transaction, ledger, answered, self.course, put_back=put_back)
        check_order(call, declared, ledger)
        begins = call.operation in self._begin
        if begins:
            scored.check(call)
        if begins or (self._begin and SCORES in declared.releases):
            scored.check_left_out(call, self.course)
        if begins:
            scored.begin(call)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        call = transaction.call
        put_back = call.site in self.sites.put_back
        check_scores(call, parcels, self.sites.ledgers[call.site], self.course, put_back=put_back)
        return parcels

    def left(self, transaction: Transaction) -> None:
        call, folder = transaction.call, transaction.site.folder
        if transaction.made and not transaction.declared.repeats:
            AnsweredCalls.at(folder / ANSWERED).note(call, transaction.asked)
        if any(parcel.kind == SCORES for parcel in transaction.made):
            ScoredWeights.at(folder / SCORED).note(call)


class Course(NamedTuple):
    """What of a study says how often a site is asked."""

    rounds: int
    #: the share of the sites that take part in a round
    fraction: float = 1.0
    #: whether the run may be over before its last round (`method.patience`)
    ends_early: bool = False

    def may_end_in(self, round: int) -> bool:
        return round == self.rounds or self.ends_early

    @property
    def left_out(self) -> int:
        """Rounds that may be left out after scores."""
        return LEFT_OUT + math.ceil(1.5 * (1 - self.fraction) * self.rounds)


def course_of(method: MethodLike) -> Course:
    """The course of a method's run."""
    patience = getattr(method, "patience", None)
    return Course(method.rounds, getattr(method, "fraction", 1.0), ends_early=patience is not None)


def check_order(call: Call, declared: Operation, ledger: Ledger) -> None:
    """ParcelRejected for a round before one in which the site has released something. After it was put back, what it
    released since then does not count."""
    if not set(declared.releases) <= {"keys"} and call.round < ledger.last_round:
        raise ParcelRejected(f"'{call.operation}' came for round {call.round}, and round {ledger.last_round} has begun")


def check_once(
    transaction: Transaction, ledger: Ledger, answered: AnsweredCalls, course: Course, *, put_back: bool
) -> None:
    """GateRefused, before the work, if an operation that a method asks once a round has released something in this one.

    Scores have a rule of their own. In a run that was put back, a call that was answered is answered again, the same;
    other calls are answered REPEATS times more, and ALL_REPEATS times in the whole run.
    """
    call, declared, asked = transaction.call, transaction.declared, transaction.asked
    if declared.repeats or (put_back and answered.has(call, asked)):
        return
    if put_back and answered.times(call) and answered.repeated() >= ALL_REPEATS:
        raise GateRefused(f"the run was put back too often: {ALL_REPEATS} calls were answered once more with others")
    if course.ends_early and not put_back and answered.ended_before(call.round):
        raise GateRefused(f"the run was over before round {call.round}: its finished model was scored")
    most = 1 + (REPEATS if put_back else 0)
    if set(declared.releases) <= {SCORES, "keys"}:
        most += course.may_end_in(call.round)  # after the last round the test images are scored, too
        if SCORES in declared.releases and put_back and answered.times(call) >= most:
            raise GateRefused(f"'{call.operation}' has released its scores of round {call.round} already")
    elif ledger.times(call.round, call.operation) >= most:
        raise GateRefused(f"'{call.operation}' has released what it made in round {call.round} already")


def digest_of_call(site: Site, call: Call) -> str:
    """A digest of a call with all that came with it, and of the site's state before it."""
    parcels = {name: parcel.digest for name, parcel in sorted(call.parcels.items())}
    return hashlib.sha256(json.dumps([asked_in_state(site, call), parcels]).encode()).hexdigest()


class AnsweredCalls(Notes):
    """The digests of the calls that a site answered in each round, whoever received what they released."""

    def clear(self) -> None:
        super().clear()
        self._times: Counter[tuple[int, str]] = Counter()
        self._repeated = 0
        #: the first round in which a model was scored twice, as happens when a run is over
        self._ended = math.inf

    def entered(self, name: str, text: str) -> None:
        round, operation = _round_and_operation(name)
        self._times[round, operation] += 1
        if self._times[round, operation] > 1:
            self._repeated += 1
            self._ended = min(self._ended, round) if operation == EVALUATE else self._ended

    def has(self, call: Call, asked: str) -> bool:
        return asked in self.of(_key(call))

    def times(self, call: Call) -> int:
        """How many different calls of this operation were answered in this round."""
        self.refresh()
        return self._times[call.round, call.operation]

    def repeated(self) -> int:
        """How many calls were answered of which the same operation had been answered in the same round before."""
        self.refresh()
        return self._repeated

    def ended_before(self, round: int) -> bool:
        """Whether a model was scored twice in an earlier round."""
        self.refresh()
        return self._ended < round

    def note(self, call: Call, asked: str) -> None:
        """The site answers this call."""
        self.add(_key(call), asked)


def _key(call: Call) -> str:
    return f"{call.round} {call.operation} {call.to}"


def _round_and_operation(key: str) -> tuple[int, str]:
    round, operation, *_ = key.split(" ")
    return int(round), operation


class ScoredWeights(Notes):
    """The digests of the weights that a site scored in each round: the next round must begin with them."""

    def clear(self) -> None:
        super().clear()
        self._begun: set[int] = set()
        #: scored rounds after which none has begun
        self._open: set[int] = set()

    def entered(self, name: str, text: str) -> None:
        if name == BEGUN:
            self._begun.add(int(text))
            self._open.discard(int(text) - 1)
        elif int(name) + 1 not in self._begun:
            self._open.add(int(name))

    def note(self, call: Call) -> None:
        """The site has released scores of the weights that came with a call."""
        if "weights" in call.parcels:
            self.add(str(call.round), call.parcels["weights"].digest)

    def check(self, call: Call) -> None:
        """ParcelRejected for weights to begin a round with that are not those scored in the round before it."""
        scored = self.of(str(call.round - 1))
        if scored and "weights" in call.parcels and call.parcels["weights"].digest not in scored:
            raise ParcelRejected(
                f"the weights that came for '{call.operation}' in round {call.round} are not those that were scored in "
                f"round {call.round - 1}"
            )

    def begin(self, call: Call) -> None:
        """A round begins at the site."""
        self.add(BEGUN, str(call.round))

    def check_left_out(self, call: Call, course: Course) -> None:
        """GateRefused where too many rounds were left out after scores: nobody compares what is scored then with what
        is trained next."""
        self.refresh()
        left_out = sum(number + 1 < call.round for number in self._open)
        if left_out > course.left_out:
            raise GateRefused(f"the rounds after {left_out} scored ones were left out, and {course.left_out} may be")


#: in the file of scored weights: the rounds that began at the site
BEGUN = "begun"
#: times more that an operation may release scores of a round that was begun again after an interruption: another site
#: may be missing then, and the model another one
REPEATS = 2


def check_scores(
    call: Call, parcels: Sequence[Parcel], ledger: Ledger, course: Course, *, put_back: bool = False
) -> None:
    """GateRefused if an operation has released its scores of this round already.

    After the last round the test images are scored, too. What repeats a line on record, after a run was interrupted,
    tells nothing new. `put_back`: the run was interrupted, and goes on from an earlier checkpoint.
    """
    address = (call.round, call.operation)
    new = [one for one in parcels if one.kind == SCORES and not ledger.has(*address, one.kind, one.digest, call.to)]
    before = ledger.times(*address, kind=SCORES)
    allowed = (2 if course.may_end_in(call.round) else 1) + (REPEATS if put_back else 0)
    if before + len(new) > allowed:
        raise GateRefused(f"'{call.operation}' has released its scores of round {call.round} already")
