"""`polyclinic data`: what it prints, what it draws, and how it ends."""

import json

import numpy as np
import pytest
from PIL import Image

from polyclinic.cli import run_app
from polyclinic.data.datasets import SOURCES

STUDY = """
[data]
source = "npz"
path = "{path}"
size = 16

[sites]
partition = "column"

[method]
name = "fedavg"
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Two hospitals: 'big' with 60 images of which a third is ill, 'small' with 20, all but two ill."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    labels = np.concatenate([np.arange(60) % 3 == 0, np.arange(20) % 10 != 0]).astype(int)
    images = np.random.default_rng(0).integers(0, 256, (80, 16, 16), np.uint8)
    names = {"label_names": np.array(["well", "ill"]), "site_names": np.array(["big", "small"])}
    np.savez(tmp_path / "a.npz", images=images, labels=labels, site=np.repeat([0, 1], [60, 20]), **names)
    (tmp_path / "study.toml").write_text(STUDY.format(path=tmp_path / "a.npz"))
    return tmp_path / "study.toml"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_show_says_where_to_get_a_source_and_its_settings(name, capsys):
    assert run_app(["data", "list"]) == 0
    assert name in capsys.readouterr().out
    assert run_app(["data", "show", name]) == 0
    printed = capsys.readouterr().out
    assert "Where to get it" in printed
    for setting, field in SOURCES[name].model_fields.items():
        assert setting == "source" or f"  {setting}" in printed
        assert setting == "source" or field.description in printed
    if hasattr(SOURCES[name], "layout"):
        assert "What must be there" in printed


def test_inspect_counts_and_draws(study, capsys):
    assert run_app(["data", "inspect", str(study)]) == 0
    printed = capsys.readouterr().out
    facts = json.loads(_facts(study, capsys))
    for site in ("big", "small"):
        (row,) = [line for line in printed.splitlines() if f" {site} " in line]
        cells = [cell.strip() for cell in row.replace("│", "|").split("|") if cell.strip()]
        counts = [*facts["counts"][site].values(), *facts["class_counts"][site]["train"]]
        assert cells == [site, *map(str, counts)]
    assert f"KS of the training labels: {facts['mean_ks']:.3f}" in printed
    assert 0.4 < facts["mean_ks"] < 0.7
    with Image.open(study.parent / "study_sites.png") as picture:
        assert picture.width > 1000


def _facts(study, capsys) -> str:
    assert run_app(["data", "inspect", str(study), "--json"]) == 0
    return capsys.readouterr().out


def test_inspect_shows_the_spread_of_values(study, capsys):
    changes = ["--set", "data.label_range=[0, 10]", "--set", "data.unit=months", "--set", "task.name=regression"]
    assert run_app(["data", "inspect", str(study), *changes, "--no-picture"]) == 0
    printed = capsys.readouterr().out
    assert "median (months)" in printed
    assert not (study.parent / "study_sites.png").exists()


def test_images_with_masks_have_masked_pixels_and_no_distance_of_labels(tmp_path, capsys):
    rng = np.random.default_rng(0)
    masks = np.zeros((24, 16, 16), np.uint8)
    masks[:12, :4] = 1  # a quarter at one site, nothing at the other
    images = rng.integers(0, 255, (24, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, masks=masks, site=np.repeat(["a", "b"], 12))
    file = tmp_path / "study.toml"
    file.write_text(
        '[data]\nsource = "npz"\npath = "a.npz"\nsize = 16\n[sites]\npartition = "column"\n'
        '[task]\nname = "segmentation"\n[model]\nbackbone = "unet"\n[method]\nname = "fedavg"\nrounds = 1\n'
    )
    assert run_app(["data", "inspect", str(file), "--out", str(tmp_path / "a.png")]) == 0
    printed = capsys.readouterr().out
    assert "masked pixels" in printed
    assert "25.0%" in printed
    assert "0.0%" in printed
    assert "KS" not in printed
    assert (tmp_path / "a.png").exists()
