"""The three words of an audit, and what one attack says: one sentence, and the figures it rests on.

*leaks*: shown. *withstood*: attacks ran that find a weak leak planted in the same setting, and found nothing.
*not tested*: all else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Word = Literal["leaks", "withstood", "not tested"]
LEAKS: Word = "leaks"
WITHSTOOD: Word = "withstood"
NOT_TESTED: Word = "not tested"
GRAVEST: tuple[Word, ...] = (LEAKS, NOT_TESTED, WITHSTOOD)


@dataclass(frozen=True)
class Verdict:
    """`leak`: whether something was found that a generator or model that never saw the images would not show.

    Without a power check, nothing found is no verdict: see `polyclinic.audits.power`.
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
