"""Questions to sites, asked like methods, though nothing is trained: counts of images (`inspect`), scores (`evaluate`).

`polyclinic deploy inspect` and `deploy evaluate` send them.
"""

from polyclinic.methods import Method
from polyclinic.questions.evaluate import EvaluateOnly
from polyclinic.questions.fingerprint import FingerprintVolumes
from polyclinic.questions.inspect import InspectSites

QUESTIONS: dict[str, type[Method]] = {
    "evaluate": EvaluateOnly,
    "inspect": InspectSites,
    "fingerprint": FingerprintVolumes,
}

__all__ = ["QUESTIONS"]
