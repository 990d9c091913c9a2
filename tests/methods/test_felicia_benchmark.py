"""The benchmark of FELICIA: studies from its examples, run by `polyclinic.run`; tables by hand."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def call(script: str, *options: str) -> subprocess.CompletedProcess:
    done = run_script(BENCHMARKS / script, *options)
    assert done.returncode == 0, done.stderr
    return done


def fours_and_nines(folder: Path) -> None:
    """An archive like MNIST's with strokes of two slants; nines have a dot."""
    rng = np.random.default_rng(0)
    images, labels = np.zeros((240, 28, 28), np.uint8), np.where(np.arange(240) % 4 < 2, 4, 9)
    for number, image in enumerate(images):
        for row in range(6, 22):
            slant = (row - 14) // 3 if number % 2 else (14 - row) // 3
            image[row, 13 + slant : 16 + slant] = 150 + rng.integers(100)
        image[2:5, 2:5] = 255 if labels[number] == 9 else 0
    parts = {"train": slice(0, 180), "test": slice(180, 240)}
    arrays = {f"{name}_images": images[part] for name, part in parts.items()}
    np.savez(folder / "mnist.npz", **arrays, **{f"{name}_labels": labels[part] for name, part in parts.items()})


def test_other_lambdas_alphas_and_seeds_than_an_experiments_own(tmp_path):
    from felicia_runs import plan

    asked = {"lambdas": [1.0], "alphas": [0, 10], "seeds": [4]}
    jobs = list(plan(["digits", "bias"], tmp_path, tmp_path, {}, asked, quick=True))
    assert [(job.experiment, job.key) for job in jobs] == [
        ("digits", {"seed": 4, "alpha": 0, "lambda": 1.0}),
        ("digits", {"seed": 4, "alpha": 10, "lambda": 1.0}),
        ("bias", {"seed": 4, "alpha": 0.0, "lambda": 1.0}),
    ]
    assert [job.tables["sites"].get("mixing") for job in jobs] == [0, 10, None]
    own = list(plan(["bias"], tmp_path, tmp_path, {}, {"lambdas": None}, quick=False))
    assert [(job.key["seed"], job.key["lambda"]) for job in own] == [(k, w) for k in range(3) for w in (0.0, 3.0)]


def test_digits_from_end_to_end(tmp_path):
    fours_and_nines(tmp_path)
    out, small = (
        tmp_path / "out",
        ["generator.batch_size=4", "method.steps=2", "method.images=8", "model.backbone=lenet5"],
    )
    where = ["--data", str(tmp_path), "--out", str(out), "--json", str(tmp_path / "all.json")]
    done = call("felicia.py", "--quick", "--only", "digits", *where, "--set", *small)
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "all.json").read_text())
    assert {(row["lambda"], row["site"]) for row in printed["rows"]} == {
        (weight, site) for weight in (0, 3) for site in ("site-1", "site-2")
    }
    assert all(0 <= row["coverage"] <= 1 and row["images"] == 8 for row in printed["rows"])
    assert "| alpha | all: local GAN | all: FELICIA, lambda 3 | more |" in done.stdout
    ledger = out / "digits" / "seed0-alpha0-lambda3" / "ledger" / "site-1.jsonl"
    assert sum(json.loads(line)["kind"] == "synthetic-images" for line in ledger.read_text().splitlines()) == 2
    again = call("felicia_figures.py", str(out)).stdout  # from rows.json alone
    assert again.strip() in done.stdout
    assert all((out / name).stat().st_size > 5000 for name in ("felicia_digits.png", "felicia_coverage.png"))


def test_every_experiment_is_a_valid_study(tmp_path):
    import felicia_runs

    jobs = list(felicia_runs.plan(list(felicia_runs.EXPERIMENTS), tmp_path, tmp_path, {}, quick=False))
    assert len({job.folder for job in jobs}) == len(jobs)
    for job in jobs:
        assert job.study.method.name == job.key.get("method", "felicia")
        assert (job.study.seed, job.study.data.seed) == (job.key["seed"], job.key["seed"])
        assert job.study.method.name != "felicia" or job.study.method.weight == job.key["lambda"]


@pytest.mark.slow  # the digits above go the same way
def test_the_check_of_the_clusters_from_end_to_end(tmp_path):
    """A network for each cluster, and one for all images, judged on the same held-out digits."""
    fours_and_nines(tmp_path)
    where = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    done = call("felicia.py", "--quick", "--only", "clusters", *where, "--set", "model.backbone=lenet5")
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["trained on"] for row in rows] == ["cluster 1", "cluster 2", "all images"]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    assert "| trained on | accuracy of held-out digits |" in done.stdout


def test_a_clusters_network_is_judged_on_the_images_of_all_sites():
    import felicia_runs

    class Result(dict):
        metrics = {  # noqa: RUF012
            "across_sites": {
                "site-2": {"site-1": {"accuracy": 0.5}, "site-2": {"accuracy": 0.9}},
                "site-1": {"site-1": {"accuracy": 1.0}, "site-2": {"accuracy": 0.6}},
            }
        }

    counts = {"site-1": {"test": 10}, "site-2": {"test": 30}}
    rows: Any = list(felicia_runs.cluster_rows(Result(method="standalone", data={"counts": counts})))  # type: ignore[arg-type]
    assert [row["trained on"] for row in rows] == ["cluster 1", "cluster 2"]
    assert [row["accuracy"] for row in rows] == pytest.approx([0.25 * 1.0 + 0.75 * 0.6, 0.25 * 0.5 + 0.75 * 0.9])


