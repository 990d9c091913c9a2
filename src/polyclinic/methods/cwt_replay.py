"""CWT+Replay (Qu et al. 2022, Algorithm 1): CWT whose sites replay what the others know; see `replay.py`."""

from __future__ import annotations

from typing import ClassVar, Literal

from polyclinic.methods.cwt import CyclicWeightTransfer


class CwtReplay(CyclicWeightTransfer):
    name: Literal["cwt-replay"] = "cwt-replay"  # type: ignore[assignment]

    summary: ClassVar[str] = "CWT whose sites also train on replayed images of all"
    replays: ClassVar[bool] = True
