"""How a site joins: the coordinator invites, the site draws keys and asks, the coordinator admits, the site confirms.

DEPLOYMENT/invitation.json   for all sites: server, TLS authority, the coordinator's public key; no secret
KIT/NAME.request.json        from a site: its public keys, and what a certificate is made from
DEPLOYMENT/requests/         the request of each site that takes part
DEPLOYMENT/admission.json    for all sites: the list of all with their public keys, and a certificate for each
KIT/next/                    private keys that a site has drawn and that are not confirmed yet

No private key of a site is ever anywhere else than in its kit. New keys, lost keys, a further site and a renewed
certificate go the same way; words are read out where the list has changed.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from pydantic import Field

from polyclinic import __version__
from polyclinic.deployment import confirmation, kits
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.federation.ledger.keys import (
    PRIVATE_FILE,
    PUBLIC_FILE,
    SIGNING_FILE,
    PublicKeys,
    secret_bytes,
    signing_public_key,
)
from polyclinic.files import atomic_write, lock, make_private, read_json
from polyclinic.settings import Settings

INVITATION, ADMISSION, REQUESTS = "invitation.json", "admission.json", "requests"
REQUEST, REVOKED, NEXT, TLS_KEY = ".request.json", ".revoked", "next", "client.key"
#: seconds to wait for a run of the site to end
WAIT = 5.0


class Invitation(Settings):
    """What a site needs to ask for admission. Nothing in it is secret, and nothing in it says what may leave a site."""

    coordinator: confirmation.Coordinator
    #: those that are asked for
    sites: tuple[confirmation.SiteName, ...]
    #: what the coordinator calls the images
    dataset: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    version: str = Field(pattern=r"^[\w.+-]{1,64}$")
    #: one hand draws the keys of all sites, which protect nothing from it
    rehearsal: bool = False


class Request(Settings):
    """What a site sends: its public keys, and a request for a TLS certificate (PEM); signed by its signing key."""

    coordinator: str
    site: confirmation.SiteName
    keys: confirmation.PublicPair
    csr: str = Field(max_length=10_000)
    signature: str = ""


class Admission(Settings):
    """What the coordinator answers to all: who takes part, and the certificates of the sites (PEM)."""

    roster: confirmation.Roster
    certificates: dict[confirmation.SiteName, str]
    signature: str = ""


# --- at the coordinator -------------------------------------------------------------------------------


def invite(
    folder: Path, names: tuple[str, ...], dataset: str, server: str, port: int, *, rehearsal: bool = False
) -> Invitation:
    """Make the kits of server and admin, and the invitation. A deployment that is there already keeps its keys and its
    address, and invites these sites."""
    kits.check_names(names)
    asked: dict[str, Any] = {"sites": names, "dataset": dataset, "version": __version__}
    if (folder / INVITATION).exists():
        made = confirmation.read(folder / INVITATION, Invitation).model_copy(update=asked)
    else:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = kits.provision_coordinator(folder, server, port)
        signing = Ed25519PrivateKey.generate()
        confirmation.OwnKeys(None, signing).write(folder / "server" / "local")
        key = signing_public_key(signing).hex()
        coordinator = {"server": server, "port": port, "authority": authority, "signing": key}
        try:
            made = Invitation(coordinator=coordinator, rehearsal=rehearsal, **asked)
        except ValueError:
            shutil.rmtree(folder)
            raise BadInput(f"--server {server}, data.dataset {dataset}: use letters, digits, '-' and '_'") from None
    atomic_write(folder / INVITATION, made.model_dump_json(indent=1) + "\n")
    make_private(folder)
    return made


def admitted(folder: Path) -> dict[str, confirmation.PublicPair]:
    """The public keys of the sites whose requests were taken so far."""
    taken = [confirmation.read(file, Request) for file in sorted((folder / REQUESTS).glob("*.json"))]
    return {one.site: one.keys for one in taken}


def admit(folder: Path, files: Sequence[Path]) -> Admission:
    """Take requests, and write the admission of all sites whose requests were taken so far, with new certificates."""
    invitation = confirmation.read(folder / INVITATION, Invitation)
    taken = {file.stem: confirmation.read(file, Request) for file in sorted((folder / REQUESTS).glob("*.json"))}
    for file in files:
        request = confirmation.read(file, Request)
        _check_request(request, invitation, file)
        if (folder / REQUESTS / f"{request.site}{REVOKED}").exists():
            raise BadInput(f"{file}: '{request.site}' was revoked; the hospital joins again under another name")
        taken[request.site] = request
    if not taken:
        raise BadInput("REQUEST: missing; each site writes one with `polyclinic site join INVITATION NAME`")
    keys = {name: one.keys for name, one in taken.items()}
    roster = confirmation.Roster(coordinator=invitation.coordinator, sites=keys)
    roster.check()  # before anything is kept: one bad request must not spoil all later lists
    certificates = {}
    for name, one in taken.items():
        public = x509.load_pem_x509_csr(one.csr.encode()).public_key()
        certificates[name] = kits.issue(folder / "authority", name, kits.organisation(name), public)
    made = Admission(roster=roster, certificates=certificates)
    (folder / REQUESTS).mkdir(mode=0o700, exist_ok=True)
    for name, request in taken.items():
        atomic_write(folder / REQUESTS / f"{name}.json", request.model_dump_json(indent=1) + "\n", durable=True)
    local = folder / "server" / "local"
    signing = Ed25519PrivateKey.from_private_bytes(secret_bytes(local / SIGNING_FILE))
    made = made.model_copy(update={"signature": confirmation.signed(signing, made)})
    kits.renew_coordinator(folder, roster.coordinator.server)
    confirmation.pin(local, roster, confirmation.OwnKeys(None, signing), rehearsal=invitation.rehearsal)
    atomic_write(folder / ADMISSION, made.model_dump_json(indent=1) + "\n")
    shutil.copy(local / PUBLIC_FILE, folder / PUBLIC_FILE)
    make_private(folder)
    return made


def _check_request(request: Request, invitation: Invitation, file: Path) -> None:
    confirmation.check_signature(request.keys.signing, request, str(file))
    if request.coordinator != digest_of_coordinator(invitation.coordinator):
        raise BadInput(f"{file}: answers the invitation of another federation")
    _refuse_uninvited(request.site, invitation)
    try:
        csr = x509.load_pem_x509_csr(request.csr.encode())
        names = [str(name.value) for name in csr.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        fits = names == [request.site] and isinstance(csr.public_key(), rsa.RSAPublicKey) and csr.is_signature_valid
    except Exception:  # whatever a broken request makes the parser raise
        fits = False
    if not fits:
        raise BadInput(f"{file}: its request for a certificate is none of site '{request.site}'")


def _refuse_uninvited(site: str, invitation: Invitation) -> None:
    if site not in invitation.sites:
        hint = did_you_mean(site, list(invitation.sites))
        asked = ", ".join(invitation.sites)
        raise BadInput(
            f"{site}: the invitation asks for {asked}{hint}; the coordinator invites further sites with `polyclinic "
            "deploy init` and a study that names them"
        )


def digest_of_coordinator(coordinator: confirmation.Coordinator) -> str:
    return hashlib.sha256(confirmation.canonical(coordinator)).hexdigest()


# --- at a site ----------------------------------------------------------------------------------------


def join(invitation: Invitation, site: str, kit: Path) -> Path:
    """Begin the kit of a site: draw its private keys, and write its request, which is returned."""
    kits.check_names((site,))
    _refuse_uninvited(site, invitation)
    if kit.exists() and any(kit.iterdir()):
        raise BadInput(f"--kit {kit}: is not empty; name a new folder, or draw new keys with `site rotate-keys`")
    kit.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic_write(kit / INVITATION, invitation.model_dump_json(indent=1) + "\n")
    return draw_keys(kit, site)


def draw_keys(kit: Path, site: str) -> Path:
    """Draw new private keys, which count when they are confirmed; the site's request, which holds none of them."""
    invitation = confirmation.read(kit / INVITATION, Invitation)
    aside = kit / NEXT
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    own, tls = confirmation.OwnKeys.draw(), rsa.generate_private_key(public_exponent=65537, key_size=3072)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = tls.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain)
    own.write(aside)
    atomic_write(aside / TLS_KEY, private, private=True, durable=True)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, site)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(tls, hashes.SHA256())
    asked, text = digest_of_coordinator(invitation.coordinator), csr.public_bytes(pem).decode()
    made = Request(coordinator=asked, site=site, keys=own.public, csr=text)
    made = made.model_copy(update={"signature": confirmation.signed(own.signing, made)})
    file = kit / f"{site}{REQUEST}"
    atomic_write(file, made.model_dump_json(indent=1) + "\n")
    make_private(kit)
    return file


