"""A model that somebody brought, scored on the sites of a study; counts before training; what a site adds."""

import functools
import json

import numpy as np
import pytest
import torch

from polyclinic.cli import run_app
from polyclinic.cli.evaluate import show
from polyclinic.errors import BadInput
from polyclinic.files import write_tensors
from polyclinic.methods.analytic import shares_of
from polyclinic.metrics.statistics.shapley import exact_shares, leave_one_out, sampled_shares
from polyclinic.models import read_weights
from polyclinic.questions.inspect import Counted, suppressed
from polyclinic.runner.evaluate.evaluate import LabelMap, evaluate
from polyclinic.runner.evaluate.inspect import as_question, draw_inspection, inspect_federated
from polyclinic.runner.export.export import export
from polyclinic.runner.run.method import more_operations
from polyclinic.runner.run.run import run


@pytest.fixture(scope="module")
def study(tiny):
    return tiny("fedavg", {"sites": {"partition": "label-skew", "count": 3, "target_ks": 0.5}}, rounds=1)


@pytest.fixture(scope="module")
def trained(study, undisturbed):
    return undisturbed(study)


@pytest.fixture(scope="module")
def figures(study, trained):
    return evaluate(trained.folder, study)


def same(one, other):
    assert one["metrics"]["pooled"].keys() == other["metrics"]["pooled"].keys()
    for name, value in one["metrics"]["pooled"].items():
        assert value == pytest.approx(other["metrics"]["pooled"][name], abs=1e-4), name


def test_a_run_is_scored_as_the_run_itself_was(trained, figures):
    for name in ("accuracy", "balanced_accuracy", "auc"):
        kept = trained.metrics["intervals"]["pooled"][name]["value"]
        assert figures["metrics"]["pooled"][name] == pytest.approx(kept, abs=1e-9)
    assert figures["metrics"]["per_site"].keys() == trained.metrics["per_site"].keys()
    low, high = (figures["intervals"]["pooled"]["accuracy"][end] for end in ("low", "high"))
    assert low <= figures["metrics"]["pooled"]["accuracy"] <= high
    assert "calibration_error" in figures["calibration"]["pooled"]


@pytest.mark.parametrize("form", ["torchscript", "monai-bundle", "onnx"])
def test_exports_are_scored_alike(study, trained, figures, tmp_path, form):
    if form == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    export(trained.folder, form, tmp_path / form)
    same(evaluate(tmp_path / form, study), figures)


def test_logits_of_a_foreign_network_are_read_as_such(study, trained, figures, tmp_path):
    from polyclinic.runner.predict.predict import load_predictor

    network = load_predictor(trained.folder).model.networks[0]
    traced = torch.jit.trace(network, torch.zeros(2, 3, 28, 28))
    traced.save(tmp_path / "theirs.pt")
    found = evaluate(tmp_path / "theirs.pt", study, outputs="logits")
    assert found["metrics"]["pooled"]["auc"] == pytest.approx(figures["metrics"]["pooled"]["auc"], abs=1e-6)


PLUGIN = """
import torch
from torch import nn

class Brightness(nn.Module):
    \"\"\"Two classes by the mean of an image, with one number to learn.\"\"\"

    def __init__(self, outputs=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, images):
        mean = images.mean((1, 2, 3))
        return torch.stack([-mean, mean], 1) * self.scale
"""


