"""CWT+Replay (Qu et al. 2022, Algorithm 1): cyclical weight transfer whose sites replay what the others know.

In the paper's first round a generator (VQ-VAE-2) goes from site to site. In all later rounds the classifier does, and
each site trains it on its own images and on replayed ones. The first round is in `shared/generative_replay.py`: the
server's half (lines 22 to 26) is `prepare`, a site's (lines 8 to 21) `train_generator`, `encode_images` and
`take_replay`. The later rounds are those of `cwt.py`, both halves; a mini-batch (lines 1 to 7) is joined by `replayed`.
"""

from typing import ClassVar, Literal

from polyclinic.methods.cwt import CyclicWeightTransfer
from polyclinic.methods.shared.generative_replay import GenerativeReplay


class CwtReplay(GenerativeReplay, CyclicWeightTransfer):
    name: Literal["cwt-replay"] = "cwt-replay"  # type: ignore[assignment]

    summary: ClassVar[str] = "CWT whose sites also train on replayed images of all"
