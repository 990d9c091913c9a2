"""A disk that is full or broken, folders where files should be: one sentence, and nothing silently other."""

import errno
import os
import shutil

import pytest
import torch

from polyclinic import cli
from polyclinic.engines.worker_process import is_storage_failure, storage_failure
from polyclinic.errors import Damaged, StorageFailed
from polyclinic.federation.checkpoint import read_manifest
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.files import make_folder_durable, read_json, read_tensors, storage_sentence, write_tensors
from polyclinic.run_folder import check_whole, with_own_digest


def test_a_full_disk_is_one_sentence_with_the_file_and_the_cure(capsys, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/history.jsonl")

    monkeypatch.setattr(cli, "app", full)
    assert cli.run_app(["run"]) == 1
    assert capsys.readouterr().err == (
        "runs/x/history.jsonl: No space left on device; make room, then do this again or go on with --resume\n"
    )


def test_an_error_without_a_file_is_said_as_well():
    assert storage_sentence(OSError("odd")) == "odd"
    assert storage_sentence(IsADirectoryError(21, "Is a directory", "a")) == "a: Is a directory"


def test_tensors_that_cannot_be_written_name_their_file(tmp_path):
    (tmp_path / "state.safetensors.partial").mkdir()
    with pytest.raises((StorageFailed, OSError), match="state"):
        write_tensors(tmp_path / "state.safetensors", {"a": torch.zeros(2)})


@pytest.mark.parametrize("read", [read_json, read_tensors, read_manifest])
def test_a_folder_in_the_place_of_a_file_is_damage(read, tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(Damaged, match="file: cannot be read"):
        read(tmp_path / "file")


@pytest.mark.parametrize("read", [read_json, read_manifest])
def test_brackets_without_end_are_damage(read, tmp_path):
    (tmp_path / "file").write_bytes(b"[" * 100_000)
    with pytest.raises(Damaged, match="file: is damaged"):
        read(tmp_path / "file")


def test_which_errors_of_a_simulated_site_end_the_run():
    assert is_storage_failure(OSError(errno.ENOSPC, "full"))
    assert is_storage_failure(LedgerBroken("line 1"))
    assert is_storage_failure(Damaged("state"))
    assert not is_storage_failure(FileNotFoundError(errno.ENOENT, "what a plug-in looks for"))
    assert not is_storage_failure(RuntimeError("a site's own failure"))
    assert "site 'north'" in str(storage_failure("north", "x"))


def test_every_new_folder_is_synced_in_the_one_above(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("polyclinic.files.sync_folder", synced.append)
    make_folder_durable(tmp_path / "a" / "b" / "c")
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    make_folder_durable(tmp_path / "a" / "b" / "c")
    assert synced == []


def test_a_text_with_its_own_digest(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(with_own_digest("seed = 1\n"))
    check_whole(tmp_path)
    path.write_text(path.read_text().replace("seed = 1", "seed = 2"))
    with pytest.raises(Damaged, match="was changed since the run began"):
        check_whole(tmp_path)
    path.write_text("seed = 2\n")  # an older version, or a hand, wrote no digest
    check_whole(tmp_path)


def test_tensors_that_were_written_as_another_file_are_damage(tmp_path):
    for version in (1, 2):
        write_tensors(tmp_path / f"state-{version}.safetensors", {"a": torch.full((2,), version)}, placed=True)
    (tmp_path / "state-1.safetensors").write_bytes((tmp_path / "state-2.safetensors").read_bytes())
    assert read_tensors(tmp_path / "state-2.safetensors")["a"].tolist() == [2, 2]
    with pytest.raises(Damaged, match=r"it holds what was written as .*/state-2\.safetensors"):
        read_tensors(tmp_path / "state-1.safetensors")


@pytest.mark.parametrize("command", [["report"], ["predict", "a.png"], ["ledger", "verify"], ["forgetting"]])
def test_a_name_that_no_system_has_is_bad_input(command, tmp_path, capsys):
    long = str(tmp_path / ("x" * 300))
    arguments = [command[0], long, *command[1:]] if command[0] != "ledger" else [*command, long]
    assert cli.run_app(arguments) == 2
    assert "the name 'xxxxxxxxxxxxxxxxxxxx...' has over 255 bytes; take a shorter one" in capsys.readouterr().err


def test_a_damaged_hand_over_is_named(tiny, undisturbed, tmp_path, capsys):
    done = undisturbed(tiny("cwt", {"sites.count": 2, "evaluation.handovers": "all"}, rounds=2)).folder
    shutil.copytree(done, tmp_path / "run")
    first = sorted((tmp_path / "run" / "handovers").rglob("*.safetensors"))
    assert cli.run_app(["forgetting", str(tmp_path / "run")]) == 0
    first[0].write_bytes(first[-1].read_bytes())  # whole, and of another turn
    assert cli.run_app(["forgetting", str(tmp_path / "run")]) == 2
    first[0].write_bytes(b"junk")
    assert cli.run_app(["forgetting", str(tmp_path / "run")]) == 2
    assert "001-site-1.safetensors: is damaged" in capsys.readouterr().err
