"""Keys: sealed boxes from site to site (X25519), signatures of ledgers (Ed25519), and the rings that hold the keys.

A box has a key of two Diffie-Hellman exchanges: of a pair drawn for this one box with the recipient's, which keeps old
boxes shut, and of the sender's own with the recipient's, which only the two of them can make, so that the box is from
whom it says. HKDF makes the key, ChaCha20-Poly1305 seals. What the bytes are about (who, to whom, when) travels open
and is bound to them: a box handed to another site, in another round or run, or under another name does not open.

A deployed site has drawn its keys itself, and finds those of the others in its kit, as its people have confirmed them:
no key that comes through the coordinator is trusted unseen. A simulated site's keys follow from the study's seed: the
same study gives the same bits. Who knows the study knows them, so the signatures of a simulated run prove nothing.
"""

import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from polyclinic.errors import BadInput, Damaged
from polyclinic.json_types import JsonMapping

KEY_BYTES = 32
#: bytes that a box is longer than what it holds: the pair drawn for it, and the seal
OVERHEAD = KEY_BYTES + 16
#: every box has a key of its own, so there is no second message that could meet the same nonce
NONCE = bytes(12)


class SealBroken(Exception):  # noqa: N818
    """A box that does not open: changed on its way, made by another, for another, or about something else."""


def public_key(key: X25519PrivateKey) -> bytes:
    """What the others need to know, 32 bytes."""
    return key.public_key().public_bytes_raw()


def seal_box(
    plain: bytes,
    about: JsonMapping,
    *,
    sender: X25519PrivateKey,
    recipient: bytes,
    drawn: X25519PrivateKey | None = None,
) -> bytearray:
    """A box for the owner of the public key `recipient`; `about` (plain JSON values) is bound to it, not in it.

    `drawn` is the pair for this one box, where it must follow from a seed; never give the same one twice.

    Models have tens of megabytes, so they are sealed into the box and opened out of it without a copy in between.
    """
    drawn = drawn or X25519PrivateKey.generate()
    theirs = X25519PublicKey.from_public_bytes(recipient)
    names = public_key(drawn) + public_key(sender) + recipient
    key = _box_key(drawn.exchange(theirs) + sender.exchange(theirs), names)
    box = bytearray(len(plain) + OVERHEAD)
    box[:KEY_BYTES] = public_key(drawn)
    ChaCha20Poly1305(key).encrypt_into(NONCE, plain, _as_bytes(about), memoryview(box)[KEY_BYTES:])
    return box


def open_box(
    box: bytes | bytearray | memoryview, about: JsonMapping, *, recipient: X25519PrivateKey, sender: bytes
) -> bytes:
    """What `seal_box` was given, by the owner of the public key `sender` and about the same; else SealBroken."""
    view = memoryview(box)
    drawn, sealed = bytes(view[:KEY_BYTES]), view[KEY_BYTES:]
    try:
        shared = [recipient.exchange(X25519PublicKey.from_public_bytes(public)) for public in (drawn, sender)]
        key = _box_key(b"".join(shared), drawn + sender + public_key(recipient))
        return ChaCha20Poly1305(key).decrypt(NONCE, sealed, _as_bytes(about))
    except (InvalidTag, ValueError) as error:  # ValueError: cut short, or a point at which X25519 is not safe
        raise SealBroken("it was changed on its way, or sealed by or for somebody else") from error


def _box_key(shared: bytes, names: bytes) -> bytes:
    return HKDF(SHA256(), length=32, salt=None, info=b"polyclinic sealing 1" + names).derive(shared)


def _as_bytes(about: JsonMapping) -> bytes:
    return json.dumps(dict(about), sort_keys=True).encode()


LINE = b"polyclinic ledger line 1 "
ANCHOR = b"polyclinic ledger anchor 1 "


class Head(NamedTuple):
    """How far a ledger has come. `signature` is that of the last line; empty where lines are not signed."""

    lines: int
    digest: str
    signature: str = ""


class Anchor(NamedTuple):
    """A head with the coordinator's counter-signature; empty where there is none."""

    lines: int
    digest: str
    signature: str = ""
    countersignature: str = ""

    @property
    def head(self) -> Head:
        return Head(*self[:3])


def signing_public_key(key: Ed25519PrivateKey) -> bytes:
    """What others need to check signatures, 32 bytes."""
    return key.public_key().public_bytes_raw()


def sign_line(key: Ed25519PrivateKey, digest_of_line: str) -> str:
    """A site's signature of a line, as hex digits."""
    return key.sign(LINE + digest_of_line.encode()).hex()


def signer_of_line(keys: Sequence[bytes], digest_of_line: str, signature: object) -> int | None:
    """The place of the public key that signed a line; None if none of them did."""
    return signer_of(keys, LINE + digest_of_line.encode(), signature)


def sign_anchor(key: Ed25519PrivateKey, run: str, site: str, head: Head) -> Anchor:
    """A head with the coordinator's counter-signature, for this run and site only."""
    return Anchor(*head, countersignature=key.sign(_anchor_text(run, site, head)).hex())


def is_countersigned(keys: Sequence[bytes], run: str, site: str, anchor: Anchor) -> bool:
    """Whether one of the coordinator's keys counter-signed this head of this site in this run."""
    return signer_of(keys, _anchor_text(run, site, anchor.head), anchor.countersignature) is not None


