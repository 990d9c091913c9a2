"""A site: what an operation gets to work with, its state (tensors that survive a restart in versioned files), what its
own people have, and what the sites of one process have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polyclinic.federation.call import Expected
from polyclinic.federation.ledger.keys import KeyRing, SeedKeys
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.policy import Policy
from polyclinic.files import read_tensors
from polyclinic.randomness import torch_rng
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.data.parts import SiteData
    from polyclinic.federation.collaborators import MethodLike, StudyLike, TrainerLike
    from polyclinic.federation.layers.interface import SiteLayer
    from polyclinic.federation.layers.suspension import Suspensions
    from polyclinic.federation.ledger.archive import ParcelArchive


class SitePosition(NamedTuple):
    """Where a site stands at a checkpoint: the version of its state, and the lines of its ledger."""

    version: int = 0
    lines: int = 0

    def check(self) -> None:
        """ParcelRejected unless both are whole numbers: a position comes from the coordinator, and names a file."""
        if set(map(type, self)) != {int} or min(self) < 0:
            raise ParcelRejected("a position of a site is two whole numbers, and something else came")


class SiteState(MutableMapping[str, Tensor]):
    """Tensors that survive a restart. Assign new tensors; one changed in place would not be saved."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._tensors = dict(tensors or {})
        self.changed = False

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):  # or the file of the state could not be written, after the work
            raise TypeError(f"site.state['{name}'] is {type(tensor).__name__}, and must be a tensor; use torch.tensor")
        self.changed = True
        self._tensors[name] = tensor

    def __delitem__(self, name: str) -> None:
        self.changed = True
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def bytes(self) -> int:
        """Memory that the tensors take."""
        return sum([tensor.nbytes for tensor in self._tensors.values()])

    def put(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a whole set of tensors under one name, replacing what was there."""
        for name in [n for n in self if n.startswith(f"{group}/")]:
            del self[name]
        for name, tensor in tensors.items():
            self[f"{group}/{name}"] = tensor

    def group(self, group: str) -> dict[str, Tensor]:
        """The tensors kept by `put`; empty if there are none."""
        return {n.removeprefix(f"{group}/"): t for n, t in self.items() if n.startswith(f"{group}/")}


def state_path(folder: Path, site: str, version: int) -> Path:
    """Where a version of a site's state lies in a run folder."""
    return folder / "sites" / site / f"state-{version}.safetensors"


def read_state(folder: Path, site: str, position: SitePosition) -> SiteState:
    """A site's state as of a position; empty if it never had any."""
    return SiteState(read_tensors(state_path(folder, site, position.version)) if position.version else {})


def version_of(state: Path) -> int:
    number = state.stem.removeprefix("state-")
    return int(number) if number.isdecimal() else 0


@dataclass
class Site:
    """What an operation gets to work with: the site's own data, state and tools, and nothing of others.

    `study` has the study's tables, `policy` what the site's people let out. `memory` holds what a turn in progress
    needs (an open autograd graph); `cache` what can be made again from the state. `place` is where its `folder` lies.
    `trainers` are the trainers of all networks that the study's sites have. `secret` goes into the noise of
    differential privacy, so that nobody who knows the seed can draw it, and into all other draws as `policy.draws`
    says; a simulated site has none, and its noise is the same in every run. `keys` are the sealing keys that it has and
    knows. `sum_secrets` are those of a secure sum in progress; they are never written to disk. `kit` is what a deployed
    site's people have.
    """

    name: str
    study: StudyLike
    data: SiteData
    trainer: TrainerLike
    state: SiteState
    place: Path
    policy: Policy = field(default_factory=lambda: Policy(few_images="allow"))
    trainers: tuple[TrainerLike, ...] = ()
    memory: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    sum_secrets: dict[str, dict[str, Any]] = field(default_factory=dict)
    round: int = 0
    secret: str = ""
    keys: KeyRing = field(default_factory=lambda: SeedKeys(0))
    kit: Kit | None = None

    def __post_init__(self) -> None:
        if self.kit and not self.secret:  # it would be taken for a simulated site, whose draws anybody can make
            raise ValueError("a deployed site has a secret")

    @cached_property
    def folder(self) -> Path:
        """The site's own folder; what lies there never leaves it. Made when somebody asks for it: most simulated sites
        put nothing there."""
        self.place.mkdir(parents=True, exist_ok=True)
        return self.place

    def address(self, *purpose: str | int) -> tuple[str | int, ...]:
        """Where a draw of this site comes from: the study's seed, the site's secret if that is to count, its name."""
        own = [self.secret] if self.secret and self.policy.draws == "own" else []
        return (self.study.seed, *own, self.name, *purpose)

    # --- of the study, the policy and the kit -------------------------------------------------------

    @property
    def seed(self) -> int:
        return self.study.seed

    @property
    def generator(self) -> Settings | None:
        return self.study.generator

    @property
    def tuning(self) -> Settings | None:
        """The table [tuning], where it is on."""
        tuning = self.study.tuning
        return tuning if tuning is not None and getattr(tuning, "on", True) else None

    @property
    def replay_settings(self) -> Settings | None:
        return self.study.replay

    @cached_property
    def unknown_classes(self) -> tuple[int, ...]:
        """Classes of the study, by number, that the site does not know (`federation.label_sets`)."""
        known = self.study.federation.label_sets.get(self.name)
        return () if known is None else tuple(n for n, c in enumerate(self.trainer.target.classes) if c not in known)

    @property
    def own_draws(self) -> bool:
        """Whether the secret goes into all draws of the site."""
        return bool(self.secret) and self.policy.draws == "own"

    @property
    def min_cohort(self) -> int:
        return self.policy.min_cohort

    @property
    def keep_model(self) -> Callable[[Mapping[str, Tensor]], None] | None:
        """Puts a finished model where the site's people find it; nobody is there at a simulated site."""
        return self.kit.keep_model if self.kit else None

    def rng(self, purpose: str) -> torch.Generator:
        """A generator for this seed, site, purpose and round."""
        return torch_rng(*self.address(purpose, self.round))

    def trainer_for(self, weights: Mapping[str, Tensor]) -> TrainerLike:
        """The trainer whose network these are whole weights of: the site's own, or that of another site."""
        for trainer in (self.trainer, *self.trainers):
            own = trainer.model.state_dict()
            if own.keys() == weights.keys() and all(own[name].shape == weights[name].shape for name in own):
                return trainer
        return self.trainer

    def lasting_rng(self, purpose: str) -> torch.Generator:
        """A generator for this seed, site and purpose, the same in every round."""
        return torch_rng(*self.address(purpose))


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What a deployed site's own people have, and no coordinator changes."""

    #: the one site that the host serves
    site: str
    #: its sealing and signing keys
    keys: KeyRing
    #: where it keeps the heads of its ledgers in a second place, a file for each run
    anchors: Path
    #: where it keeps what it may need again, such as trained generators; None is the user's cache
    cache: Path | None = None
    #: where its studies are stopped until a person has looked
    suspensions: Suspensions
    #: raises Suspended where its people have not approved the study, or no longer do
    require_approval: Callable[[], None]
    #: puts a finished model where they find it
    keep_model: Callable[[Mapping[str, Tensor]], None] | None = None
    #: layers that they add, which may refuse, and never change what leaves
    layers: tuple[SiteLayer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """What the sites of one process have in common."""

    study: StudyLike
    #: what a site trains with, and that of sites with another network, by site
    trainer: TrainerLike
    trainers: Mapping[str, TrainerLike] = field(default_factory=dict)
    #: the run folder
    folder: Path
    open_data: Callable[[str], SiteData]
    policy: Policy
    #: what parcels of each kind must look like
    expected: Mapping[str, Expected]
    #: the weights that a site's network begins with; None where they follow from more than the study's seed
    first_weights: Callable[[str], Mapping[str, Tensor] | None] = lambda _: None
    #: keeps parcels for an audit, where the study says so
    archive: ParcelArchive | None = None
    #: all settings of the study that results depend on, as JSON
    result_settings_json: str = ""
    #: has operations that every method of the study has, besides the method's own
    more_operations: tuple[object, ...] = ()
    #: of a deployed site; None where all sites of a simulation live in one folder
    kit: Kit | None = None

    @property
    def method(self) -> MethodLike:
        return self.study.method

    @property
    def run_name(self) -> str:
        """The name of the run in secure sums, as the coordinator has it (`FederationSpec`)."""
        return self.folder.name if self.kit else f"seed {self.study.seed}"

    @cached_property
    def key_ring(self) -> KeyRing:
        """The keys of the sites: a simulated one's follow from the seed."""
        return self.kit.keys if self.kit else SeedKeys(self.study.seed)
