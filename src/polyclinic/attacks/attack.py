"""The notion of an attack: what it needs to see and to know, checked against what a study grants an attacker."""

from __future__ import annotations

from abc import abstractmethod
from enum import StrEnum
from typing import ClassVar

from pydantic import Field

from polyclinic.errors import BadInput
from polyclinic.settings import Settings


class Capability(StrEnum):
    """Something an attacker may see or know. The value is what a study writes."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    ARCHITECTURE = "architecture"
    BATCH_SIZE = "batch-size"
    LOCAL_TRAINING = "local-training"
    LABELS = "labels"
    BATCH_NORM_STATISTICS = "batch-norm-statistics"
    PRIOR = "prior"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Capability.GRADIENTS: "the gradients that a site sent",
    Capability.WEIGHTS: "the weights that a site sent, and those it started from",
    Capability.ARCHITECTURE: "the network (weights and loss included)",
    Capability.BATCH_SIZE: "the number of images",
    Capability.LOCAL_TRAINING: "learning rate and number of the site's local steps",
    Capability.LABELS: "the images' labels",
    Capability.BATCH_NORM_STATISTICS: "the batch-norm statistics that the site computed with",
    Capability.PRIOR: "images to start from",
}
_SEEN = (Capability.GRADIENTS, Capability.WEIGHTS)


class ThreatModel(Settings):
    """What a study grants an attacker. The default is a coordinator that follows the protocol and is curious."""

    granted: frozenset[Capability] = Field(
        frozenset(
            {
                Capability.GRADIENTS,
                Capability.WEIGHTS,
                Capability.ARCHITECTURE,
                Capability.BATCH_SIZE,
                Capability.LOCAL_TRAINING,
            }
        ),
        description="what the attacker sees and knows: " + ", ".join(Capability),
    )

    def __str__(self) -> str:
        withheld = frozenset(Capability) - self.granted
        return f"The attacker is granted {words_of(self.granted)}; not {words_of(withheld)}."


class Attack(Settings):
    """Settings of an attack. Printing it prints its threat model in a sentence."""

    name: str

    reads: ClassVar[tuple[str, ...]]  #: kinds of parcel it can take

    @property
    @abstractmethod
    def needs(self) -> frozenset[Capability]:
        """What it sees and knows with these settings. Of a parcel, one kind is enough: see `reads`."""

    @property
    @abstractmethod
    def assumptions(self) -> str:
        """What it takes for granted beyond its needs: how labels are found, how batch norm was computed."""

    def check(self, threat: ThreatModel) -> None:
        """Raise BadInput unless all that this attack needs is granted."""
        missing = self.needs - threat.granted
        if missing:
            raise BadInput(
                f"audit.threat_model: the attack '{self.name}' needs {words_of(missing)}, which is not granted; "
                f"grant {', '.join(sorted(missing))}, or choose other settings of the attack"
            )

    def __str__(self) -> str:
        seen = words_of(self.needs & frozenset(_SEEN))
        known = words_of(self.needs - frozenset(_SEEN))
        return f"{self.name}: the attacker sees {seen}, knows {known}; {self.assumptions}."


def words_of(capabilities: frozenset[Capability]) -> str:
    """Capabilities as a phrase, in their order of declaration."""
    words = [capability.words for capability in Capability if capability in capabilities]
    if not words:
        return "nothing"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