def head_from_json(value: Any) -> Head:
    """A head that came from outside; ValueError if it is none."""
    return Head(*_checked(value, Head))


def anchor_from_json(value: Any) -> Anchor:
    """An anchor that came from outside; ValueError if it is none."""
    return Anchor(*_checked(value, Anchor))


def _checked(value: Any, wanted: type[Head] | type[Anchor]) -> Sequence[Any]:
    fits = isinstance(value, list | tuple) and len(value) == len(wanted._fields)
    if not fits or type(value[0]) is not int or value[0] < 1 or not all(isinstance(text, str) for text in value[1:]):
        raise ValueError("not the head of a ledger")
    return value


def _anchor_text(run: str, site: str, head: Head) -> bytes:
    return ANCHOR + json.dumps([run, site, head.lines, head.digest]).encode()


def signer_of(keys: Sequence[bytes], message: bytes, signature: object) -> int | None:
    """The place of the public key that signed a message (hex digits); None if none of them did."""
    try:
        signed = bytes.fromhex(signature) if isinstance(signature, str) else b""
    except ValueError:
        return None
    if signed.hex() != signature:  # other letters for the same number: somebody changed the file
        return None
    for place, key in enumerate(keys):
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signed, message)
        except InvalidSignature:
            continue
        return place
    return None


#: in the folder `local` of a kit: the owner's private keys, and the public keys of all by name, as hex digits
PRIVATE_FILE = "sealing.key"
SIGNING_FILE = "signing.key"
PUBLIC_FILE = "site_keys.toml"
#: in it: the names of all sites whose keys were confirmed, also of those that are not trusted any more
CONFIRMED_NAMES = "confirmed"


class SeedKeys:
    """Keys of simulated sites, which follow from the study's seed. Nobody pins them."""

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
        """The public sealing key of a site, or None for one that nobody vouches for."""
        found = self._table("sealing").get(site)
        return None if found is None else _key(found, self.path, f"sealing.{site}")

    def pinned(self) -> tuple[str, ...]:
        """The sites that the people of a kit have confirmed."""
        return tuple(self.tables().get(CONFIRMED_NAMES, ()))

    def verifying_keys(self, site: str) -> tuple[bytes, ...]:
        """The public keys that a site, or the coordinator, signs with: one for each rotation, oldest first."""
        return tuple(_key(text, self.path, f"signing.{site}") for text in self._table("signing").get(site, []))

    def _table(self, name: str) -> dict[str, Any]:
        return dict(self.tables().get(name, {}))

    def tables(self) -> dict[str, Any]:
        """All that the file holds."""
        try:
            return tomllib.loads(require(self.path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{self.path}: is no TOML file of public keys ({error})") from None


class KitKeys(PublicKeys):
    """Keys of a deployed site, or of the coordinator, in the folder `local` of its kit."""

    def __init__(self, local: Path) -> None:
        super().__init__(local / PUBLIC_FILE)
        self.local = local

    def own(self, site: str) -> X25519PrivateKey:
        key = X25519PrivateKey.from_private_bytes(secret_bytes(self.local / PRIVATE_FILE))
        if public_key(key) not in map(self.public, self._table("sealing")):
            raise Damaged(f"{self.local / PRIVATE_FILE}: {NOT_LISTED}")
        return key

    def signing_key(self, site: str = "") -> Ed25519PrivateKey:
        key = Ed25519PrivateKey.from_private_bytes(secret_bytes(self.local / SIGNING_FILE))
        if self._name_of(key) is None:
            raise Damaged(f"{self.local / SIGNING_FILE}: {NOT_LISTED}")
        return key

    def owner(self) -> str:
        """The name under which the public keys list the key of this kit."""
        return self._name_of(self.signing_key()) or ""

    def _name_of(self, key: Ed25519PrivateKey) -> str | None:
        """Who signs with a key now; a key of before a rotation is nobody's."""
        mine = signing_public_key(key)
        return next((name for name in self._table("signing") if mine in self.verifying_keys(name)[-1:]), None)


NOT_LISTED = f"is damaged (its public key is not the one in {PUBLIC_FILE} beside it); bring it back from a copy"


def secret_bytes(path: Path) -> bytes:
    """A private key; Damaged if it is missing or has another length."""
    if not path.is_file():
        raise Damaged(f"{path}: is missing; bring it back from a copy, or join again (`polyclinic site join`)")
    if len(content := path.read_bytes()) != KEY_BYTES:
        raise Damaged(f"{path}: is damaged ({len(content)} bytes are no key of {KEY_BYTES}); bring it back from a copy")
    return content


#: the keys that a site works with
KeyRing = SeedKeys | KitKeys


def require(path: Path) -> Path:
    """The path of a file of keys; BadInput if there is none."""
    if not path.is_file():
        raise BadInput(f"{path}: no such file; `polyclinic site confirm` puts one into a kit")
    return path


def _key(text: object, path: Path, name: str) -> bytes:
    try:
        key = bytes.fromhex(str(text))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise BadInput(f"{path}: {name} is no public key of 64 hex digits; bring the file back from a copy")
    return key
