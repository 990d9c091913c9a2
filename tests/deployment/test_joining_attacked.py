# ruff: noqa: F401, F811 - fixtures of the other file
"""Joining, attacked by a coordinator, another site, whoever carries the files, and haste."""

import base64
import itertools
import json
import shutil
import tomllib
from functools import cache

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from test_joining import (
    NAMES,
    STUDY,
    admission_of,
    changed_admission,
    federation,
    made,
    signing_key_of_coordinator,
    unconfirmed,
)

from polyclinic.cli import run_app
from polyclinic.deployment import joining, kits
from polyclinic.deployment.confirmation import Confirmation, OwnKeys, Roster, confirmation_of, read, signed
from polyclinic.deployment.joining import Invitation, Request, admit, confirm, draw_keys, invite, join, to_confirm
from polyclinic.deployment.site_status import distrust, leave
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.federation.policy import Policy
from polyclinic.federation.sums.settings import floor_of


def request_of(federation, site, key=None, /, **change):
    """A site's request with changes, signed by a key of the list again."""
    request = read(federation / site / f"{site}.request.json", Request).model_copy(update=change)
    key = key or KitKeys(federation / site / "local").signing_key()
    file = federation / "sent.json"
    file.write_text(request.model_copy(update={"signature": signed(key, request)}).model_dump_json())
    return file


def confirm_all(federation):
    for name in NAMES:
        confirm(to_confirm(federation / name, admission_of(federation)), admission_of(federation).roster.words)


@cache
def neighbours_in(names, site):
    return Roster.model_construct(sites=dict.fromkeys(names)).neighbours(site)


def test_one_site_that_helps_cannot_keep_honest_ones_from_comparing():
    """Whatever lists five sites are shown, also lists that leave out the one that is deceived: if somebody's list has
    an honest site that sees another list, an honest site compares with an honest one that sees another list."""
    names = ("a", "b", "c", "d", "e")
    subsets = [one for size in range(1, 6) for one in itertools.combinations(names, size)]
    for liar in ("a", "c"):
        honest = [name for name in names if name != liar]
        for lists in itertools.product(*([one for one in subsets if name in one] for name in honest)):
            sees = dict(zip(honest, lists, strict=True))
            deceived = any(sees[other] != sees[site] for site in honest for other in sees[site] if other in sees)
            noticed = any(
                sees[other] != sees[site]
                for site in honest
                for other in neighbours_in(sees[site], site)
                if other in sees
            )
            assert noticed == deceived


def test_confirm_asks_for_the_words_of_both_neighbours(unconfirmed, monkeypatch, capsys):
    """linz, which helps, reads graz's words to it; wien, which was shown a list without graz, cannot."""
    words, asked = admission_of(unconfirmed).roster.words, []
    heard = iter([words, "1" * 60, words, words])
    monkeypatch.setattr("typer.prompt", lambda text: asked.append(text) or next(heard))
    admission = str(unconfirmed / "coordinator" / "admission.json")
    command = ["site", "confirm", admission, "--kit", str(unconfirmed / "graz")]
    assert run_app(command) == 2
    assert "these are not the words" in capsys.readouterr().err
    assert not (unconfirmed / "graz" / "startup").exists()
    assert run_app(command) == 0
    assert [text.split("site ")[1].split()[0] for text in asked] == ["'linz'", "'wien'"] * 2


def test_a_site_of_the_coordinators_own_needs_a_new_call_and_lowers_no_floor(federation, capsys):
    eve = OwnKeys.draw().public
    with_eve = changed_admission(federation, paris=eve)
    before = KitKeys(federation / "graz" / "local").pinned()
    (federation / "new.json").write_text(with_eve.model_dump_json())
    command = ["site", "confirm", str(federation / "new.json"), "--kit", str(federation / "graz")]
    assert run_app([*command, "--words", admission_of(federation).roster.words]) == 2
    told = capsys.readouterr()
    assert "paris  NEW SITE" in told.out
    assert "these are not the words" in told.err
    assert KitKeys(federation / "graz" / "local").pinned() == before == NAMES
    assert KitKeys(federation / "graz" / "local").public("paris") is None
    # a list that hides sites from one of them does not fit either, and would be the only way down
    assert floor_of(Policy(), len(before)).min_sites == 3
    # and nobody writes a site into the file of keys by hand
    file = federation / "graz" / "local" / "site_keys.toml"
    file.write_text(file.read_text().replace("[signing]", f'paris = "{eve.sealing}"\n\n[signing]'))
    with pytest.raises(BadInput, match=r"site_keys\.toml: is not the file that was confirmed"):
        confirmation_of(federation / "graz")


