"""A site that leaves for good, and a site that others no longer trust. New keys: `joining.py`."""

import shutil
import time
from pathlib import Path

import tomli_w

from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.confirmation import KEYS_HEAD, confirmation_of, sign_kit
from polyclinic.deployment.joining import NEXT
from polyclinic.deployment.kits import SCRATCH
from polyclinic.deployment.processes import LEFT, is_running
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import PRIVATE_FILE, PUBLIC_FILE, SIGNING_FILE, KitKeys
from polyclinic.files import PARTIAL, atomic_write


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
    # what could act in the site's name, undo its noise, or hold its images
    keys = [kit / "startup" / "client.key", kit / "local" / PRIVATE_FILE, kit / "local" / SIGNING_FILE]
    unfinished = [*kit.glob(f"{SCRATCH}*"), *(kit / "local").glob(f"*{PARTIAL}")]  # of a `confirm` that was killed
    noise = sorted((kit / "runs").glob("*/sites/*/noise.key"))
    found = [path for path in (*keys, kit / NEXT, *unfinished, *noise, kit / "cache") if path.exists()]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def distrust(kit: Path, other: str) -> None:
    """Seal nothing for another site any more. Its signing keys stay, so that its old ledgers can be verified, and it
    still counts among the confirmed sites: a secure sum needs as many sites as before."""
    confirmed, file = confirmation_of(kit), kit / "local" / PUBLIC_FILE
    tables = KitKeys(kit / "local").tables()
    if tables["sealing"].pop(other, None) is None:
        raise BadInput(f"{other}: {file} has no sealing key of this site; it lists {', '.join(tables['sealing'])}")
    atomic_write(file, KEYS_HEAD + tomli_w.dumps(tables), private=True, durable=True)
    sign_kit(kit / "local", confirmed.roster, rehearsal=confirmed.rehearsal)
