"""The host of sites: runs operations at the sites of one process, with an LRU cache of open sites.

A site's state lies on disk between its turns: a host keeps those it used last in memory, up to a size, so that
memory does not grow with the number of sites' models."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyclinic.data.names import refuse_unsafe_name
from polyclinic.federation.call import COORDINATOR, Call, Reply
from polyclinic.federation.call_check import check_call
from polyclinic.federation.leaving import key_exchange, transcript
from polyclinic.federation.leaving.anchor_file import AnchorFile
from polyclinic.federation.leaving.archive import ParcelArchive
from polyclinic.federation.leaving.budget import SCORES, Budget, Price, price_at, tells_something
from polyclinic.federation.leaving.cohort import (
    GENERATED,
    cohort,
    fewest_patients,
    images_in_generator_step,
    images_in_private_step,
    patients_in,
    scored_splits,
)
from polyclinic.federation.leaving.gate import Gate, GateRefused
from polyclinic.federation.leaving.key_ring import KeyRing, SeedKeys
from polyclinic.federation.leaving.ledger import Ledger
from polyclinic.federation.leaving.parcel import SEALED, Expected, Parcel, ParcelRejected
from polyclinic.federation.leaving.policy import Policy
from polyclinic.federation.leaving.raw_images import RawImages
from polyclinic.federation.leaving.score_course import check_round, check_scores
from polyclinic.federation.leaving.signing import Anchor, is_countersigned, signer_of_line
from polyclinic.federation.leaving.suspension import DataDependentRefusal, Suspended, Suspensions
from polyclinic.federation.leaving.target import Target
from polyclinic.federation.operation import Operation
from polyclinic.federation.site import Site
from polyclinic.federation.state import SitePosition, SiteState, read_state, state_path
from polyclinic.files import atomic_write, write_tensors
from polyclinic.randomness import seeded
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.data.parts import SiteData
    from polyclinic.federation.collaborators import MethodLike, TrainerLike


def room_for_states() -> int:
    """A 32nd of the machine's memory, between 256 MiB and 1 GiB, as processes side by side take as much each.

    Half a dozen sites with ResNet-18 fit into that; without room they are read and written at every turn.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        memory = 0
    return min(max(memory // 32, 2**28), 2**30)


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What the sites of one process have in common."""

    method: MethodLike
    seed: int
    #: what a site trains with, and that of sites with another network, by site
    trainer: TrainerLike
    trainers: Mapping[str, TrainerLike] = field(default_factory=dict)
    #: the run folder
    folder: Path
    open_data: Callable[[str], SiteData]
    policy: Policy
    #: what parcels of each kind must look like
    expected: Mapping[str, Expected]
    #: keeps parcels for an audit, where the study says so
    archive: ParcelArchive | None = None
    #: what leaves instead of a parcel, given what the site had received
    defend: Callable[[Parcel, Mapping[str, Parcel]], Parcel] | None = None
    #: the study's tables [generator], [tuning] and [replay]
    generator: Settings | None = None
    tuning: Settings | None = None
    replay_settings: Settings | None = None
    #: all settings of the study that results depend on, as JSON
    result_settings_json: str = ""
    #: puts a finished model where a deployed site's people find it
    keep_model: Callable[[Mapping[str, Tensor]], None] | None = None
    #: the one site that a deployed host serves; None where all sites of a simulation live in one folder
    only: str | None = None
    #: the sealing and signing keys of a deployed site; those of simulated sites follow from the seed
    keys: KeyRing | None = None
    #: where a deployed site keeps the heads of its ledgers in a second place, a file for each run
    anchors: Path | None = None
    #: where a deployed site's studies are stopped until a person there has looked
    suspensions: Suspensions | None = None
    #: raises Suspended where a deployed site's people have not approved the study, or no longer do
    require_approval: Callable[[], None] | None = None


class SiteHost:
    """Runs operations at the sites of one process: finds the site, runs, and passes results by the gate."""

    #: sites kept open: opening one takes a millisecond, but each holds about ten files, and often only 1024 are allowed
    RESIDENT = 32
    #: bytes of state that open sites keep in memory; sites beyond that, the longest idle first, go to disk
    RESIDENT_BYTES = room_for_states()
    #: sites that may work at once in a grouped operation: all of them are open
    GROUPED = 64
    #: sites whose cache is kept; nobody knows its size
    CACHED = 8

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.keys = key_exchange.KeyExchange()
        self._key_ring: KeyRing = spec.keys or SeedKeys(spec.seed)
        self._sites: OrderedDict[str, Site] = OrderedDict()
        self._gates: dict[str, Gate] = {}  # of the sites in memory
        self._ledgers: dict[str, Ledger] = {}  # of all sites: a chain is checked from its beginning only once
        self._positions: dict[str, SitePosition] = {}
        self._put_back: set[str] = set()  # sites that go on from an earlier checkpoint than their ledger has seen

    def handle(self, call: Call) -> Reply:
        """Run one call. Whatever it raises is the site's failure."""
        [answer] = self.handle_group([call])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_grouped(self, operation: str) -> bool:
        """Whether a method can work at several sites at once in this operation."""
        return self._operation(operation)[1].grouped

    def handle_group(self, calls: Sequence[Call]) -> list[Reply | Exception]:
        """Run an operation at several sites at once; every site's parcels pass its own gate.

        An exception in the answers is one site's failure. Where the work itself fails, it fails for all of them.
        """
        work, declared = self._operation(calls[0].operation)
        group = [call.site for call in calls]
        answers: dict[str, Any] = {call.site: self._caught(self._begin, call, declared, group) for call in calls}
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

    def _begin(self, call: Call, declared: Operation, group: Sequence[str]) -> Turn:
        """Open the site, and what came for it."""
        self._refuse_other_names([call.site])
        self._refuse_while_stopped()
        check_call(call, declared, self._work_of(call), deployed=self.spec.policy.deployed)
        if self.spec.policy.deployed:
            check_round(call, self._rounds)
        site = self._site(call.site, group)
        if call.anchor and self.spec.anchors:
            self._take_anchor(call.site, call.anchor)
        if self.spec.policy.deployed:
            size = model_bytes(site.trainer)
            self._gates[call.site].check_before_work(call.round, call.operation, declared.releases, size)
        site.round = call.round
        turn = Turn(site, call)
        with _undone_on_error([turn]):
            turn.parcels = {name: self._received(site, one, call, declared) for name, one in call.parcels.items()}
        if self.spec.archive:
            self.spec.archive.begins(site, turn.parcels)
        return turn

    @property
    def _rounds(self) -> int:
        """Rounds of the study."""
        return int(getattr(self.spec.method, "rounds", 0))

    def _refuse_while_stopped(self) -> None:
        """Suspended if the people of a deployed site have stopped the study, or must look at it first."""
        if self.spec.require_approval:
            self.spec.require_approval()
        if self.spec.suspensions:
            self.spec.suspensions.refuse_while_any()

    def _take_anchor(self, site: str, anchor: Anchor) -> None:
        """Keep the counter-signed head that came with a call; ParcelRejected unless site and coordinator signed it."""
        own, others = self._key_ring.verifying_keys(site), self._key_ring.verifying_keys(COORDINATOR)
        if signer_of_line(own, anchor.digest, anchor.signature) is None:
            raise ParcelRejected("the ledger's head that came with the call is not signed by this site")
        if not is_countersigned(others, self.spec.folder.name, site, anchor):
            raise ParcelRejected("the ledger's head that came with the call is not signed by the coordinator's key")
        self._ledgers[site].take_anchor(anchor)

    def _work_of(self, call: Call) -> Callable[..., Any]:
        return self._operation(call.operation)[0]

    def _work(self, work: Callable[..., Any], declared: Operation, turns: Sequence[Turn]) -> list[tuple[Parcel, ...]]:
        """What each site releases, before its gate has seen it."""
        call = turns[0].call
        with _undone_on_error(turns):
            for turn in turns:
                if turn.site.secret and turn.site.trainer.privacy is not None:
                    transcript.extend(turn.site, self.spec.result_settings_json, turn.call, turn.parcels)
            # dropout draws from global state
            gpus = range(torch.cuda.device_count())
            with seeded(self.spec.seed, call.site, declared.address, call.round, gpus=gpus):
                if not declared.grouped:
                    return [self._work_alone(work, turn) for turn in turns]
                return self._work_together(work, turns)

    def _work_together(self, work: Callable[..., Any], turns: Sequence[Turn]) -> list[tuple[Parcel, ...]]:
        """The work of several sites at once. A deployed site works by itself, and notes which images it used."""
        names = dict.fromkeys(name for turn in turns for name in turn.payload)
        lists = {name: [turn.payload.get(name) for turn in turns] for name in names}
        with contextlib.ExitStack() as noting:
            if self.spec.policy.deployed:
                [turn] = turns
                turn.used = noting.enter_context(turn.site.trainer.note_batches())
            return [_parcels(released) for released in work([turn.site for turn in turns], **lists)]

    def _work_alone(self, work: Callable[..., Any], turn: Turn) -> tuple[Parcel, ...]:
        """One site's work; an archive and a smallest cohort want to know which images it used."""
        if not (self.spec.archive or self.spec.policy.min_cohort):
            return _parcels(work(turn.site, **turn.payload))
        with turn.site.trainer.note_batches() as turn.used:
            return _parcels(work(turn.site, **turn.payload))

    def _finish(self, turn: Turn, declared: Operation, released: tuple[Parcel, ...]) -> Reply:
        """Pass what a site releases through its gate; where that refuses it, nothing has happened at the site."""
        with _undone_on_error([turn]):
            check_private(turn.site, turn.call.operation, released)
            if self.spec.defend:
                released = tuple(self.spec.defend(parcel, turn.parcels) for parcel in released)
            if self.spec.policy.deployed:
                released = tuple(without_loss(self._scores(turn, declared, parcel)) for parcel in released)
            self._refuse_while_stopped()  # as it may have been since the call began
            leaving = self._release(turn, declared, released)
            return Reply(turn.call.site, leaving, self._ledgers[turn.call.site].head)

    def _scores(self, turn: Turn, declared: Operation, parcel: Parcel) -> Parcel:
        """Scores as a deployed site lets them out: none of training images, others as its policy says; anything else as
        it is."""
        policy = self.spec.policy
        if parcel.kind != SCORES:
            return parcel
        if scored_splits(turn.call, declared, self._work_of(turn.call)) == ("train",):
            return replace(parcel, tensors={})
        if policy.scores == "fine":
            return parcel
        sums = turn.site.trainer.task.coarse(dict(parcel.tensors), max(policy.min_cohort, 1))
        return replace(parcel, tensors=sums)

    def _received(self, site: Site, parcel: Parcel, call: Call, declared: Operation) -> Parcel:
        """A parcel that came, opened if it is sealed, and what the site expects of its kind."""
        if declared.sealed_only and parcel.kind != SEALED:
            raise ParcelRejected(f"'{call.operation}' takes what another site sealed, and {parcel.kind} came open")
        found = key_exchange.unseal(site, parcel, call) if parcel.kind == SEALED else parcel
        self.spec.expected.get(found.kind, Expected(found.kind)).check(found)
        return found

    def _operation(self, name: str) -> tuple[Callable[..., Any], Operation]:
        """An operation of the method, or of the key exchange that every site takes part in, and what it declares."""
        for owner in (self.spec.method, self.keys):
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
            put_back = call.site in self._put_back
            check_scores(call, parcels, self._gates[call.site].ledger, self._rounds, put_back=put_back)
        leaving = self._gates[call.site].release(
            parcels,
            round=call.round,
            operation=call.operation,
            to=call.to,
            simulation_only=declared.simulation_only,
            seal=None if call.to == COORDINATOR else lambda parcel: key_exchange.seal(site, parcel, call),
            cohort=self._cohort(turn, declared, parcels) if policy.min_cohort else None,
        )
        if self.spec.archive:
            self.spec.archive.released(site, call, parcels, turn.used, declared.address)
        return leaving

    def _cohort(self, turn: Turn, declared: Operation, parcels: Sequence[Parcel]) -> int:
        """Patients behind what a site releases: those of its batches, or of the splits it scored."""
        scored = scored_splits(turn.call, declared, self._work_of(turn.call))
        counts = [cohort(turn.site.data, split) for split in scored]
        if scored == ("train",):
            counts += [self._patients_behind(turn, parcel) for parcel in parcels if tells_something(parcel)]
        return min(counts)

    def _patients_behind(self, turn: Turn, parcel: Parcel) -> int:
        """Patients whose training images a parcel is computed from.

        Which images a private step takes is itself a secret, so it counts by its size; but where the site has a budget
        of epsilon, that protects every patient. A generator counts by its mini-batch.
        """
        data, train = turn.site.data, turn.site.data.train
        if parcel.privacy is not None:
            if self.spec.policy.max_epsilon is not None:
                return cohort(data, "train")
            return fewest_patients(train, images_in_private_step(parcel.privacy, len(train)))
        if parcel.kind in GENERATED:
            return fewest_patients(train, images_in_generator_step(self.spec.generator))
        return patients_in(train, turn.used) if turn.used else cohort(data, "train")

    def checkpoint(self) -> dict[str, SitePosition]:
        """Write every changed state to disk; the position of every site this host has worked for."""
        for name in self._sites:
            self.save(name)
        return dict(self._positions)

    def save(self, name: str) -> SitePosition:
        """Write a site's state to disk if it has changed; where the site stands now."""
        self._save(self._sites[name])
        return self._positions[name]

    def resident(self) -> list[Site]:
        """The sites in memory now."""
        return list(self._sites.values())

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        """Forget what happened after the given positions."""
        self._refuse_other_names(positions)
        for position in positions.values():
            SitePosition(*position).check()
        self._sites.clear()
        self._gates.clear()
        self._ledgers.clear()
        self._positions = {name: SitePosition(*position) for name, position in positions.items()}

    def drop_old_versions(self, names: Mapping[str, SitePosition]) -> None:
        """Delete states that a durable checkpoint no longer needs."""
        self._refuse_other_names(names)
        self._refuse_while_stopped()
        for name, position in names.items():
            position.check()
            for path in self._old_states(name, position.version):
                path.unlink(missing_ok=True)

    def _old_states(self, name: str, durable: int) -> list[Path]:
        """The states that a checkpoint with this version does not need. A deployed site, which must not believe the
        coordinator, gives up those before it only, and none if it does not stand so far itself."""
        if self.spec.only is not None:
            stands = self._positions.get(name, SitePosition()).version
            return [state_path(self.spec.folder, name, old) for old in range(durable)] if durable <= stands else []
        kept = state_path(self.spec.folder, name, durable)
        return [path for path in kept.parent.glob("state-*.safetensors") if path != kept]

    def _refuse_other_names(self, names: Iterable[str]) -> None:
        """ParcelRejected for a name that is not this host's: under each name a site would have a budget of its own."""
        for name in names:
            if self.spec.only not in (None, name):
                raise ParcelRejected(f"this host serves site '{self.spec.only}' only")

    def _site(self, name: str, group: Sequence[str] = ()) -> Site:
        if name not in self._sites:
            self._sites[name] = self._open(name)
        self._sites.move_to_end(name)
        self._evict(group)
        return self._sites[name]

    def _evict(self, group: Sequence[str] = ()) -> None:
        """Send the sites that were idle longest to disk; not those at work, nor one in the middle of something."""
        *others, _ = self._sites.values()
        for site in others[: -self.CACHED]:
            site.cache.clear()
        states = sum(site.state.bytes for site in self._sites.values())
        for site in others:
            if len(self._sites) <= self.RESIDENT and states <= self.RESIDENT_BYTES:
                return
            if not site.memory and site.name not in group:
                states -= site.state.bytes
                self._save(site)
                del self._sites[site.name], self._gates[site.name]

    def _open(self, name: str) -> Site:
        spec = self.spec
        refuse_unsafe_name(name)
        position = self._positions.setdefault(name, SitePosition())
        state = read_state(spec.folder, name, position)
        data = spec.open_data(name)
        if name not in self._ledgers:
            anchor = AnchorFile(spec.anchors / f"{spec.folder.name}.json") if spec.anchors else None
            path = spec.folder / "ledger" / f"{name}.jsonl"
            self._ledgers[name] = Ledger(path, self._key_ring.signing_key(name), anchor)
            if position.lines < self._ledgers[name].position.lines:
                self._put_back.add(name)
            self._ledgers[name].expect_repeats_after(position.lines)
        runs = spec.folder.parent if spec.policy.deployed else None  # a site's runs lie side by side
        raw_images = RawImages(data.train.images, data.validation.images, data.test.images)
        price = price_at(spec.policy, data.train)
        budget = Budget(spec.policy, self._ledgers[name].path, runs, price, spec.anchors)
        target = self._target(name, price)
        self._gates[name] = Gate(name, spec.policy, self._ledgers[name], raw_images, budget, target)
        folder = spec.folder / "sites" / name
        folder.mkdir(parents=True, exist_ok=True)
        secret = secret_in(folder) if spec.policy.deployed else ""
        return Site(
            name=name,
            seed=spec.seed,
            data=data,
            trainer=spec.trainers.get(name, spec.trainer),
            state=state,
            folder=folder,
            generator=spec.generator,
            tuning=spec.tuning,
            replay_settings=spec.replay_settings,
            trainers=(spec.trainer, *spec.trainers.values()),
            secret=secret,
            keys=self._key_ring,
            max_delta=spec.policy.delta_for(len(data.train)) if spec.policy.deployed else 1.0,
            keep_model=spec.keep_model,
        )

    def _target(self, name: str, price: Price) -> Target | None:
        """The epsilon that a deployed site's people approved with the study; a simulated site's state is enough."""
        if not self.spec.policy.deployed:
            return None
        privacy = self.spec.trainers.get(name, self.spec.trainer).privacy
        if privacy is None or privacy.target_epsilon is None:
            return None
        return Target(privacy.target_epsilon, self._ledgers[name].path, price)

    def _save(self, site: Site) -> None:
        lines = self._ledgers[site.name].confirmed
        version = self._positions[site.name].version
        if site.state.changed:
            version += 1
            path = state_path(self.spec.folder, site.name, version)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, site.state)
            site.state.changed = False
        self._positions[site.name] = SitePosition(version, lines)


def check_private(site: Site, operation: str, released: Iterable[Parcel]) -> None:
    """LookupError if an operation releases updates trained without differential privacy where the study wants it."""
    privacy = site.trainer.privacy if site.trainer else None
    if privacy is None:
        return
    if privacy.cover == "all":
        check_all_covered(operation, released)
    if "classifier" not in privacy.on:
        return
    for parcel in released:
        if parcel.kind in ("weights", "gradients") and parcel.privacy is None:
            raise LookupError(
                f"'{operation}' trained {parcel.kind} without differential privacy, which privacy.on = 'classifier' "
                "asks for; the method must train with local_training.train, or take 'classifier' out of its traits"
            )


def check_all_covered(operation: str, released: Iterable[Parcel]) -> None:
    """GateRefused if a parcel is not covered by differential privacy, or holds scores, where the study wants all
    covered."""
    for parcel in released:
        if parcel.kind == SCORES or (parcel.privacy is None and parcel.kind != "keys" and tells_something(parcel)):
            raise GateRefused(f"'{operation}' releases {parcel.kind} that nothing covers, and privacy.cover is 'all'")


def without_loss(parcel: Parcel) -> Parcel:
    """The parcel without its training loss, an exact score of training images that no method needs."""
    told = {name: value for name, value in parcel.metadata.items() if name != "loss"}
    return parcel if len(told) == len(parcel.metadata) else replace(parcel, metadata=told)


def model_bytes(trainer: TrainerLike) -> int:
    """The bytes of what a site shares of its model."""
    shared = {name: t for name, t in trainer.model.state_dict().items() if name not in trainer.local_names}
    return sum(tensor.numel() * tensor.element_size() for tensor in shared.values())


def secret_in(folder: Path) -> str:
    """The secret of a deployed site: drawn once, and kept, so that a resumed run draws the same noise again."""
    path = folder / "noise.key"
    if not path.exists():
        atomic_write(path, secrets.token_hex(32), private=True)
    return path.read_text()


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


class Turn:
    """An operation at a site. `undo` leaves the site as it was, as if its process had died: no half-made state (or NaN
    in it) may reach the next round."""

    def __init__(self, site: Site, call: Call) -> None:
        self.site, self.call = site, call
        #: what came with the call, opened
        self.parcels: Mapping[str, Parcel] = {}
        self.before, self.changed = dict(site.state), site.state.changed
        #: indices of the site's images in every batch that it took, where an archive wants them
        self.used: list[Tensor] = []

    @property
    def payload(self) -> dict[str, Any]:
        return {name: parcel.tensors for name, parcel in self.parcels.items()} | dict(self.call.arguments)

    def undo(self) -> None:
        self.site.state = SiteState(self.before)
        self.site.state.changed = self.changed
        self.site.memory.clear()
        self.site.cache.clear()


@contextlib.contextmanager
def _undone_on_error(turns: Sequence[Turn]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for turn in turns:
            turn.undo()
        raise
