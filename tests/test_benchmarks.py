"""The benchmarks run, end in one line of JSON with the documented keys, and compare like with like."""

import json
from pathlib import Path

import pytest
from processes import run_script

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run_benchmark(name, *options, file):
    """The figures that a benchmark wrote to `file`, and those in its last line of output."""
    done = run_script(BENCHMARKS / f"{name}.py", "--quick", "--json", str(file), *options)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), json.loads(done.stdout.splitlines()[-1])


def test_ledger_times_a_line_of_each_sort(tmp_path):
    written, printed = run_benchmark("ledger", file=tmp_path / "figures.json")
    assert written == printed
    assert set(written["microseconds"]) == {"chained", "signed", "signed_and_on_disk", "verify_a_line", "countersign"}
    assert all(value > 0 for value in written["microseconds"].values())


def test_overhead_compares_two_loops_that_end_in_the_same_weights(tmp_path):
    written, printed = run_benchmark(
        "overhead", "--pairs", "2", "--sites", "2", "--images-per-site", "8", file=tmp_path / "figures.json"
    )
    assert written == printed
    assert set(written) == {"benchmark", "quick", "threads", "target", "within_target", "same_weights", "cases"}
    assert (written["benchmark"], written["quick"], written["target"]) == ("overhead", True, 1.05)
    assert written["same_weights"]
    assert [case["backbone"] for case in written["cases"]] == ["small-cnn", "lenet5", "small-cnn"]
    for case in written["cases"]:
        assert case["sites"] == case["pairs"] == 2
        for ratio in (case["wall_ratio"], case["cpu_ratio"]):
            assert 0 < ratio["q1"] <= ratio["median"] <= ratio["q3"]
        assert case["bare_cpu_seconds"] > 0
        assert case["largest_difference_of_weights"] <= 1e-6


def test_incoming_counts_honest_rounds_through_the_pool_until_the_time_is_over(tmp_path):
    """The clock stops study 6 in its first round, before a checkpoint: resumed, it begins there again."""
    options = ("--part", "honest", "--first", "6", "--seconds", "0")
    written, printed = run_benchmark("incoming", *options, file=tmp_path / "figures.json")
    assert written == printed
    assert written["honest"]["rounds_by_method"] == {"fedbn": 1}
    assert (written["honest"]["runs"], written["honest"]["runs_that_failed"]) == (1, 0)
    assert written["honest"]["figures"] > 50


def test_scaling_measures_each_point_in_a_process_of_its_own(tmp_path):
    options = ("--series", "fedavg/small-cnn", "--sites", "2", "3")
    written, printed = run_benchmark("scaling", *options, file=tmp_path / "figures.json")
    assert written == printed
    assert set(written) == {"benchmark", "quick", "points", "growth"}
    assert [(p["method"], p["backbone"], p["sites"]) for p in written["points"]] == [
        ("fedavg", "small-cnn", 2),
        ("fedavg", "small-cnn", 3),
    ]
    for point in written["points"]:
        assert point["seconds_per_round"] > 0
        assert point["peak_mib"] > point["added_mib"] > 0
    assert [(growth["from_sites"], growth["to_sites"]) for growth in written["growth"]] == [(2, 3)]


@pytest.mark.slow
def test_private_gradients_are_those_of_a_loop_over_images(tmp_path):
    written, printed = run_benchmark("dp_gradients", file=tmp_path / "figures.json")
    assert written == printed
    names = ["small-cnn", "lenet5", "VQ-VAE-2, grey", "VQ-VAE-2, colour"]
    assert [row["backbone"] for row in written["checks"]] == names
    for row in written["checks"]:
        assert set(row["errors"]) >= {"ghost", "stored"}
        assert max(row["errors"].values()) < 1e-3
    assert all(value > 0 for row in written["steps"] for value in row["milliseconds"].values())


@pytest.mark.slow
def test_steps_of_stacked_sites_are_the_steps_of_each(tmp_path):
    written, printed = run_benchmark("steps", file=tmp_path / "figures.json")
    assert written == printed
    check, *rows = written["rows"]
    assert check["stacked"] < 1e-3 < check["another seed"]
    assert [row["networks"] for row in rows] == [1, 1, 4]
    assert all(value > 0 for row in rows for value in row["milliseconds"].values())


@pytest.mark.slow
def test_feder_is_timed_as_stacks_and_one_after_the_other(tmp_path):
    written, printed = run_benchmark("feder_stacked", "--size", "28", "--device", "cpu", file=tmp_path / "figures.json")
    assert written == printed
    assert {way: len(seconds) for way, seconds in written["seconds"].items()} == {
        "one after the other": 1,
        "stacked": 1,
    }
    assert written["told"]["stacked"]["stacked"] == ["adapt", "prepare"]
    assert written["told"]["one after the other"]["stacked"] == []
