"""What attacks on latents, generators and synthetic images need to see and know, beyond what gradients need."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from polyclinic.attacks.attack import Attack, ThreatModel, words_of
from polyclinic.errors import BadInput


class ImageCapability(StrEnum):
    """Something that an attacker on images may see or hold. The value is what a study writes."""

    LATENTS = "latents"
    GENERATOR = "generator"
    SYNTHETIC_IMAGES = "synthetic-images"
    DISCRIMINATOR = "discriminator"
    CLASSIFIER = "classifier"
    CANDIDATES = "candidates"
    SIMILAR_IMAGES = "similar-images"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    ImageCapability.LATENTS: "the latents or activations that a site sent",
    ImageCapability.GENERATOR: "the generator with its weights",
    ImageCapability.SYNTHETIC_IMAGES: "synthetic images",
    ImageCapability.DISCRIMINATOR: "the discriminator with its weights, which no site need ever send",
    ImageCapability.CLASSIFIER: "the trained model's outputs",
    ImageCapability.CANDIDATES: "the images that it asks about",
    ImageCapability.SIMILAR_IMAGES: "images of the same kind, to train models of its own",
}
#: what a receiver of parcels has; candidates belong to the question "was this image among them?" itself
RECEIVER = frozenset(ImageCapability) - {ImageCapability.DISCRIMINATOR, ImageCapability.SIMILAR_IMAGES}


class ImageThreatModel(ThreatModel):
    """What a study grants an attacker, images included. A plain `ThreatModel` stands for the default of this one."""

    granted_of_images: frozenset[ImageCapability] = Field(
        RECEIVER, description="what the attacker sees and holds: " + ", ".join(ImageCapability)
    )

    def __str__(self) -> str:
        withheld = frozenset(ImageCapability) - self.granted_of_images
        return f"{super().__str__()} Of images: {_phrase(self.granted_of_images)}; not {_phrase(withheld)}."


class ImageAttack(Attack):
    """Settings of an attack on what images are turned into; `sees` is declared besides `needs`."""

    @property
    def sees(self) -> frozenset[ImageCapability]:
        """What it sees and holds with these settings."""
        raise NotImplementedError

    def check(self, threat: ThreatModel) -> None:
        """Raise BadInput unless all that this attack needs and sees is granted."""
        super().check(threat)
        granted = threat.granted_of_images if isinstance(threat, ImageThreatModel) else RECEIVER
        missing = self.sees - granted
        if missing:
            raise BadInput(
                f"audit.threat_model: the attack '{self.name}' needs {_phrase(missing)}, which is not granted; "
                f"grant {', '.join(sorted(missing))}, or choose another attack"
            )

    def __str__(self) -> str:
        known = f", knows {words_of(self.needs)}" if self.needs else ""
        return f"{self.name}: the attacker has {_phrase(self.sees)}{known}; {self.assumptions}."


def _phrase(capabilities: frozenset[ImageCapability]) -> str:
    words = [capability.words for capability in ImageCapability if capability in capabilities]
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else "".join(words) or "nothing"
