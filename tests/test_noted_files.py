"""A finished run's files are checked when they are read: one flipped bit is named."""

import json
import shutil

import pytest

from polyclinic.errors import Damaged
from polyclinic.noted_files import FILE, FINISHED, check_noted, read_result
from polyclinic.runner.run import run


@pytest.fixture
def folder(tiny, undisturbed, tmp_path):
    finished = undisturbed(tiny("fedavg", {"data.samples": 36}, rounds=1))
    shutil.copytree(finished.folder, tmp_path / "run")
    return tmp_path / "run"


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("place", [3, 40, -2])
@pytest.mark.parametrize("name", [*FINISHED, FILE])
def test_a_flipped_bit_is_noticed(folder, name, place):
    check_noted(folder, *FINISHED)
    flip(folder / name, place)
    with pytest.raises(Damaged, match=f"{name}: is damaged"):
        check_noted(folder, *FINISHED)


@pytest.mark.parametrize("name", FINISHED)
def test_a_file_that_is_gone_is_noticed(folder, name):
    (folder / name).unlink()
    with pytest.raises(Damaged, match=name):
        check_noted(folder, name)


def test_a_damaged_result_is_not_read(folder, tiny):
    values = json.loads((folder / "result.json").read_text())
    assert read_result(folder) == values
    values["metrics"]["test"]["accuracy"] = 1.0
    (folder / "result.json").write_text(json.dumps(values))
    with pytest.raises(Damaged, match=r"result.json: is damaged"):
        run(None, folder, resume=True)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00", '{"a":' * 100_000])
def test_an_older_run_with_a_result_that_is_no_json_is_named(folder, text):
    (folder / FILE).unlink()
    (folder / "result.json").write_text(text)
    with pytest.raises(Damaged, match=r"result.json: is damaged"):
        read_result(folder)


def test_a_run_without_noted_digests_is_of_an_older_version(folder):
    (folder / FILE).unlink()
    flip(folder / "history.jsonl", 3)
    check_noted(folder, *FINISHED)
