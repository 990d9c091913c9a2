"""Layers that check a call: whom the answer is for, what the operation takes, the form of what came, and at a deployed
site the order of calls. No image is looked at, so that a refusal tells nothing.

The order: an operation once a round, and scores of weights that are trained next. A coordinator that could have weights
of its choice trained or scored as often as it likes would find out about single patients. The ledger counts, and a file
of the site has the weights that were scored; no coordinator can put them back.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from polyclinic.data.dataset import SPLITS
from polyclinic.federation.call import COORDINATOR, Call, Expected, GateRefused
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.layers.sealing import asked_in_state, unseal
from polyclinic.federation.ledger.budget import SCORES
from polyclinic.federation.ledger.keys import is_countersigned, signer_of_line
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.notes import Notes
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import FRONT, Operation, Parcels, Transaction, signature_of
from polyclinic.federation.site import SiteState
from polyclinic.federation.sums.settings import ADD_FINAL_SCORES, EVALUATE

if TYPE_CHECKING:
    from polyclinic.federation.host import SiteHost


class OwnName(Layer):
    """One host serves one site: under each other name it would have a budget of its own."""

    def arriving(self, transaction: Transaction) -> None:
        self.sites.refuse_other_names([transaction.call.site])


class TakenCall(Layer):
    """The operation answers to who asks, and takes what came."""

    def arriving(self, transaction: Transaction) -> None:
        call, declared, is_open = transaction.call, transaction.declared, transaction.call.to == COORDINATOR
        if declared.releases and is_open == (declared.partner == "sites"):
            only = "another site only, sealed, and the coordinator" if is_open else "the coordinator, and a site"
            raise ParcelRejected(f"'{call.operation}' releases to {only} asked")
        unknown = set(transaction.splits) - set(SPLITS)
        if unknown:
            raise ParcelRejected(f"'{call.operation}': there is no split '{unknown.pop()}'; use {', '.join(SPLITS)}")
        try:
            signature_of(transaction.work).bind(None, **{**call.parcels, **call.arguments})
        except TypeError as error:
            raise ParcelRejected(f"'{call.operation}' does not take what came with it: {error}") from None


class TakenByHospital(TakenCall):
    """The same, without what exists in simulation only, and without scores of training images."""

    def arriving(self, transaction: Transaction) -> None:
        if transaction.declared.partner == "simulator":
            raise GateRefused(f"'{transaction.call.operation}': this exists in simulation only")
        super().arriving(transaction)
        if "split" in signature_of(transaction.work).parameters and "train" in transaction.splits:
            raise GateRefused("scores of training images never leave a deployed site")


class SumSteps(Layer):
    """What is a part of a sum is the coordinator's to ask, in a study that adds up so."""

    def arriving(self, transaction: Transaction) -> None:
        call, sums = transaction.call, self.host.sums
        secret = call.operation in sums.secure_only
        if call.to != COORDINATOR and (secret or call.operation in sums.covered):
            raise ParcelRejected(f"'{call.operation}' is a part of a sum, which the coordinator adds up; nobody else")
        if call.operation in sums.other_scores:
            how = "are added up" if call.operation == EVALUATE else "leave each site by themselves"
            raise ParcelRejected(f"'{call.operation}' was asked, and in this study scores {how}")
        if secret and sums.settings.sum != "secure":
            raise ParcelRejected(f"'{call.operation}' is a part of secure sums, and federation.sum is not 'secure'")
        sum_of = call.arguments.get("sum_of", "")
        if call.operation in sums.steps and not (isinstance(sum_of, str) and sum_of in sums.covered):
            raise ParcelRejected(f"'{call.operation}' is a step of a sum, and {sum_of!r:.40} is none of this study")


class RoundOfStudy(Layer):
    """The study has this round."""

    def arriving(self, transaction: Transaction) -> None:
        round, rounds = transaction.call.round, self.spec.method.rounds
        if type(round) is not int or not 0 <= round <= rounds:
            raise ParcelRejected(f"the study has rounds 0 to {rounds}, and round {round!r} came")


