"""The spec of a host: what the sites of one process have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from polyclinic.federation.ledger.key_ring import KeyRing
from polyclinic.federation.ledger.parcel import Expected, Parcel
from polyclinic.federation.ledger.wire import Encoding
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import Federated
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.data.parts import SiteData
    from polyclinic.federation.collaborators import MethodLike, TrainerLike
    from polyclinic.federation.layers import Layer
    from polyclinic.federation.layers.poisoning import Poisoning
    from polyclinic.federation.layers.stopped import Suspensions
    from polyclinic.federation.ledger.archive import ParcelArchive


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
    #: the weights that a site's network begins with; None where they follow from more than the study's seed
    first_weights: Callable[[str], Mapping[str, Tensor] | None] = lambda _: None
    #: whether the method's weights come nearer step by step, by training at the sites
    has_course: bool = True
    #: keeps parcels for an audit, where the study says so
    archive: ParcelArchive | None = None
    #: what leaves instead of a parcel, given what the site had received
    poisoning: Poisoning | None = None
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
    #: where a deployed site keeps what it may need again, such as trained generators; the user's cache if not given
    cache: Path | None = None
    #: where a deployed site keeps the heads of its ledgers in a second place, a file for each run
    anchors: Path | None = None
    #: where a deployed site's studies are stopped until a person there has looked
    suspensions: Suspensions | None = None
    #: how what the sites send is added up, and the name of the run in secure sums
    federated: Federated = field(default_factory=Federated)
    run_name: str = ""
    #: classes, by number, that a site does not know
    unknown_classes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    #: has operations that every method of the study has, besides the method's own
    more_operations: tuple[object, ...] = ()
    #: whether what a checkpoint has saved survives a loss of power
    durable: bool = False
    #: how numbers of parcels travel
    wire: Encoding = "exact"
    #: layers that a deployed site's people add; they may refuse, and never change what leaves
    own_layers: tuple[type[Layer], ...] = ()
    #: raises Suspended where a deployed site's people have not approved the study, or no longer do
    require_approval: Callable[[], None] | None = None
