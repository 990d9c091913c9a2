"""FedER's benchmarks: sites are balanced, figures are those of arithmetic by hand, and the benchmarks run."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from processes import run_script

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import feder_figures  # noqa: E402
import feder_generators  # noqa: E402
from feder_data import balanced  # noqa: E402
from feder_options import read_options  # noqa: E402
from feder_plan import Plan  # noqa: E402

from polyclinic.methods.shared import synthetic_buffer  # noqa: E402
from polyclinic.study import parse_study  # noqa: E402


def test_sites_have_as_many_of_either_class():
    labels = np.array([0] * 90 + [1] * 10 + [0] * 5 + [1] * 50)
    sites = np.array(["a"] * 100 + ["b"] * 55)
    chosen = balanced(labels, sites, ("a", "b"), most=8)
    for site, each in (("a", 8), ("b", 5)):
        here = chosen[sites[chosen] == site]
        assert np.bincount(labels[here]).tolist() == [each, each]
    assert np.array_equal(chosen, balanced(labels, sites, ("a", "b"), most=8))


class Finished:
    def __init__(self, result):
        self.result = result


def result(accuracy, stds):
    scores = {"accuracy": accuracy, "auc": accuracy + 0.05}
    return {
        "metrics": {
            "mean": scores,
            "test": scores,
            "per_site": {"a": scores, "b": scores},
            "convergence": {
                site: {name: {"mean": mean, "std": s} for name, mean in scores.items()} for site, s in stds.items()
            },
        },
        "handed_over_per_round": {"a": {"weights": 100, "synthetic-images": 50}, "b": {"weights": 100}},
        "data": {"counts": {"a": 1, "b": 1}},
    }


def test_figures_are_means_over_seeds_by_hand():
    runs = [Finished(result(0.8, {"a": 0.02, "b": 0.04})), Finished(result(0.9, {"a": 0.0, "b": 0.02})), Finished(None)]
    found = feder_figures.figures(runs)
    assert found["n"] == 2
    assert found["site performance"]["mean"] == pytest.approx(85.0)
    assert found["site performance"]["std"] == pytest.approx(50**0.5)
    assert found["convergence by site"]["a"]["std"] == pytest.approx(1.0)
    assert found["convergence std"] == pytest.approx(2.0)
    assert found["AUC"]["each model at each site"]["mean"] == pytest.approx(90.0)
    assert found["AUC"]["convergence std"] == pytest.approx(2.0)
    assert found["bytes a site sends in a round"] == 125
    assert feder_figures.figures([Finished(None)]) == {"n": 0}


def test_fig_2_has_a_line_a_method_and_leaves_out_what_is_not_finished(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Axes, "errorbar", lambda self, x, y, deviation, **more: drawn.append((x, y, deviation)))
    monkeypatch.setattr(Axes, "legend", lambda self: None)
    runs = [Finished(result(accuracy, {"a": 0.0, "b": 0.0})) for accuracy in (0.8, 0.9)]
    by_count = {"2": {"feder": feder_figures.figures(runs)}, "4": {"feder": {"n": 0}}}
    feder_figures.draw_scalability(by_count, ["feder"], tmp_path / "fig2.png")
    assert drawn == [([2], [pytest.approx(85.0)], [pytest.approx(50**0.5)])]
    assert (tmp_path / "fig2.png").stat().st_size > 0


def test_rows_with_another_network_and_without_step(tmp_path):
    options = read_options(None, ["--quick", "--out", str(tmp_path)])
    plan = Plan(options)
    mixed = plan.entry("feder, two networks", 0, 1e-3).study
    assert (mixed.model.backbone, mixed.model.backbones) == ("lenet5", {"site-1": "small-cnn"})
    late = plan.entry("feder, asynchronous", 0, 1e-3).study.method
    assert (late.mode, late.turn_takes) == ("asynchronous", {"site-1": 2.0})


def test_generators_trained_side_by_side_are_those_that_runs_would_train(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYCLINIC_CACHE", str(tmp_path / "cache"))
    study = parse_study(
        {
            "data": {"source": "skin-phantom", "size": 28, "samples": 60},
            "sites": {"partition": "iid", "count": 3},
            "method": {"name": "feder", "reuse_generators": True},
            "generator": {"name": "stylegan2", "width": 2, "latent": 4, "batch_size": 4, "steps": 2},
            "tuning": {"on": False},
        }
    )
    sites = feder_generators._sites(study, tmp_path)
    alone = [synthetic_buffer.new_generator(site) for site in sites]
    for site, model in zip(sites, alone, strict=True):
        synthetic_buffer.fit(site, model)
    told: list[str] = []
    feder_generators.train_ahead([study], tmp_path, 2, None, told.append)
    assert len(told) == 3

    monkeypatch.setattr(synthetic_buffer, "fit", lambda *_: pytest.fail("trained again"))
    for site, model in zip(sites, alone, strict=True):
        found, _ = synthetic_buffer.train_generator(site, reuse=True)
        for name, tensor in model.state().items():
            assert torch.equal(found.state()[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("feder", ("--rows", "feder;fedavg;centralized, synthetic")), ("feder_privacy", ()), ("stylegan2", ())],
)
def test_a_benchmark_ends_in_one_line_of_json(tmp_path, name, options):
    done = run_script(BENCHMARKS / f"{name}.py", "--quick", "--json", str(tmp_path / "found.json"), *options)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert printed == json.loads((tmp_path / "found.json").read_text())
    assert printed["benchmark"] == name
