"""FedAvg+Replay (Qu et al. 2022, section 3.1): FedAvg whose sites replay what the others know.

Before the first round the generator goes from site to site, as in CWT+Replay (`cwt_replay.py`); then all sites train
the classifier at once, each on mini-batches of its own images, joined by replayed ones, and their mean is the next
round's.
"""

from typing import ClassVar, Literal

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.generative_replay import GenerativeReplay


class FedAvgReplay(GenerativeReplay, FedAvg):
    name: Literal["fedavg-replay"] = "fedavg-replay"  # type: ignore[assignment]

    summary: ClassVar[str] = "FedAvg whose sites also train on replayed images of all"