@dataclass(frozen=True)
class ToConfirm:
    """An admission that fits a kit, and what the kit's people confirmed before. `keys` is the folder of the private
    keys whose public ones the list has."""

    kit: Path
    site: str
    admission: Admission
    keys: Path
    before: confirmation.Confirmation | None

    @property
    def roster(self) -> confirmation.Roster:
        return self.admission.roster

    @property
    def is_known(self) -> bool:
        """Whether the same list was confirmed before, so that nobody needs to call again."""
        return self.before is not None and self.before.roster == self.roster

    def sentences(self) -> list[str]:
        """The list, and what is new in it."""
        known = self.before.roster.sites if self.before else {}
        told = []
        for name, keys in sorted(self.roster.sites.items()):
            state = "" if not known or known.get(name) == keys else "  NEW KEYS" if name in known else "  NEW SITE"
            told.append(f"  {name}{' (this site)' if name == self.site else ''}{state}")
        gone = [f"  {name}  NOT ON THE LIST ANY MORE" for name in sorted(known.keys() - self.roster.sites.keys())]
        count, coordinator = len(self.roster.sites), self.roster.coordinator
        return [f"{count} sites take part, by the server {coordinator.server}:{coordinator.port}:", *told, *gone]


def to_confirm(kit: Path, admission: Admission) -> ToConfirm:
    """What the people of a kit are asked to confirm; BadInput for an admission that is not for this kit."""
    asked = sorted(kit.glob(f"*{REQUEST}"))
    if len(asked) != 1:
        raise BadInput(f"{kit}: is no kit that has asked for admission; `polyclinic site join INVITATION NAME` begins")
    site, roster = confirmation.read(asked[0], Request).site, admission.roster
    if confirmation.read(kit / INVITATION, Invitation).coordinator != roster.coordinator:
        raise BadInput("ADMISSION: is of another coordinator than the invitation that this site joined by")
    confirmation.check_signature(roster.coordinator.signing, admission, "ADMISSION")
    kits.check_names(tuple(roster.sites))
    roster.check()
    _refuse_earlier_keys(kit, roster)
    if site not in roster.sites:
        raise BadInput(f"ADMISSION: does not have site '{site}'; send {asked[0].name} to the coordinator")
    drawn = [one for one in (kit / NEXT, kit / "local") if (one / SIGNING_FILE).is_file()]
    folder = next((one for one in drawn if _own(one).public == roster.sites[site]), None)
    if folder is None:
        raise BadInput(
            f"ADMISSION: has other keys under the name '{site}' than this site has drawn. Do not confirm it: ask the "
            f"coordinator whether {asked[0].name} was used, and if so, who else has sent one in your name"
        )
    before = None
    with contextlib.suppress(BadInput):  # nothing was confirmed, or a `confirm` was cut off, which asks again
        before = confirmation.confirmation_of(kit)
    found = ToConfirm(kit, site, admission, folder, before)
    _check_certificate(found)
    return found


