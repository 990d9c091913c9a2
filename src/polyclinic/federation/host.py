"""The host of sites: runs operations at the sites of one process; an engine speaks to it only.

A site's state lies on disk between its turns: those used last are kept in memory (an LRU cache), up to a size, so that
memory does not grow with the number of sites' models."""

import contextlib
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from polyclinic.errors import Damaged
from polyclinic.federation.call import Call, LooksOn, Reply, may_depend_on_images
from polyclinic.federation.layers import DEPLOYED, SIMULATED, Inspection, Layer
from polyclinic.federation.layers.gate import Gate, RawImages
from polyclinic.federation.layers.raw_volumes import RawVolumes
from polyclinic.federation.layers.sealing import KeyExchange
from polyclinic.federation.layers.suspension import refuse_while_stopped
from polyclinic.federation.ledger.budget import Budget, EpsilonLimit, price_at
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import Operation, Transaction, carry_out
from polyclinic.federation.site import HostSpec, Site, SitePosition, read_state, state_path, version_of
from polyclinic.federation.sums.settings import added_up, floor_of
from polyclinic.federation.sums.site_sums import SiteSums
from polyclinic.files import atomic_write, sync_files, write_tensors
from polyclinic.randomness import seeded


class SiteHost:
    """Runs operations at the sites of one process: a call passes the layers, the work is done, its answer passes them.

    `layers/__init__.py` has the lists of layers, which are the specification of what happens in which order.
    """

    #: sites that may work at once in a grouped operation: all of them are open
    GROUPED = 64

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.keys = KeyExchange()
        self.method = spec.study.method
        pinned = len(spec.kit.keys.pinned()) if spec.kit else 0
        floor = floor_of(spec.policy, pinned)
        self.sums = SiteSums(spec.study.federation, spec.run_name, floor, added_up(spec.study))
        lists = DEPLOYED if spec.policy.deployed else SIMULATED
        self.sites = OpenSites(spec, deployed=lists is DEPLOYED)
        # what an engine asks of the sites' states between calls
        self.checkpoint, self.restore = self.sites.checkpoint, self.sites.restore
        self.save, self.settle, self.resident = self.sites.save, self.sites.settle, self.sites.resident
        self.drop_old_versions = self.sites.drop_old_versions
        #: carries out the plans of sites; reference runs of an audit have those of many hosts carried out at once
        self.carry_out: Callable[[Sequence[Any]], list[Any]] = carry_out
        #: whether replies go to the coordinator as they are, in this process, and not as bytes
        self.by_reference = False
        self.layers = {kind: kind(self) for kind in dict.fromkeys(kind for of_list in lists for kind in of_list)}
        self._arriving, self._working, self._leaving, self._left = (
            [layer for layer in (self.layers[kind] for kind in kinds) if layer.is_needed()] for kinds in lists
        )
        self._alone = any(layer.alone for layer in (*self._working, *self._left))

    @property
    def inspection(self) -> Layer:
        """The incoming check."""
        return self.layers[Inspection]

    def handle(self, call: Call) -> Reply:
        """Run one call. Whatever it raises is the site's failure."""
        [answer] = self.handle_group([call])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def handle_group(self, calls: Sequence[Call]) -> list[Reply | Exception]:
        """Run an operation at several sites at once: each arrives, one work is done, each leaves.

        An exception in the answers is one site's failure. Where the work itself fails, it fails for all of them.
        """
        if len(calls) > 1 and not self.is_grouped(calls[0].operation, len(calls)):
            return [answer for call in calls for answer in self.handle_group([call])]
        work, declared = self._operation(calls[0].operation)
        answers: dict[str, Any] = {}
        for call in calls:
            answers[call.site] = None
        arrived: list[Transaction] = []
        with contextlib.ExitStack() as held:
            for call in calls:
                one = Transaction(call, work, declared, tuple(answers))
                held.enter_context(one.held)
                with self._refusing([one], answers, working=False):
                    for layer in self._arriving:
                        layer.arriving(one)
                    arrived.append(one)
            made: list[Any] = []
            with self._refusing(arrived, answers):
                if arrived:
                    made = self._work(arrived)
            for one, released in zip(arrived, made, strict=False):
                with self._refusing([one], answers):
                    answers[one.call.site] = self._leave(one, released)
        return list(answers.values())

    @contextlib.contextmanager
    def _refusing(
        self, asked: Sequence[Transaction], answers: dict[str, Any], *, working: bool = True
    ) -> Iterator[None]:
        """An exception is the sites' answer, and nothing has happened at them. One that may depend on a deployed site's
        images suspends the study."""
        try:
            yield
        except BaseException as error:
            for one in asked:
                if not isinstance(error, LooksOn):
                    one.undo()
                answers[one.call.site] = one.refusal(error)
            if not isinstance(error, Exception):
                raise
            if self.spec.kit and may_depend_on_images(error, working=working):
                self.spec.kit.suspensions.suspend(self.spec.folder.name, f"{type(error).__name__}: {error}")

    def _work(self, arrived: Sequence[Transaction]) -> list[Any]:
        """What each site makes, before a layer has seen it. Layers around the work are for a site that works alone."""
        first, work = arrived[0], arrived[0].work
        # dropout draws from global state
        gpus = range(torch.cuda.device_count())
        with seeded(*first.site.address(first.declared.address, first.call.round), gpus=gpus):
            for layer in self._working if len(arrived) == 1 else ():
                first.held.enter_context(layer.around(first))
            begun = []
            for one in arrived:
                arguments = dict(one.call.arguments)
                for name, parcel in one.received.items():
                    arguments.setdefault(name, parcel.tensors)
                begun.append(work(one.site, **arguments))
            return self.carry_out(begun)

    def _leave(self, transaction: Transaction, released: Any) -> Reply:
        parcels = () if released is None else (released,) if isinstance(released, Parcel) else tuple(released)
        for layer in self._leaving:
            parcels = layer.leaving(transaction, parcels)
        transaction.sent = parcels
        for layer in self._left:
            layer.left(transaction)
        site, ledger = transaction.call.site, self.sites.ledgers[transaction.call.site]
        if ledger.due:
            return Reply(site, parcels, head_soon=lambda: ledger.head)
        return Reply(site, parcels, ledger.head)

    def is_grouped(self, operation: str, sites: int) -> bool:
        """Whether the plans of so many sites may be carried out at once in this operation; all have one network."""
        plan, spec = self._operation(operation)[1].plan, self.spec
        if plan is None or spec.trainers:
            return False
        return plan.may_group(self.method, spec.trainer, sites, noted=self._alone)

    def can_divide(self, operation: str) -> bool:
        """Whether so many sites that not all are open at once may do an operation in groups, one after the other."""
        plan = self._operation(operation)[1].plan
        return plan is not None and plan.divides

    def _operation(self, name: str) -> tuple[Callable[..., Any], Operation]:
        """An operation of the method, or of the key exchange and the sums of every site, and what it declares."""
        for owner in (self.method, self.keys, self.sums, *self.spec.more_operations):
            found: Any = getattr(owner, name, None)
            if hasattr(found, "operation"):
                return found, found.operation
        raise LookupError(f"method '{self.method.name}' has no operation '{name}'")


