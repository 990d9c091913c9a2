"""What a secure sum costs: bytes and seconds of a round with 4, 8 and 32 sites, beside an open one.

Bytes are those of the encoded parcels that go to and come from one site in a round: weights and answer, and in a secure
sum also keys and shares. Seconds are those of one site (its masks), of the coordinator (taking them out) and of one
local epoch of 1,000 images, which is timed over a few mini-batches. They are CPU seconds; an epoch is taken to keep two
cores busy, masks only one. Sites work at the same time on machines of their
own, so a round takes an epoch, one site's masks and the coordinator's work. `time_ratio` is that over an open round,
which has the epoch and the coordinator's mean.
Nothing is sent. CKKS (TenSEAL) is timed for the same numbers where it is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from polyclinic.federation.call import Call
from polyclinic.federation.leaving.key_ring import SeedKeys
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.federation.state import SiteState
from polyclinic.federation.summing.masks import add_mask
from polyclinic.federation.summing.settings import Federated
from polyclinic.federation.summing.site_sums import SiteSums
from polyclinic.methods.shared.averaging import WeightedMean
from polyclinic.models import build

IMAGES, BATCH, SIDE, CORES = 1000, 32, 64, 2
NETWORKS = ("small-cnn", "resnet18")
SITES = (4, 8, 32)


class Training:
    @operation("weights", summed="mean")
    def train(self, site: Site, weights: Any) -> None: ...


def network(name: str) -> torch.nn.Module:
    return build(name, channels=3, outputs=2, size=SIDE)


def epoch_seconds(name: str, batches: int) -> float:
    """One pass over IMAGES images, from the seconds of a few mini-batches after one that warms up."""
    model = network(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.rand(BATCH, 3, SIDE, SIDE), torch.randint(2, (BATCH,))
    for number in range(batches + 1):
        if number == 1:
            begin = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return (time.process_time() - begin) / batches * IMAGES / BATCH / CORES


def measure(name: str, count: int, epoch: float) -> dict[str, Any]:
    """Bytes of one site's round, and seconds of its masks and of the coordinator's."""
    weights = {key: tensor.detach().clone() for key, tensor in network(name).state_dict().items()}
    answer = Parcel("weights", weights, {"samples": IMAGES, "steps": IMAGES // BATCH})
    with tempfile.TemporaryDirectory() as folder:
        found = _one_site(Path(folder), count, answer)
    down, open_bytes = answer.size, 2 * answer.size
    secure_bytes = down + found["bytes"]
    openly, coordinator = _coordinator_seconds(found.pop("numbers"), answer, count)
    return {
        "network": name,
        "sites": count,
        "numbers": sum(tensor.numel() for tensor in weights.values()),
        "bytes_ratio": round(secure_bytes / open_bytes, 3),
        "bytes_up_ratio": round(found["bytes_up"] / answer.size, 3),
        "site_seconds": round(found["seconds"], 3),
        "coordinator_seconds": round(coordinator, 3),
        "epoch_seconds": round(epoch, 3),
        "open_coordinator_seconds": round(openly, 3),
        "time_ratio": round((epoch + found["seconds"] + coordinator) / (epoch + openly), 3),
    }


def _one_site(folder: Path, count: int, answer: Parcel) -> dict[str, Any]:
    sums = SiteSums(Federated(sum="secure"), "benchmark", 3)
    names = [f"site-{number:02d}" for number in range(count)]
    sites = {
        name: Site(name, 0, data=None, trainer=None, state=SiteState(), folder=folder, keys=SeedKeys(0), round=1)  # type: ignore[arg-type]
        for name in names
    }
    keys = {name: sums.give_mask_key(site, "train").tensors[name] for name, site in sites.items()}
    given = {name: sums.give_shares(site, keys, "train") for name, site in sites.items()}
    mine, place = names[0], 0
    boxes = {name: parcel.tensors["boxes"][place] for name, parcel in given.items() if name != mine}
    begin = time.process_time()
    sums.take_shares(sites[mine], boxes, "train")
    call = Call(mine, "train", 1, {"weights": answer})
    gate: Any = SimpleNamespace(check_summand=lambda _: None)
    [masked] = sums.outgoing(sites[mine], call, gate, Training.train.operation, (answer,), "samples")  # type: ignore[attr-defined]
    shares = sums.unmask(sites[mine], names, "train")
    seconds = time.process_time() - begin
    up = [Parcel("keys", {mine: keys[mine]}), given[mine], masked, shares]
    down = [Parcel("keys", keys), Parcel("shares", boxes)]
    sent = sum(parcel.size for parcel in up)
    return {
        "seconds": seconds,
        "bytes": sent + sum(parcel.size for parcel in down),
        "bytes_up": sent,
        "numbers": masked.tensors["numbers"],
    }


def _coordinator_seconds(numbers: torch.Tensor, answer: Parcel, count: int) -> tuple[float, float]:
    """Seconds to add up so many answers: open ones as FedAvg does, and masked ones, with the masks taken out."""
    mean, row = WeightedMean(), numbers.numpy().view(np.uint64)
    mean.add(answer.tensors, IMAGES)
    total = row.copy()
    begin = time.process_time()
    mean.add(answer.tensors, IMAGES)
    openly = (time.process_time() - begin) * count
    begin = time.process_time()
    total += row
    add_mask(total, bytes(32), b"benchmark", sign=-1)
    return openly, (time.process_time() - begin) * count


def ckks(numbers: int) -> dict[str, Any]:
    """Encrypting, adding and decrypting as many numbers with CKKS, timed over one piece of them."""
    try:
        import tenseal
    except ImportError:
        return {"ckks": "not installed (pip install tenseal)"}
    context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=8192, coeff_mod_bit_sizes=[60, 40, 60])
    context.global_scale = 2**40
    piece = np.random.default_rng(0).standard_normal(4096)
    begin = time.process_time()
    box = tenseal.ckks_vector(context, piece)
    size = len(box.serialize())
    (box + box).decrypt()
    pieces = math.ceil(numbers / len(piece))
    return {
        "ckks": "measured over one piece of 4096",
        "ckks_seconds": round((time.process_time() - begin) * pieces, 3),
        "ckks_bytes_up_ratio": round(size * pieces / (4 * numbers), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small network with 4 and 8 sites")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in NETWORKS[:1] if arguments.quick else NETWORKS:
        epoch = epoch_seconds(name, 2 if arguments.quick else 4)
        for count in SITES[:2] if arguments.quick else SITES:
            rows.append(measure(name, count, epoch))
            print(rows[-1], flush=True)
        rows[-1] |= ckks(rows[-1]["numbers"])
    figures = {"rows": rows, "images": IMAGES, "side": SIDE, "batch": BATCH}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
