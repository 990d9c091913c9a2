"""Key rotation: a site takes new sealing and signing keys, and the old key vouches for them.

KIT/keys/rotations/ledger/SITE.jsonl   two lines for every rotation, signed by the old key: `digest` is a new public key

That file holds no secret. The site gives it to the coordinator and the other sites, who take the new keys from it with
`accept_rotations`. Old ledgers stay as they are: public keys are kept for good, and each line is checked with the key
that signed it.
"""

from __future__ import annotations

import contextlib
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic.deployment.kits import KEYS_HEAD
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.key_ring import PRIVATE_FILE, PUBLIC_FILE, SIGNING_FILE, KitKeys, PublicKeys
from polyclinic.federation.ledger.ledger import Ledger, verify
from polyclinic.federation.ledger.sealing import public_key
from polyclinic.federation.ledger.signing import AnchorFile, LedgerBroken, signer_of_line, signing_public_key
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
