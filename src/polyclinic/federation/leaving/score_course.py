"""The course of scores at a deployed site: one release of metrics by each operation in each round of the study.

A coordinator that could ask for scores of weights of its choice as often as it likes would find out about single
patients. The ledger counts, which no coordinator can put back.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyclinic.federation.call import Call
from polyclinic.federation.leaving.budget import SCORES
from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.ledger import Ledger, verify
from polyclinic.federation.leaving.parcel import Parcel, ParcelRejected


def check_round(call: Call, rounds: int) -> None:
    """ParcelRejected for a round that the study does not have."""
    if type(call.round) is not int or not 0 <= call.round <= rounds:
        raise ParcelRejected(f"the study has rounds 0 to {rounds}, and round {call.round!r} came")


#: times more that an operation may release scores of a round that was begun again after an interruption: another site
#: may be missing then, and the model another one
REPEATS = 2


def check_scores(call: Call, parcels: Sequence[Parcel], ledger: Ledger, rounds: int, *, put_back: bool = False) -> None:
    """GateRefused if an operation has released its scores of this round already.

    After the last round the test images are scored, too. What repeats a line on record, after a run was interrupted,
    tells nothing new. `put_back`: the run was interrupted, and goes on from an earlier checkpoint.
    """
    address = (call.round, call.operation)
    new = [one for one in parcels if one.kind == SCORES and not ledger.has(*address, one.kind, one.digest, call.to)]
    if not new or not ledger.path.exists():
        return
    lines = verify(ledger.path)
    before = sum((line["round"], line["operation"], line["kind"]) == (*address, SCORES) for line in lines)
    allowed = (2 if call.round == rounds else 1) + (REPEATS if put_back else 0)
    if before + len(new) > allowed:
        raise GateRefused(f"'{call.operation}' has released its scores of round {call.round} already")
