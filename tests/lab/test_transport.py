"""The transport campaign, in short: a deployed federation in network namespaces meets one fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
CAMPAIGN = Path(__file__).parents[2] / "lab" / "campaigns" / "transport.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not Path("/dev/net/tun").exists() or os.geteuid() != 0, reason="needs network namespaces, and root for them"
    ),
]


def test_a_run_that_is_cut_from_a_site_ends_with_the_same_weights(tmp_path):
    options = ["--trials", "1", "--methods", "fedavg", "--only", "partition", "--json", tmp_path / "trials.jsonl"]
    done = subprocess.run([sys.executable, CAMPAIGN, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [trial] = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert trial["outcome"].endswith("same weights")
    assert trial["faults"][0]["kind"] == "partition"
    assert json.loads(done.stdout.splitlines()[-1])["ended"] == {trial["outcome"]: 1}