def test_weights_of_a_network_out_of_a_plug_in_are_scored(study, tmp_path, monkeypatch):
    """A network of somebody else's package, and a file that torch wrote."""
    (tmp_path / "somebody_nets.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    torch.save({"scale": torch.full((2,), 30.0)}, tmp_path / "theirs.pt")
    theirs = study.with_settings({"model.backbone": "somebody_nets:Brightness"})
    found = evaluate(tmp_path / "theirs.pt", theirs)
    torch.save({"scale": torch.full((2,), -30.0)}, tmp_path / "turned.pt")
    turned = evaluate(tmp_path / "turned.pt", theirs)
    total = found["metrics"]["pooled"]["auc"] + turned["metrics"]["pooled"]["auc"]
    assert total == pytest.approx(1)  # the file's weights are what is scored
    assert found["metrics"]["pooled"]["auc"] != pytest.approx(0.5, abs=0.02)


def test_classes_of_other_names_are_mapped_and_those_that_lack_are_said(study, trained):
    swapped = evaluate(trained.folder, study, label_map=["healthy=diseased", "diseased=healthy"])
    plain = evaluate(trained.folder, study)
    assert swapped["metrics"]["pooled"]["accuracy"] == pytest.approx(1 - plain["metrics"]["pooled"]["accuracy"])
    of_one = evaluate(trained.folder, study, label_map=["site-1:healthy=diseased", "site-1:diseased=healthy"])
    assert of_one["metrics"]["per_site"]["site-2"] == plain["metrics"]["per_site"]["site-2"]
    assert of_one["metrics"]["per_site"]["site-1"] != plain["metrics"]["per_site"]["site-1"]
    found = evaluate(trained.folder, study, label_map=["site-1:healthy=-"])
    assert found["notes"] == ["site 'site-1' has no image of healthy"]
    assert "auc" not in found["metrics"]["per_site"]["site-1"]


@pytest.mark.parametrize(("given", "sentence"), [
    (["healthy"], "write CLASS=CLASS_OF_MODEL"),
    (["nowhere:healthy=diseased"], "there is no site 'nowhere'"),
    (["helthy=diseased"], "did you mean 'healthy'"),
    (["healthy=well"], "the model does not know 'well'"),
])  # fmt: skip
def test_a_label_map_that_does_not_fit_is_refused(given, sentence):
    classes = ("healthy", "diseased")
    with pytest.raises(BadInput, match=sentence):
        LabelMap.parse(given, ["site-1"], classes).numbers("site-1", classes, classes)


def test_the_command_prints_and_writes_figures(study, trained, tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text(study.to_toml())
    assert run_app(["evaluate", str(trained.folder), "--study", str(file), "--out", str(tmp_path / "e.json")]) == 0
    assert "test images (95 % intervals)" in capsys.readouterr().out
    assert json.loads((tmp_path / "e.json").read_text())["split"] == "test"
    for wrong in (["missing.onnx"], [str(trained.folder), "--split", "train"], [str(file)]):
        assert run_app(["evaluate", *wrong, "--study", str(file)]) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert run_app(["evaluate", str(trained.folder), "--study", str(file), "--set", "data.size=32"]) == 2
    assert "add --set data.size=28" in capsys.readouterr().err


def test_sites_asked_to_evaluate_tell_intervals_and_train_nothing(study, trained, tmp_path):
    asked = as_question(study, "evaluate", model__weights=str(trained.folder / "model.safetensors"))
    found = run(asked, tmp_path / "run").values
    assert found["metrics"]["test"]["accuracy"] == pytest.approx(trained.metrics["test"]["accuracy"], abs=1e-9)
    assert found["weights_sha256"] == trained.values["weights_sha256"]
    told = found["safe_statistics"]
    assert set(told["per_site"]) == {"site-1", "site-2", "site-3"}  # of fewer than ten patients each: no interval
    assert all(sum(one["bins"]) > 0 for one in told["calibration"].values())


def test_an_evaluation_does_not_ask_for_statistics_twice(study):
    """A deployed site tells them once, and would refuse the second question with a warning."""
    wanted = study.with_settings({"evaluation.statistics": True})
    assert more_operations(wanted, lambda _: None)
    assert more_operations(as_question(wanted, "evaluate"), lambda _: None) == ()


def test_two_models_are_compared_on_the_same_cases(study, trained, tmp_path, capsys):
    other = tmp_path / "other.safetensors"
    tensors = read_weights(trained.folder / "model.safetensors").tensors
    write_tensors(other, {name: -one if name.startswith("fc3") else one for name, one in tensors.items()})
    found = evaluate(trained.folder / "model.safetensors", study, against=other)
    worse = evaluate(other, study)["metrics"]["pooled"]["accuracy"]
    change = found["changes"]["accuracy"]
    assert change["value"] == pytest.approx(found["metrics"]["pooled"]["accuracy"] - worse)
    assert change["low"] <= change["value"] <= change["high"]
    assert found["changes"]["auc by DeLong"]["value"] == pytest.approx(found["changes"]["auc"]["value"])
    show(found)
    assert "accuracy: +" in capsys.readouterr().out


def test_two_models_are_compared_at_simulated_sites(study, trained, tmp_path):
    model = str(trained.folder / "model.safetensors")
    found = run(as_question(study, "evaluate", model__weights=model, method__against=model), tmp_path / "run").values
    told = found["safe_statistics"]
    assert all(one[0] == 0 for name, one in told["mean"].items() if name.startswith("change of"))
    damaged = tmp_path / "other.safetensors"
    write_tensors(damaged, {"fc3.bias": torch.zeros(2)})
    with pytest.raises(BadInput, match=r"method\.against: .* has other tensors than the first model"):
        run(as_question(study, "evaluate", model__weights=model, method__against=str(damaged)), tmp_path / "other")


def test_sites_tell_counts_and_a_secure_sum_only_their_totals(study, trained):
    found = inspect_federated(study)
    info = trained.values
    assert sum(found["total"]["labels"]) == found["total"]["splits"][0] == 63
    assert found["mean_ks"] == pytest.approx(info["heterogeneity"]["mean_ks"], abs=1e-3)
    assert any("Labels differ" in sentence for sentence in found["guidance"])
    assert found["total"]["sides"][0] == found["total"]["spacings"][-1] == 63  # drawn at 28 px, without millimetres
    assert set(found["ks"]) == {"intensities", "sides", "spacings"}
    assert draw_inspection(found, "tiny").axes
    openly = inspect_federated(study)
    secretly = inspect_federated(study.with_settings({"federation.sum": "secure"}))
    assert secretly["total"] == openly["total"]
    assert secretly["per_site"] == {}
    assert secretly["pairwise_ks"] == {}


@pytest.mark.parametrize(("counts", "told"), [
    ([20, 30, 40], [20, 30, 40]),
    ([3, 30, 40], [0, 0, 40]),  # the complement: 30 would give 3 away
    ([3, 2, 40], [0, 0, 40]),
    ([1, 1, 30, 40], [0, 0, 0, 40]),  # 30 would give the two away
    ([0, 30, 40], [0, 30, 40]),
    ([4], [0]),
])  # fmt: skip
def test_small_counts_and_their_complements_are_not_told(counts, told):
    cells = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    found, known = suppressed(Counted(torch.tensor(counts), cells), 5)
    assert found.tolist() == told
    assert [bool(one) for one in known] == [number == count for number, count in zip(told, counts, strict=True)]


def test_the_command_inspects_by_questions(study, tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text(study.to_toml())
    picture = tmp_path / "sites.png"
    assert run_app(["data", "inspect", str(file), "--federated", "--out", str(picture)]) == 0
    assert "what the sites tell" in capsys.readouterr().out
    assert picture.stat().st_size > 5000


def additive(some):
    return sum({"a": 1.0, "b": 2.0, "c": 4.0}[name] for name in some)


def glove(some):
    """Worth something only with a left glove and a right one: 1/6, 1/6, 4/6 (a textbook game)."""
    return float("c" in some and bool({"a", "b"} & some))


def test_shapley_values_of_games_known_from_books():
    assert {name: one.value for name, one in exact_shares("abc", additive).items()} == {"a": 1, "b": 2, "c": 4}
    found = {name: one.value for name, one in exact_shares("abc", glove).items()}
    assert found == pytest.approx({"a": 1 / 6, "b": 1 / 6, "c": 4 / 6})
    assert leave_one_out("abc", glove) == {"a": 0, "b": 0, "c": 1}
    found = sampled_shares("abc", glove, 400, np.random.default_rng(0))
    for name, exact in {"a": 1 / 6, "b": 1 / 6, "c": 4 / 6}.items():
        assert found[name].value == pytest.approx(exact, abs=0.1)
        assert found[name].low < found[name].value < found[name].high
    assert sum(one.value for one in found.values()) == pytest.approx(1)


@pytest.mark.parametrize(("sites", "sampled"), [(10, False), (11, True)])
def test_values_are_exact_up_to_ten_sites_and_sampled_above(sites, sampled):
    """A site adds its number, and the first two more together."""
    names = [f"site-{number}" for number in range(sites)]

    def game(some):
        return sum(names.index(name) for name in some) + 5 * ({names[0], names[1]} <= some)

    found = shares_of(names, functools.cache(game), "points", "a game")
    for number, name in enumerate(names):
        one, exact = found["sites"][name], number + 2.5 * (number < 2)
        assert ("low" in one) == sampled
        assert one["shapley"] == pytest.approx(exact, abs=0.6 if sampled else 1e-9)
        if sampled:
            assert one["low"] - 0.3 <= exact <= one["high"] + 0.3