def test_an_old_request_or_list_does_not_bring_earlier_keys_back(federation):
    """Stolen keys of graz, which has drawn new ones: whoever carries files sends the old request, or list, again."""
    place, old = federation / "coordinator", admission_of(federation)
    shutil.copy(federation / "graz" / "graz.request.json", federation / "old.json")
    admit(place, [draw_keys(federation / "graz", "graz")])
    confirm_all(federation)
    for replayed in (old, admit(place, [federation / "old.json"])):
        with pytest.raises(BadInput, match="has earlier keys of 'graz'"):
            to_confirm(federation / "linz", replayed)


def test_a_renewed_certificate_brings_no_distrusted_site_back(federation):
    graz, place = federation / "graz", federation / "coordinator"
    distrust(graz, "linz")
    admit(place, [])
    assert to_confirm(graz, admission_of(federation)).is_known
    confirm(to_confirm(graz, admission_of(federation)), "")
    ring = KitKeys(graz / "local")
    assert ring.public("linz") is None
    assert ring.public("wien") is not None
    assert ring.pinned() == NAMES
    # the thief's sealing key, signed by the stolen key, does not do either; new keys do
    stolen = KitKeys(federation / "linz" / "local").public("linz")
    pair = admission_of(federation).roster.sites["linz"].model_copy(update={"sealing": OwnKeys.draw().public.sealing})
    with_thief = changed_admission(federation, linz=pair)
    confirm(to_confirm(graz, with_thief), with_thief.roster.words)
    assert KitKeys(graz / "local").public("linz") is None
    admit(place, [draw_keys(federation / "linz", "linz")])
    confirm(to_confirm(graz, admission_of(federation)), admission_of(federation).roster.words)
    assert KitKeys(graz / "local").public("linz") not in (None, stolen)


def test_a_revoked_site_is_not_admitted_again(federation):
    place = federation / "coordinator"
    kept = place / "requests" / "linz.json"
    kept.rename(kept.with_suffix(".revoked"))  # as `deploy revoke-site` does
    with pytest.raises(BadInput, match="'linz' was revoked"):
        admit(place, [federation / "linz" / "linz.request.json"])
    assert sorted(admit(place, []).roster.sites) == ["graz", "wien"]


def test_requests_that_do_not_fit_are_refused(federation, tmp_path):
    place, own = federation / "coordinator", OwnKeys.draw()
    request = read(federation / "graz" / "graz.request.json", Request)
    for change, words in (
        ({"coordinator": "0" * 64}, "of another federation"),
        ({"site": "rom"}, "rom: the invitation asks for graz, linz, wien"),
        ({"site": "linz"}, "is none of site 'linz'"),
        ({"csr": "nothing"}, "is none of site 'graz'"),
    ):
        with pytest.raises(BadInput, match=words):
            admit(place, [request_of(federation, "graz", own.signing, keys=own.public, **change)])
    for change in ({"keys": own.public}, {"site": "wien"}):  # without a new signature
        (tmp_path / "r.json").write_text(request.model_copy(update=change).model_dump_json())
        with pytest.raises(BadInput, match="its signature does not fit"):
            admit(place, [tmp_path / "r.json"])
    for text in ("", "[]", "{}", '{"site": "../x"}'):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(BadInput, match=r"r\.json: is "):
            admit(place, [tmp_path / "r.json"])


def test_lists_that_nobody_should_confirm_are_refused(federation):
    sites = admission_of(federation).roster.sites
    for change, words in (
        ({"linz": sites["wien"]}, "one key under two names"),
        ({"linz": sites["linz"].model_copy(update={"sealing": "0" * 64})}, "no key of 'linz'"),
        ({"Wien": OwnKeys.draw().public}, "differ by upper case only"),
        ({"coordinator": OwnKeys.draw().public}, "cannot be called 'coordinator'"),
    ):
        with pytest.raises(BadInput, match=words):
            to_confirm(federation / "graz", changed_admission(federation, **change))
    other = admission_of(federation).model_copy(update={"signature": "00" * 64})
    with pytest.raises(BadInput, match="its signature does not fit"):
        to_confirm(federation / "graz", other)
    thief = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    forged = kits.issue(federation / "coordinator" / "authority", "graz", "graz", thief)
    old = changed_admission(federation)
    new = old.model_copy(update={"certificates": {**old.certificates, "graz": forged}, "signature": ""})
    new = new.model_copy(update={"signature": signed(signing_key_of_coordinator(federation), new)})
    with pytest.raises(BadInput, match="its certificate for 'graz' is not for the key of this site"):
        to_confirm(federation / "graz", new)


