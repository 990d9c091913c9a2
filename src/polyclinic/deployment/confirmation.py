"""Who takes part in a federation: the list of its sites with their public keys, the words that two people read to each
other to compare it, and a kit's own signed note of what was confirmed.

KIT/local/confirmed.json   the list, who confirmed it and when, digests of the kit's files; signed by the kit's own key
"""

import getpass
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from pydantic import Field, StringConstraints, ValidationError

from polyclinic.data.allowed_paths import COORDINATOR, check_site_names
from polyclinic.errors import BadInput, Damaged
from polyclinic.federation.ledger.keys import (
    CONFIRMED_NAMES,
    PRIVATE_FILE,
    PUBLIC_FILE,
    SIGNING_FILE,
    KitKeys,
    public_key,
    signer_of,
    signing_public_key,
)
from polyclinic.files import atomic_write, read_json, sha256_of
from polyclinic.settings import Settings

CONFIRMED = "confirmed.json"
#: files of a kit that its people have no reason to change, from the folder `local`
SIGNED = ("../startup/*", "resources.json", "authorization.json", "comm_config.json", PUBLIC_FILE)
KEYS_HEAD = """# The public keys of the sites that were confirmed here, and of the coordinator. Do not change this file.
# Nothing is sealed for a site that has no sealing key here. Signing keys: the oldest first, as keys may be rotated.
"""
#: what the words stand for cannot be tried out in bulk: one try takes 32 MB and a tenth of a second
SCRYPT = {"n": 2**15, "r": 8, "p": 1, "maxmem": 2**26}
DIGITS, WORD = 60, 5

SiteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,63}$")]
Key = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PublicPair(Settings):
    """The two public keys of a site, as hex digits."""

    sealing: Key
    signing: Key


class Coordinator(Settings):
    """What all sites must agree on about the coordinator: address, TLS authority (PEM), key that counter-signs."""

    server: str = Field(pattern=r"^[A-Za-z0-9.-]{1,253}$")
    port: int = Field(ge=1, le=65535)
    authority: str = Field(max_length=10_000)
    signing: Key


class Roster(Settings):
    """All who take part, with their public keys: the list that each site confirms."""

    coordinator: Coordinator
    sites: dict[SiteName, PublicPair] = Field(min_length=1, max_length=1024)

    def check(self) -> None:
        """BadInput unless every name and every key is somebody's own, and every key is one."""
        check_site_names(self.sites)
        signing = [self.coordinator.signing, *(pair.signing for pair in self.sites.values())]
        sealing = [pair.sealing for pair in self.sites.values()]
        for keys in (signing, sealing):
            if len(set(keys)) < len(keys):
                raise BadInput("the list has one key under two names; do not confirm it")
        for name, pair in self.sites.items():
            try:
                X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(pair.sealing)))
            except ValueError:
                raise BadInput(f"the list has no key of '{name}' that anything could be sealed for") from None
        zeros = (b"\1" + bytes(63)).hex()  # for a point of small order, such a signature fits one text in eight
        if any(signer_of([bytes.fromhex(key)], bytes([n]), zeros) is not None for key in signing for n in range(64)):
            raise BadInput("the list has a key by which anybody could sign; do not confirm it")

    @property
    def words(self) -> str:
        """Twelve words of five digits, 199 bits, that stand for the whole list. A coordinator that chooses both of two
        lists searches for a pair with the same words: some 2^100 tries of `SCRYPT`. Digits, as they are the same in
        every language and are told apart on a telephone."""
        digest = hashlib.scrypt(canonical(self), salt=b"polyclinic list of sites 1", dklen=32, **SCRYPT)
        digits = f"{int.from_bytes(digest, 'big') % 10**DIGITS:0{DIGITS}d}"
        return " ".join(digits[start : start + WORD] for start in range(0, DIGITS, WORD))

    def neighbours(self, site: str) -> tuple[str, ...]:
        """With whom a site compares words: whom it calls, and who calls it. In the order of names, and the first after
        the last, so the calls join all sites; one call alone would not, as each list says who is called."""
        names = sorted(self.sites)
        place = names.index(site)
        found = dict.fromkeys((names[(place + 1) % len(names)], names[place - 1]))
        return tuple(name for name in found if name != site)


def same_words(given: str, words: str) -> bool:
    """Whether these are the words, however they are spaced."""
    return re.sub(r"[\s.,-]", "", given) == words.replace(" ", "")


def canonical(told: Settings, *but: str) -> bytes:
    """The bytes that a signature, or the words, are about."""
    return json.dumps(told.model_dump(mode="json", exclude=set(but)), sort_keys=True).encode()


def signed(key: Ed25519PrivateKey, told: Settings) -> str:
    return key.sign(type(told).__name__.encode() + b" " + canonical(told, "signature")).hex()


def check_signature(public: str, told: Any, what: str) -> None:
    """BadInput unless `told.signature` is by this key."""
    text = type(told).__name__.encode() + b" " + canonical(told, "signature")
    if signer_of([bytes.fromhex(public)], text, told.signature) is None:
        raise BadInput(f"{what}: its signature does not fit; somebody changed it")


