"""The whole check of a run's ledgers: chain, signatures, anchors, and what the coordinator received, which it writes
down as it comes.

It needs nothing but files: a site's ledgers, public keys, and what others wrote down about them.
"""

import contextlib
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.data.source import AT_SITES
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.keys import (
    PUBLIC_FILE,
    SIGNING_FILE,
    Anchor,
    Head,
    KeyRing,
    KitKeys,
    PublicKeys,
    SeedKeys,
    anchor_from_json,
    is_countersigned,
    sign_anchor,
    signer_of_line,
)
from polyclinic.federation.ledger.kinds import SEALED, ParcelRejected
from polyclinic.federation.ledger.ledger import AnchorFile, LedgerBroken, check_head, verify
from polyclinic.files import append
from polyclinic.json_types import JsonObject, parse_json
from polyclinic.run_folder import check_whole

if TYPE_CHECKING:  # here: who checks ledgers need not wait for torch
    from polyclinic.federation.call import Call, Reply

RECEIVED_FILE = "received.jsonl"


def read_received(folder: Path) -> list[JsonObject]:
    """What a coordinator wrote down, oldest first, without a line that a killed process left unfinished."""
    path = folder / RECEIVED_FILE
    found: list[JsonObject] = []
    for number, text in enumerate(path.read_bytes().splitlines() if path.exists() else [], 1):
        with contextlib.suppress(ValueError):
            found.append(parse_json(text) | {"number": number})
    return found


class Heads:
    """The heads of all ledgers of one run. A ledger that went back, or is another one now, is refused."""

    def __init__(self, folder: Path, ring: KeyRing | None = None) -> None:
        """`folder`: the coordinator's run folder; `ring`: its keys in a deployed run, where heads must be signed."""
        self._folder, self._keys = folder, ring
        self.known: dict[str, Anchor] = {}  #: of a deployed site, counter-signed: goes with its next call
        self._soon: dict[str, Callable[[], Head | None]] = {}  # of simulated sites whose lines are being written
        received = folder / RECEIVED_FILE
        if ring and received.exists() and not received.read_bytes().endswith(b"\n"):
            append(received, b"\n")  # what comes next does not go on with what a killed process left unfinished

    def receive(self, call: "Call", reply: "Reply") -> None:
        """Take the head that came with an answer; ParcelRejected if the ledger is not the one that was known."""
        if reply.head_soon:
            self._soon[reply.site] = reply.head_soon
            return
        if self._soon:
            self._settle(reply.site)
        head, known = reply.head, self.known.get(reply.site)
        if head is None:
            if known or (self._keys and reply.parcels):
                raise ParcelRejected("the answer came without the head of the site's ledger")
            return
        if known and (head.lines < known.lines or (head.lines == known.lines and head.digest != known.digest)):
            raise ParcelRejected(f"its ledger had {known.lines} lines, and is another one now, of {head.lines} lines")
        self.known[reply.site] = self._countersigned(reply.site, head)
        if self._keys:
            self._write(call, reply)

    def anchor(self, site: str) -> Anchor | None:
        """The counter-signed head of a deployed site, which goes with its next call."""
        return self.known.get(site) if self._keys else None

    def restore(self, plain: Mapping[str, Sequence[Any]]) -> None:
        """Take over what `plain` gave, and what came after that checkpoint."""
        self.known = {site: anchor_from_json(value) for site, value in plain.items()}
        for line in read_received(self._folder) if self._keys else []:
            anchor = anchor_from_json(line["head"])
            if line["site"] not in self.known or anchor.lines > self.known[line["site"]].lines:
                self.known[line["site"]] = anchor

    def plain(self) -> dict[str, Anchor]:
        """What a checkpoint keeps."""
        if self._soon:
            self._settle(*self._soon)
        return dict(self.known)

    def summary(self) -> JsonObject:
        """For the result: lines and last digest of each ledger, and the signatures of a deployed run."""
        self._settle(*self._soon)
        return {site: {name: value for name, value in a._asdict().items() if value} for site, a in self.known.items()}

    def _settle(self, *sites: str) -> None:
        """Take the heads that were still to come."""
        for site in sites:
            if site in self._soon and (head := self._soon.pop(site)()):
                self.known[site] = self._countersigned(site, head)

    def _countersigned(self, site: str, head: Head) -> Anchor:
        if self._keys is None:
            return Anchor(head.lines, head.digest)
        if signer_of_line(self._keys.verifying_keys(site), head.digest, head.signature) is None:
            raise ParcelRejected("the head of its ledger is not signed with the key that the kits have for it")
        return sign_anchor(self._keys.signing_key(COORDINATOR), self._folder.name, site, head)

    def _write(self, call: "Call", reply: "Reply") -> None:
        line = {"site": call.site, "round": call.round, "operation": call.operation, "to": call.to}
        line["parcels"] = [
            {"kind": one.content, "bytes": one.size, "digest": None if one.kind == SEALED else one.digest}
            for one in reply.parcels  # of a sealed one nobody here knows what is inside
        ]
        line["head"] = self.known[call.site]
        append(self._folder / RECEIVED_FILE, json.dumps(line).encode() + b"\n")