def test_rows_come_from_the_result_of_a_run():
    import felicia_runs

    scores = {"test": {"auc": 0.9, "accuracy": 0.8}, "subgroups": {"9": {"accuracy": 0.7}}}
    table = {"real": scores, "synthetic": scores, "augmented": scores, "released": "augmented"}
    worth = [{"round": 1, "sites": {"biased": {"test_real": 0.5}}}]

    class Result(dict):
        metrics = {"diets": {"biased": table, "helper": {}}}  # noqa: RUF012

    rows: Any = list(felicia_runs.utility_rows(Result(worth=worth)))  # type: ignore[arg-type]
    assert [row["trained on"] for row in rows] == ["real", "synthetic", "augmented"]
    assert [row["released"] for row in rows] == [False, False, True]
    assert (rows[0]["accuracy of 9"], rows[0]["curve"], rows[1]["curve"]) == (0.7, {"1": 0.5}, {"1": None})


def test_means_are_over_seeds_and_differences_seed_by_seed():
    import felicia_figures as figures

    rows = [{"seed": seed, "auc": auc} for seed, auc in ((0, 0.6), (0, 0.8), (1, 0.5), (1, 0.9))]
    base = [{"seed": 0, "auc": 0.5}, {"seed": 1, "auc": 0.3}]
    assert figures.by_seed(rows, "auc") == pytest.approx({0: 0.7, 1: 0.7})
    assert figures.gain(rows, base, "auc") == pytest.approx({0: 0.2, 1: 0.4})
    assert figures.text(figures.gain(rows, base, "auc")) == f"0.300 ± {math.sqrt(0.02):.3f}"


def test_settings_are_written_as_in_a_study():
    import felicia_runs

    assert felicia_runs.setting("method.steps=600") == ("method.steps", 600)
    assert felicia_runs.setting("generator.condition=apart") == ("generator.condition", "apart")
    assert felicia_runs.setting("method.images=") == ("method.images", None)
    tables = {"data": {"size": 28, "per_class": 6}, "seed": 1}
    changes = {"data.per_class": None, "seed": 2, "engine.device": "cpu"}
    assert felicia_runs.changed(tables, changes) == {"data": {"size": 28}, "seed": 2, "engine": {"device": "cpu"}}
    assert tables["data"] == {"size": 28, "per_class": 6}


def test_what_perfect_discriminators_would_settle_at():
    import felicia_balance as ideal

    for loss in (ideal.log, ideal.log_as_written):
        assert ideal.balance(loss, 0.02, 0.0) == pytest.approx((0.02, 0.5))  # nobody but one's own images
        shares = [ideal.balance(loss, 0.1, weight)[0] for weight in (0.0, 1.0, 3.0)]
        assert shares == sorted(shares)
        alike = ideal.balance(loss, 0.1, 1000.0)
        assert alike[0] == pytest.approx(alike[1], abs=1e-2)  # with a large lambda sites make the same
    # with the formula as written that is the middle of what both have, where their losses are level
    level = sum(ideal.log_as_written(r, 0.28) - ideal.log_as_written(1 - r, 0.72) for r in (0.1, 0.5))
    assert level == pytest.approx(0.0, abs=0.05)


def test_neither_site_of_a_balance_would_rather_make_another_share():
    """What both pay, written out: all of Eq. 6 as it stands, and what GANs are trained with."""
    import felicia_balance as ideal

    def slope(real: float, made: float, others: float, written: bool) -> float:
        rare, usual = real / (real + made), (1 - real) / (2 - real - made)  # D of an image of either sub-group
        known, usually_known = made / (made + others), (1 - made) / (2 - made - others)  # D_p of its site
        if written:
            return math.log((1 - rare) / (1 - usual)) + 3 * math.log(known / usually_known)
        return -math.log(rare / usual) - 3 * math.log((1 - known) / (1 - usually_known))

    for written, prices in ((True, (ideal.log_as_written, ideal.away)), (False, (ideal.log, ideal.other))):
        first, second = ideal.balance(prices[0], 0.02, 3.0, prices[1])
        assert 0.02 < first < second < 0.5
        assert slope(0.02, first, second, written) == pytest.approx(0.0, abs=0.01)
        assert slope(0.5, second, first, written) == pytest.approx(0.0, abs=0.01)


def test_the_balance_ends_in_one_line_of_json(tmp_path):
    done = call("felicia_balance.py", "--quick", "--json", str(tmp_path / "found.json"))
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "found.json").read_text())
    assert [(row["loss"], row["towards"]) for row in printed["rows"]] == [
        *(("log", "other"), ("log", "away"), ("log, as written", "other"), ("log, as written", "away"))
    ]
    assert all(row["made"] == sorted(row["made"]) for row in printed["rows"])
