"""Attack: ask one site under many names, to get a fresh budget, ledger and noise key with each."""

import pytest
from attacked_site import ask, first_weights

from polyclinic.data.allowed_paths import check_site_names
from polyclinic.deployment.kits import check_names
from polyclinic.errors import BadInput
from polyclinic.federation.call import GateRefused
from polyclinic.federation.ledger.kinds import ParcelRejected


def files(folder):
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", ["south", "x1", "coordinator", "../../../../../escaped"])
def test_a_host_serves_its_own_site_and_no_other_name(kit, name):
    host = kit.host()
    before = files(kit.folder.parent)
    with pytest.raises(ParcelRejected, match="this host serves site 'north' only"):
        ask(host, "train", weights=first_weights(host), site=name)
    assert files(kit.folder.parent) == before


def test_a_budget_that_is_spent_stays_spent_whatever_the_run_or_the_name(kit):
    host = kit.host()
    size = len(ask(host, "train", weights=first_weights(host)).parcels[0].encoded)
    # a ledger that an older version wrote under another name
    ledgers = kit.folder / "runs" / "run" / "ledger"
    (ledgers / "north.jsonl").rename(ledgers / "x1.jsonl")
    kit.policy(max_bytes=size + 100)
    with pytest.raises(GateRefused, match="bytes would have left"):
        ask(kit.host(run="second"), "train", weights=first_weights(host))


@pytest.mark.parametrize("name", ["coordinator", "Coordinator"])
def test_no_site_may_be_called_coordinator(name):
    with pytest.raises(BadInput, match="'coordinator'"):
        check_site_names(["north", name])
    with pytest.raises(BadInput, match="'coordinator'"):
        check_names(("north", name))
