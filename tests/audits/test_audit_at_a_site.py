"""A deployed site audits its part of a run in its own kit, with the study it was sent and images it alone has."""

import json
import shutil
from pathlib import Path

import pytest

from polyclinic.audits.audit import audit
from polyclinic.audits.grid import grid
from polyclinic.data.parts import prepare
from polyclinic.deployment.kits import as_sent
from polyclinic.errors import BadInput

RUN = "fedavg-seed0"


@pytest.fixture(autouse=True)
def _hurried(hurry) -> None:
    hurry()


@pytest.fixture
def kit(tiny, undisturbed, tmp_path: Path) -> Path:
    """The kit of site-1 after a run, as `polyclinic deploy` leaves it."""
    study = tiny("fedavg", {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}, rounds=1)
    done = undisturbed(study)
    parts = prepare(study.data, study.sites)
    kit, run = tmp_path / "kit", tmp_path / "kit" / "runs" / RUN
    shutil.copytree(parts.folder / "site-1", kit / "data" / "site-1")
    shutil.copytree(done.folder / "sites" / "site-1", run / "sites" / "site-1")
    (run / "ledger").mkdir()
    shutil.copy(done.folder / "ledger" / "site-1.jsonl", run / "ledger")
    sent = as_sent(study, parts, parts.names)
    (kit / "local").mkdir()
    (kit / "local" / "site.toml").write_text(f'[datasets.{sent.data.dataset}]\nprepared = "../data/site-1"\n')
    (run / "study.toml").write_text(sent.to_toml())
    return kit


def test_a_site_audits_its_own_part(kit: Path):
    report = audit(kit / "runs" / RUN)
    told = [(one["site"], one["kind"]) for one in report["parcels"] if one["kind"] != "metrics"]
    assert told == [("site-1", "weights")]
    assert {one["site"] for one in report["parcels"]} == {"site-1"}
    attacks = {one["attack"]: one for one in report["parcels"][0]["findings"]}
    assert set(attacks) == {"gradient-inversion", "loss-threshold", "rmia", "lira"}
    assert (kit / "runs" / RUN / attacks["loss-threshold"]["picture"]).is_file()
    assert json.loads((kit / "runs" / RUN / "audit.json").read_text()) == report


def test_it_finds_what_an_audit_of_the_simulated_run_finds(kit: Path, tiny, undisturbed, tmp_path: Path):
    study = tiny("fedavg", {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}, rounds=1)
    shutil.copytree(undisturbed(study).folder, tmp_path / "simulated")
    ours, theirs = audit(kit / "runs" / RUN), audit(tmp_path / "simulated")
    # a kit knows no other sites: whose images the search may start from, and which site an image is from
    others = ("gradient-inversion", "site-inference", "site-of-update")
    found = [report["parcels"][0]["findings"] for report in (ours, theirs)]
    words = [[one["words"] for one in some if one["attack"] not in others] for some in found]
    assert len(words[0]) == 3
    assert words[0] == words[1]


def test_what_a_kit_cannot_do_alone_is_said(kit: Path, tmp_path: Path):
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    shutil.copy(kit / "runs" / RUN / "study.toml", fetched)
    with pytest.raises(BadInput, match=r"are at its sites; each audits its own part, with `polyclinic audit KIT/runs"):
        audit(fetched)
    with pytest.raises(BadInput, match=r"^--grid: runs the study again with all its sites"):
        grid(kit / "runs" / RUN)
    (kit / "runs" / RUN / "study.toml").rename(tmp_path / "study.toml")
    with pytest.raises(BadInput, match=r"ask the coordinator for its study.toml, and name that file with --study$"):
        audit(kit / "runs" / RUN)
    assert audit(kit / "runs" / RUN, study=tmp_path / "study.toml")["verdicts"]["weights"]["words"]


def test_a_site_tests_its_own_patients_and_never_says_withstood(kit: Path, hurry):
    hurry(patient_references=4)
    run = kit / "runs" / RUN
    found = audit(run, patients=True, kinds=["weights"])["patients"]
    assert found["verdict"] == "not tested"
    assert "Reference runs have the images of 'site-1' alone" in found["words"]
    assert [(run / place).is_file() for place in found["lists"]] == [True]
    assert "what left" not in found["words"]
