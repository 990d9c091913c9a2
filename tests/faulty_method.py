"""FedAvg and FedBN whose sites get into trouble when a file says so.

The file `<trouble>/<site>-<round>` holds what goes wrong in the site's training of that round. It is a file, not a
setting, so that trouble can end without the study becoming another one. The file is a plug-in.
"""

import math
import os
import signal
import time
from pathlib import Path
from typing import Literal

import torch

from polyclinic.federation.call import Call
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.fedbn import FedBN


class Faulty(FedAvg):
    name: Literal["faulty"] = "faulty"  # type: ignore[assignment]
    trouble: str

    @operation("weights")
    def train(self, site, weights):
        return afflict(self.trouble, site, (yield from super().train(site, weights)))


class FaultyBN(FedBN):
    name: Literal["faulty-bn"] = "faulty-bn"  # type: ignore[assignment]
    trouble: str

    @operation("weights")
    def train(self, site, weights):
        return afflict(self.trouble, site, (yield from super().train(site, weights)))


def afflict(trouble: str, site, parcel: Parcel) -> Parcel:
    """What the site sends instead of `parcel`, if its trouble lets it send anything."""
    file = Path(trouble) / f"{site.name}-{site.round}"
    what = file.read_text() if file.exists() else ""
    if what == "raise":
        raise RuntimeError("the scanner\nis on fire")
    if what == "hang":
        (Path(trouble) / f"{site.name}-hangs").touch()
        time.sleep(3600)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "nan":
        for name, tensor in site.state.items():
            site.state[name] = torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor
        return Parcel("weights", {name: tensor * math.nan for name, tensor in parcel.tensors.items()}, parcel.metadata)
    if what == "nan loss":
        return Parcel("weights", parcel.tensors, {**parcel.metadata, "loss": math.nan})
    if what == "wrong shape":
        return Parcel("weights", {name: tensor[..., None] for name, tensor in parcel.tensors.items()}, parcel.metadata)
    if what == "images":
        return Parcel("weights", {"conv1.weight": torch.tensor(site.data.train.images[:2])}, parcel.metadata)
    return parcel


def will_hang(trouble: Path, call: Call) -> bool:
    """Whether a call will never be answered."""
    file = trouble / f"{call.site}-{call.round}"
    return call.operation == "train" and file.exists() and file.read_text() == "hang"


METHODS = {"faulty": Faulty, "faulty-bn": FaultyBN}
