"""Key rings: the sealing and signing keys that a site has of its own, and the public keys that it knows of others.

A deployed site finds them in its kit, where they were put when the kits were made: no key that comes through the
coordinator is trusted. A simulated site's keys follow from the study's seed: the same study gives the same bits. Who
knows the study knows them, so the signatures of a simulated run prove nothing.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic.errors import BadInput
from polyclinic.federation.ledger.sealing import public_key
from polyclinic.federation.ledger.signing import signing_public_key

#: in the folder `local` of a kit: the owner's private keys, and the public keys of all by name, as hex digits
PRIVATE_FILE = "sealing.key"
SIGNING_FILE = "signing.key"
PUBLIC_FILE = "site_keys.toml"


class KeyRing(Protocol):
    """The keys that a site works with."""

    def own(self, site: str) -> X25519PrivateKey:
        """The private sealing key of the site itself."""

    def public(self, site: str) -> bytes | None:
        """The public sealing key of a site, or None for one that nobody vouches for."""

    def pinned(self) -> tuple[str, ...]:
        """The sites whose sealing keys a kit pins; none in a simulation, where keys follow from the seed."""

    def signing_key(self, site: str) -> Ed25519PrivateKey:
        """The private signing key of the owner of this ring."""

    def verifying_keys(self, site: str) -> tuple[bytes, ...]:
        """The public keys that a site, or the coordinator, signs with: one for each rotation, oldest first."""


class SeedKeys:
    """Keys of simulated sites, which follow from the study's seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def own(self, site: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(hashlib.sha256(f"sealing key {self.seed} {site}".encode()).digest())

    def public(self, site: str) -> bytes | None:
        return public_key(self.own(site))

    def pinned(self) -> tuple[str, ...]:
        return ()

    def signing_key(self, site: str) -> Ed25519PrivateKey:
        digest = hashlib.sha256(f"signing key {self.seed} {site}".encode()).digest()
        return Ed25519PrivateKey.from_private_bytes(digest)

    def verifying_keys(self, site: str) -> tuple[bytes, ...]:
        return (signing_public_key(self.signing_key(site)),)


class PublicKeys:
    """The public keys of a file `site_keys.toml`: all that somebody outside needs to check ledgers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def public(self, site: str) -> bytes | None:
        found = self._table("sealing").get(site)
        return None if found is None else _key(found, self.path, f"sealing.{site}")

    def pinned(self) -> tuple[str, ...]:
        return tuple(self._table("sealing"))

    def verifying_keys(self, site: str) -> tuple[bytes, ...]:
        return tuple(_key(text, self.path, f"signing.{site}") for text in self._table("signing").get(site, []))

    def signers(self) -> list[str]:
        """All who have a signing key here."""
        return list(self._table("signing"))

    def _table(self, name: str) -> dict[str, Any]:
        try:
            return dict(tomllib.loads(require(self.path).read_text(encoding="utf-8")).get(name, {}))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{self.path}: is no TOML file of public keys ({error})") from None


class KitKeys(PublicKeys):
    """Keys of a deployed site, or of the coordinator, pinned in its kit when the kits were made."""

    def __init__(self, local: Path) -> None:
        super().__init__(local / PUBLIC_FILE)
        self.local = local

    def own(self, site: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(require(self.local / PRIVATE_FILE).read_bytes())

    def signing_key(self, site: str = "") -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(require(self.local / SIGNING_FILE).read_bytes())

    def owner(self) -> str:
        """The name under which the public keys list the key of this kit."""
        mine = signing_public_key(self.signing_key())
        for name in self.signers():
            if mine in self.verifying_keys(name):
                return name
        raise BadInput(f"{self.path}: does not list the public key of {self.local / SIGNING_FILE}; put it back")


def require(path: Path) -> Path:
    """The path of a file of keys; BadInput if there is none."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file; `polyclinic deploy init` puts one into every kit")
    return path


def _key(text: object, path: Path, name: str) -> bytes:
    try:
        key = bytes.fromhex(str(text))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise BadInput(f"{path}: {name} is no public key of 64 hex digits; put the file back as `deploy init` made it")
    return key
