"""One small site with a real network, and what arrives there."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.call import Call
from polyclinic.federation.layers.incoming import Inspection
from polyclinic.federation.layers.incoming_figures import History
from polyclinic.federation.ledger.parcel import SEALED, Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.policy import Incoming
from polyclinic.federation.site import Site, SiteState
from polyclinic.models import build, initial_weights
from polyclinic.tasks import Target
from polyclinic.tasks.classification import Classification
from polyclinic.training.loop import Trainer, TrainerSpec
from polyclinic.training.optimizer import Optimizer

SIZE, LAST = 16, "fc3"
LIMITS = Incoming()


class Asked:
    @operation("weights", "statistics")
    def train(self, site, weights): ...

    @operation("metrics")
    def evaluate(self, site, weights): ...

    @operation("latents")
    def encode(self, site, weights): ...

    @operation()
    def tune(self, site, weights): ...

    @operation(address="keep_model")
    def finish(self, site, weights): ...


def network():
    return build("lenet5", channels=1, outputs=2, size=SIZE)


#: of half of the digits, which are those that a site remembers
FIRST = {name: one.bfloat16().to(one.dtype) for name, one in initial_weights(network, 0).items()}


def make_site(images=20, round=1, **optimizer):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, 1, SIZE, SIZE), dtype=np.uint8)
    part = ImageSet(pixels, np.arange(images, dtype=np.int64) % 2)
    spec = TrainerSpec(
        task=Classification(),
        target=Target(("a", "b")),
        optimizer=Optimizer(**{"batch_size": 8, "lr": 0.1, **optimizer}),
    )
    trainer = Trainer(network(), spec)
    trainer.load(FIRST)
    data = SiteData("north", part, part, part)
    return Site("north", SimpleNamespace(seed=1), data, trainer, SiteState(), Path("nowhere"), round=round)


def make_check(limits=LIMITS, first=FIRST):
    """The incoming check of a site that knows these first weights."""
    policy = SimpleNamespace(incoming=limits)
    method = SimpleNamespace(traits=SimpleNamespace(gradual=True))
    spec = SimpleNamespace(policy=policy, method=method, first_weights=lambda _: first)
    return Inspection(SimpleNamespace(spec=spec, sites=None))


def inspect(site, tensors, kind="weights", declared=Asked.train, check=None, sealed=False, limits=LIMITS):
    check = check or make_check(limits)
    parcel = Parcel(kind, tensors)
    came = Parcel(SEALED, {"sealed": torch.ones(1)}, {"kind": kind}) if sealed else parcel
    name = kind.replace("-", "_")
    call, operation_ = Call("north", "train", 1, {name: came}), declared.operation if declared else None
    check.arriving(SimpleNamespace(site=site, call=call, received={name: parcel}, declared=operation_))
    return check


def changed(layer=LAST, times=-1.0, weights=FIRST):
    """The weights with one layer multiplied: by -1, every row of it moves by twice its length."""
    return {name: one * times if name.startswith(layer) else one for name, one in weights.items()}


def own(site):
    return History(site.state).most("own")