@dataclass(frozen=True)
class Witness:
    """Somebody who has seen the head of a site's ledger: `name` is a file, or what it stands for."""

    name: str
    site: str
    anchor: Anchor


@dataclass(frozen=True)
class Evidence:
    """What ledgers are compared with. `strict`: a line without a signature is a broken one."""

    keys: SeedKeys | PublicKeys | None = None
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
    known = evidence.keys.verifying_keys(site) if evidence.keys else None
    if known == () and path.exists():
        raise LedgerBroken(f"{path}, line 1: there is no public key of site '{site}' to check its signature with")
    lines = verify(path, known if evidence.strict else None) if path.exists() else []
    signed = ["signature" in line for line in lines]
    unsigned = signed.index(True) if True in signed else len(signed)  # the first ones, which an older version wrote
    if not all(signed[unsigned:]):
        raise LedgerBroken(f"{path}, line {unsigned + signed[unsigned:].index(False) + 1}: is not signed")
    if known and lines and not evidence.strict:
        verify(path, known, unsigned=unsigned)
    checked = Checked(lines, unsigned, signatures_checked=evidence.keys is not None)
    digests = [line["digest_of_line"] for line in lines]
    keys = evidence.keys.verifying_keys(COORDINATOR) if evidence.keys and evidence.run else ()
    for witness in evidence.witnesses:
        if witness.site == site:
            anchor = witness.anchor
            check_head(anchor, path, digests, witness.name)
            checked.seen = max(checked.seen, anchor.lines)
            if anchor.countersignature:
                if keys and not is_countersigned(keys, evidence.run, site, anchor):
                    raise LedgerBroken(
                        f"{witness.name}: the counter-signature of {anchor.lines} lines is not the coordinator's"
                    )
                checked.countersigned = max(checked.countersigned, anchor.lines)
    if evidence.received is not None:
        _compare(path, site, checked, evidence.received)
    return checked


# --- what others have seen ----------------------------------------------------------------------------


def witnesses_in(folder: Path) -> list[Witness]:
    """What a run folder says about the heads of ledgers: its result, its checkpoint, what the coordinator received.

    Damaged where its result is gone, or is not what the run wrote: it might not speak of a ledger any more.
    """
    check_whole(folder, "result.json")
    found = []
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


def check_run(run: Path, keys: Path | None = None, against: Path | None = None) -> dict[str, Checked]:
    """The ledgers of a run that hold, by site; WorkFailed, with all faults, if one does not.

    `run` is a run folder or one ledger file, `keys` a file of public keys, `against` the coordinator's run folder.
    """
    check_whole(run)
    if run.is_file() and run.resolve().parent.name != "ledger" and b'"digest_of_line"' not in run.read_bytes():
        raise BadInput(f"{run}: is no ledger; name a run folder, or a file such as ledger/site-1.jsonl in one")
    try:
        evidence = evidence_about(run, keys, against)
    except LedgerBroken as error:
        raise WorkFailed(f"the ledger cannot be checked: {error}") from None
    found, faults = {}, []
    for site, file in _files(run, evidence).items():
        try:
            found[site] = check_ledger(file, site, evidence)
        except LedgerBroken as error:
            faults.append(f"the ledger of site '{site}' does not hold: {error}")
    if faults:
        raise WorkFailed("\n".join(faults))
    return found


