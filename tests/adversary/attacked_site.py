"""A deployed site in one process, with a real kit folder, and a coordinator that may send it anything.

The coordinator of these tests has what docs/deploy.md grants one: settings of studies, weights of its choice, and any
declared operation, as often as it likes.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pinned_keys import pin_keys

from polyclinic.deployment.deployed_site import deployed_host
from polyclinic.federation.call import COORDINATOR, Call, Reply
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.study import Study

SITE = "north"
KINDS = ["weights", "gradients", "metrics", "statistics", "keys", "synthetic-images", "generator"]


class Kit:
    """The kit of site 'north', with 60 small images of its own in a folder: two classes, a patient each.

    `south` and `server` have the keys of another site and of the coordinator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(0)
        for name in ("clear", "ill"):
            place = folder.parent / "scans" / name
            place.mkdir(parents=True)
            for number in range(30):
                pixels = rng.integers(0, 255, (16, 16), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{name}{number:02d}.png")
        (folder / "local").mkdir(parents=True)
        self.south, self.server = folder.parent / "south", folder.parent / "server"
        self.south.mkdir()
        self.server.mkdir()
        pin_keys({SITE: folder / "local", "south": self.south}, self.server)
        (folder / "local" / "site.toml").write_text('[datasets.scans]\nsource = "folder"\npath = "../../scans"\n')
        self.policy()

    def policy(self, approve: str = "every = true", incoming: str = "on = false", **settings: Any) -> None:
        """What the site's people write into policy.toml; `approve` is its table of rules. The incoming check is off, so
        that each other defence is tried by itself."""
        settings = {"kinds": KINDS, "min_cohort": 1, "scores": "fine", **settings}
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if value is not None]
        lines += ["[incoming]", incoming, "[approve]", approve]
        (self.folder / "local" / "policy.toml").write_text("\n".join(lines) + "\n")

    def host(self, run: str = "run", **changes: Any) -> SiteHost:
        """The site's process for a run of this name, as the coordinator orders it."""
        spec = {"study": study(**changes).as_tables(), "run": run, "site": SITE, "kit": str(self.folder)}
        return deployed_host(json.loads(json.dumps(spec)))

    def log(self) -> str:
        """What the site's own people read."""
        file = self.folder / "failures.log"
        return file.read_text() if file.exists() else ""


def study(**changes: Any) -> Study:
    """A study as a coordinator sends it; `study(method__name="fedsgd")` changes a setting of a table."""
    tables: dict[str, Any] = {
        "data": {"source": "at-sites", "dataset": "scans", "size": 16, "classes": ["clear", "ill"]},
        "sites": {"partition": "column", "names": ["north", "south"]},
        "model": {"backbone": "lenet5"},
        "optimizer": {"batch_size": 8, "lr": 0.05},
        "method": {"name": "fedavg", "rounds": 3},
        "engine": {"device": "cpu"},
    }
    for path, value in changes.items():
        table, _, name = path.partition("__")
        if name:
            tables.setdefault(table, {})[name] = value
        else:
            tables[table] = value
    return Study(**tables)


def ask(
    host: SiteHost,
    operation: str,
    round: int = 1,
    *,
    site: str = SITE,
    to: str = COORDINATOR,
    weights: Any = None,
    parcels: dict[str, Parcel] | None = None,
    **arguments: Any,
) -> Reply:
    """What the site answers to one call."""
    carried = {**({"weights": Parcel("weights", weights)} if weights is not None else {}), **(parcels or {})}
    return host.handle(Call(site, operation, round, carried, arguments, to))


def first_weights(host: SiteHost) -> dict[str, Any]:
    """The weights that a study begins with."""
    return host.spec.first_weights(SITE)


def shuffled(weights, seed=1):
    """Another network of the same numbers: every row of every layer takes another one's place."""
    rng = torch.Generator().manual_seed(seed)
    return {name: tensor[torch.randperm(len(tensor), generator=rng)] for name, tensor in weights.items()}


PRIVATE = {"on": ["classifier"], "noise_multiplier": 1.0, "max_grad_norm": 1.0}
