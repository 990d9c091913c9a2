"""`Result` in Python: opened again, its history, picture, model and predictions, and what a notebook shows of it."""

import builtins
import json

import numpy as np
import pytest
import torch
from PIL import Image

from polyclinic import BadInput, Result
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import Damaged
from polyclinic.runner.run.result_display import few_images, history_rows, image_counts


@pytest.fixture(scope="module")
def study(tiny):
    return tiny("fedavg")


@pytest.fixture(scope="module")
def result(study, undisturbed):
    return undisturbed(study)


@pytest.fixture(scope="module")
def images(study):
    """The test images of one site, uint8 [N, C, H, W]."""
    parts = prepare(study.data, study.sites)
    return np.array(open_site(parts.folder, "site-1").test.images)


def test_a_result_is_opened_again(result):
    again = Result.open(str(result.folder))
    assert again.values == result.values
    assert again == result


@pytest.mark.parametrize(("content", "words"), [(None, "holds no"), ("{", "is damaged"), ("[]", "is no result")])
def test_a_folder_without_a_result_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    with pytest.raises(BadInput, match=words):
        Result.open(tmp_path)


def test_the_history_has_a_row_for_each_round_with_and_without_pandas(result, monkeypatch):
    frame = result.history
    lines = [json.loads(text) for text in (result.folder / "history.jsonl").read_text().splitlines()]
    assert list(frame["round"]) == [1, 2, 3]
    assert list(frame["total_bytes"]) == [line["total_bytes"] for line in lines]
    assert frame["validation_accuracy"][1] == lines[1]["validation"]["pooled"]["accuracy"]
    assert frame["validation_accuracy/site-2"][2] == lines[2]["validation"]["per_site"]["site-2"]["accuracy"]
    assert list(frame["failed"]) == ["", "", ""]
    real = builtins.__import__

    def without_pandas(name, *rest, **more):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    assert [row["round"] for row in result.history] == [1, 2, 3]


def test_histories_and_sites_of_few_images_by_hand(tmp_path):
    line = {"round": 1, "validation": None, "failed": {"b": "gone", "a": "gone"}, "total_bytes": 5, "seconds": 1.0}
    (tmp_path / "history.jsonl").write_text(json.dumps(line) + "\n")
    expected = {"round": 1, "seconds": 1.0, "total_bytes": 5, "failed": "a, b"}
    assert history_rows(tmp_path / "history.jsonl") == [expected]
    assert history_rows(tmp_path / "none.jsonl") == []
    known = {"north": {"train": 50, "test": 30}, "west": {"train": 9, "test": 2}, "east": {"train": 5}}
    counts = image_counts({"data": {"counts": known}}, "test")
    assert counts == {"north": 30, "west": 2}
    assert image_counts({"data": {}}, "test") == {}  # sites that keep their numbers
    assert few_images(counts, ["north", "west", "east"]).startswith(
        "fewer than 10 images at west (2): one image decides"
    )
    assert few_images(counts, ["north", "east"]) == ""
    assert few_images({"north": 30, "west": 0}, ["north"]) == "no row for west: none of these images is theirs"
    many = {f"site-{number}": 3 for number in range(8)}
    assert "site-4 (3) and 3 more sites:" in few_images(many, many)


def test_the_model_says_what_predict_says(result, images, tmp_path):
    for number, image in enumerate(images[:3]):
        Image.fromarray(np.moveaxis(image, 0, -1)).save(tmp_path / f"{number}.png")
    found = result.predict(tmp_path)
    assert [one.file.name for one in found] == ["0.png", "1.png", "2.png"]
    assert [one.values for one in result.predict([tmp_path / "1.png"])] == [found[1].values]
    with torch.no_grad():
        probabilities = result.model()(torch.from_numpy(images[:3]))
    told = [[value for name, value in one.values.items() if name.startswith("p(")] for one in found]
    assert torch.allclose(probabilities, torch.tensor(told), atol=1e-5)


def test_the_picture_stands_alone(result):
    curves, sites = result.plot().axes
    drawn = [text.get_text() for text in curves.get_legend().get_texts()]
    assert drawn == ["all sites together", "site-1", "site-2", "site-3"]
    assert f"{result['data']['counts']['site-1']['test']} images" in sites.get_xticklabels()[1].get_text()
    assert sites.patches[0].get_height() == result.metrics["test"]["accuracy"]
    assert result.plot("auc").axes[1].get_ylabel() == "auc"
    with pytest.raises(BadInput, match="metric 'mae': is not among accuracy"):
        result.plot("mae")


def test_errors_of_regression_have_their_unit(tiny, undisturbed):
    run = undisturbed(tiny("fedavg", {"data.source": "hand-phantom", "task.name": "regression"}, rounds=1))
    assert run.plot().axes[1].get_ylabel() == "mae (months)"
    assert run.plot("loss").axes[1].get_ylabel() == "loss"


def test_a_notebook_shows_names_as_texts(result, tmp_path):
    hostile = "<script>alert(1)</script>"
    values = json.loads(json.dumps(result.values))
    values["metrics"]["per_site"] = {hostile: values["metrics"]["per_site"]["site-1"]}
    values["method"] = hostile
    page = Result(tmp_path / "<b>x", values)._repr_html_()
    assert "<script" not in page
    assert "<b>x" not in page
    assert page.count("&lt;script&gt;") == 2
    assert f"{result.metrics['test']['accuracy']:.3f}" in result._repr_html_()


@pytest.mark.parametrize("line", ["[]", "{}", '{"round": 1', '{"round": 1, "validation": 3}', "\x00"])
def test_a_damaged_line_of_the_history_is_named(tmp_path, line):
    (tmp_path / "history.jsonl").write_text(line + "\n")
    with pytest.raises(Damaged, match=r"history\.jsonl, line 1"):
        history_rows(tmp_path / "history.jsonl")
