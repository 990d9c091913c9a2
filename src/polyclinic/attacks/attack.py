"""Attack settings and threat models: what an attack needs, checked against what a study grants an attacker."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal

from pydantic import Field

from polyclinic.errors import BadInput
from polyclinic.settings import Settings


class Capability(StrEnum):
    """Something an attacker may see, hold or know. The value is what a study writes."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    LATENTS = "latents"
    GENERATOR = "generator"
    SYNTHETIC_IMAGES = "synthetic-images"
    CLASSIFIER = "classifier"
    DISCRIMINATOR = "discriminator"
    CANDIDATES = "candidates"
    CANDIDATE_LABELS = "candidate-labels"
    ARCHITECTURE = "architecture"
    BATCH_SIZE = "batch-size"
    LOCAL_TRAINING = "local-training"
    BATCH_NORM_STATISTICS = "batch-norm-statistics"
    LABELS = "labels"
    PRIOR = "prior"
    SIMILAR_IMAGES = "similar-images"
    PAIRED_LATENTS = "paired-latents"
    CHOSEN_WEIGHTS = "chosen-weights"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Capability.GRADIENTS: "the gradients that a site sent",
    Capability.WEIGHTS: "the weights that a site sent, and those it started from",
    Capability.LATENTS: "the latents or activations that a site sent",
    Capability.GENERATOR: "the generator with its weights",
    Capability.SYNTHETIC_IMAGES: "synthetic images",
    Capability.CLASSIFIER: "the trained model's outputs",
    Capability.DISCRIMINATOR: "the discriminator with its weights, which no site need ever send",
    Capability.CANDIDATES: "the images that it asks about",
    Capability.CANDIDATE_LABELS: "the labels of those that it asks about",
    Capability.ARCHITECTURE: "the network (weights and loss included)",
    Capability.BATCH_SIZE: "the number of images",
    Capability.LOCAL_TRAINING: "learning rate and number of the site's local steps",
    Capability.BATCH_NORM_STATISTICS: "the batch-norm statistics that the site computed with",
    Capability.LABELS: "the labels of the images behind a parcel",
    Capability.PRIOR: "images to start from",
    Capability.SIMILAR_IMAGES: "images of the same kind, to train models of its own",
    Capability.PAIRED_LATENTS: "images of its own with the latents that the same encoder made of them",
    Capability.CHOSEN_WEIGHTS: "the weights that the site starts from, since it chose them",
}
Capabilities = frozenset[Capability]
#: what an attacker holds in its hands; the rest is what it knows
_HELD = frozenset(list(Capability)[: list(Capability).index(Capability.ARCHITECTURE)])
#: what an honest but curious receiver of all parcels has. Candidates and their labels belong to the question "was
#: this image among them?" itself; whoever has a network has the statistics in it; images of the same kind are public
RECEIVER = frozenset(Capability) - {
    Capability.DISCRIMINATOR,
    Capability.LABELS,
    Capability.PRIOR,
    Capability.PAIRED_LATENTS,
    Capability.CHOSEN_WEIGHTS,
}


class ThreatModel(Settings):
    """What a study grants an attacker. The default is a receiver that follows the protocol and is curious."""

    granted: frozenset[Capability] = Field(
        RECEIVER, description="what the attacker sees, holds and knows: " + ", ".join(Capability)
    )

    def brief(self) -> list[str]:
        """The same in short sentences: what all who receive parcels have, and what this attacker has otherwise."""
        more, less = self.granted - RECEIVER, RECEIVER - self.granted
        return [
            "The attacker receives the parcels, follows the rules, and is curious.",
            "It knows the network and how the sites train, and may ask whether a given image was among those "
            "trained on.",
            *([f"It has more than such a receiver: {words_of(more)}."] if more else []),
            *([f"It lacks {words_of(less)}."] if less else []),
        ]

    def table(self) -> list[list[str]]:
        """The same as rows of a short table."""
        groups = {"holds": self.granted & _HELD, "knows": self.granted - _HELD, "lacks": set(Capability) - self.granted}
        rows = [[name, ", ".join(one for one in Capability if one in group) or "-"] for name, group in groups.items()]
        honest = Capability.CHOSEN_WEIGHTS not in self.granted
        return [["follows the rules", "yes, and is curious" if honest else "no: it chooses the weights"], *rows]

    def __str__(self) -> str:
        withheld = frozenset(Capability) - self.granted
        return f"The attacker is granted {words_of(self.granted)}; not {words_of(withheld)}."


class AttackSettings(Settings):
    """Settings of an attack. Printing it prints its threat model in a sentence."""

    name: str

    reads: ClassVar[tuple[str, ...]]  #: kinds of parcel it can take

    @property
    @abstractmethod
    def needs(self) -> frozenset[Capability]:
        """What it sees, holds and knows with these settings. Of a parcel, one kind is enough: see `reads`."""

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
                f"grant {', '.join(sorted(missing))}, or choose other settings or another attack"
            )

    def __str__(self) -> str:
        known = self.needs - _HELD
        knows = f", knows {words_of(known)}" if known else ""
        return f"{self.name}: the attacker has {words_of(self.needs & _HELD)}{knows}; {self.assumptions}."


def words_of(capabilities: frozenset[Capability]) -> str:
    """Capabilities as a phrase, in their order of declaration."""
    words = [capability.words for capability in Capability if capability in capabilities]
    if not words:
        return "nothing"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


Word = Literal["leaks", "withstood", "not tested"]
LEAKS: Word = "leaks"
WITHSTOOD: Word = "withstood"
NOT_TESTED: Word = "not tested"
GRAVEST: tuple[Word, ...] = (LEAKS, NOT_TESTED, WITHSTOOD)


@dataclass(frozen=True)
class Verdict:
    """`leak`: whether something was found that a generator or model that never saw the images would not show.

    Without a power check, nothing found is no verdict: see `polyclinic.audits.verdicts`.
    """

    leak: bool
    because: str
    evidence: dict[str, float | int | str]

    def __str__(self) -> str:
        return f"{'Leaks' if self.leak else 'Nothing found'}: {self.because}."


def verdict_word(one: Mapping[str, Any]) -> Word:
    """The word of a verdict or finding in audit.json. An older file says `leak`, and nothing of power: nothing found is
    then not tested."""
    found = next((word for word in GRAVEST if word == one.get("verdict")), None)
    return found or (LEAKS if one.get("leak") else NOT_TESTED)
