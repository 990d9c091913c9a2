"""The benchmarks run, end in one line of JSON with the documented keys, and compare like with like."""

import json
from pathlib import Path

import pytest
from processes import run_script

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
