"""The whole check of a run's ledgers: chain, signatures, anchors, and what the coordinator received.

It needs nothing but files: a site's ledgers, public keys, and what others wrote down about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.federation.leaving.anchor_file import AnchorFile, LedgerBroken, check_head
from polyclinic.federation.leaving.ledger import verify
from polyclinic.federation.leaving.signing import Anchor, anchor_from_json, is_countersigned
from polyclinic.federation.received import RECEIVED_FILE, read_received
from polyclinic.files import check_noted
from polyclinic.json_types import JsonObject, parse_json


class VerifyingKeys(Protocol):
    """Public keys by name."""

    def verifying_keys(self, site: str) -> tuple[bytes, ...]: ...


@dataclass(frozen=True)
class Witness:
    """Somebody who has seen the head of a site's ledger: `name` is a file, or what it stands for."""

    name: str
    site: str
    anchor: Anchor


@dataclass(frozen=True)
class Evidence:
    """What ledgers are compared with. `strict`: a line without a signature is a broken one."""

    keys: VerifyingKeys | None = None
    strict: bool = False
    witnesses: Sequence[Witness] = ()
    #: the run folder of the coordinator, if it has written down what it received
    received: Path | None = None
    #: the name of the run, which counter-signatures are bound to; without it they are not checked
    run: str = ""


@dataclass
class Checked:
    """A ledger that holds: its lines, how many of the first are not signed, and who has seen it how far."""

    lines: list[JsonObject]
    unsigned: int = 0
    signatures_checked: bool = False
    #: lines that the furthest witness has seen, and those that the coordinator counter-signed
    seen: int = 0
    countersigned: int = 0
    #: lines to the coordinator that it never received: lost on their way, or the run was killed
    not_received: list[int] = field(default_factory=list)


def check_ledger(path: Path, site: str, evidence: Evidence) -> Checked:
    """What a ledger holds; LedgerBroken, with file and line, where it does not hold."""
    lines = _signed_lines(path, site, evidence) if path.exists() else []
    checked = Checked(lines, unsigned=_unsigned(path, lines), signatures_checked=evidence.keys is not None)
    digests = [line["digest_of_line"] for line in lines]
    for witness in evidence.witnesses:
        if witness.site == site:
            check_head(witness.anchor, path, digests, witness.name)
            checked.seen = max(checked.seen, witness.anchor.lines)
            if witness.anchor.countersignature:
                _check_countersignature(witness, evidence)
                checked.countersigned = max(checked.countersigned, witness.anchor.lines)
    if evidence.received is not None:
        _compare(path, site, checked, evidence.received)
    return checked


def _unsigned(path: Path, lines: Sequence[JsonObject]) -> int:
    """How many of the first lines have no signature, as an older version wrote them; LedgerBroken for a later one."""
    signed = ["signature" in line for line in lines]
    first = signed.index(True) if True in signed else len(signed)
    if not all(signed[first:]):
        raise LedgerBroken(f"{path}, line {first + signed[first:].index(False) + 1}: is not signed")
    return first


def _signed_lines(path: Path, site: str, evidence: Evidence) -> list[JsonObject]:
    if evidence.keys is None:
        return verify(path)
    keys = evidence.keys.verifying_keys(site)
    if not keys:
        raise LedgerBroken(f"{path}, line 1: there is no public key of site '{site}' to check its signature with")
    return verify(path, keys, unsigned=0 if evidence.strict else _unsigned(path, verify(path)))


def _check_countersignature(witness: Witness, evidence: Evidence) -> None:
    keys = evidence.keys.verifying_keys(COORDINATOR) if evidence.keys and evidence.run else ()
    if keys and not is_countersigned(keys, evidence.run, witness.site, witness.anchor):
        raise LedgerBroken(
            f"{witness.name}: the counter-signature of {witness.anchor.lines} lines is not the coordinator's"
        )


# --- what others have seen ----------------------------------------------------------------------------


def witnesses_in(folder: Path) -> list[Witness]:
    """What a run folder says about the heads of ledgers: its result, its checkpoint, what the coordinator received.

    Damaged where its result is not what the run wrote: it might not speak of a ledger any more.
    """
    found = []
    if (folder / "result.json").exists():
        check_noted(folder, "result.json")
    for site, values in _table(folder / "result.json", "ledgers").items():
        anchor = [values.get(name, "") for name in Anchor._fields]
        found.append(_witness(folder / "result.json", site, anchor))
    for site, value in _table(folder / "checkpoint" / "manifest.json", "plain", "ledgers").items():
        found.append(_witness(folder / "checkpoint" / "manifest.json", site, value))
    last = {line["site"]: (line["number"], line["head"]) for line in read_received(folder)}
    for site, (number, value) in last.items():
        found.append(_witness(f"{folder / RECEIVED_FILE}, line {number},", site, value))
    return found


def witnesses_at_site(anchor: Path, site: str) -> list[Witness]:
    """What the anchor of a deployed site says about one of its ledgers."""
    kept = AnchorFile(anchor)
    heads = [kept.head and Anchor(*kept.head), kept.countersigned]
    return [Witness(f"the anchor {anchor}", site, head) for head in heads if head]


def _table(path: Path, *names: str) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        for name in names:
            found = found.get(name, {})
        return dict(found)
    except (ValueError, AttributeError, TypeError) as error:
        raise LedgerBroken(f"{path}: is damaged") from error


def _witness(name: Path | str, site: str, value: Any) -> Witness:
    try:
        return Witness(str(name), site, anchor_from_json(value))
    except ValueError as error:
        raise LedgerBroken(f"{name}: what it says about the ledger of site '{site}' is damaged") from error


def _compare(path: Path, site: str, checked: Checked, folder: Path) -> None:
    """LedgerBroken if the coordinator received something that the ledger does not have."""
    left = Counter(_identity(line, line) for line in checked.lines)
    left += Counter(_identity(line, line | {"digest": None}) for line in checked.lines if line["to"] != COORDINATOR)
    came: set[tuple] = set()
    for line in read_received(folder):
        for parcel in line["parcels"] if line["site"] == site else []:
            if not left[_identity(line, parcel)]:
                about = f"{parcel['kind']} of '{line['operation']}' in round {line['round']}"
                where = f"{folder / RECEIVED_FILE}, line {line['number']}"
                raise LedgerBroken(f"{where}: {about} came, and {path} has no such line")
            came.add(_identity(line, parcel))
    to_coordinator = [line for line in checked.lines if line["to"] == COORDINATOR and line["bytes"]]
    checked.not_received = [line["index"] + 1 for line in to_coordinator if _identity(line, line) not in came]


def _identity(line: JsonObject, parcel: JsonObject) -> tuple:
    return (line["round"], line["operation"], line["to"], parcel["kind"], parcel["bytes"], parcel["digest"])
