"""Benchmarks, campaigns and archives run quickly."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import run_script

from polyclinic_lab import archives
from polyclinic_lab.claim import CLAIMS

BENCHMARKS = Path(__file__).parents[2] / "lab" / "benchmarks"


def run_benchmark(name, *options, file):
    """The figures that a benchmark wrote to `file`, which are those in its last line of output."""
    done = run_script(BENCHMARKS / f"{name}.py", "--quick", "--json", str(file), *options)
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written == json.loads(done.stdout.splitlines()[-1])
    assert written["benchmark"] == name
    return written


def test_overhead_compares_two_loops_that_end_in_the_same_weights(tmp_path):
    options = ("--pairs", "2", "--sites", "2", "--images-per-site", "8")
    written = run_benchmark("overhead", *options, file=tmp_path / "figures.json")
    assert written["same_weights"]
    assert [case["backbone"] for case in written["cases"]] == ["small-cnn", "lenet5", "small-cnn"]
    for case in written["cases"]:
        assert case["sites"] == case["pairs"] == 2
        for ratio in (case["wall_ratio"], case["cpu_ratio"]):
            assert 0 < ratio["q1"] <= ratio["median"] <= ratio["q3"]
        assert case["largest_difference_of_weights"] <= 1e-6


def test_scaling_measures_each_point_in_a_process_of_its_own(tmp_path):
    options = ("--series", "fedavg/small-cnn", "--sites", "2", "3")
    written = run_benchmark("scaling", *options, file=tmp_path / "figures.json")
    assert [point["sites"] for point in written["points"]] == [2, 3]
    for point in written["points"]:
        assert point["seconds_per_round"] > 0
        assert point["peak_mib"] > point["added_mib"] > 0


@pytest.mark.slow
def test_a_round_is_timed_beside_a_bare_loop(tmp_path):
    written = run_benchmark("gpu_round", file=tmp_path / "figures.json")
    assert [case["backbone"] for case in written["cases"]] == ["resnet18", "small-cnn"]
    assert all(case["ratio"] > 0 for case in written["cases"])


@pytest.mark.slow
def test_private_gradients_are_those_of_a_loop_over_images(tmp_path):
    written = run_benchmark("dp_gradients", file=tmp_path / "figures.json")
    names = ["small-cnn", "lenet5", "VQ-VAE-2, grey", "VQ-VAE-2, colour"]
    assert [row["backbone"] for row in written["checks"]] == names
    for row in written["checks"]:
        assert set(row["errors"]) >= {"ghost", "stored"}
        assert max(row["errors"].values()) < 1e-3
    assert all(value > 0 for row in written["steps"] for value in row["milliseconds"].values())


@pytest.mark.slow
def test_steps_of_stacked_sites_are_the_steps_of_each(tmp_path):
    written = run_benchmark("steps", file=tmp_path / "figures.json")
    check, *rows = written["rows"]
    assert check["stacked"] < 1e-3 < check["another seed"]
    assert [row["networks"] for row in rows] == [1, 1, 4]
    assert all(value > 0 for row in rows for value in row["milliseconds"].values())


@pytest.mark.slow
def test_every_kind_of_generator_is_timed(tmp_path):
    written = run_benchmark("generator_steps", file=tmp_path / "figures.json")
    assert written["stylegan2"][0]["images a second"] > 0
    assert written["vqvae2"][0]["images a second"] > 0
    assert written["gan"][0]["steps a second"] > 0
    assert set(written["stacks"][0]["steps a second"]) == {"one after the other", "stacked"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peers", "secure_sum"])
def test_a_benchmark_of_rounds_runs(name, tmp_path):
    assert len(run_benchmark(name, file=tmp_path / "figures.json")) > 1


@pytest.mark.slow
def test_an_audit_is_measured_on_a_planted_leak(tmp_path):
    options = ("--only", "real images", "--out", str(tmp_path / "cases.jsonl"))
    written = run_benchmark("audit_power", *options, file=tmp_path / "figures.json")
    assert written["cases"] == 1
    assert written["budgets"]["quick"]["full"] == {"leaks": 1}


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


ROWS = 120


@pytest.fixture
def eyes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive such as the retinopathy claims read, of 40 px; the claim wants twenty a class at 32."""
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (ROWS, 40, 40, 3), dtype=np.uint8),
        "labels": np.arange(ROWS) % 5,
        "patient": np.arange(ROWS),
        "label_names": np.array(list("01234")),
    }
    np.savez(tmp_path / "dr_multisite_128_jpeg.npz", **arrays)
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))
    claim = dataclasses.replace(
        CLAIMS["qu-figure5-retina-low"], scales={"quick": ("data.size=32", "data.per_class=20")}
    )
    monkeypatch.setattr(archives, "find_claim", lambda name: claim)
    return tmp_path


@pytest.mark.parametrize("fit", [False, True])
def test_an_archive_keeps_its_rows_and_only_the_images_that_are_read(eyes: Path, tmp_path: Path, fit: bool) -> None:
    (study,) = archives.studies_of(["qu-figure5-retina-low"], "quick")
    small = tmp_path / "small"
    small.mkdir()
    archives.write(study.data.location, [study], small / study.data.location.name, fit=fit)
    with np.load(small / study.data.location.name) as kept:
        assert len(kept["labels"]) == ROWS
        assert kept["images"].shape == ((ROWS, 32, 32, 3) if fit else (ROWS, 40, 40, 3))
        assert kept["images"].any((1, 2, 3)).sum() == 40
    assert archives.facts(study) == archives.facts(study, small)


def test_packed_pictures_that_nobody_reads_are_empty(tmp_path: Path) -> None:
    file = tmp_path / "packed.npz"
    np.savez(file, jpeg=np.arange(9, dtype=np.uint8), jpeg_off=np.array([0, 2, 5, 9]), labels=np.arange(3))
    used = np.array([True, False, True])
    found = archives.blanked(archives.Archive(file), "jpeg", used)
    assert found["jpeg"].tolist() == [0, 1, 5, 6, 7, 8]
    assert found["jpeg_off"].tolist() == [0, 2, 2, 6]
    assert archives.blanked(archives.Archive(file), "jpeg_off", used) == {}
    assert archives.blanked(archives.Archive(file), "labels", used)["labels"].tolist() == [0, 1, 2]
