"""The host of sites: runs operations at the sites of one process; an engine speaks to it only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyclinic.federation.arriving.inspection import Inspection, one_pass
from polyclinic.federation.call import COORDINATOR, Call, Reply, base_of
from polyclinic.federation.call_check import check_call, check_parcel
from polyclinic.federation.host_spec import HostSpec
from polyclinic.federation.leaving import key_exchange, transcript
from polyclinic.federation.leaving.budget import SCORES
from polyclinic.federation.leaving.cohort import scored_splits
from polyclinic.federation.leaving.encodings import ROUNDING
from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.parcel import SEALED, Expected, Parcel, ParcelRejected, shortened
from polyclinic.federation.leaving.score_course import (
    AnsweredCalls,
    ScoredWeights,
    check_once,
    check_order,
    check_round,
    check_scores,
    course_of,
    digest_of_call,
)
from polyclinic.federation.leaving.signing import Anchor, is_countersigned, signer_of_line
from polyclinic.federation.leaving.suspension import DataDependentRefusal, Suspended
from polyclinic.federation.leaving.tested_model import TestedModel
from polyclinic.federation.open_sites import OpenSites
from polyclinic.federation.operation import Operation
from polyclinic.federation.plan import work_at
from polyclinic.federation.release_checks import (
    check_drawn_patients,
    check_private,
    coarse_scores,
    count_patients,
    without_loss,
    without_samples,
)
from polyclinic.federation.site import Site
from polyclinic.federation.state import SitePosition
from polyclinic.federation.summing.floor import floor_of
from polyclinic.federation.summing.site_sums import SiteSums
from polyclinic.federation.turn import Turn, undone_on_error
from polyclinic.randomness import seeded, torch_rng

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike

#: in a deployed site's folder: the digests of the weights that it scored
SCORED = "scored.json"
#: and those of the calls that it answered
ANSWERED = "answered.json"


class SiteHost:
    """Runs operations at the sites of one process: finds the site, runs, and passes results by the gate."""

    #: sites that may work at once in a grouped operation: all of them are open
    GROUPED = 64

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.keys = key_exchange.KeyExchange()
        pinned = len(spec.keys.pinned()) if spec.keys else 0
        self.sums = SiteSums(spec.federated, spec.run_name, floor_of(spec.policy, pinned))
        self.inspection = Inspection(
            spec.policy.incoming,
            spec.first_weights,
            has_course=spec.has_course,
            steps=getattr(spec.method, "steps_at", one_pass),
        )
        self.sites = OpenSites(spec)
        self.course = course_of(spec.method)
        operations = (getattr(getattr(spec.method, name, None), "operation", None) for name in dir(type(spec.method)))
        self._has_beginnings = any(one is not None and one.begins_round for one in operations)
        #: whether replies go to the coordinator as they are, in this process, and not as bytes
        self.by_reference = False

    def handle(self, call: Call) -> Reply:
        """Run one call. Whatever it raises is the site's failure."""
        [answer] = self.handle_group([call])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_grouped(self, operation: str, sites: int) -> bool:
        """Whether the plans of so many sites may be carried out at once in this operation."""
        plan, spec = self._operation(operation)[1].plan, self.spec
        if plan is None or spec.trainers:
            return False
        noted = bool(spec.archive or spec.policy.min_cohort or spec.policy.shares == "random")
        return plan.may_group(spec.method, spec.trainer, sites, noted=noted)

    def can_divide(self, operation: str) -> bool:
        """Whether so many sites that not all are open at once may do an operation in groups, one after the other."""
        plan = self._operation(operation)[1].plan
        return plan is not None and plan.divides

    def handle_group(self, calls: Sequence[Call]) -> list[Reply | Exception]:
        """Run an operation at several sites at once; every site's parcels pass its own gate.

        An exception in the answers is one site's failure. Where the work itself fails, it fails for all of them.
        """
        with contextlib.ExitStack() as held:
            return self._handle_group(calls, held)

    def _handle_group(self, calls: Sequence[Call], held: contextlib.ExitStack) -> list[Reply | Exception]:
        """The same; what deployed sites set aside of their budgets is held until the end."""
        work, declared = self._operation(calls[0].operation)
        group = [call.site for call in calls]
        answers: dict[str, Any] = {call.site: self._caught(self._begin, call, declared, group, held) for call in calls}
        turns = [turn for turn in answers.values() if isinstance(turn, Turn)]
        released = self._caught(self._work, work, declared, turns) if turns else []
        for place, turn in enumerate(turns):
            failed = isinstance(released, Exception)
            answers[turn.call.site] = (
                released if failed else self._caught(self._finish, turn, declared, released[place])
            )
        return list(answers.values())

    def _caught(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns, or the exception that it raises; one that may depend on a deployed site's images
        suspends the study."""
        try:
            return function(*arguments)
        except Exception as error:
            if self.spec.suspensions and may_depend_on_images(error, working=function != self._begin):
                self.spec.suspensions.suspend(self.spec.folder.name, f"{type(error).__name__}: {error}")
            return error

    def _begin(self, call: Call, declared: Operation, group: Sequence[str], held: contextlib.ExitStack) -> Turn:
        """Open the site, and what came for it."""
        self.sites.refuse_other_names([call.site])
        self._refuse_while_stopped()
        check_call(call, declared, self._work_of(call), deployed=self.spec.policy.deployed)
        self.sums.check(declared, call)
        if self.spec.policy.deployed:
            check_round(call, self.spec.method.rounds)
        site, asked = self.sites.get(call.site, group), ""
        if call.anchor and self.spec.anchors:
            self._take_anchor(call.site, call.anchor)
        if self.spec.policy.deployed:
            asked = "" if declared.repeats else digest_of_call(site, call)
            self._check_course(site, call, declared, asked)
            kinds, size, private = (
                self.sums.kinds(declared),
                model_bytes(site.trainer),
                site.trainer.privacy is not None,
            )
            gate = self.sites.gates[call.site]
            held.enter_context(gate.reserved(call.round, call.operation, kinds, size, private=private))
        site.round = call.round
        turn = Turn(site, call, asked=asked)
        with undone_on_error([turn]):
            turn.parcels = {name: self._received(site, name, call, declared) for name in call.parcels}
            looks_on = self.inspection.arrived(site, call, turn.parcels, declared)
        if looks_on:  # what it has seen of the course is kept
            raise ParcelRejected(looks_on)
        if self.spec.archive:
            self.spec.archive.begins(site, turn.parcels)
        return turn

    def _check_course(self, site: Site, call: Call, declared: Operation, asked: str) -> None:
        """What came must be a step of the method's own course, whatever else the coordinator would like to know."""
        ledger, put_back = self.sites.ledgers[call.site], call.site in self.sites.put_back
        answered, scored = AnsweredCalls(site.folder / ANSWERED), ScoredWeights(site.folder / SCORED)
        check_once(call, declared, ledger, answered, asked=asked, course=self.course, put_back=put_back)
        check_order(call, declared, ledger)
        if declared.begins_round:
            scored.check(call)
        if self._has_beginnings and (declared.begins_round or SCORES in declared.releases):
            scored.check_left_out(call, self.course)
        if declared.begins_round:
            scored.begin(call)
        TestedModel(site, declared, call, self._work_of(call)).check(call)

    def _refuse_while_stopped(self) -> None:
        """Suspended if the people of a deployed site have stopped the study, or must look at it first."""
        if self.spec.require_approval:
            self.spec.require_approval()
        if self.spec.suspensions:
            self.spec.suspensions.refuse_while_any()

    def _take_anchor(self, site: str, anchor: Anchor) -> None:
        """Keep the counter-signed head that came with a call; ParcelRejected unless site and coordinator signed it."""
        own, others = self.sites.key_ring.verifying_keys(site), self.sites.key_ring.verifying_keys(COORDINATOR)
        if signer_of_line(own, anchor.digest, anchor.signature) is None:
            raise ParcelRejected("the ledger's head that came with the call is not signed by this site")
        if not is_countersigned(others, self.spec.folder.name, site, anchor):
            raise ParcelRejected("the ledger's head that came with the call is not signed by the coordinator's key")
        self.sites.ledgers[site].take_anchor(anchor)

    def _work_of(self, call: Call) -> Callable[..., Any]:
        return self._operation(call.operation)[0]

    def _work(self, work: Callable[..., Any], declared: Operation, turns: Sequence[Turn]) -> list[tuple[Parcel, ...]]:
        """What each site releases, before its gate has seen it."""
        call = turns[0].call
        with undone_on_error(turns):
            for turn in turns:
                if turn.site.secret and turn.site.trainer.privacy is not None:
                    transcript.extend(turn.site, self.spec.result_settings_json, turn.call, turn.parcels)
            # dropout draws from global state
            gpus = range(torch.cuda.device_count())
            with seeded(*turns[0].site.address(declared.address, call.round), gpus=gpus):
                if len(turns) > 1:
                    made = work_at([turn.site for turn in turns], work, [turn.payload for turn in turns])
                    return [_parcels(released) for released in made]
                return [self._work_alone(work, turns[0])]

    def _work_alone(self, work: Callable[..., Any], turn: Turn) -> tuple[Parcel, ...]:
        """One site's work; an archive and a smallest cohort want to know which images it used."""
        with contextlib.ExitStack() as around:
            around.enter_context(self._shares(turn))
            if self.spec.archive or self.spec.policy.min_cohort:
                turn.used = around.enter_context(turn.site.trainer.note_batches())
            [released] = work_at([turn.site], work, [turn.payload])
            return _parcels(released)

    def _shares(self, turn: Turn) -> contextlib.AbstractContextManager[None]:
        """Random shares of images in the gradients of this work, where the policy wants them: others for every call, so
        that a run that is put back tells nothing more. Differential privacy bounds each image's share itself, and its
        proof wants no other image to change it."""
        site = turn.site
        if self.spec.policy.shares == "equal" or site.trainer.privacy is not None:
            return contextlib.nullcontext()
        return site.trainer.random_shares(torch_rng(*site.address("shares", site.round), site.secret, turn.asked))

    def _finish(self, turn: Turn, declared: Operation, released: tuple[Parcel, ...]) -> Reply:
        """Pass what a site releases through its gate; where that refuses it, nothing has happened at the site."""
        with undone_on_error([turn]):
            check_private(turn.site, turn.call.operation, released)
            self.inspection.left(turn.site, released, turn.parcels.values())
            if self.spec.defend:
                released = tuple(self.spec.defend(parcel, turn.parcels) for parcel in released)
            if attack := self.spec.poisoning:
                told = (turn.call.site, self.spec.seed, turn.call.round)
                released = tuple(attack.update(told[0], parcel, turn.parcels, *told[1:]) for parcel in released)
            if self.spec.policy.deployed:
                splits = self._splits(turn, declared)
                released = tuple(
                    without_loss(coarse_scores(self.spec.policy, turn, splits, parcel)) for parcel in released
                )
            self._refuse_while_stopped()  # as it may have been since the call began
            leaving = self._release(turn, declared, released)
            ledger = self.sites.ledgers[turn.call.site]
            if ledger.is_settled:
                return Reply(turn.call.site, leaving, ledger.head)
            return Reply(turn.call.site, leaving, head_soon=lambda: ledger.head)

    def _splits(self, turn: Turn, declared: Operation) -> tuple[str, ...]:
        """The splits of the site's images that the operation's release is computed from."""
        return scored_splits(turn.call, declared, self._work_of(turn.call))

    def _received(self, site: Site, name: str, call: Call, declared: Operation) -> Parcel:
        """A parcel that came, opened if it is sealed, and what the site expects of its kind."""
        parcel = call.parcels[name]
        if declared.sealed_only and parcel.kind != SEALED:
            raise ParcelRejected(f"'{call.operation}' takes what another site sealed, and {parcel.kind} came open")
        found = key_exchange.unseal(site, parcel, call) if parcel.kind == SEALED else parcel
        self.spec.expected.get(found.kind, Expected(found.kind)).check(found)
        if self.spec.policy.deployed:
            check_parcel(site, name, found, declared, self._work_of(call))
        return found

    def _operation(self, name: str) -> tuple[Callable[..., Any], Operation]:
        """An operation of the method, or of the key exchange and the sums of every site, and what it declares."""
        for owner in (self.spec.method, self.keys, self.sums, *self.spec.more_operations):
            found: Any = getattr(owner, name, None)
            if hasattr(found, "operation"):
                return found, found.operation
        raise LookupError(f"method '{self.spec.method.name}' has no operation '{name}'")

    def _release(self, turn: Turn, declared: Operation, parcels: tuple[Parcel, ...]) -> tuple[Parcel, ...]:
        site, call, policy = turn.site, turn.call, self.spec.policy
        for parcel in parcels:
            if parcel.kind not in declared.releases:
                raise LookupError(f"'{call.operation}' did not declare that it releases {parcel.kind}")
        if policy.deployed:
            check_drawn_patients(policy, turn)
            put_back = call.site in self.sites.put_back
            check_scores(call, parcels, self.sites.gates[call.site].ledger, self.course, put_back=put_back)
        outgoing = self._rounded(call, self._summed(turn, declared, parcels))
        if self.spec.wire == "delta" and call.to == COORDINATOR:
            outgoing = tuple(shortened(parcel, "delta", base_of(turn.parcels)) for parcel in outgoing)
        leaving = self.sites.gates[call.site].release(
            outgoing,
            round=call.round,
            operation=call.operation,
            to=call.to,
            simulation_only=declared.simulation_only,
            seal=None if call.to == COORDINATOR else lambda parcel: key_exchange.seal(site, parcel, call),
            cohort=count_patients(self.spec, turn, self._splits(turn, declared), parcels)
            if policy.min_cohort
            else None,
            by_reference=self.by_reference,
        )
        if policy.deployed and parcels and not declared.repeats:
            AnsweredCalls(site.folder / ANSWERED).note(call, turn.asked)
        if policy.deployed and any(parcel.kind == SCORES for parcel in parcels):
            ScoredWeights(site.folder / SCORED).note(call)
        if policy.deployed and parcels:
            TestedModel(site, declared, call, self._work_of(call)).note(call)
        if self.spec.archive:
            kept = outgoing if self.spec.wire in ROUNDING else parcels  # an attacker gets the rounded numbers
            self.spec.archive.released(site, call, kept, turn.used, declared.address, self._left_as(declared, outgoing))
        return leaving

    def _left_as(self, declared: Operation, outgoing: tuple[Parcel, ...]) -> tuple[Parcel, ...] | None:
        return outgoing if self.sums.covers(declared) or self.spec.wire == "delta" else None

    def _rounded(self, call: Call, parcels: tuple[Parcel, ...]) -> tuple[Parcel, ...]:
        """The parcels with the numbers that their receiver gets, where `engine.wire` rounds them."""
        if self.spec.wire not in ROUNDING:
            return parcels
        for parcel in parcels:  # an image that is rounded is no longer found among the site's own
            self.sites.gates[call.site].check_numbers(parcel)
        return tuple(shortened(parcel, self.spec.wire) for parcel in parcels)

    def _summed(self, turn: Turn, declared: Operation, parcels: tuple[Parcel, ...]) -> tuple[Parcel, ...]:
        """The parcels as they leave: as they are, or as whole numbers of a sum."""
        weighting = getattr(self.spec.method, "weighting", "samples")
        if self.sums.covers(declared):
            gate = self.sites.gates[turn.call.site]
            return self.sums.outgoing(turn.site, turn.call, gate, declared, parcels, weighting)
        return without_samples(self.spec.policy, declared, parcels, weighting)

    def checkpoint(self) -> dict[str, SitePosition]:
        """Write every changed state to disk; the position of every site this host has worked for."""
        return self.sites.checkpoint()

    def settle(self) -> None:
        """Write the lines of all ledgers that wait for digests."""
        self.sites.settle()

    def save(self, name: str) -> SitePosition:
        """Write a site's state to disk if it has changed; where the site stands now."""
        return self.sites.save(name)

    def resident(self) -> list[Site]:
        """The sites in memory now."""
        return self.sites.resident()

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        """Forget what happened after the given positions."""
        self.sites.restore(positions)

    def drop_old_versions(self, names: Mapping[str, SitePosition]) -> None:
        """Delete states that a durable checkpoint no longer needs."""
        self.sites.refuse_other_names(names)
        self._refuse_while_stopped()
        self.sites.drop_old_versions(names)


def model_bytes(trainer: TrainerLike) -> int:
    """The bytes of what a site shares of its model."""
    shared = {name: t for name, t in trainer.model.state_dict().items() if name not in trainer.local_names}
    return sum(tensor.numel() * tensor.element_size() for tensor in shared.values())


def _parcels(released: Any) -> tuple[Parcel, ...]:
    if released is None:
        return ()
    return (released,) if isinstance(released, Parcel) else tuple(released)


def may_depend_on_images(error: Exception, *, working: bool) -> bool:
    """Whether the coordinator could learn something about a site's images from the mere fact of this failure.

    Before the work (`working` is false) nothing has looked at them, unless a check says so. In the work, everything
    may have, but for what the site's policy refuses, what does not fit the study, and a machine that is full.
    """
    if isinstance(error, DataDependentRefusal):
        return True
    unrelated = (GateRefused, ParcelRejected, Suspended, OSError, MemoryError, torch.OutOfMemoryError)
    return working and not isinstance(error, unrelated)
