"""Damage to the kit of a deployed site: keys, pins, policy, confirmation, certificates, admission."""

import random
import shutil
from pathlib import Path

from faults_children import Trial, in_child, tail
from faults_damage import damage_a_file

from polyclinic.cli import run_app
from polyclinic.data.own_images import own_data
from polyclinic.deployment.approval_rules import policy_of
from polyclinic.deployment.confirmation import confirmation_of
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.study.reading import load_study

SITE = "site-1"
#: what a site's people write by themselves: another number there is another wish
OWN = ("policy.toml", "site.toml")


def _used(kit: Path, study: Path) -> int:
    """The site confirms, and reads what it needs for work; prints what of its secrets others may know."""
    if code := run_app(["site", "confirm", str(kit / "sent" / "admission.json"), "--words", "", "--kit", str(kit)]):
        return code
    try:
        keys, _ = KitKeys(kit / "local"), confirmation_of(kit)
        print(keys.own(SITE).public_key().public_bytes_raw(), keys.verifying_keys(SITE), keys.pinned())
        print(keys.signing_key(SITE).public_key().public_bytes_raw(), policy_of(kit / "local" / "policy.toml"))
        print(own_data(kit / "local" / "site.toml", load_study(study).data, SITE, kit / "cache").train.images.sum())
    except (BadInput, WorkFailed) as error:
        return (print(error), 2)[1]
    return run_app(["site", "status", "--kit", str(kit)])


def damaged_kit(place: Path, study: Path, draw: random.Random) -> Trial:
    """Damage a file of a kit, or the admission. The deployment is made once, by the product's command."""
    whole, kit, printed, what = place / "deployment", place / "kit", [], ""
    if not whole.exists():
        code = run_app(["deploy", "init", str(study), "--out", str(whole)])
        assert code == 0
    for is_damaged in (False, True):
        shutil.rmtree(kit, ignore_errors=True)
        shutil.copytree(whole / "sites" / SITE, kit)
        (kit / "sent").mkdir()
        shutil.copy(whole / "admission.json", kit / "sent")
        if is_damaged:
            what = damage_a_file(kit / draw.choice(("local", "local", "startup", "sent")), draw)
        outcome = in_child(lambda: _used(kit, whole / "study.toml"))
        printed.append(outcome.printed)
        assert is_damaged or outcome.code == 0, outcome.printed
    problem = "hang" if outcome.hung else "traceback" if outcome.crashed else ""
    if not problem and outcome.code:
        problem = "" if outcome.printed.strip() else "no sentence"
    elif not problem and printed[0] != printed[1] and not what.endswith(OWN):
        problem = "other kit"
    return Trial("damaged kits", what, problem, tail(outcome) if problem else "", outcome.seconds)