class OpenedSite(Layer):
    """The site's state, images, ledger and gate are at hand."""

    def arriving(self, transaction: Transaction) -> None:
        transaction.site = self.sites.get(transaction.call.site, transaction.group)


class CountersignedHead(Layer):
    """The head of the site's ledger that came with a call is kept, if site and coordinator have signed it."""

    def arriving(self, transaction: Transaction) -> None:
        anchor, site = transaction.call.anchor, transaction.call.site
        if anchor is None or self.spec.kit is None:
            return
        own, others = self.sites.key_ring.verifying_keys(site), self.sites.key_ring.verifying_keys(COORDINATOR)
        if signer_of_line(own, anchor.digest, anchor.signature) is None:
            raise ParcelRejected("the ledger's head that came with the call is not signed by this site")
        if not is_countersigned(others, self.spec.folder.name, site, anchor):
            raise ParcelRejected("the ledger's head that came with the call is not signed by the coordinator's key")
        self.sites.ledgers[site].take_anchor(anchor)


class Begin(Layer):
    """From here on a failure undoes what changed at the site."""

    def arriving(self, transaction: Transaction) -> None:
        transaction.site.round = transaction.call.round
        state = transaction.site.state
        transaction.before = SiteState(state)
        transaction.before.changed = state.changed


class Unsealed(Layer):
    """What another site sealed for this one is opened; some operations take nothing else."""

    def arriving(self, transaction: Transaction) -> None:
        call = transaction.call
        for name, parcel in call.parcels.items():
            is_sealed = parcel.kind == SEALED
            if transaction.declared.partner == "sites" and not is_sealed:
                raise ParcelRejected(f"'{call.operation}' takes what another site sealed, and {parcel.kind} came open")
            transaction.received[name] = unseal(transaction.site, parcel, call) if is_sealed else parcel


class ExpectedForm(Layer):
    """What came is what the site expects of its kind."""

    def arriving(self, transaction: Transaction) -> None:
        for parcel in transaction.received.values():
            self.spec.expected.get(parcel.kind, Expected(parcel.kind)).check(parcel)


class OwnArguments(Layer):
    """Each parcel has its argument's kind, as what is checked follows from that. Weights have all names that the method
    shares of a network: what is left out would keep its value, of the site's own model."""

    def arriving(self, transaction: Transaction) -> None:
        for name, parcel in transaction.received.items():
            check_argument(transaction, name, parcel)


def check_argument(transaction: Transaction, name: str, parcel: Parcel) -> None:
    """ParcelRejected unless the operation takes this parcel, opened, as the argument `name`."""
    declared, taken = transaction.declared, signature_of(transaction.work).parameters.get(name)
    kind, came = declared.kind_of(name), parcel.tensors.keys()
    if parcel.kind != kind:
        raise ParcelRejected(f"'{declared.address}' takes {kind} as '{name}', and {parcel.kind} came in their place")
    if kind != "weights" or (not came and taken is not None and taken.default is None):
        return
    missing: set[str] = set()
    for trainer in (transaction.site.trainer, *transaction.site.trainers):
        whole = set(trainer.model.state_dict())
        shared = whole - trainer.local_names or whole
        if declared.takes.get(name) == FRONT:
            shared = set(trainer.split(trainer.model)[0].state_dict())
        if came in (whole, shared):
            return
        missing = missing or (shared - came)
    left_out = ", ".join(sorted(missing)[:3]) or "nothing"
    raise ParcelRejected(f"weights: the names are not those that the method shares; left out: {left_out}")


#: in a deployed site's folder: the digests of the weights that it scored
SCORED = "scored.json"
#: and those of the calls that it answered
ANSWERED = "answered.json"
#: calls, over a whole run, that may be answered though the same operation was answered in the same round: after
#: interruptions
ALL_REPEATS = 12
#: rounds, beside those for which a site is not chosen, that may be left out after scores
LEFT_OUT = 3
#: in the file of scored weights: the rounds that began at the site
BEGUN = "begun"
#: times more that an operation may release scores of a round that was begun again after an interruption: another site
#: may be missing then, and the model another one
REPEATS = 2