def test_an_invitation_brings_no_settings_of_a_site(federation, tmp_path):
    """A name of images that would write a list of plug-ins into site.toml, and addresses that would write JSON."""
    good = read(federation / "coordinator" / "invitation.json", Invitation).model_dump(mode="json")
    for change in (
        {"dataset": 'x]\nplugins = ["evil"]\n[a'},
        {"sites": ["../../x"]},
        {"coordinator": {**good["coordinator"], "server": 'x", "a": "'}},
        {"policy": "kinds = []"},
    ):
        (tmp_path / "i.json").write_text(json.dumps({**good, **change}))
        assert run_app(["site", "join", str(tmp_path / "i.json"), "graz", "--kit", str(tmp_path / "kit")]) == 2
        assert not (tmp_path / "kit").exists()
    policy, own = (
        tomllib.loads((federation / "graz" / "local" / f"{one}.toml").read_text()) for one in ("policy", "site")
    )
    assert policy["approve"]["every"] is False
    assert policy["min_cohort"] == 10
    assert {"real-images", "labels", "masks"}.isdisjoint(policy["kinds"])
    assert own["datasets"] == {"chest": {"source": "folder", "path": "/data/chest"}}


def test_one_bad_request_spoils_no_later_list(federation):
    """linz sends graz's public sealing key as its own; the coordinator goes on without it."""
    place = federation / "coordinator"
    sites = admission_of(federation).roster.sites
    for sealing in (sites["graz"].sealing, "0" * 64):
        pair = sites["linz"].model_copy(update={"sealing": sealing})
        with pytest.raises(BadInput, match=r"one key under two names|has no key of 'linz'"):
            admit(place, [request_of(federation, "linz", keys=pair)])
        assert admit(place, []).roster.sites == sites


def test_the_coordinator_is_told_of_new_keys_in_a_sites_name(federation, capsys):
    """Somebody else's request in graz's name looks like any other."""
    own = OwnKeys.draw()
    file = request_of(federation, "graz", own.signing, keys=own.public)
    capsys.readouterr()
    assert run_app(["deploy", "admit", str(file), "-d", str(federation / "coordinator")]) == 0
    told = capsys.readouterr().out
    assert "graz: NEW KEYS; ask its people by telephone" in told
    assert "linz: NEW KEYS" not in told
    assert admission_of(federation).roster.words not in told  # words that travel with a list compare nothing


def test_broken_requests_for_a_certificate_are_refused_in_a_sentence(federation):
    place = federation / "coordinator"
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "graz")])
    made_csr = x509.CertificateSigningRequestBuilder().subject_name(name)
    der = made_csr.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)
    algorithm = bytes.fromhex("06092a864886f70d010101")  # rsaEncryption; one of which nobody has heard; version 66
    changed = [der.replace(algorithm, algorithm[:-1] + b"\x76", 1), der.replace(b"\x02\x01\x00", b"\x02\x01\x42", 1)]
    assert der not in changed
    pems = [pem_of(one) for one in changed]
    pems.append(made_csr.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(serialization.Encoding.PEM))
    for pem in pems:
        with pytest.raises(BadInput, match="is none of site 'graz'"):
            admit(place, [request_of(federation, "graz", csr=pem.decode())])


def pem_of(der):
    text = base64.encodebytes(der)
    return b"-----BEGIN CERTIFICATE REQUEST-----\n" + text + b"-----END CERTIFICATE REQUEST-----\n"


