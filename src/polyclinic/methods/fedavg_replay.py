"""FedAvg+Replay (Qu et al. 2022): FedAvg whose sites replay what the others know; see `replay.py`."""

from __future__ import annotations

from typing import ClassVar, Literal

from polyclinic.methods.fedavg import FedAvg


class FedAvgReplay(FedAvg):
    name: Literal["fedavg-replay"] = "fedavg-replay"  # type: ignore[assignment]

    summary: ClassVar[str] = "FedAvg whose sites also train on replayed images of all"
    replays: ClassVar[bool] = True