def evidence_about(run: Path, keys: Path | None = None, against: Path | None = None) -> Evidence:
    """What the ledgers of a run are compared with."""
    folder = _folder_of(run)
    witnesses, kit = witnesses_in(folder) if folder else [], _kit_of(folder)
    if folder and kit and (owner := _owner_of(kit, folder)) not in (None, COORDINATOR):
        place = folder.resolve()  # what the site's own anchor of this folder says
        anchor = kit / "anchors" / place.parent.name / f"{place.name}.json"
        witnesses = [*witnesses, *witnesses_at_site(anchor, owner or "")]
    if against is not None:
        if not (against / RECEIVED_FILE).exists():
            raise BadInput(f"--against {against}: holds no {RECEIVED_FILE}; name the coordinator's folder of this run")
        witnesses += witnesses_in(against)
    public, strict = _keys_for(folder, keys)
    return Evidence(public, strict, witnesses, against, folder.resolve().name if folder else "")


def _folder_of(run: Path) -> Path | None:
    """The run folder; None for a ledger file that lies in none."""
    if not run.is_file():
        return run
    return run.resolve().parent.parent if run.resolve().parent.name == "ledger" else None


def _keys_for(folder: Path | None, keys: Path | None) -> tuple[SeedKeys | PublicKeys | None, bool]:
    """The public keys to check signatures with, and whether every line must have one.

    Those named; those of the kit; those that follow from a simulated study's seed, where lines that an older version
    wrote have none.
    """
    kit = _kit_of(folder)
    if keys is None and kit:
        keys = kit / "local" / PUBLIC_FILE
    if keys is not None:
        return PublicKeys(keys), True
    if folder:
        check_whole(folder, "study.toml")
    study = folder / "study.toml" if folder else None
    if study is None or not study.exists():
        return None, False
    tables = tomllib.loads(study.read_text(encoding="utf-8"))
    deployed = tables.get("data", {}).get("source") in AT_SITES
    return (None if deployed else SeedKeys(int(tables.get("seed", 0)))), False


def _kit_of(folder: Path | None) -> Path | None:
    """The kit with keys that a folder with ledgers lies in: KIT/runs/NAME or KIT/approvals/NAME."""
    kit = folder.resolve().parent.parent if folder else None
    return kit if kit and (kit / "local" / PUBLIC_FILE).exists() else None


def _owner_of(kit: Path, folder: Path) -> str | None:
    """The site, or coordinator, whose kit it is; of a site that has left and deleted its key, by the ledger's name."""
    if (kit / "local" / SIGNING_FILE).exists():
        return KitKeys(kit / "local").owner()
    names = [file.stem for file in (folder / "ledger").glob("*.jsonl")]
    return names[0] if len(names) == 1 else None


def _files(run: Path, evidence: Evidence) -> dict[str, Path]:
    """The ledger files of a run by site, those included that are gone although somebody has seen them."""
    if run.is_file():
        return {run.stem: run}
    files = {file.stem: file for file in sorted((run / "ledger").glob("*.jsonl"))}
    if not files and (run / RECEIVED_FILE).exists():
        raise BadInput(f"{run}: the ledgers of this run are at its sites; name KIT/runs/NAME, and --against {run}")
    kit = _kit_of(run)
    owner = _owner_of(kit, run) if kit else None
    seen = [witness.site for witness in evidence.witnesses if owner in (None, witness.site)]
    if not files and not seen:
        raise BadInput(f"{run}: holds no ledger; name a run folder or a ledger file")
    return {site: run / "ledger" / f"{site}.jsonl" for site in sorted({*seen, *files})}
