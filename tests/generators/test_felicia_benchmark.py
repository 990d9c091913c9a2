"""The benchmark of FELICIA runs, keeps what it found at every look, and its figures can be drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def call(script: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done


def fours(folder: Path) -> None:
    """An archive like MNIST's with nothing but strokes of two slants, all called four."""
    rng = np.random.default_rng(0)
    images = np.zeros((120, 28, 28), np.uint8)
    for number, image in enumerate(images):
        for row in range(6, 22):
            slant = (row - 14) // 3 if number % 2 else (14 - row) // 3
            image[row, 13 + slant : 16 + slant] = 150 + rng.integers(100)
    labels = np.full(120, 4)
    np.savez(
        folder / "mnist.npz",
        train_images=images[:90],
        train_labels=labels[:90],
        test_images=images[90:],
        test_labels=labels[90:],
    )


def test_digits_from_end_to_end(tmp_path):
    fours(tmp_path)
    out = tmp_path / "out"
    options = ["--quick", "--only", "digits", "--data", str(tmp_path), "--out", str(out), "--json"]
    grid = ["--steps", "2", "--points", "0", "25", "--lambdas", "0", "1", "--seeds", "1"]
    done = call("felicia.py", *options, str(tmp_path / "all.json"), *grid)
    printed, written = json.loads(done.stdout.splitlines()[-1]), json.loads((tmp_path / "all.json").read_text())
    assert printed == written
    found = json.loads((out / "digits.json").read_text())
    assert found == written["digits"]
    assert found["training"]["owners"] == 8
    assert found["training"]["images_per_owner"] == 2 * 32
    assert {(row["seed"], row["alpha"], row["lambda"], row["owner"]) for row in found["rows"]} == {
        (seed, alpha, weight, owner)
        for seed in (0,)
        for alpha in (0, 25)
        for weight in (0, 1)
        for owner in ("site-1", "site-2")
    }
    assert all(0 <= row["coverage"] <= 1 for row in found["rows"])
    tables = call("felicia_figures.py", str(out)).stdout
    assert "| all, local GAN | all, FELICIA, λ = 1 | other's, local GAN | other's, FELICIA, λ = 1 |" in tables
    assert all((out / name).stat().st_size > 5000 for name in ("digits.png", "digits_coverage.png", "digits_sheet.png"))


def test_speed_needs_no_images():
    found = json.loads(call("felicia.py", "--quick", "--only", "speed").stdout.splitlines()[-1])
    assert [row["owners"] for row in found["speed"]] == [2, 4]
    assert all(row["stacked"] > 0 and row["one_by_one"] > 0 and row["ratio"] > 0 for row in found["speed"])


def test_what_was_found_is_kept_at_every_look(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import felicia_experiments as experiments
    from felicia_common import Scale

    fours(tmp_path)
    kept = []
    scale = Scale(20, 600, 2, 1, (0.0, 1.0), (10,), small={"width": 2, "batch_size": 4})
    found = experiments.digits(tmp_path, scale, lambda text: None, lambda now: kept.append(len(now["rows"])))
    assert kept == [4, 8]
    assert found["training"]["steps"] == 20


def test_tables_average_late_looks_and_choose_by_validation(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import felicia_figures as figures

    rows = [
        {"seed": seed, "images": images, "lambda": 1.0, "validation": validation, "auc": auc}
        for seed, images, validation, auc in (
            *((0, 10, 0.9, 0.1), (0, 20, 0.8, 0.6), (0, 30, 0.7, 0.8)),
            *((1, 10, 0.1, 0.2), (1, 20, 0.2, 0.5), (1, 30, 0.3, 0.7)),
        )
    ]
    assert figures.mean_std(figures.late(rows), "auc")[0] == np.mean([0.7, 0.6])  # looks at 20 and 30 of each seed
    assert [row["images"] for row in figures.best_look(rows)] == [10, 30]
    assert [row["images"] for row in figures.chosen_by_validation(rows)] == [10, 30]
    real = [{"seed": 0, "validation": 0.95, "auc": 0.4}, {"seed": 1, "validation": 0.05, "auc": 0.5}]
    more, spread = figures.gain(figures.late(rows), real, "auc")
    assert (round(more, 6), round(spread, 6)) == (0.2, round(float(np.std([0.3, 0.1], ddof=1)), 6))
    assert [row["auc"] for row in figures.released(rows, real)] == [0.4, 0.7]
