"""A study of which nothing but the method matters, and the kit of a site."""

from types import SimpleNamespace

from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import SeedKeys
from polyclinic.federation.site import Kit
from polyclinic.federation.sums.settings import Federated

ENGINE = {"wire": "exact", "durable": False, "on_failure": "continue", "quorum": 0.5, "checkpoint_every": 1}


def plain_study(method=None, *, seed=0, federation=None, **tables):
    """What is read of a study; tables that are not given are not there. Settings of the engine are given by name."""
    engine = SimpleNamespace(**{name: tables.pop(name, value) for name, value in ENGINE.items()})
    given = {**dict.fromkeys(("defence", "poisoning", "generator", "tuning", "replay")), **tables}
    return SimpleNamespace(method=method, seed=seed, engine=engine, federation=federation or Federated(), **given)


def kit_of(folder, suspensions=None, require_approval=lambda: None, keys=None):
    """What the people of site "a" have."""
    return Kit(
        site="a",
        keys=keys or SeedKeys(0),
        anchors=folder / "anchors",
        suspensions=suspensions or Suspensions(folder),
        require_approval=require_approval,
    )
