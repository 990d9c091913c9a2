"""All claims by name."""

from __future__ import annotations

from polyclinic.claims import deciding, feder, felicia, gradient_inversion, ours, qu
from polyclinic.claims.claim import Claim
from polyclinic.errors import BadInput
from polyclinic.settings import nearest

CLAIMS: dict[str, Claim] = {
    claim.name: claim for paper in (qu, feder, felicia, gradient_inversion, ours, deciding) for claim in paper.CLAIMS
}


def find_claim(name: str) -> Claim:
    """The claim of a name; BadInput where there is none."""
    if name not in CLAIMS:
        hint = nearest(name, list(CLAIMS))
        raise BadInput(f"no such claim: '{name}'{hint}; `polyclinic reproduce --list` shows all")
    return CLAIMS[name]
