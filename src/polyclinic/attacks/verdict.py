"""Verdict of an attack: one sentence, and the figures it rests on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """`leak`: whether something was found that a generator or model that never saw the images would not show."""

    leak: bool
    because: str
    evidence: dict[str, float | int | str]

    def __str__(self) -> str:
        return f"{'Leaks' if self.leak else 'No sign of a leak'}: {self.because}."
