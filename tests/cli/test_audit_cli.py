"""`polyclinic audit` as a user types it."""

import json
import os

import pytest

from polyclinic.audits import audit
from polyclinic.cli import run_app
from polyclinic.study import tables as audit_settings
from polyclinic.study.tables import Effort

STUDY = """
data = { source = "fundus-phantom", size = 28, samples = 80 }
sites = { partition = "iid", count = 2 }
model = { backbone = "lenet5" }
optimizer = { batch_size = 8 }
method = { name = "fedavg", rounds = 1 }
engine = { workers = 1 }
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    few = Effort(
        sites=1, releases=1, images=2, update_steps=2, latent_steps=2, projected=4, projection_steps=1, candidates=20
    )
    monkeypatch.setitem(audit_settings.EFFORTS, "quick", few)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def test_an_audit_prints_verdicts_and_where_pictures_lie(here, capsys):
    assert run_app(["run", "study.toml", "--set", "audit.keep_parcels=0", "--out", "out", "--quiet"]) == 0
    assert run_app(["audit", "out"]) == 0
    captured = capsys.readouterr()
    assert "gradient-inversion" in captured.out
    assert "attacker" in captured.out
    assert "weights, not tried: 1 of 2 parcels that left" in captured.out
    assert "1 of 2" in captured.out
    pictures = [line.split(": ")[1] for line in captured.out.splitlines() if line.endswith(".png")]
    assert len(pictures) == 6
    assert all((here / picture).is_file() for picture in pictures)
    assert "audit: 2 of 2 done" in captured.err  # weights, and the scores of the first evaluation

    assert run_app(["audit", "out", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((here / "out" / "audit.json").read_text())
    assert captured.err == ""

    assert run_app(["audit", "out", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_run_that_kept_nothing_and_flags_that_a_grid_does_not_have_are_refused(here, capsys):
    assert run_app(["run", "study.toml", "--out", "out", "--quiet"]) == 0
    assert run_app(["audit", "out"]) == 2
    assert "kept no parcels" in capsys.readouterr().err
    for flag in (["--kinds", "weights"], ["--sites", "site-1"], ["--features", "lpips-alex"], ["--study", "a.toml"]):
        assert run_app(["audit", "out", "--grid", *flag]) == 2
        assert capsys.readouterr().err.startswith("--grid: ")
    assert not (here / "out" / "grid").exists()


def test_an_interrupted_audit_says_what_there_is(here, capsys, monkeypatch):
    assert run_app(["run", "study.toml", "--set", "audit.keep_parcels=0", "--out", "out", "--quiet"]) == 0
    attack_one, done = audit.audit_parcel, []

    def stop_at_the_second(*given):
        if done:
            raise KeyboardInterrupt
        done.append(attack_one(*given))
        return done[0]

    monkeypatch.setattr(audit, "audit_parcel", stop_at_the_second)
    both = ["audit", "out", "--sites", "site-1,site-2", "--quiet"]
    assert run_app(both) == 1
    assert capsys.readouterr().err == "interrupted; what was found so far is in out/audit.json\n"
    report = json.loads((here / "out" / "audit.json").read_text())
    assert (report["complete"], len(report["parcels"])) == (False, 1)
    os.utime(here / "out" / "audit.json", (0, 0))  # from now on an earlier audit's
    assert run_app(both) == 1
    assert capsys.readouterr().err == "interrupted; nothing was found yet\n"
    assert json.loads((here / "out" / "audit.json").read_text()) == report


@pytest.mark.slow
def test_a_grid_prints_what_defences_cost(here, capsys):
    sets = ["--set", "audit.keep_parcels=0", "--set", 'audit.defences=["quantise"]']
    assert run_app(["run", "study.toml", *sets, "--out", "out", "--quiet"]) == 0
    assert run_app(["audit", "out", "--grid"]) == 0
    printed = capsys.readouterr().out
    assert "8 bits" in printed
    assert (here / "out" / "grid.png").is_file()
    assert "out/grid.png" in printed
    assert run_app(["audit", "out", "--grid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((here / "out" / "grid.json").read_text())
