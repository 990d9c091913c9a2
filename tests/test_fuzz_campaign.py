"""A quick version of the fuzz campaign: what others wrote, changed, is read or refused in the project's own words."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"


def test_every_changed_input_is_read_or_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--quick", "--json", tmp_path / "found.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=500,
    )
    assert (tmp_path / "found.json").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert done.returncode == 0, done.stdout[-3000:]
    assert found["failures"] == {}
    assert found["tried"] >= 2000
    assert {"study", "parcel", "call", "ledger", "manifest", "model", "image png"} <= set(found["targets"])