def _refuse_earlier_keys(kit: Path, roster: confirmation.Roster) -> None:
    """BadInput for a list, or a request in it, of before: the earlier keys of a site may be somebody else's now."""
    file = kit / "local" / PUBLIC_FILE
    known = PublicKeys(file) if file.is_file() else None
    for name, keys in roster.sites.items():
        if known and bytes.fromhex(keys.signing) in known.verifying_keys(name)[:-1]:
            raise BadInput(
                f"ADMISSION: has earlier keys of '{name}' than those confirmed here: it is an old list, or was made of "
                f"an old request. Ask the people of '{name}'; if they mean these, they draw new ones instead "
                "(`polyclinic site rotate-keys`)"
            )


def _own(folder: Path) -> confirmation.OwnKeys:
    sealing = X25519PrivateKey.from_private_bytes(secret_bytes(folder / PRIVATE_FILE))
    return confirmation.OwnKeys(sealing, Ed25519PrivateKey.from_private_bytes(secret_bytes(folder / SIGNING_FILE)))


def _tls_key(keys: Path) -> Path:
    return keys / TLS_KEY if keys.name == NEXT else keys.parent / "startup" / TLS_KEY


def _check_certificate(found: ToConfirm) -> None:
    try:
        made = x509.load_pem_x509_certificate(found.admission.certificates[found.site].encode())
        made.verify_directly_issued_by(x509.load_pem_x509_certificate(found.roster.coordinator.authority.encode()))
        own: Any = serialization.load_pem_private_key(_tls_key(found.keys).read_bytes(), None)
        oids = x509.NameOID.COMMON_NAME, x509.NameOID.ORGANIZATION_NAME
        names = [name.value for oid in oids for name in made.subject.get_attributes_for_oid(oid)]
        fits = made.public_key() == own.public_key() and names == [found.site, kits.organisation(found.site)]
    except Exception:  # whatever a broken certificate makes the parser raise
        fits = False
    if not fits:
        raise BadInput(f"ADMISSION: its certificate for '{found.site}' is not for the key of this site")


