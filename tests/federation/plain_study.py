"""A study of which nothing but the method matters, and the kit of a site."""

from types import SimpleNamespace

from polyclinic.federation.layers.stopped import Suspensions
from polyclinic.federation.ledger.key_ring import SeedKeys
from polyclinic.federation.site import Kit
from polyclinic.federation.sums.settings import Federated


def plain_study(method=None, *, seed=0, wire="exact", durable=False, federation=None, **tables):
    """What a host and its sites read of a study; tables that are not given are not there."""
    given = {**dict.fromkeys(("defence", "poisoning", "generator", "tuning", "replay")), **tables}
    engine = SimpleNamespace(wire=wire, durable=durable)
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
