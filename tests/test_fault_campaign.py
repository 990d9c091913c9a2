"""A quick version of the fault campaign: a few kills, power cuts, damaged files, full disks and lies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "faults.py"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the campaign forks, and follows open files in /proc")
def test_no_fault_of_the_quick_campaign_goes_unnoticed(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--quick", "--json", tmp_path / "found.json"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=500,
    )
    assert (tmp_path / "found.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 0, done.stdout[-3000:]
    assert found["failures"] == []
    tried = {kind: counts["tried"] for kind, counts in found["kinds"].items()}
    assert {"kills", "power cuts", "damaged, interrupted", "full disk", "lies"} <= set(tried)
    assert sum(tried.values()) >= 25
