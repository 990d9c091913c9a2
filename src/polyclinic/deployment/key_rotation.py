"""Keys of a site that change hands: rotation, a site that leaves for good, a site that others no longer trust.

In a rotation the old key vouches for the new ones:

KIT/keys/rotations/ledger/SITE.jsonl   two lines for every rotation, signed by the old key: `digest` is a new public key

That file holds no secret. The site gives it to the coordinator and the other sites, who take the new keys from it with
`accept_rotations`. Old ledgers stay as they are: public keys are kept for good, and each line is checked with the key
that signed it.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.kits import KEYS_HEAD
from polyclinic.deployment.processes import LEFT, is_running
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import (
    PRIVATE_FILE,
    PUBLIC_FILE,
    SIGNING_FILE,
    KitKeys,
    PublicKeys,
    public_key,
    signer_of_line,
    signing_public_key,
)
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken, verify
from polyclinic.files import atomic_write, lock

#: the kinds of the two lines
SEALING, SIGNING = "sealing-key", "signing-key"
#: seconds to wait for a run of the site to end
WAIT = 5.0


def rotations_file(kit: Path, site: str) -> Path:
    """The site's record of its rotations, which others need."""
    return kit / "keys" / "rotations" / "ledger" / f"{site}.jsonl"


def rotate_keys(kit: Path) -> Path:
    """Give a site new keys; the file that the coordinator and the other sites need to take them.

    BadInput while a run of the site is at work. If this is cut off in the middle, the old keys are still there, and it
    can be done again.
    """
    local, old = kit / "local", KitKeys(kit / "local")
    site = old.owner()
    with _no_run_at_work(kit):
        sealing, signing = X25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        file = rotations_file(kit, site)
        ledger = Ledger(file, old.signing_key(), AnchorFile(kit / "anchors" / "keys" / "rotations.json"))
        for kind, key in ((SEALING, public_key(sealing)), (SIGNING, signing_public_key(signing))):
            ledger.append(round=0, operation="rotate_keys", kind=kind, bytes=0, digest=key.hex(), to=site)
        ledger.commit()
        _extend(local / PUBLIC_FILE, site, public_key(sealing).hex(), [signing_public_key(signing).hex()])
        atomic_write(local / PRIVATE_FILE, sealing.private_bytes_raw(), private=True, durable=True)
        atomic_write(local / SIGNING_FILE, signing.private_bytes_raw(), private=True, durable=True)
    return file


def accept_rotations(public_file: Path, rotations: Path) -> tuple[str, int]:
    """Take a site's new keys into a file of public keys; the site's name, and how many signing keys are new.

    LedgerBroken unless the key that is known of the site vouches for the next one, and so on.
    """
    site, known = rotations.stem, PublicKeys(public_file).verifying_keys(rotations.stem)
    if not known:
        raise BadInput(f"{public_file}: has no signing key of a site '{site}'; the file must be called SITE.jsonl")
    if PublicKeys(public_file).public(site) is None:
        raise BadInput(f"{public_file}: has no sealing key of site '{site}', which is not trusted here; take new kits")
    keys, sealing = [known[0]], ""
    for number, line in enumerate(verify(rotations), 1):
        if signer_of_line(keys[-1:], line["digest_of_line"], line.get("signature")) is None:
            raise LedgerBroken(f"{rotations}, line {number}: is not signed by the key that site '{site}' had then")
        if line["kind"] == SIGNING:
            keys.append(bytes.fromhex(line["digest"]))
        elif line["kind"] == SEALING:
            sealing = line["digest"]
    if tuple(keys[: len(known)]) != known:
        raise LedgerBroken(f"{rotations}: lacks a key of site '{site}' that {public_file} has; ask for the newest file")
    new = [key.hex() for key in keys[len(known) :]]
    if new:
        _extend(public_file, site, sealing, new)
    return site, len(new)


def _extend(public_file: Path, site: str, sealing: str, signing: list[str]) -> None:
    tables: dict[str, Any] = tomllib.loads(public_file.read_text(encoding="utf-8"))
    tables["sealing"][site] = sealing
    tables["signing"][site] = [*tables["signing"][site], *signing]
    atomic_write(public_file, KEYS_HEAD + tomli_w.dumps(tables), private=True, durable=True)


@contextlib.contextmanager
def _no_run_at_work(kit: Path) -> Any:
    """Hold the locks of all runs: one at work has the old keys in memory, and others seal for them."""
    with contextlib.ExitStack() as held:
        for file in sorted((kit / "runs").glob(".*.lock")):
            try:
                held.enter_context(lock(file, wait=WAIT))
            except TimeoutError:
                run = file.name.removeprefix(".").removesuffix(".lock")
                raise BadInput(f"run '{run}' is at work at this site; stop it before you rotate the keys") from None
        yield


def leave(kit: Path, site: str) -> list[Path]:
    """End everything that could act in the site's name; what was deleted.

    Every study is revoked or refused, with a line in the ledger, before the keys go. Ledgers, anchors, decisions,
    models and public keys stay: they are the site's proof of what left.
    """
    if is_running(kit):
        raise BadInput(f"site {site} is running; stop it (Ctrl-C, or your service manager) before it leaves")
    approvals = Approvals(kit, site)
    for request in approvals.requests():
        decided = approvals.decisions(request.run)
        if not decided or decided[-1].decision == "approve":
            approvals.decide(request.run, "revoke" if decided else "refuse", "the site leaves for good")
    atomic_write(kit / LEFT, f"site {site} left for good on {time.strftime('%Y-%m-%d %H:%M:%S')}\n", private=True)
    return [path for path in secrets_of(kit) if _delete(path)]


def secrets_of(kit: Path) -> list[Path]:
    """What of a kit could act in the site's name, undo its noise, or hold its images."""
    keys = [kit / "startup" / "client.key", kit / "local" / PRIVATE_FILE, kit / "local" / SIGNING_FILE]
    return [*keys, *sorted((kit / "runs").glob("*/sites/*/noise.key")), kit / "cache"]


def _delete(path: Path) -> bool:
    there = path.exists()
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return there


def distrust(kit: Path, other: str) -> None:
    """Seal nothing for another site any more. Its signing keys stay, so that its old ledgers can be verified."""
    file = kit / "local" / PUBLIC_FILE
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    if tables["sealing"].pop(other, None) is None:
        raise BadInput(f"{other}: {file} has no sealing key of this site; it lists {', '.join(tables['sealing'])}")
    atomic_write(file, KEYS_HEAD + tomli_w.dumps(tables), private=True)
