"""The attack benchmarks run from end to end, and end with one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from processes import run_script

BENCHMARKS = Path(__file__).parents[2] / "lab" / "benchmarks"


def figures(name: str, *options: str, data: Path | None = None) -> dict:
    done = run_script(BENCHMARKS / name, "--threads", "1", *options, POLYCLINIC_DATA=str(data or ""))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_both_sides_end_with_the_same_images():
    (row,) = figures("attacks.py", "--quick", "--targets", "6", "--steps", "1")["rows"]
    pairs = zip(row["mse_at_once"], row["mse_one_by_one"], strict=True)
    near = [pair for pair in pairs if max(pair) < 0.2]  # a search that runs away makes much of a last bit
    assert len(near) >= 3  # five, near 0.1
    assert [ours for ours, _ in near] == pytest.approx([theirs for _, theirs in near], rel=0.1)
    assert row["evaluations_per_target_at_once"] == row["evaluations_per_target_one_by_one"] == 20


@pytest.mark.slow
def test_black_box(tmp_path: Path):
    """Every attacker at one cut, on random pictures; the mean image tells nobody apart."""
    rng = np.random.default_rng(3)
    pictures = rng.integers(0, 256, (96, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "tb_cxr_64.npz", images=pictures, labels=np.arange(96) % 2)
    sites = {"site": np.ones(96, dtype=int), "site_names": np.array(["elsewhere", "NIH_ChestXray8"])}
    np.savez(tmp_path / "covid_cxr_64.npz", images=pictures, labels=np.arange(96) % 2, **sites)
    options = ["--backbone", "small-cnn", "--size", "16", "--pairs", "8", "--steps", "2", "--iterations", "2"]
    rows = figures("attack_black_box.py", "--quick", *options, data=tmp_path)["rows"]
    assert [row["attacker"] for row in rows] == ["mean image", "white box", "pairs 8", "surrogates"]
    assert rows[0]["identified"] <= 1 / 16
    assert {row["images"] for row in rows} == {16}