def confirm(found: ToConfirm, words: str, *, server: str = "") -> str:
    """Make the kit, if these are the words of the list; they are not needed for a list that was confirmed before.
    `server` is the address of a relay in the hospital, `HOST:PORT`, by default the one that the kit
    has; it is returned. Cut off in the middle, it can be done again."""
    if not found.is_known and not confirmation.same_words(words, found.roster.words):
        raise BadInput(
            "--words: these are not the words of the list that came here: somebody has another list. Nothing was "
            "changed. If nobody misread, the coordinator, or who sends in its name, deceives you: tell the other sites"
        )
    kit, invitation = found.kit, confirmation.read(found.kit / INVITATION, Invitation)
    if found.before and not server:  # whoever renews a certificate a year later does not name the relay again
        server = read_json(kit / "startup" / "fed_client.json")["servers"][0]["service"]["target"]
    with no_run_at_work(kit):
        kits.write_site(kit, found.site, found.admission, _tls_key(found.keys), server)
        kits.write_own_settings(kit, invitation.dataset)
        confirmation.pin(kit / "local", found.roster, _own(found.keys), rehearsal=invitation.rehearsal)
    if found.keys.name == NEXT:
        shutil.rmtree(found.keys)
    make_private(kit)
    return server


@contextlib.contextmanager
def no_run_at_work(kit: Path) -> Iterator[None]:
    """Hold the locks of all runs: one at work has the old keys in memory, and others seal for them."""
    with contextlib.ExitStack() as held:
        for file in sorted((kit / "runs").glob(".*.lock")):
            try:
                held.enter_context(lock(file, wait=WAIT))
            except TimeoutError:
                run = file.name.removeprefix(".").removesuffix(".lock")
                raise BadInput(f"run '{run}' is at work at this site; stop it before the keys change") from None
        yield
