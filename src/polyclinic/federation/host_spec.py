"""The spec of a host: what the sites of one process have in common, and what a deployed site's own people have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from polyclinic.federation.ledger.key_ring import KeyRing
from polyclinic.federation.ledger.parcel import Expected
from polyclinic.federation.policy import Policy

if TYPE_CHECKING:
    from polyclinic.data.parts import SiteData
    from polyclinic.federation.collaborators import MethodLike, StudyLike, TrainerLike
    from polyclinic.federation.layers import Layer
    from polyclinic.federation.layers.stopped import Suspensions
    from polyclinic.federation.ledger.archive import ParcelArchive


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What a deployed site's own people have, and no coordinator changes."""

    #: the one site that the host serves
    site: str
    #: its sealing and signing keys
    keys: KeyRing
    #: where it keeps the heads of its ledgers in a second place, a file for each run
    anchors: Path
    #: where it keeps what it may need again, such as trained generators
    cache: Path | None = None
    #: where its studies are stopped until a person has looked
    suspensions: Suspensions
    #: raises Suspended where its people have not approved the study, or no longer do
    require_approval: Callable[[], None]
    #: puts a finished model where they find it
    keep_model: Callable[[Mapping[str, Tensor]], None] | None = None
    #: layers that they add, which may refuse, and never change what leaves
    layers: tuple[type[Layer], ...] = ()


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
    #: the name of the run in secure sums
    run_name: str = ""
    #: classes, by number, that a site does not know
    unknown_classes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: has operations that every method of the study has, besides the method's own
    more_operations: tuple[object, ...] = ()
    #: of a deployed site; None where all sites of a simulation live in one folder
    kit: Kit | None = None

    @property
    def method(self) -> MethodLike:
        return self.study.method