class Confirmation(Settings):
    """What the people of a kit have confirmed. `files`: the SHA-256 of the kit's files, from the folder `local`."""

    roster: Roster
    by: str
    at: str
    rehearsal: bool
    files: dict[str, str]
    signature: str = ""


class OwnKeys(NamedTuple):
    """The private keys of a site; the coordinator has no sealing key."""

    sealing: X25519PrivateKey | None
    signing: Ed25519PrivateKey

    @classmethod
    def draw(cls) -> "OwnKeys":
        return cls(X25519PrivateKey.generate(), Ed25519PrivateKey.generate())

    @property
    def public(self) -> PublicPair:
        assert self.sealing
        return PublicPair(sealing=public_key(self.sealing).hex(), signing=signing_public_key(self.signing).hex())

    def write(self, folder: Path) -> None:
        if self.sealing:
            atomic_write(folder / PRIVATE_FILE, self.sealing.private_bytes_raw(), private=True, durable=True)
        atomic_write(folder / SIGNING_FILE, self.signing.private_bytes_raw(), private=True, durable=True)


def pin(local: Path, roster: Roster, own: OwnKeys, *, rehearsal: bool = False) -> None:
    """Put keys and the confirmed list into a kit. A site's earlier signing keys stay, for ledgers of before."""
    file = local / PUBLIC_FILE
    tables = KitKeys(local).tables() if file.exists() else {}
    before = tables.get("signing", {})
    names = {name: pair.signing for name, pair in roster.sites.items()} | {COORDINATOR: roster.coordinator.signing}
    signing = before | {n: [*(k for k in before.get(n, []) if k != key), key] for n, key in names.items()}
    # whom this site distrusts has no sealing key here until it has new keys
    distrusted = set(tables.get(CONFIRMED_NAMES, ())) - set(tables.get("sealing", {}))
    distrusted = {name for name in distrusted if names.get(name) in before.get(name, ())}
    sealing = {name: pair.sealing for name, pair in roster.sites.items() if name not in distrusted}
    tables = {CONFIRMED_NAMES: sorted(roster.sites), "sealing": sealing, "signing": signing}
    own.write(local)
    atomic_write(file, KEYS_HEAD + tomli_w.dumps(tables), private=True, durable=True)
    sign_kit(local, roster, rehearsal=rehearsal)


def sign_kit(local: Path, roster: Roster, *, rehearsal: bool) -> None:
    """Sign what was confirmed, with the files that the kit has now."""
    keys = KitKeys(local)
    patterns = (PUBLIC_FILE,) if keys.owner() == COORDINATOR else SIGNED
    paths = sorted(path for pattern in patterns for path in local.glob(pattern))
    files = {Path(os.path.relpath(path, local)).as_posix(): sha256_of(path) for path in paths}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    made = Confirmation(roster=roster, by=user, at=at, rehearsal=rehearsal, files=files)
    made = made.model_copy(update={"signature": signed(keys.signing_key(), made)})
    atomic_write(local / CONFIRMED, made.model_dump_json(indent=1) + "\n", private=True, durable=True)


def confirmation_of(kit: Path) -> Confirmation:
    """What the people of a kit confirmed; BadInput where they did not, or where the kit is not what they confirmed."""
    local = kit / "local"
    if not (local / CONFIRMED).is_file() and (kit / "startup" / "fed_server.json").is_file():
        raise BadInput(
            f"{kit}: no site was admitted; `polyclinic deploy admit REQUEST...` does. A deployment of an older version "
            "has drawn the keys of its sites: begin a new one with `polyclinic deploy init`"
        )
    if not (local / CONFIRMED).is_file():
        raise BadInput(
            f"{kit}: nobody at this site has confirmed who takes part; `polyclinic site confirm ADMISSION` does. A kit "
            "that was made by the coordinator, as older versions did, has keys that others had: join anew with "
            "`polyclinic site join INVITATION NAME`"
        )
    found = read(local / CONFIRMED, Confirmation)
    check_signature(signing_public_key(KitKeys(local).signing_key()).hex(), found, str(local / CONFIRMED))
    for name, digest in found.files.items():
        if sha256_of(local / name) != digest:
            raise Damaged(
                f"{(local / name).resolve()}: is not the file that was confirmed; bring it back from a copy, or do "
                "`polyclinic site confirm ADMISSION` again"
            )
    return found


def read(file: Path, kind: type) -> Any:
    """A file of one of the kinds above; BadInput where it is something else."""
    if not file.is_file():
        raise BadInput(f"{file}: no such file")
    if file.stat().st_size > 2**23:
        raise BadInput(f"{file}: has more bytes than such a file can have")
    try:
        return kind(**read_json(file))
    except (ValidationError, TypeError) as error:
        first = error.errors()[0]["loc"] if isinstance(error, ValidationError) else ()
        where = ".".join(map(str, first))
        raise BadInput(f"{file}: is no {kind.__name__.lower()} of this version ({where or 'its form'})") from None