def room_for_states() -> int:
    """A 32nd of the machine's memory, between 256 MiB and 1 GiB, as processes side by side take as much each.

    Half a dozen sites with ResNet-18 fit into that; without room they are read and written at every turn.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return 2**28
    return min(max(memory // 32, 2**28), 2**30)


class OpenSites:
    """Opens sites with their gates and ledgers, keeps those used last, and writes the states of others to disk."""

    #: sites kept open: opening one takes a millisecond
    RESIDENT = 256
    #: files that open sites may hold open; often only 1024 are allowed
    FILES = 320
    #: bytes of state that open sites keep in memory; sites beyond that, the longest idle first, go to disk
    RESIDENT_BYTES = room_for_states()
    #: sites whose cache is kept; nobody knows its size
    CACHED = 8

    def __init__(self, spec: HostSpec, *, deployed: bool) -> None:
        self.spec, self.key_ring, self._deployed = spec, spec.key_ring, deployed
        self._limited = deployed or spec.policy.is_limited
        self.gates: dict[str, Gate] = {}  # of the sites in memory
        self.ledgers: dict[str, Ledger] = {}  # of all sites: a chain is checked from its beginning only once
        self.put_back: set[str] = set()  # sites that go on from an earlier checkpoint than their ledger has seen
        self._sites: OrderedDict[str, Site] = OrderedDict()
        self._positions: dict[str, SitePosition] = {}
        self._files: dict[str, int] = {}  # open files of the sites in memory
        self._bytes: dict[str, int] = {}  # of the states of sites in memory, as they were when these were last at work
        self._at_work: set[str] = set()  # sites whose states may have changed since
        self._caching: dict[str, None] = {}  # sites whose cache may hold something, the longest idle first

    def checkpoint(self) -> dict[str, SitePosition]:
        """Write every changed state to disk; the position of every site this host has worked for."""
        for name in self._sites:
            self.save(name)
        if self.spec.study.engine.durable:  # a line of the ledger is on disk before any checkpoint that counts it
            paths = []
            for ledger in self.ledgers.values():
                ledger.settle()
                if ledger.unsynced:
                    ledger.unsynced = False
                    paths.append(ledger.path)
            sync_files(paths)
        return dict(self._positions)

    def saved_positions(self) -> dict[str, SitePosition]:
        """Where the states on disk stand."""
        return dict(self._positions)

    def save(self, name: str) -> SitePosition:
        """Write a site's state to disk if it has changed; where the site stands now."""
        site, version = self._sites[name], self._positions[name].version
        if site.state.changed:
            version += 1
            path = state_path(self.spec.folder, name, version)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, site.state, durable=self.spec.study.engine.durable, placed=True)
            site.state.changed = False
        self._positions[name] = SitePosition(version, self.ledgers[name].confirmed)
        return self._positions[name]

    def settle(self) -> None:
        """Write the lines of all ledgers that wait for digests."""
        for ledger in self.ledgers.values():
            ledger.settle()

    def resident(self) -> list[Site]:
        """The sites in memory now."""
        return list(self._sites.values())

    def restore(self, positions: Mapping[str, SitePosition]) -> None:
        """Forget what happened after the given positions."""
        self.refuse_other_names(positions)
        for position in positions.values():
            SitePosition(*position).check()
        self._sites.clear()
        self._caching.clear()
        self._files.clear()
        self._bytes.clear()
        self.gates.clear()
        self.ledgers.clear()
        self._positions = {name: SitePosition(*position) for name, position in positions.items()}

    def drop_old_versions(self, names: Mapping[str, SitePosition]) -> None:
        """Delete states that a durable checkpoint no longer needs. A deployed site does not believe the coordinator: it
        gives up nothing where it does not stand so far itself."""
        if self.spec.kit:
            self.refuse_other_names(names)
            refuse_while_stopped(self.spec.kit)
        for name, position in names.items():
            position.check()
            durable, stands = position.version, self._positions.get(name, SitePosition()).version
            if durable == 0 or (self.spec.kit and durable > stands):
                continue  # none is older: a folder of each of many sites need not be read
            for path in state_path(self.spec.folder, name, durable).parent.glob("state-*.safetensors"):
                if version_of(path) < durable:
                    path.unlink(missing_ok=True)

    def refuse_other_names(self, names: Iterable[str]) -> None:
        """ParcelRejected for a name that is not this host's: under each name a site would have a budget of its own."""
        own = self.spec.kit
        if own and any(name != own.site for name in names):
            raise ParcelRejected(f"this host serves site '{own.site}' only")

    def get(self, name: str, group: Sequence[str] = ()) -> Site:
        """The site, opened if it is not; those of `group` stay open."""
        if name not in self._sites:
            self._sites[name] = self.open(name)
        self._sites.move_to_end(name)
        self._at_work.add(name)
        self._caching.pop(name, None)
        self._caching[name] = None
        self._evict(group)
        self._at_work = {name, *group}
        return self._sites[name]

    def _evict(self, group: Sequence[str] = ()) -> None:
        """Send the sites that were idle longest to disk; not those at work, nor one in the middle of something."""
        for name in list(self._caching)[: -self.CACHED - 1]:  # those give up what they can make again
            if name in self._sites:
                self._sites[name].cache.clear()
            if name not in self._at_work:  # one that is at work may make it once more, and is looked at again
                del self._caching[name]
        for name in self._at_work & self._sites.keys():
            self._bytes[name] = self._sites[name].state.bytes
        states, files, others = sum(self._bytes.values()), sum(self._files.values()), iter([*self._sites.values()][:-1])
        while len(self._sites) > self.RESIDENT or states > self.RESIDENT_BYTES or files > self.FILES:
            site = next(others, None)
            if site is None:
                return
            if not site.memory and site.name not in group:
                self.save(site.name)
                states -= self._bytes.pop(site.name)
                files -= self._files.pop(site.name)
                del self._sites[site.name], self.gates[site.name]

    def open(self, name: str) -> Site:
        """The site, opened. Its name became a folder when the study was prepared, or is that of the kit."""
        spec = self.spec
        position = self._positions.setdefault(name, SitePosition())
        state = read_state(spec.folder, name, position)
        data = spec.open_data(name)
        if name not in self.ledgers:
            anchor = AnchorFile(spec.kit.anchors / f"{spec.folder.name}.json") if spec.kit else None
            path = spec.folder / "ledger" / f"{name}.jsonl"
            self.ledgers[name] = Ledger(path, self.key_ring.signing_key(name), anchor)
            if position.lines < self.ledgers[name].position.lines:
                self.put_back.add(name)
            self.ledgers[name].expect_repeats_after(position.lines)
        self._files[name] = data.mapped_files
        place = spec.folder / "sites" / name
        site = Site(
            name=name,
            study=spec.study,
            data=data,
            trainer=spec.trainers.get(name, spec.trainer),
            state=state,
            place=place,
            policy=spec.policy,
            trainers=(spec.trainer, *spec.trainers.values()),
            secret=secret_in(place, begun=self.ledgers[name].position.lines > 0) if self._deployed or spec.kit else "",
            keys=self.key_ring,
            kit=spec.kit,
        )
        self.gates[name] = self._gate(site)
        return site

    def _gate(self, site: Site) -> Gate:
        """The site's gate. A deployed one's budget is over all its runs, which lie side by side, and it counts the
        epsilon that its people approved with the study; a simulated site's state is enough for that."""
        spec, ledger, data = self.spec, self.ledgers[site.name], site.data
        budget = target = None
        if self._limited:
            price, privacy = price_at(spec.policy, data.train), site.trainer.privacy if site.secret else None
            runs, anchors = spec.folder.parent if site.secret else None, spec.kit.anchors if spec.kit else None
            budget = Budget(spec.policy, ledger.path, runs, price, anchors)
            if privacy is not None and privacy.target_epsilon is not None:
                target = EpsilonLimit(privacy.target_epsilon, ledger.path, price)
        raw = RawVolumes if data.train.images.dtype == object else RawImages
        raw_images = raw(data.train.images, data.validation.images, data.test.images)
        return Gate(site.name, spec.policy, ledger, raw_images, budget, target)


def secret_in(folder: Path, *, begun: bool = False) -> str:
    """A deployed site's secret for one run: drawn once, and kept, so that a resumed run draws the same again.

    Damaged where it is none of 64 hex digits, which anybody could guess, or is missing although the run has `begun`."""
    path = folder / "noise.key"
    if not path.exists():
        if begun:
            raise Damaged(f"{path}: is missing, and something has left in this run; bring it back from a copy")
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, secrets.token_hex(32), private=True, durable=True)
    if not re.fullmatch(rb"[0-9a-f]{64}", content := path.read_bytes()):
        raise Damaged(f"{path}: is damaged (it is no secret of 64 hex digits); bring it back from a copy")
    return content.decode()
