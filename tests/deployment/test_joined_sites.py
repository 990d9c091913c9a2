"""Sites that joined by the real commands, each with keys and images of its own, add up a secure sum over NVFlare."""

import numpy as np
import pytest
from PIL import Image
from processes import free_port, polyclinic
from rehearsals import rehearsed
from run_folders import result

from polyclinic.deployment.confirmation import read
from polyclinic.deployment.joining import Admission
from polyclinic.federation.ledger.keys import PublicKeys
from polyclinic.federation.ledger.ledger import verify

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NAMES = ("graz", "linz", "wien")
STUDY = """
[data]
source = "at-sites"
dataset = "scans"
size = 16
classes = ["clear", "ill"]
[sites]
partition = "column"
names = ["graz", "linz", "wien"]
[model]
backbone = "lenet5"
[optimizer]
batch_size = 8
lr = 0.01
[method]
name = "fedavg"
rounds = 2
[federation]
sum = "secure"
[engine]
silence = 600.0
"""


def test_sites_that_joined_add_up_a_secure_sum(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    place = tmp_path / "deployment"
    polyclinic("deploy", "init", tmp_path / "study.toml", "-d", place, "--port", free_port())
    kits = {name: place / "sites" / name for name in NAMES}  # where `deploy up --here` looks
    for name, kit in kits.items():
        polyclinic("site", "join", place / "invitation.json", name, "--kit", kit)
    polyclinic("deploy", "admit", *(kit / f"{name}.request.json" for name, kit in kits.items()), "-d", place)
    words = read(place / "admission.json", Admission).roster.words
    rng = np.random.default_rng(0)
    for name, kit in kits.items():
        polyclinic("site", "confirm", place / "admission.json", "--kit", kit, "--words", words)
        for label in ("clear", "ill"):
            (tmp_path / name / label).mkdir(parents=True)
            for number in range(40):
                pixels = rng.integers(0, 120 if label == "clear" else 255, (16, 16), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / label / f"{number:02d}.png")
        (kit / "local" / "site.toml").write_text(f'[datasets.scans]\nsource = "folder"\npath = "{tmp_path / name}"\n')
        policy = kit / "local" / "policy.toml"
        policy.write_text(policy.read_text().replace("methods = []", "methods = ['fedavg']"))
    with rehearsed(place):
        polyclinic("deploy", "submit", tmp_path / "study.toml", "-d", place, "--within", 900, "--out", tmp_path / "run")
    assert result(tmp_path / "run")["rounds"] == 2
    keys = PublicKeys(place / "site_keys.toml")
    for name, kit in kits.items():
        lines = verify(kit / "runs" / "fedavg-seed0" / "ledger" / f"{name}.jsonl", keys.verifying_keys(name))
        kinds = {line["kind"] for line in lines if line["operation"] == "train"}
        assert kinds == {"masked"}
