"""Quick versions of the campaigns: faults, changed inputs, and the check of what arrives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGNS = Path(__file__).parents[2] / "lab" / "campaigns"


def run_campaign(name, tmp_path, *options):
    done = subprocess.run(
        [sys.executable, CAMPAIGNS / f"{name}.py", "--quick", "--json", tmp_path / "found.json", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=500,
    )
    assert (tmp_path / "found.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the campaign forks, and follows open files in /proc")
def test_no_fault_of_the_quick_campaign_goes_unnoticed(tmp_path):
    found = run_campaign("faults", tmp_path)
    assert found["failures"] == []
    tried = {kind: counts["tried"] for kind, counts in found["kinds"].items()}
    assert {"kills", "power cuts", "damaged, interrupted", "full disk", "lies"} <= set(tried)
    assert sum(tried.values()) >= 25


def test_every_changed_input_is_read_or_refused(tmp_path):
    found = run_campaign("fuzz", tmp_path)
    assert found["failures"] == {}
    assert found["tried"] >= 2000
    assert {"study", "parcel", "call", "ledger", "manifest", "model", "image png"} <= set(found["targets"])


def test_honest_rounds_pass_the_incoming_check(tmp_path):
    found = run_campaign("incoming", tmp_path, "--part", "honest", "--first", "6", "--rounds", "1", "--each", "2")
    assert found["honest"]["rounds"] == 2
    assert found["honest"]["figures"] > 50
    assert (found["honest"]["runs_with_alarms"], found["honest"]["runs_that_failed"]) == ([], [])


@pytest.mark.slow
def test_crafted_weights_give_an_alarm_and_honest_ones_none(tmp_path):
    rows = run_campaign("incoming", tmp_path, "--part", "attacks")["attacks"]
    alarms = {(row["attack"], row["honest_rounds_before"]): row["alarms"] for row in rows}
    assert alarms["honest weights", 0] == alarms["honest weights", 3] == []
    strong = ("imprint brightness", "imprint random", "crafted-sum", "trap-weights", "fishing", "overflow filter")
    assert all(alarms[attack, warm] for attack in strong for warm in (0, 3))
