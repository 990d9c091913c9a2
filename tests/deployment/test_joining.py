"""Joining: keys that the site draws, words that two people compare, and what a coordinator tries in between."""

import base64
import datetime
import hashlib
import shutil
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from polyclinic.cli import run_app
from polyclinic.deployment import confirmation, joining, kits
from polyclinic.deployment.joining import Admission, Invitation, admit, confirm, draw_keys, join, to_confirm
from polyclinic.deployment.processes import Participant
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.keys import KitKeys, SealBroken, open_box, public_key, seal_box, signing_public_key
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger, LedgerBroken, verify
from polyclinic.federation.sums.site_memory import OpenSum, check_agreement, signature_of
from polyclinic.files import lock

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")

NAMES = ("graz", "linz", "wien")
STUDY = """[data]\nsource = "at-sites"\ndataset = "chest"\nclasses = ["clear", "ill"]\n
[sites]\npartition = "column"\nnames = {names}\n[method]\nname = "fedavg"\n"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A federation: the coordinator's machine, and a machine of each site."""
    folder = tmp_path_factory.mktemp("federation")
    (folder / "study.toml").write_text(STUDY.format(names=str(list(NAMES)).replace("'", '"')))
    place = folder / "coordinator"
    assert run_app(["deploy", "init", str(folder / "study.toml"), "-d", str(place), "--server", "fl.example.org"]) == 0
    for name in NAMES:
        assert run_app(["site", "join", str(place / "invitation.json"), name, "--kit", str(folder / name)]) == 0
    requests = [str(folder / name / f"{name}.request.json") for name in NAMES]
    assert run_app(["deploy", "admit", *requests, "-d", str(place)]) == 0
    words = confirmation.read(place / "admission.json", Admission).roster.words
    shutil.copytree(folder, folder.with_name(f"{folder.name}-unconfirmed"))
    for name in NAMES:
        confirmed = ["site", "confirm", str(place / "admission.json"), "--kit", str(folder / name), "--words", words]
        assert run_app(confirmed) == 0
    return folder


@pytest.fixture
def federation(made, tmp_path):
    """The same, to be changed."""
    shutil.copytree(made, tmp_path / "f")
    return tmp_path / "f"


@pytest.fixture
def unconfirmed(made, tmp_path):
    """The same before anybody has confirmed."""
    shutil.copytree(made.with_name(f"{made.name}-unconfirmed"), tmp_path / "f")
    return tmp_path / "f"


def admission_of(federation):
    return confirmation.read(federation / "coordinator" / "admission.json", Admission)


def signing_key_of_coordinator(federation):
    return KitKeys(federation / "coordinator" / "server" / "local").signing_key()


def changed_admission(federation, **sites):
    """The admission with other sites or keys, as the coordinator can sign it."""
    old = admission_of(federation)
    roster = old.roster.model_copy(update={"sites": old.roster.sites | sites})
    new = old.model_copy(update={"roster": roster, "signature": ""})
    return new.model_copy(update={"signature": confirmation.signed(signing_key_of_coordinator(federation), new)})


def secrets_of_sites(federation):
    """Private keys of all sites, as bytes: sealing, signing, and both primes of TLS."""
    found = []
    for name in NAMES:
        kit = federation / name
        found += [(kit / "local" / file).read_bytes() for file in ("sealing.key", "signing.key")]
        found += primes(kit / "startup" / "client.key")
    return found


