"""The course of a study at a deployed site: an operation once a round, and scores of weights that are trained next.

A coordinator that could have weights of its choice trained or scored as often as it likes would find out about single
patients. The ledger counts, and a file of the site has the weights that were scored; no coordinator can put them back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from polyclinic.federation.call import Call
from polyclinic.federation.leaving.budget import SCORES
from polyclinic.federation.leaving.gate import GateRefused
from polyclinic.federation.leaving.ledger import Ledger, verify
from polyclinic.federation.leaving.parcel import Parcel, ParcelRejected
from polyclinic.federation.operation import Operation
from polyclinic.files import atomic_write


def check_round(call: Call, rounds: int) -> None:
    """ParcelRejected for a round that the study does not have."""
    if type(call.round) is not int or not 0 <= call.round <= rounds:
        raise ParcelRejected(f"the study has rounds 0 to {rounds}, and round {call.round!r} came")


def check_once(call: Call, declared: Operation, ledger: Ledger, *, put_back: bool = False) -> None:
    """GateRefused, before the work, if an operation that a method asks once a round has released something in this one.

    Scores have a rule of their own. What an interrupted run has released may be released again.
    """
    if declared.repeats or set(declared.releases) <= {SCORES, "keys"} or ledger.may_repeat(call.round, call.operation):
        return
    if ledger.times(call.round, call.operation, call.to) >= 1 + (REPEATS if put_back else 0):
        raise GateRefused(f"'{call.operation}' has released what it made in round {call.round} already")


class ScoredWeights:
    """The digests of the weights that a site scored in each round, in a file: the next round must begin with them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, call: Call) -> None:
        """The site has released scores of the weights that came with a call."""
        known = self._known()
        if "weights" in call.parcels and call.parcels["weights"].digest not in known.get(str(call.round), []):
            known.setdefault(str(call.round), []).append(call.parcels["weights"].digest)
            atomic_write(self.path, json.dumps(known), private=True, durable=True)

    def check(self, call: Call) -> None:
        """ParcelRejected for weights to begin a round with that are not those scored in the round before it."""
        scored = self._known().get(str(call.round - 1), [])
        if scored and "weights" in call.parcels and call.parcels["weights"].digest not in scored:
            raise ParcelRejected(
                f"the weights that came for '{call.operation}' in round {call.round} are not those that were scored in "
                f"round {call.round - 1}"
            )

    def _known(self) -> dict[str, list[str]]:
        return dict(json.loads(self.path.read_text(encoding="utf-8"))) if self.path.exists() else {}


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
