"""A study of which nothing but the method matters; the images, the trainer and the host of its sites; a kit."""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import SeedKeys
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import HostSpec, Kit
from polyclinic.federation.sums.settings import Federated

ENGINE = {"wire": "exact", "durable": False, "on_failure": "continue", "quorum": 0.5, "checkpoint_every": 1}


def plain_study(method=None, *, seed=0, federation=None, **tables):
    """What is read of a study; tables that are not given are not there. Settings of the engine are given by name."""
    engine = SimpleNamespace(**{name: tables.pop(name, value) for name, value in ENGINE.items()})
    given = {**dict.fromkeys(("privacy", "defence", "poisoning", "generator", "tuning", "replay")), **tables}
    return SimpleNamespace(method=method, seed=seed, engine=engine, federation=federation or Federated(), **given)


def data_of(name):
    """Four images of noise in each split."""
    images = np.random.default_rng(len(name)).integers(0, 256, (3, 4, 1, 8, 8), dtype=np.uint8)
    return SiteData(name, *(ImageSet(some, np.zeros(4, dtype=np.int64)) for some in images))


def plain_trainer():
    return SimpleNamespace(
        privacy=None,
        device=torch.device("cpu"),
        local_names=frozenset(),
        model=torch.nn.Linear(1, 1),
        random_shares=lambda rng: contextlib.nullcontext(),
    )


def host_spec(folder, method=None, **changes):
    """How simulated sites work with a method; what is named here is another one."""
    plain = {"study": plain_study(method), "trainer": None, "folder": folder, "open_data": data_of, "expected": {}}
    return HostSpec(**{**plain, "policy": Policy(shares="equal"), **changes})


def kit_of(folder, suspensions=None, require_approval=lambda: None, keys=None):
    """What the people of site "a" have."""
    return Kit(
        site="a",
        keys=keys or SeedKeys(0),
        anchors=folder / "anchors",
        suspensions=suspensions or Suspensions(folder),
        require_approval=require_approval,
    )
