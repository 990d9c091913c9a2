"""What a federation consists of: its sites, what their parcels must look like, and what happens when one fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from polyclinic.federation.layers.replies import ChecksReplies
from polyclinic.federation.ledger.key_ring import KeyRing
from polyclinic.federation.ledger.parcel import Expected
from polyclinic.federation.ledger.wire import Encoding
from polyclinic.federation.sums.settings import Federated
from polyclinic.settings import Settings

if TYPE_CHECKING:
    from polyclinic.federation.collaborators import TrainerLike


@dataclass(frozen=True)
class Faults:
    """What happens when a site fails: the round goes on with at least `quorum` of the sites, or stops."""

    on_failure: Literal["continue", "stop"] = "continue"
    quorum: float = 0.5


@dataclass(frozen=True, kw_only=True)
class FederationSpec:
    """What a federation consists of."""

    sites: tuple[str, ...]
    seed: int
    #: the run folder
    folder: Path
    initial_weights: Callable[[], dict[str, Tensor]]
    #: what parcels of each kind must look like
    expected: Mapping[str, Expected]
    #: whose operations the sites answer; without it, replies are checked by their kinds only
    method: ChecksReplies | None = None
    #: channels, height and width of the images
    image_shape: tuple[int, ...] = ()
    #: the coordinator's own trainer, for methods in which it trains as well
    trainer: TrainerLike
    faults: Faults = Faults()
    #: rounds between checkpoints; 0 for none
    checkpoint_every: int = 1
    #: the share of the sites that take part in a round, and the rounds without a better score after which a run stops
    fraction: float = 1.0
    patience: int | None = None
    #: the networks of sites that have another one, by site
    backbones: Mapping[str, str] = field(default_factory=dict)
    #: the study's tables [generator] and [replay]
    generator: Settings | None = None
    replay_settings: Settings | None = None
    #: the coordinator's keys in a deployed run
    keys: KeyRing | None = None
    #: where the coordinator's weights lie
    device: str = "cpu"
    #: how what the sites send is added up, and the name of the run in secure sums
    federated: Federated = field(default_factory=Federated)
    run_name: str = ""
    #: whether what a checkpoint has saved survives a loss of power
    durable: bool = False
    #: how numbers of parcels travel
    wire: Encoding = "exact"
