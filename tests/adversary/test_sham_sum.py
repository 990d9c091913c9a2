"""Attack: begin a secure sum in a study that has none. Where sites share the noise of differential privacy, each adds a
part of it, since others' noise is in the sum too: an answer that leaves in the clear must not have that part alone."""

import pytest
import torch
from attacked_site import ask

from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.sums.site_memory import OpenSum, keep


def private_head(kit, how):
    return kit.host(
        model={"backbone": "efficientnet-lite0-1024", "input_size": 32},
        method={"name": "private-head", "rounds": 1, "numbers": 4, "phantoms": 10},
        privacy={"noise_multiplier": 1.0, "max_grad_norm": 1.0},
        federation={"sum": how},
    )


@pytest.mark.parametrize("how", ["float", "integer"])
def test_no_sum_begins_where_answers_leave_in_the_clear(kit, how):
    host = private_head(kit, how)
    with pytest.raises(ParcelRejected, match=r"federation\.sum is not 'secure'"):
        ask(host, "give_mask_key", 1, sum_of="give_share_of_sum")


@pytest.mark.parametrize("how", ["float", "integer"])
def test_no_part_of_the_noise_leaves_in_the_clear(kit, how):
    """Though the site takes part in a sum, as it would if an earlier version had begun one."""
    host = private_head(kit, how)
    site = host.sites.get("north")
    basis = {**host.spec.method._basis(site), "sites": torch.tensor(2)}
    ask(host, "take_basis", 0, parcels={"statistics": Parcel("statistics", basis)})
    keep(site, OpenSum(run="run", round=1, operation="give_share_of_sum", step="ready", honest=100))
    head = Parcel("statistics", {"head": torch.zeros(2, 5)})
    with pytest.raises(ParcelRejected, match=r"federation\.sum is not 'secure'"):
        ask(host, "give_share_of_sum", 1, parcels={"statistics": head})
