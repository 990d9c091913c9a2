"""The attack benchmarks run from end to end, and end with one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import run_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LIGHT = ("pydantic", "monai", "safetensors", "scipy")


def figures(name: str, *options: str, data: Path | None = None) -> dict:
    done = run_script(BENCHMARKS / name, "--threads", "1", *options, POLYCLINIC_DATA=str(data or ""))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_both_sides_end_with_the_same_images():
    (row,) = figures("attacks.py", "--quick", "--targets", "6", "--steps", "1")["rows"]
    pairs = zip(row["mse_at_once"], row["mse_one_by_one"], strict=True)
    near = [pair for pair in pairs if max(pair) < 0.2]  # a search that runs away makes much of a last bit
    assert len(near) >= 3  # five, near 0.1
    assert [ours for ours, _ in near] == pytest.approx([theirs for _, theirs in near], rel=0.1)
    assert row["evaluations_per_target_at_once"] == row["evaluations_per_target_one_by_one"] == 20


def test_tables_of_the_paper(tmp_path: Path):
    rng = np.random.default_rng(0)
    pictures, labels = rng.integers(0, 256, (5, 8, 8), dtype=np.uint8), np.arange(5)
    np.savez(tmp_path / "mnist.npz", test_images=pictures, test_labels=labels)
    options = ["--data", "mnist", "svhn", "--images", "3", "--steps", "2", "--lrs", "0.1"]
    options += ["--figures", str(tmp_path / "drawn")]
    found = figures("attack_tables.py", "--quick", *options, data=tmp_path)
    assert len(found["rows"]) == 3 * 2 + 2 * 4  # three named distances from two starts; two forms of two lambda²
    assert found["rows"][0]["paper"] == {"mse": None, "ssim": None, "non_converging": 4}
    assert {row["start"] for row in found["rows"]} == {"TG", "Unif"}
    assert {row["data"] for row in found["rows"]} == {"mnist"}  # nobody has put an svhn.npz there
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        f"{what}-mnist-LeNet-5-lr0.1.png" for what in ("curves", "images")
    ]


def test_the_authors_compare_with_the_first_step_and_the_text_with_the_start(monkeypatch):
    """By hand: mean squared errors of 0.81 at the start, 0.04 after one step and 0.25 at the end; SSIM needs 11 px."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from attack_tables import scores_of

    images = torch.tensor([0.9, 0.2, 0.5]).view(1, 3, 1, 1, 1).expand(1, 3, 1, 16, 16)
    scores, _ = scores_of(images, (0, 1, 7), torch.zeros(1, 1, 16, 16))
    assert (scores["non_converging"], scores["steps"]) == (0, 7)
    assert scores["their_scoring"]["non_converging"] == 1
    scores, _ = scores_of(images[:, [0, 2, 1]], (0, 1, 7), torch.zeros(1, 1, 16, 16))
    assert scores["their_scoring"]["non_converging"] == 0
    with pytest.raises(ValueError, match="tuple"):  # without the first step there is no such score
        scores_of(images, (0, 250, 500), torch.zeros(1, 1, 16, 16))


def test_tables_in_markdown(tmp_path: Path):
    """Two rows by hand: ours, the paper's in brackets, and no mean where nothing converged."""
    common = {"data": "cifar", "network": "LeNet-5", "start": "TG", "lr": 0.1, "form": ""}
    scores = {"mse": 0.00123, "ssim": 0.957, "non_converging": 3}
    theirs = {"mse": None, "ssim": None, "non_converging": 100}
    paper = {"mse": 5.71e-3, "ssim": 0.85, "non_converging": 6}
    rows = [{**common, "distance": "AG", **scores, "their_scoring": theirs, "paper": paper}]
    rows.append({**common, "distance": "50", "form": "whole", **scores, "their_scoring": theirs, "paper": None})
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    ours, others = (
        run_script(BENCHMARKS / "attack_tables_markdown.py", str(tmp_path / "a.json"), *more).stdout.splitlines()
        for more in ([], ["--theirs"])
    )
    assert ours[4] == "| adaptive Gaussian, n Var | 0.0012 (0.0057) | 0.96 (0.85) | 3 (6) |  |  |  |  |  |"
    assert ours[5] == "| lambda² = 50, one kernel | 0.0012 | 0.96 | 3 |  |  |  |  |  |"
    assert others[5] == "| lambda² = 50, one kernel | – | – | 100 |  |  |  |  |  |"


@pytest.mark.slow  # the tables with LeNet-5 above go the same way
def test_tables_with_resnet(tmp_path: Path):
    """A narrow one, each image with a network of its own: scores after each number of steps, and TG by channel."""
    pictures = np.random.default_rng(2).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "svhn.npz", images=pictures, labels=np.arange(2))
    narrow = ["--resnet-only", "--resnet-widths", "2", "2", "2", "2", "--resnet-steps", "1", "2"]
    options = ["--images", "2", "--data", "svhn", "--distances", "Eucl", "Var", "--scaling", "channel", *narrow]
    found = figures("attack_tables.py", "--quick", *options, data=tmp_path)["rows"]
    assert [row["steps"] for row in found] == [1, 1, 2, 2, 1, 1, 2, 2]
    assert {row["network"] for row in found} == {"ResNet-18"}
    assert {row["images"] for row in found} == {2}


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


def test_coordinator_attacks(tmp_path: Path):
    """Random pictures come back; a backbone of each sort."""
    pictures = np.random.default_rng(3).integers(0, 256, (96, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "tb_cxr_64.npz", images=pictures[:48], labels=np.arange(48) % 2)
    sites = {"site": np.ones(48, dtype=int), "site_names": np.array(["elsewhere", "NIH_ChestXray8"])}
    np.savez(tmp_path / "covid_cxr_64.npz", images=pictures[48:], labels=np.arange(48) % 2, **sites)
    options = ["--images", "6", "--public", "40", "--size", "16"]
    rows = figures("coordinator_attacks.py", "--quick", *options, data=tmp_path)["rows"]
    names = ["imprint", "imprint", "trap-weights", "crafted-sum", "overflow-filter", "fishing"]
    assert [row["attack"] for row in rows] == names
    assert rows[0]["images"] >= 3
    assert rows[0]["by_chance"] == 0


def test_benchmarks_need_torch_and_numpy_only():
    """So that they run on any machine that has a GPU and torch."""
    code = f"import attacks, attack_tables, sys; print([m for m in {LIGHT} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=BENCHMARKS, check=True)
    assert done.stdout.strip() == "[]"