class CallOrder(Layer):
    """What came must be a step of the method's own course, whatever else the coordinator would like to know."""

    def __init__(self, host: "SiteHost") -> None:
        super().__init__(host)
        method = self.spec.method
        ends_early = getattr(method, "patience", None) is not None
        self.course = Course(method.rounds, getattr(method, "fraction", 1.0), ends_early=ends_early)
        #: operations whose mean is the next model: each round begins with the weights that were scored before it
        self._begin = {name for name, how in host.sums.summed.items() if how == "mean"}

    def arriving(self, transaction: Transaction) -> None:
        site, call, declared = transaction.site, transaction.call, transaction.declared
        ledger, scored = self.sites.ledgers[call.site], ScoredWeights.at(site.folder / SCORED)
        if not declared.repeats:
            came = {name: parcel.digest for name, parcel in sorted(call.parcels.items())}
            transaction.asked = hashlib.sha256(json.dumps([asked_in_state(site, call), came]).encode()).hexdigest()
        answered, put_back = AnsweredCalls.at(site.folder / ANSWERED), call.site in self.sites.put_back
        sums = len(self.host.sums.covered) if call.operation in self.host.sums.steps else 1
        check_once(transaction, ledger, answered, self.course, put_back=put_back, sums=sums)
        if call.operation == ADD_FINAL_SCORES and not self.course.may_end_in(call.round):
            raise GateRefused(f"'{call.operation}' came in round {call.round}, and the run is not over")
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


def check_order(call: Call, declared: Operation, ledger: Ledger) -> None:
    """ParcelRejected for a round before one in which the site has released something. After it was put back, what it
    released since then does not count."""
    if not set(declared.releases) <= {"keys"} and call.round < ledger.last_round:
        raise ParcelRejected(f"'{call.operation}' came for round {call.round}, and round {ledger.last_round} has begun")


def check_once(
    transaction: Transaction,
    ledger: Ledger,
    answered: "AnsweredCalls",
    course: Course,
    *,
    put_back: bool,
    sums: int = 1,
) -> None:
    """GateRefused, before the work, if an operation that a method asks once a round has released something in this one.

    Scores have a rule of their own. In a run that was put back, a call that was answered is answered again, the same;
    other calls are answered REPEATS times more, and ALL_REPEATS times in the whole run. `sums`: how many sums of a
    round it may be a step of, each of which is begun, agreed to and opened once (`site_memory`).
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
    elif ledger.times(call.round, call.operation) >= most * sums:
        raise GateRefused(f"'{call.operation}' has released what it made in round {call.round} already")


class AnsweredCalls(Notes):
    """The digests of the calls that a site answered in each round, whoever received what they released."""

    def clear(self) -> None:
        super().clear()
        self._times: Counter[tuple[int, str]] = Counter()
        self._repeated = 0
        #: the first round in which a model was scored twice, as happens when a run is over
        self._ended = math.inf

    def entered(self, name: str, text: str) -> None:
        round, operation, *_ = name.split(" ")
        self._times[int(round), operation] += 1
        if self._times[int(round), operation] > 1:
            self._repeated += 1
            self._ended = min(self._ended, int(round)) if operation == EVALUATE else self._ended
        if operation == ADD_FINAL_SCORES:
            self._ended = min(self._ended, int(round))

    def has(self, call: Call, asked: str) -> bool:
        return asked in self.of(f"{call.round} {_named(call)} {call.to}")

    def times(self, call: Call) -> int:
        """How many different calls of this operation were answered in this round."""
        self.refresh()
        return self._times[call.round, _named(call)]

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
        self.add(f"{call.round} {_named(call)} {call.to}", asked)


def _named(call: Call) -> str:
    """The operation of a call, with the sum that it is a step of."""
    return ":".join([call.operation, *filter(None, [call.arguments.get("sum_of")])])


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
