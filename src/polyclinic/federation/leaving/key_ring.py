"""Key rings: the sealing keys that a site has of its own and knows of others.

A deployed site finds them in its kit, where they were put when the kits were made: no key that comes through the
coordinator is trusted. A simulated site's keys follow from the study's seed: the same study gives the same bits.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from polyclinic.errors import BadInput
from polyclinic.federation.leaving.sealing import public_key

#: in the folder `local` of a kit: the site's own private key, and the public keys of all sites by name, as hex digits
PRIVATE_FILE = "sealing.key"
PUBLIC_FILE = "site_keys.toml"


class KeyRing(Protocol):
    """The keys that a site works with."""

    def own(self, site: str) -> X25519PrivateKey:
        """The private key of the site itself."""

    def public(self, site: str) -> bytes | None:
        """The public key of a site, or None for one that nobody vouches for."""


class SeedKeys:
    """Keys of simulated sites, which follow from the study's seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def own(self, site: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(hashlib.sha256(f"sealing key {self.seed} {site}".encode()).digest())

    def public(self, site: str) -> bytes | None:
        return public_key(self.own(site))


class KitKeys:
    """Keys of a deployed site, pinned in its kit when the kits were made."""

    def __init__(self, local: Path) -> None:
        self.local = local

    def own(self, site: str) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self._file(PRIVATE_FILE).read_bytes())

    def public(self, site: str) -> bytes | None:
        found = tomllib.loads(self._file(PUBLIC_FILE).read_text(encoding="utf-8")).get(site)
        return None if found is None else bytes.fromhex(found)

    def _file(self, name: str) -> Path:
        if not (self.local / name).is_file():
            raise BadInput(f"{self.local / name}: no such file; `polyclinic deploy init` puts one into every kit")
        return self.local / name