def primes(file):
    numbers = serialization.load_pem_private_key(file.read_bytes(), None).private_numbers()
    return [number.to_bytes(number.bit_length() // 8, "big") for number in (numbers.p, numbers.q)]


def forms(secret):
    """A secret as it may stand in a file: bytes, hex digits, base64 from each of three places."""
    yield from (secret, secret.hex().encode())
    for before in range(3):
        text = base64.b64encode(bytes(before) + secret)
        yield text[-(-before * 8 // 6) + (before > 0) :].rstrip(b"=")[:-2]


def test_the_coordinators_machine_never_held_a_private_key_of_a_site(federation):
    place = federation / "coordinator"
    files = [path for path in place.rglob("*") if path.is_file()]
    sent = [federation / name / f"{name}.request.json" for name in NAMES]
    assert {"cert.json", "admission.json", "signing.key", "server.key", "graz.json"} <= {path.name for path in files}
    written = [path.read_bytes() for path in (*files, *sent)]
    joined = [text.replace(b"\n", b"").replace(b"\\n", b"") for text in written]  # base64 is broken into lines
    content = [*written, *joined]  # as it stands, too: a key of random bytes may have the byte of a line's end
    for own in ((place / "server/local/signing.key").read_bytes(), *primes(place / "server/startup/server.key")):
        assert any(form in text for form in forms(own) for text in content)  # the search finds what is there
    for secret in secrets_of_sites(federation):
        assert not any(form in text for form in forms(secret) for text in content)


def test_private_keys_are_for_the_sites_user_alone(made):
    for folder in (made, made.with_name(f"{made.name}-unconfirmed")):
        for name in NAMES:
            keys = list((folder / name).rglob("*.key"))
            assert len(keys) == 3
            assert all(path.stat().st_mode & 0o777 == 0o600 for path in keys)
            assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / name).rglob("*"))


def test_who_holds_the_authority_opens_and_signs_nothing_in_a_sites_name(federation, tmp_path):
    """A certificate in a site's name opens a TLS connection; for all else the confirmed keys count."""
    place, graz, linz = (federation / name for name in ("coordinator", "graz", "linz"))
    tls = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    forged = kits.issue(place / "authority", "linz", "linz", tls.public_key()).encode()
    root = x509.load_pem_x509_certificate((graz / "startup" / "rootCA.pem").read_bytes())
    x509.load_pem_x509_certificate(forged).verify_directly_issued_by(root)  # graz's TLS takes it
    thief, about = confirmation.OwnKeys.draw(), {"from": "graz", "to": "linz"}
    ring = KitKeys(graz / "local")
    box = seal_box(b"model", about, sender=ring.own("graz"), recipient=ring.public("linz"))
    assert open_box(box, about, recipient=KitKeys(linz / "local").own("linz"), sender=ring.public("graz")) == b"model"
    with pytest.raises(SealBroken):
        open_box(box, about, recipient=thief.sealing, sender=ring.public("graz"))
    back = {"from": "linz", "to": "graz"}
    sealed = seal_box(b"trap", back, sender=thief.sealing, recipient=ring.public("graz"))
    with pytest.raises(SealBroken):
        open_box(sealed, back, recipient=ring.own("graz"), sender=ring.public("linz"))
    for number, key in enumerate((thief.signing, signing_key_of_coordinator(federation))):
        forge = Ledger(tmp_path / f"{number}.jsonl", key)
        forge.append(round=1, operation="train", kind="weights", bytes=1, digest="0" * 64, to="coordinator")
        with pytest.raises(LedgerBroken, match="is not signed by the site's key"):
            verify(tmp_path / f"{number}.jsonl", ring.verifying_keys("linz"))


def test_all_sites_see_the_same_words_and_each_calls_another(made, capsys):
    roster = admission_of(made).roster
    assert (
        roster.words
        == confirmation.read(made / "wien" / "local" / "confirmed.json", confirmation.Confirmation).roster.words
    )
    assert [len(word) for word in roster.words.split()] == [5] * 12  # 60 digits, 199 bits
    assert confirmation.same_words(f" {roster.words.replace(' ', '-')}\n", roster.words)
    assert not confirmation.same_words("", roster.words)
    assert not confirmation.same_words(roster.words[:-1], roster.words)
    assert [roster.neighbours(name)[0] for name in NAMES] == ["linz", "wien", "graz"]


def test_a_coordinator_who_swaps_one_public_key_is_caught(unconfirmed):
    """graz is shown a key of the coordinator's as linz's: the words that linz's people read are others."""
    honest, eve = admission_of(unconfirmed), confirmation.OwnKeys.draw().public
    told = {"sealing": eve, "signing": eve}
    for half in told:
        pair = honest.roster.sites["linz"].model_copy(update={half: getattr(eve, half)})
        swapped = changed_admission(unconfirmed, linz=pair)
        found = to_confirm(unconfirmed / "graz", swapped)
        with pytest.raises(BadInput, match="these are not the words of the list that came here"):
            confirm(found, honest.roster.words)
        assert not (unconfirmed / "graz" / "startup").exists()
        assert not (unconfirmed / "graz" / "local").exists()
        with pytest.raises(BadInput, match="other keys under the name 'linz' than this site has drawn"):
            to_confirm(unconfirmed / "linz", swapped)


def test_every_part_of_the_list_changes_the_words(made):
    roster = admission_of(made).roster
    other = confirmation.OwnKeys.draw().public
    lists = [
        roster.model_copy(update={"coordinator": roster.coordinator.model_copy(update={name: value})})
        for name, value in {"server": "evil.example.org", "port": 1, "authority": "x", "signing": other.signing}.items()
    ]
    lists += [roster.model_copy(update={"sites": sites}) for sites in (
        {**roster.sites, "paris": other}, {k: v for k, v in roster.sites.items() if k != "wien"},
        {**roster.sites, "graz": roster.sites["linz"], "linz": roster.sites["graz"]})]  # fmt: skip
    assert len({one.words for one in (roster, *lists)}) == len(lists) + 1


@pytest.mark.parametrize(
    ("kit", "words"),
    [
        ("graz", "nothing is confirmed yet; `polyclinic site confirm ADMISSION`"),
        ("coordinator/server", "no site was admitted; `polyclinic deploy admit"),
        ("linz", "join anew with `polyclinic site join INVITATION NAME`"),  # made by an older version
    ],
)
def test_a_kit_refuses_to_work_before_and_says_the_cure(unconfirmed, made, capsys, kit, words):
    if kit != "graz":
        shutil.copytree(made / kit, unconfirmed / kit, dirs_exist_ok=True)
        (unconfirmed / kit / "local" / "confirmed.json").unlink()
    assert run_app(["deploy", "start", str(unconfirmed / kit)]) == 2
    assert words in capsys.readouterr().err
    if kit == "linz":
        assert run_app(["site", "status", "--kit", str(unconfirmed / kit)]) == 0
        assert "it takes part in nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "file",
    ["startup/rootCA.pem", "startup/fed_client.json", "local/authorization.json", "local/resources.json",
     "local/site_keys.toml", "local/confirmed.json"],
)  # fmt: skip
def test_a_file_that_somebody_else_changed_is_named(federation, file):
    kit = federation / "graz"
    confirmation.confirmation_of(kit)
    text = (kit / file).read_text()
    (kit / file).write_text(text.replace("linz", "Linz") if file.endswith("confirmed.json") else f"{text}\n")
    with pytest.raises(BadInput, match=file.split("/")[1].replace(".", r"\.")):
        Participant.of(kit).start()


def test_a_confirmation_of_another_key_is_none(federation):
    """The coordinator's own confirmed list, put into a site's kit."""
    shutil.copy(federation / "linz" / "local" / "confirmed.json", federation / "graz" / "local" / "confirmed.json")
    with pytest.raises(BadInput, match=r"confirmed\.json: its signature does not fit"):
        confirmation.confirmation_of(federation / "graz")


def test_what_is_the_sites_own_may_change(federation):
    for name in ("site.toml", "policy.toml"):
        file = federation / "graz" / "local" / name
        file.write_text(f"{file.read_text()}\n# ours\n")
    confirmation.confirmation_of(federation / "graz")
    confirm(to_confirm(federation / "graz", admission_of(federation)), "")
    assert "# ours" in (federation / "graz" / "local" / "policy.toml").read_text()


def test_a_confirmation_that_was_cut_off_is_done_again(unconfirmed, monkeypatch):
    admission, kit = admission_of(unconfirmed), unconfirmed / "graz"
    with monkeypatch.context() as cut:
        cut.setattr(joining.confirmation, "pin", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            confirm(to_confirm(kit, admission), admission.roster.words)
    with pytest.raises(BadInput, match="nobody at this site has confirmed"):
        Participant.of(kit).start()
    confirm(to_confirm(kit, admission), admission.roster.words)
    confirmation.confirmation_of(kit)


def test_a_relay_of_the_hospital_is_written_into_the_kit_and_stays_there(federation):
    """A certificate is renewed each year by people who have forgotten the relay by then."""
    for server in ("relay.example:9002", ""):
        confirm(to_confirm(federation / "graz", admission_of(federation)), "", server=server)
        assert '"relay.example:9002"' in (federation / "graz" / "startup" / "fed_client.json").read_text()
        confirmation.confirmation_of(federation / "graz")
    confirm(to_confirm(federation / "graz", admission_of(federation)), "", server="fl.example.org:8002")
    assert "relay.example" not in (federation / "graz" / "startup" / "fed_client.json").read_text()


def release(kit, content):
    path = kit / "runs" / "run" / "ledger" / "graz.jsonl"
    ledger = Ledger(path, KitKeys(kit / "local").signing_key(), AnchorFile(kit / "anchors" / "runs" / "run.json"))
    digest = hashlib.sha256(content.encode()).hexdigest()
    ledger.append(round=1, operation="train", kind="weights", bytes=1, digest=digest, to="coordinator")
    ledger.commit()
    return path


def test_new_keys_count_when_they_are_confirmed_and_old_ledgers_verify(federation, capsys):
    graz, linz, place = (federation / name for name in ("graz", "linz", "coordinator"))
    path = release(graz, "before")
    old = KitKeys(graz / "local").signing_key(), KitKeys(graz / "local").public("graz")
    assert run_app(["site", "rotate-keys", "--kit", str(graz)]) == 0
    release(graz, "between")  # with the old keys, which still are the site's
    confirmation.confirmation_of(graz)
    assert run_app(["deploy", "admit", str(graz / "graz.request.json"), "-d", str(place)]) == 0
    capsys.readouterr()
    for name in NAMES:  # a word of the old key is not asked for, and does not do
        command = ["site", "confirm", str(place / "admission.json"), "--kit", str(federation / name)]
        assert run_app([*command, "--words", "none"]) == 2
        assert KitKeys(federation / name / "local").public("graz") == old[1]
        assert run_app([*command, "--words", admission_of(federation).roster.words]) == 0
        assert "graz (this site)  NEW KEYS" in capsys.readouterr().out or name != "graz"
        assert (
            KitKeys(federation / name / "local").public("graz") == public_key(KitKeys(graz / "local").own("")) != old[1]
        )
    release(graz, "after")
    keys = KitKeys(linz / "local").verifying_keys("graz")
    assert keys == (signing_public_key(old[0]), signing_public_key(KitKeys(graz / "local").signing_key()))
    assert len(verify(path, keys)) == 3
    assert run_app(["ledger", "verify", str(path.parent.parent)]) == 0
    assert not (graz / "next").exists()
    (graz / "local" / "signing.key").write_bytes(old[0].private_bytes_raw())
    with pytest.raises(BadInput, match=r"signing\.key: is damaged"):
        KitKeys(graz / "local").signing_key()


def test_an_old_key_agrees_to_no_secure_sum(federation):
    """Somebody who had it could open a sum in the name of a site that has new keys."""
    graz, place = federation / "graz", federation / "coordinator"
    old = KitKeys(graz / "local").signing_key()
    admit(place, [draw_keys(graz, "graz")])
    for name in NAMES:
        confirm(to_confirm(federation / name, admission_of(federation)), admission_of(federation).roster.words)
    keys = {name: confirmation.OwnKeys.draw().public.sealing for name in NAMES}
    begun = {"run": "run", "round": 1, "operation": "train", "step": "agreed", "keys": keys, "members": NAMES}
    found = OpenSum(**begun, threshold=3)
    own = {name: SimpleNamespace(name=name, keys=KitKeys(federation / name / "local")) for name in NAMES}
    signed_by = {name: signature_of(site, found, NAMES).hex() for name, site in own.items()}
    check_agreement(own["linz"], found, NAMES, signed_by)
    thief = SimpleNamespace(name="graz", keys=SimpleNamespace(signing_key=lambda site: old))
    with pytest.raises(ParcelRejected, match="2 of the 3 sites that are needed have signed"):
        check_agreement(own["linz"], found, NAMES, signed_by | {"graz": signature_of(thief, found, NAMES).hex()})


def test_a_site_that_lost_its_machine_joins_anew_and_the_others_are_asked(federation, capsys):
    place = federation / "coordinator"
    path, backup = release(federation / "graz", "before"), federation / "backup"
    shutil.move(federation / "graz", backup)
    assert run_app(["site", "join", str(place / "invitation.json"), "graz", "--kit", str(federation / "graz")]) == 0
    with pytest.raises(BadInput, match="has other keys under the name 'graz' than this site has drawn"):
        to_confirm(federation / "graz", admission_of(federation))
    admit(place, [federation / "graz" / "graz.request.json"])
    found = to_confirm(federation / "linz", admission_of(federation))
    assert "  graz  NEW KEYS" in found.sentences()
    assert not found.is_known
    for folder in ("runs", "anchors", "local/site_keys.toml", "local/site.toml"):  # what the backup has
        (federation / "graz" / "local").mkdir(exist_ok=True)
        shutil.move(backup / folder, federation / "graz" / folder)
    confirm(to_confirm(federation / "graz", admission_of(federation)), admission_of(federation).roster.words)
    release(federation / "graz", "after")
    assert len(verify(path, KitKeys(federation / "graz" / "local").verifying_keys("graz"))) == 2
    confirmation.confirmation_of(federation / "graz")


def test_keys_do_not_change_while_a_run_is_at_work(federation, monkeypatch):
    monkeypatch.setattr(joining, "WAIT", 0.05)
    graz, place = federation / "graz", federation / "coordinator"
    admit(place, [draw_keys(graz, "graz")])
    (graz / "runs").mkdir()
    words = admission_of(federation).roster.words
    with lock(graz / "runs" / ".study.lock"), pytest.raises(BadInput, match="run 'study' is at work at this site"):
        confirm(to_confirm(graz, admission_of(federation)), words)
    confirm(to_confirm(graz, admission_of(federation)), words)


def test_a_certificate_is_renewed_without_a_call(federation, capsys):
    graz, place = federation / "graz", federation / "coordinator"
    before = (graz / "startup" / "client.crt").read_bytes()
    admit(place, [])
    assert run_app(["site", "confirm", str(place / "admission.json"), "--kit", str(graz)]) == 0
    assert "this list was confirmed before: nobody needs to call" in capsys.readouterr().out
    behind = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    for file in ("client.crt", "rootCA.pem"):  # a hospital's clock may be an hour behind
        assert x509.load_pem_x509_certificate((graz / "startup" / file).read_bytes()).not_valid_before_utc < behind
    assert (graz / "startup" / "client.crt").read_bytes() != before
    confirmation.confirmation_of(graz)


def test_a_further_site_is_invited_later(federation):
    place = federation / "coordinator"
    (federation / "more.toml").write_text(STUDY.format(names='["graz", "linz", "wien", "paris"]'))
    before = confirmation.read(place / "invitation.json", Invitation)
    assert run_app(["deploy", "init", str(federation / "more.toml"), "-d", str(place)]) == 0
    invitation = confirmation.read(place / "invitation.json", Invitation)
    assert invitation.coordinator == before.coordinator
    admit(place, [join(invitation, "paris", federation / "paris")])
    assert to_confirm(federation / "graz", admission_of(federation)).sentences()[-2].endswith("paris  NEW SITE")
