"""Open sites: an LRU cache of the sites of one process.

A site's state lies on disk between its turns: those used last are kept in memory, up to a size, so that memory does
not grow with the number of sites' models."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from polyclinic.data.allowed_paths import refuse_unsafe_name
from polyclinic.federation.layers.gate import Gate, RawImages
from polyclinic.federation.ledger.budget import Budget, EpsilonLimit, Price, price_at
from polyclinic.federation.ledger.key_ring import KeyRing, SeedKeys
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.federation.ledger.parcel import ParcelRejected
from polyclinic.federation.ledger.signing import AnchorFile
from polyclinic.federation.site import HostSpec, Site, SitePosition, read_state, state_path, version_of
from polyclinic.files import atomic_write, sync_files, write_tensors


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

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.key_ring: KeyRing = spec.kit.keys if spec.kit else SeedKeys(spec.study.seed)
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
            self.settle()
            sync_files([ledger.path for ledger in self.ledgers.values() if ledger.take_unsynced()])
        return dict(self._positions)

    def saved_positions(self) -> dict[str, SitePosition]:
        """Where the states on disk stand."""
        return dict(self._positions)

    def save(self, name: str) -> SitePosition:
        """Write a site's state to disk if it has changed; where the site stands now."""
        self._save(self._sites[name])
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
        """Delete states that a durable checkpoint no longer needs."""
        for name, position in names.items():
            position.check()
            for path in self._old_states(name, position.version):
                path.unlink(missing_ok=True)

    def _old_states(self, name: str, durable: int) -> list[Path]:
        """The states that a checkpoint with this version does not need. A deployed site, which must not believe the
        coordinator, gives up those before it only, and none if it does not stand so far itself."""
        if self.spec.kit is not None:
            stands = self._positions.get(name, SitePosition()).version
            return [state_path(self.spec.folder, name, old) for old in range(durable)] if durable <= stands else []
        if durable == 0:
            return []  # none is older: a folder of each of many sites need not be read
        kept = state_path(self.spec.folder, name, durable)
        return [path for path in kept.parent.glob("state-*.safetensors") if version_of(path) < durable]

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
        self._at_work |= {name}
        self._caching.pop(name, None)
        self._caching[name] = None
        self._evict(group)
        self._at_work = {name, *group}
        return self._sites[name]

    def _evict(self, group: Sequence[str] = ()) -> None:
        """Send the sites that were idle longest to disk; not those at work, nor one in the middle of something."""
        self._clear_caches()
        self._bytes |= {name: self._sites[name].state.bytes for name in self._at_work if name in self._sites}
        states, files = sum(self._bytes.values()), sum(self._files.values())
        if self._has_room(states, files):
            return  # as at nearly every call: then nobody looks at all sites
        *others, _ = self._sites.values()
        for site in others:
            if self._has_room(states, files):
                return
            if not site.memory and site.name not in group:
                self._save(site)
                states -= self._bytes.pop(site.name)
                files -= self._files.pop(site.name)
                del self._sites[site.name], self.gates[site.name]

    def _has_room(self, states: int, files: int) -> bool:
        """Whether all open sites may stay, with so many bytes of state and open files."""
        return len(self._sites) <= self.RESIDENT and states <= self.RESIDENT_BYTES and files <= self.FILES

    def _clear_caches(self) -> None:
        """All but the sites that were asked last give up what they can make again. One that is still at work may make
        it once more, and is looked at again."""
        for name in list(self._caching)[: -self.CACHED - 1]:
            if name in self._sites:
                self._sites[name].cache.clear()
            if name not in self._at_work:
                del self._caching[name]

    def open(self, name: str) -> Site:
        spec = self.spec
        refuse_unsafe_name(name)
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
        runs = spec.folder.parent if spec.policy.deployed else None  # a site's runs lie side by side
        raw_images = RawImages(data.train.images, data.validation.images, data.test.images)
        price = price_at(spec.policy, data.train)
        budget = Budget(spec.policy, self.ledgers[name].path, runs, price, spec.kit.anchors if spec.kit else None)
        target = self._target(name, price)
        self.gates[name] = Gate(name, spec.policy, self.ledgers[name], raw_images, budget, target)
        place = spec.folder / "sites" / name
        self._files[name] = data.mapped_files
        return Site(
            name=name,
            study=spec.study,
            data=data,
            trainer=spec.trainers.get(name, spec.trainer),
            state=state,
            place=place,
            policy=spec.policy,
            trainers=(spec.trainer, *spec.trainers.values()),
            secret=secret_in(place) if spec.policy.deployed else "",
            keys=self.key_ring,
            unknown_classes=spec.unknown_classes.get(name, ()),
            kit=spec.kit,
        )

    def _target(self, name: str, price: Price) -> EpsilonLimit | None:
        """The epsilon that a deployed site's people approved with the study; a simulated site's state is enough."""
        if not self.spec.policy.deployed:
            return None
        privacy = self.spec.trainers.get(name, self.spec.trainer).privacy
        if privacy is None or privacy.target_epsilon is None:
            return None
        return EpsilonLimit(privacy.target_epsilon, self.ledgers[name].path, price)

    def _save(self, site: Site) -> None:
        lines = self.ledgers[site.name].confirmed
        version = self._positions[site.name].version
        if site.state.changed:
            version += 1
            path = state_path(self.spec.folder, site.name, version)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_tensors(path, site.state, durable=self.spec.study.engine.durable, placed=True)
            site.state.changed = False
        self._positions[site.name] = SitePosition(version, lines)


def secret_in(folder: Path) -> str:
    """A deployed site's secret for one run: drawn once, and kept, so that a resumed run draws the same again."""
    path = folder / "noise.key"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, secrets.token_hex(32), private=True, durable=True)
    return path.read_text()
