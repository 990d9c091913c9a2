"""What `report verify` finds: flipped bits, added, hidden and renamed files, links, other figures, broken ledgers."""

import json
import os
import shutil

import pytest
from dossier_files import sealed_anew

from polyclinic.errors import BadInput
from polyclinic.files import sha256_of
from polyclinic.report.dossier import write_dossier
from polyclinic.report.dossier_check import verify_dossier
from polyclinic.run_folder import note_files


def test_a_flipped_bit_in_any_file_is_found(copy):
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert len(files) >= 12
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            problems = verify_dossier(copy)
            assert problems, (path, place)
            assert any(path.name.removesuffix(".sha256").removesuffix(".json") in text for text in problems), problems
        path.write_bytes(content)
    assert verify_dossier(copy) == []


@pytest.mark.parametrize(
    "name", ["note.txt", ".hidden", "evidence/.hidden", "evidence/ledger/site-9.jsonl", "new/file"]
)
def test_an_added_file_is_found(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("")
    assert f"{name}: was added" in verify_dossier(copy)


def test_added_folders_removed_and_renamed_files_are_found(copy):
    (copy / ".empty").mkdir()
    (copy / "model_card.md").rename(copy / "Model_card.md")
    assert verify_dossier(copy) == [
        "model_card.md: is gone",
        "Model_card.md: was added",
        ".empty: is a folder that was added",
    ]


@pytest.mark.parametrize(
    "name", ["model_card.md", "evidence/result.json", "manifest.json", "manifest.sha256", "evidence"]
)
def test_a_link_in_the_place_of_a_file_is_found(copy, tmp_path, name):
    """Even one to the very same content."""
    (copy / name).rename(tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    assert verify_dossier(copy) == [f"{name}: is a link, or no file at all"]


def test_a_pipe_is_found_and_not_read(copy):
    os.mkfifo(copy / "pipe")
    assert verify_dossier(copy) == ["pipe: is a link, or no file at all"]


def test_a_dossier_that_was_made_anew_is_another_one(copy, whole, run_folder, tmp_path):
    """Whoever writes all digests anew is found by the digest that was noted elsewhere."""
    forged = tmp_path / "run"
    shutil.copytree(run_folder, forged)
    result = json.loads((forged / "result.json").read_text())
    result["metrics"]["test"]["accuracy"] = 0.999
    (forged / "result.json").write_text(json.dumps(result))
    with pytest.raises(BadInput, match=r"result\.json: is damaged"):
        write_dossier(forged)
    note_files(forged)
    other = write_dossier(forged)
    assert verify_dossier(other.folder) == []
    [problem] = verify_dossier(other.folder, whole.digest)
    assert "this is another dossier" in problem
    assert any("result.json: is not the file" in text for text in verify_dossier(other.folder, run=run_folder))


def test_a_figure_that_its_file_does_not_have_is_found(copy):
    """Even where the manifest was written anew for the changed page."""
    for name in ("index.html", "figures.json"):
        file = copy / name
        file.write_text(
            file.read_text().replace(">fedavg<", ">fedavg, private<").replace('"fedavg"', '"fedavg, private"')
        )
    sealed_anew(copy, {name: sha256_of(copy / name) for name in ("index.html", "figures.json")})
    [problem] = [text for text in verify_dossier(copy) if "/method" in text]
    assert problem == "evidence/result.json, /method: has fedavg, and the page shows fedavg, private"


def test_a_broken_ledger_is_found_even_under_a_new_manifest(run_folder, tmp_path):
    forged = tmp_path / "run"
    shutil.copytree(run_folder, forged)
    ledger = sorted((forged / "ledger").iterdir())[0]
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:1] + lines[2:]))
    problems = verify_dossier(write_dossier(forged).folder)
    assert any("its chain does not hold" in text for text in problems)