@pytest.mark.parametrize("organisation", [None, "graz config_folder=elsewhere"])
def test_a_certificate_with_another_organisation_is_refused(federation, organisation):
    """NVFlare is started with what stands there."""
    authority = json.loads((federation / "coordinator" / "authority" / "cert.json").read_text())
    root = x509.load_pem_x509_certificate(authority["root_cert"].encode())
    old = x509.load_pem_x509_certificate((federation / "graz" / "startup" / "client.crt").read_bytes())
    names = {x509.NameOID.COMMON_NAME: "graz", x509.NameOID.ORGANIZATION_NAME: organisation}
    subject = x509.Name([x509.NameAttribute(oid, text) for oid, text in names.items() if text])
    builder = x509.CertificateBuilder(root.subject, subject, old.public_key(), 7)
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    private = serialization.load_pem_private_key(authority["root_pri_key"].encode(), None)
    pem = builder.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    admission = admission_of(federation)
    forged = admission.model_copy(update={"certificates": {**admission.certificates, "graz": pem}, "signature": ""})
    key = signing_key_of_coordinator(federation)
    with pytest.raises(BadInput, match="its certificate for 'graz' is not for the key of this site"):
        to_confirm(federation / "graz", forged.model_copy(update={"signature": signed(key, forged)}))


def test_a_signing_key_by_which_anybody_could_sign_is_refused(federation):
    """linz could deny every line of its ledger: points of small order, for which signatures need no private key."""
    for key in ("01" + "00" * 31, "ec" + "ff" * 30 + "7f", "00" * 32):
        pair = admission_of(federation).roster.sites["linz"].model_copy(update={"signing": key})
        with pytest.raises(BadInput, match="by which anybody could sign"):
            to_confirm(federation / "graz", changed_admission(federation, linz=pair))


def test_a_user_without_a_name_confirms(federation, monkeypatch):
    """A container that runs as a number."""
    monkeypatch.setattr("getpass.getuser", lambda: {}["no such user"])
    confirm(to_confirm(federation / "graz", admission_of(federation)), "")


@pytest.fixture
def rehearsed(tmp_path):
    """A coordinator's folder and a kit of a rehearsal, made as `kits.rehearse` does."""
    invitation = invite(tmp_path / "d", ("graz",), "chest", "localhost", 8002, rehearsal=True)
    kit = tmp_path / "d" / "sites" / "graz"
    admission = admit(tmp_path / "d", [join(invitation, "graz", kit)])
    confirm(to_confirm(kit, admission), admission.roster.words)
    return tmp_path / "d"


def test_a_rehearsal_stays_one_whatever_is_confirmed_later(rehearsed, monkeypatch, capsys):
    kit = rehearsed / "sites" / "graz"
    marks = [rehearsed / "server" / "local" / "confirmed.json", kit / "local" / "confirmed.json"]
    (kit / "local" / "confirmed.json").unlink()
    assert run_app(["deploy", "admit", "-d", str(rehearsed)]) == 0
    words = read(rehearsed / "admission.json", joining.Admission).roster.words
    assert run_app(["site", "confirm", str(rehearsed / "admission.json"), "-k", str(kit), "--words", words]) == 0
    assert all(read(mark, Confirmation).rehearsal for mark in marks)
    monkeypatch.setattr("polyclinic.deployment.processes.Participant.start", lambda *_, **__: 1 / 0)
    capsys.readouterr()
    with pytest.raises(ZeroDivisionError):
        run_app(["deploy", "start", str(kit)])
    assert "is of a rehearsal: others have its keys" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"client": 1}', "\udcff"])
def test_a_damaged_kit_is_named_in_a_sentence(federation, content, capsys):
    kit = federation / "graz"
    (kit / "startup" / "fed_client.json").write_bytes(content.encode(errors="surrogateescape"))
    for command in (
        ["deploy", "start", str(kit)],
        ["site", "status", "-k", str(kit)],
        ["site", "pending", "-k", str(kit)],
    ):
        assert run_app(command) == 2
        assert "fed_client.json: is damaged" in capsys.readouterr().err


def test_leaving_deletes_copies_of_keys_that_a_killed_confirm_left(federation):
    kit = federation / "graz"
    (kit / ".confirm-12" / "polyclinic").mkdir(parents=True)
    shutil.copy(kit / "startup" / "client.key", kit / ".confirm-12" / "polyclinic" / "client.key")
    shutil.copy(kit / "local" / "signing.key", kit / "local" / "signing.key.partial")
    draw_keys(kit, "graz")
    leave(kit, "graz")
    assert not list(kit.rglob("*.key*"))
