"""`polyclinic ledger` and `polyclinic data` as they are typed."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from polyclinic.cli import run_app
from polyclinic.cli.ledger import sentences
from polyclinic.data.datasets import SOURCES
from polyclinic.federation.ledger.ledger import Ledger


@pytest.fixture
def folder(tmp_path, monkeypatch, undisturbed, tiny):
    """A copy of a simulated run, in the working folder, under the name of a command."""
    shutil.copytree(undisturbed(tiny("fedavg", {"sites.count": 2})).folder, tmp_path / "verify")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "verify"


def said(capsys, *arguments, code):
    assert run_app(["ledger", *arguments]) == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_a_folder_that_is_called_like_a_command_has_a_dot(folder, capsys):
    assert "all chains hold" in said(capsys, "./verify", code=0)
    assert said(capsys, "--lines", "./verify", code=0).count("to coordinator") > 4
    assert said(capsys, "verify", "./verify", code=0).count("signatures are right") == 2
    assert said(capsys, "show", "./verify", code=0) == said(capsys, "./verify", "--lines", code=0)
    assert "Missing argument" in said(capsys, "verify", code=2)
    assert "no ledger" in said(capsys, "nothing", code=2)


def test_a_ledger_that_was_cut_or_deleted_is_found_by_the_result(folder, capsys):
    path = folder / "ledger" / "site-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    words = said(capsys, "./verify", code=1)
    assert f"site-1.jsonl, line {len(lines)}: is missing; " in words
    assert f"result.json says {len(lines)} lines" in words
    path.unlink()
    (folder / "ledger" / "site-2.jsonl").unlink()
    words = said(capsys, "verify", "./verify", code=1)
    assert words.count("line 1: is missing, the ledger is empty or gone") == 2


def test_a_run_without_its_result_has_the_checkpoint(folder, capsys):
    (folder / "result.json").unlink()
    assert "result.json: is gone" in said(capsys, "verify", "./verify", code=2)
    (folder / "digests.json").unlink()  # as in a run that has not ended
    path = folder / "ledger" / "site-1.jsonl"
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
    assert "manifest.json says" in said(capsys, "verify", "./verify", code=1)


def test_a_damaged_result_beside_the_ledgers_is_named(folder, capsys):
    result = folder / "result.json"
    result.write_text(result.read_text().replace('"ledgers"', '"ledgerr"', 1))
    path = folder / "ledger" / "site-1.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert "result.json: is damaged" in said(capsys, "verify", "./verify", code=2)


def test_another_seed_has_other_keys(folder, capsys):
    study = folder / "study.toml"
    study.write_text(study.read_text().replace("seed = 0", "seed = 1", 1))
    assert "study.toml: is damaged" in said(capsys, "verify", "./verify", code=2)
    (folder / "digests.json").unlink()  # who can write the folder can take that away, too
    study.write_text(study.read_text().partition("\n")[2])
    assert "line 1: is not signed by the site's key" in said(capsys, "verify", "./verify", code=1)


def test_an_officer_reads_epsilon_and_what_it_does_not_cover(tmp_path):
    ledger = Ledger(tmp_path / "north.jsonl")

    def release(kind, to, round, epsilon=None):
        record = {"epsilon": epsilon, "delta": 1e-5, "accountant": "prv", "steps": round}
        record |= {"covers": ["the weights"], "does_not_cover": ["scores"]}
        about = {"operation": "train", "kind": kind, "bytes": 1000, "digest": "0" * 64, "to": to}
        ledger.append(round=round, **about, privacy=None if epsilon is None else record)

    for round in (1, 2):
        release("weights", "coordinator", round, epsilon=float(round))
    release("synthetic-images", "south", 0)
    lines = [json.loads(text) for text in ledger.path.read_text().splitlines()]
    assert sentences(lines) == [
        "What left (3.0 kB in all):",
        "- weights of a model: 2 times, in rounds 1 to 2, 2.0 kB, to the coordinator (step 'train').",
        "- synthetic images: once, before the first round, 1.0 kB, to site 'south', sealed: the coordinator cannot "
        "read it (step 'train').",
        "Differential privacy: epsilon 2 in all at delta 1e-05 (accountant prv). It covers the weights.",
        "It does not cover scores.",
        "No epsilon holds for: synthetic images.",
    ]
    assert sentences([]) == ["Nothing left this site."]


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
