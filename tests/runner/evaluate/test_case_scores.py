"""What a simulated run keeps of each image, the intervals that come from it, and files that are not to be trusted."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score

from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput
from polyclinic.runner.evaluate.case_scores import Cases, example_rows, read_cases, write_cases
from polyclinic.runner.evaluate.case_statistics import intervals_of, metrics_of
from polyclinic.runner.predict.predict import load_predictor
from polyclinic.runner.run.run import run
from polyclinic.study import load_run_study


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Sixty images of thirty patients, with sex and scanner."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    rows = [["path", "label", "patient", "sex", "scanner"]]
    for i in range(60):
        bright = (i // 2) % 2
        Image.fromarray(rng.integers(60 * bright, 160 + 60 * bright, (16, 16), np.uint8)).save(folder / f"{i}.png")
        rows.append([f"{i}.png", ["no", "yes"][bright], f"p{i // 2}", "mf"[(i // 2) % 3 == 0], f"<b>{i % 2}</b>"])
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder / "images.csv"


@pytest.fixture(scope="module")
def result(table, tiny, undisturbed):
    data = {"source": "csv", "path": str(table), "size": 16, "columns": ["sex", "scanner"], "test": 0.5}
    study = tiny("fedavg", {"data": data, "sites.count": 2}, rounds=2)
    return undisturbed(study)


def test_every_test_image_is_kept_with_site_patient_label_and_columns(result, tiny):
    cases = read_cases(result.folder)
    study = load_run_study(result.folder)
    parts = prepare(study.data, study.sites)
    sites = [open_site(parts.folder, name).test for name in parts.names]
    assert cases.sites.tolist() == list(parts.names)
    assert np.array_equal(cases.labels, np.concatenate([site.labels for site in sites]))
    assert np.array_equal(cases.patients, np.concatenate([site.cases for site in sites]))
    assert cases.column_names.tolist() == ["sex", "scanner"]
    assert set(cases.column("sex")) == {"m", "f"}
    assert np.array_equal(cases.columns, np.concatenate([site.columns for site in sites]))
    predictor = load_predictor(result.folder)
    again = predictor.outputs(np.concatenate([site.images for site in sites])).numpy()
    np.testing.assert_allclose(cases.predictions, again, atol=1e-5)
    assert len(read_cases(result.folder, "validation")) == sum(
        len(open_site(parts.folder, name).validation) for name in parts.names
    )


def test_metrics_and_intervals_from_cases_are_those_of_the_result(result):
    cases, metrics = read_cases(result.folder), result.metrics
    found = metrics_of(cases)
    assert found["accuracy"] == pytest.approx(metrics["test"]["accuracy"])
    assert found["balanced_accuracy"] == pytest.approx(metrics["test"]["balanced_accuracy"])
    assert found["loss"] == pytest.approx(metrics["test"]["loss"], rel=1e-5)
    assert found["auc"] == pytest.approx(roc_auc_score(cases.labels, cases.predictions[:, 1]))
    assert found["auc"] == pytest.approx(metrics["test"]["auc"], abs=0.05)  # which is from bins
    for site in cases.sites.tolist():
        assert metrics_of(cases.of_site(site))["accuracy"] == pytest.approx(metrics["per_site"][site]["accuracy"])
    intervals = result.metrics["intervals"]
    assert intervals["unit"] == "patient"
    assert intervals["split"] == "test"
    for one in intervals["pooled"].values():
        assert one["low"] <= one["high"]
    assert intervals["pooled"]["accuracy"]["value"] == pytest.approx(result.metrics["test"]["accuracy"])
    assert result.metrics["calibration"]["pooled"].keys() == {"calibration_error", "brier"}
    cases = read_cases(result.folder)
    again = intervals_of(cases, ("test", ""))
    assert again["brier"].low == pytest.approx(intervals["pooled"]["brier"]["low"])
    cases = read_cases(result.folder)
    few = cases.take(np.flatnonzero(np.isin(cases.patients, np.unique(cases.patients)[:9])))
    assert intervals_of(few, ("few",)) == {}
    assert metrics_of(few)["accuracy"] >= 0


@pytest.mark.parametrize(("final", "kept"), [("validation", {"validation.npz"}), ("none", set())])
def test_nothing_is_tested_where_the_study_says_so(final, kept, tiny, tmp_path):
    found = run(tiny("fedavg", {"evaluation.final": final}, rounds=1), tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").glob("cases/*")} == kept
    assert ("calibration" in found.metrics) == bool(kept)
    assert read_cases(tmp_path / "run") is None


def test_each_site_is_judged_by_its_own_model_where_it_has_one(tiny, undisturbed):
    result = undisturbed(tiny("standalone", rounds=1))
    cases = read_cases(result.folder)
    assert result["model"] == "one of each site"
    for site, metrics in result.metrics["per_site"].items():
        assert metrics_of(cases.of_site(site))["accuracy"] == pytest.approx(metrics["accuracy"])
    across = [metrics_of(cases)["accuracy"], result.metrics["test"]["accuracy"]]
    assert across[0] != pytest.approx(across[1])  # two quantities, and the result says of what
    said = result.metrics["models_judged"]
    assert "mean over the sites' models" in said["test"]
    assert "its own site's model" in said["intervals.pooled"]


def test_masks_have_areas_distances_and_examples_from_worst_to_best(tiny, undisturbed):
    settings = {"data.source": "brain-phantom", "model.backbone": "unet"}
    task = {"task": {"name": "segmentation", "surface_distances": True}}
    result = undisturbed(tiny("fedavg", {**settings, **task}, rounds=1))
    cases = read_cases(result.folder)
    metrics = metrics_of(cases)
    assert metrics["dice"] == pytest.approx(result.metrics["test"]["dice"])
    if "hausdorff95" in result.metrics["test"]:
        assert metrics["hausdorff95"] == pytest.approx(result.metrics["test"]["hausdorff95"])
    chosen = cases.dices[cases.examples]
    assert (np.diff(chosen) >= 0).all()
    assert [int(mask.sum()) for mask in cases.masks] == cases.areas[cases.examples, 1].tolist()


def test_a_regression_keeps_values_in_the_unit_of_the_label(tiny, undisturbed):
    result = undisturbed(tiny("fedavg", {"data.source": "hand-phantom", "task": {"name": "regression"}}, rounds=1))
    cases = read_cases(result.folder)
    assert np.abs(cases.predictions - cases.labels).mean() == pytest.approx(result.metrics["test"]["mae"], rel=1e-5)
    assert result.metrics["intervals"]["pooled"]["mae"]["low"] < result.metrics["test"]["mae"]


def areas(dices: list[float]) -> Cases:
    """Masks of 100 pixels, predicted and true, that overlap by so much; a Dice of -1 is an image without a mask."""
    rows = np.array([[round(100 * d), 100, 100] if d >= 0 else [0, 5, 0] for d in dices])
    zeros = np.zeros(len(dices), np.int64)
    return Cases("segmentation", np.array(["a"]), zeros, zeros, areas=rows)


def test_examples_are_the_worst_the_middle_and_the_best_by_hand():
    order = [0.5, 0.1, 0.9, -1, 0.2, 0.52, 0.8, 0.3, 0.51, 0.7, 0.95, 0.6]
    chosen = example_rows(areas(order))
    assert [order[row] for row in chosen] == [0.1, 0.2, 0.3, 0.5, 0.51, 0.52, 0.8, 0.9, 0.95]
    assert len(example_rows(areas([-1, -1]))) == 0
    assert example_rows(areas([0.4])).tolist() == [0]


def a_case(**changes) -> Cases:
    count = 4
    known = Cases(
        "classification",
        np.array(["a", "<script>"]),
        np.array([0, 0, 1, 1]),
        np.array([0, 1, 0, 1]),
        predictions=np.full((count, 2), 0.5),
        columns=np.full((count, 1), "x"),
        column_names=np.array(["sex"]),
    )
    return replace(known, **changes)


def test_what_is_written_is_read(tmp_path):
    write_cases(a_case(), tmp_path, "test")
    first = (tmp_path / "cases" / "test.npz").read_bytes()
    found = read_cases(tmp_path)
    assert found.sites.tolist() == ["a", "<script>"]
    assert found.column("sex").tolist() == ["x"] * 4
    write_cases(found, tmp_path, "test")
    assert (tmp_path / "cases" / "test.npz").read_bytes() == first
    with pytest.raises(BadInput, match="--by age: the run kept no such column; choose from sex, site"):
        found.column("age")


@pytest.mark.parametrize("changes", [
    {"site": np.array([0, 0, 1, 2])},
    {"site": np.array([0.0, 0, 1, 1])},
    {"labels": np.array([0, 1, 0, 5])},
    {"labels": np.array([0, 1, 0])},
    {"predictions": np.zeros((4, 2, 2))},
    {"predictions": None},
    {"like": "divination"},
    {"columns": np.full((4, 2), "x")},
    {"columns": None},
    {"examples": np.array([7]), "masks": np.zeros((1, 2, 2), np.uint8)},
    {"sites": np.array([1, 2])},
], ids=str)  # fmt: skip
def test_arrays_that_do_not_fit_each_other_are_refused(changes, tmp_path):
    write_cases(a_case(**changes), tmp_path, "test")
    with pytest.raises(BadInput, match=r"test\.npz: is damaged"):
        read_cases(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 nonsense", b"\x80\x04."])
def test_a_damaged_file_is_refused_with_a_sentence(content, tmp_path):
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "test.npz").write_bytes(content)
    with pytest.raises(BadInput, match=r"test\.npz: is damaged"):
        read_cases(tmp_path)


@pytest.mark.parametrize(("place", "value"), [(8, 1), (10, 8), (10, 99)], ids=["encrypted", "no deflate", "unknown"])
def test_a_file_that_is_packed_in_another_way_is_refused_with_a_sentence(place, value, tmp_path):
    write_cases(a_case(), tmp_path, "test")
    file = tmp_path / "cases" / "test.npz"
    content = bytearray(file.read_bytes())
    content[content.index(b"PK\x01\x02") + place] = value  # of the first array, in the list of contents
    content[content.index(b"\x93NUMPY")] = 7  # zlib knows no block that begins so
    file.write_bytes(content)
    with pytest.raises(BadInput, match=r"test\.npz: is damaged"):
        read_cases(tmp_path)


def test_no_pickled_object_is_loaded(tmp_path):
    (tmp_path / "cases").mkdir()
    np.savez(tmp_path / "cases" / "test.npz", like=np.array({"a": 1}, dtype=object), allow_pickle=True)
    with pytest.raises(BadInput, match=r"test\.npz: is damaged"):
        read_cases(tmp_path)


def test_a_model_that_says_nan_ends_in_a_result_without_intervals(tiny, tmp_path, monkeypatch):
    def broken(self, output, target):
        return torch.full_like(output, float("nan"))

    monkeypatch.setattr("polyclinic.tasks.classification.Classification.predictions", broken, raising=False)
    found = run(tiny("fedavg", rounds=1), tmp_path / "run")
    assert "intervals" not in found.metrics
    assert json.loads((tmp_path / "run" / "result.json").read_text())["metrics"]["test"]
