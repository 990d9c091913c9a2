"""Attack: have a site train again for each site that could receive what it makes."""

import pytest
import torch
from attacked_site import ask

from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared.method import operation


class Gossip(FedAvg):
    """A plug-in whose sites train and hand each other what they made."""

    @operation("weights", partner="sites")
    def whisper(self, site):
        site.state["trained"] = site.state.get("trained", torch.tensor(0)) + 1
        return Parcel("weights", {"w": site.state["trained"].float().reshape(1)})


@pytest.fixture
def host(kit):
    host = kit.host()
    host.method = Gossip(rounds=3)
    return host


def test_a_site_trains_once_a_round_whoever_receives(host):
    assert ask(host, "whisper", 1, to="south").parcels
    for receiver in ("north", "south"):
        with pytest.raises(GateRefused, match="'whisper' has released what it made in round 1 already"):
            ask(host, "whisper", 1, to=receiver)
    assert ask(host, "whisper", 2, to="north").parcels
    assert int(host.sites.get("north").state["trained"]) == 2
