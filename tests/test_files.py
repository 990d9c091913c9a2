"""Files, and progress."""

import errno
import io
import itertools
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import kill, start, wait_for
from rich.console import Console
from safetensors.torch import load_file

from polyclinic import cli, files, progress
from polyclinic.cli import display as displays
from polyclinic.cli.display import RunDisplay
from polyclinic.engines import worker_process
from polyclinic.engines.worker_process import WorkerProcess, is_storage_failure, storage_failure
from polyclinic.errors import BadInput, Damaged, StorageFailed
from polyclinic.federation.call import pack, unpack
from polyclinic.federation.checkpoint import read_manifest
from polyclinic.federation.ledger.ledger import LedgerBroken
from polyclinic.progress import listening, tell, time_left
from polyclinic.run_folder import check_whole, with_own_digest
from polyclinic.runner.run.run import run


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("content", "written"), [("Größe\r\n", "Größe\r\n".encode()), (b"\x00\n", b"\x00\n")])
def test_a_file_is_written_and_replaced(tmp_path, content, written):
    for _ in range(2):
        files.atomic_write(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == written
    assert names(tmp_path) == ["file"]


def test_content_is_put_at_the_end_of_a_file_whatever_the_system_takes_at_once(tmp_path, monkeypatch):
    files.append(tmp_path / "file", b"one\n")

    class Reluctant(io.FileIO):
        def write(self, content):
            return super().write(content[:3])

    monkeypatch.setattr("polyclinic.files.open", lambda path, mode, buffering: Reluctant(path, mode), raising=False)
    files.append(tmp_path / "file", b"and another\n")
    assert (tmp_path / "file").read_bytes() == b"one\nand another\n"


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    files.atomic_write(tmp_path / "file", "old")

    def write_half():
        with files.atomic_file(tmp_path / "file") as partial:
            partial.write_text("ne")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        write_half()
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.slow
def test_a_kill_leaves_the_old_file_and_the_next_write_is_whole(tmp_path):
    files.atomic_write(tmp_path / "file", "old")
    process = start(_die_half_way, tmp_path / "file")
    process.join()
    assert process.exitcode == 3
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file", f"file{files.PARTIAL}"]
    files.atomic_write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert names(tmp_path) == ["file"]


def _die_half_way(path):
    with files.atomic_file(path) as partial:
        partial.write_text("ne")
        os._exit(3)


def test_private_files_and_folders_are_never_readable_by_others(tmp_path):
    (tmp_path / f"key{files.PARTIAL}").touch(mode=0o644)  # left by somebody else
    files.atomic_write(tmp_path / "key", "secret", private=True)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    (tmp_path / "kit" / "startup").mkdir(parents=True)
    script = tmp_path / "kit" / "startup" / "start.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    files.make_private(tmp_path / "kit")
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "kit", script.parent, script)] == [0o700] * 3


def test_tensors_that_share_memory_are_written_and_come_back_in_order(tmp_path):
    whole = torch.arange(6.0).reshape(2, 3)
    tensors = {"whole": whole, "again": whole, "across": whole.T}
    files.write_tensors(tmp_path / "file", tensors)
    for name, tensor in load_file(tmp_path / "file").items():
        assert torch.equal(tensor, tensors[name])
    assert names(tmp_path) == ["file"]
    # `safetensors.torch.load` has another order in every call, and replayed images would change with it.
    sites = [f"site-{number}" for number in range(50)]
    files.write_tensors(tmp_path / "many.safetensors", {name: torch.zeros(2) for name in reversed(sites)})
    content = (tmp_path / "many.safetensors").read_bytes()
    orders = {tuple(files.decode_tensors(content)) for _ in range(5)}
    assert orders == {tuple(sorted(sites))}
    assert tuple(files.read_tensors(tmp_path / "many.safetensors")) == tuple(sorted(sites))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells which files are mapped")
def test_a_file_that_was_read_is_not_held(tmp_path):
    """Windows would refuse to remove it, as it would the one that is mapped here."""
    files.write_tensors(tmp_path / "file", {"a": torch.arange(100_000.0)})
    mapped = load_file(tmp_path / "file")
    assert f"{tmp_path}/file" in Path("/proc/self/maps").read_text()
    del mapped
    read = files.read_tensors(tmp_path / "file")
    assert f"{tmp_path}/file" not in Path("/proc/self/maps").read_text()
    assert torch.equal(read["a"], torch.arange(100_000.0))


def test_a_folder_appears_when_it_is_complete(tmp_path):
    with pytest.raises(KeyboardInterrupt), files.atomic_folder(tmp_path / "entry"):
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    (tmp_path / f".entry{files.PARTIAL}").mkdir()
    (tmp_path / f".entry{files.PARTIAL}" / "left by an earlier attempt").touch()
    with files.atomic_folder(tmp_path / "entry") as partial:
        (partial / "a").touch()
        assert not (tmp_path / "entry").exists()
    assert names(tmp_path) == ["entry"]
    assert names(tmp_path / "entry") == ["a"]


def test_a_lock_is_held_until_its_process_is_gone(tmp_path):
    holder = start(_hold, tmp_path / "lock", tmp_path / "held")
    wait_for((tmp_path / "held").exists)
    with pytest.raises(TimeoutError), files.lock(tmp_path / "lock", wait=0):
        pass
    kill(holder)
    with files.lock(tmp_path / "lock"):
        pass


def _hold(path, told):
    with files.lock(path):
        told.touch()
        time.sleep(3600)


def test_a_place_where_nothing_can_be_made_is_said_before_anybody_works(tmp_path, monkeypatch):
    files.check_place(tmp_path / "new" / "run")
    (tmp_path / "draw.py").write_text("")
    with pytest.raises(BadInput, match=r"draw.py is a file, not a folder; name another place"):
        files.check_place(tmp_path / "draw.py" / "x")
    with pytest.raises(BadInput, match=r"^--out: the name 'ééé.* has over 255 bytes"):
        files.check_place(tmp_path / ("é" * 128) / "run")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(BadInput, match="cannot be written; name another place"):
        files.check_place(tmp_path / "new")


def test_a_full_disk_is_one_sentence_with_the_file_and_the_cure(capsys, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/history.jsonl")

    monkeypatch.setattr(cli, "app", full)
    assert cli.run_app(["run"]) == 1
    assert capsys.readouterr().err == (
        "runs/x/history.jsonl: No space left on device; make room, then do this again or go on with --resume\n"
    )
    assert files.storage_sentence(OSError("odd")) == "odd"


@pytest.mark.parametrize("read", [files.read_json, files.read_tensors, read_manifest])
def test_a_folder_in_the_place_of_a_file_and_brackets_without_end_are_damage(read, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "brackets").write_bytes(b"[" * 100_000)
    for name, words in (("folder", "cannot be read"), ("brackets", "is damaged")):
        with pytest.raises(Damaged, match=f"{name}: {words}"):
            read(tmp_path / name)


def test_tensors_that_cannot_be_written_name_their_file(tmp_path):
    (tmp_path / "state.safetensors.partial").mkdir()
    with pytest.raises((StorageFailed, OSError), match="state"):
        files.write_tensors(tmp_path / "state.safetensors", {"a": torch.zeros(2)})


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
    files.make_folder_durable(tmp_path / "a" / "b" / "c")
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    files.make_folder_durable(tmp_path / "a" / "b" / "c")
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
        files.write_tensors(tmp_path / f"state-{version}.safetensors", {"a": torch.full((2,), version)}, placed=True)
    (tmp_path / "state-1.safetensors").write_bytes((tmp_path / "state-2.safetensors").read_bytes())
    assert files.read_tensors(tmp_path / "state-2.safetensors")["a"].tolist() == [2, 2]
    with pytest.raises(Damaged, match=r"it holds what was written as .*/state-2\.safetensors"):
        files.read_tensors(tmp_path / "state-1.safetensors")


@pytest.mark.parametrize("command", [["report"], ["predict", "a.png"], ["ledger", "verify"], ["forgetting"]])
def test_a_name_that_no_system_has_is_bad_input(command, tmp_path, capsys):
    long = str(tmp_path / ("x" * 300))
    arguments = [command[0], long, *command[1:]] if command[0] != "ledger" else [*command, long]
    assert cli.run_app(arguments) == 2
    assert "the name 'xxxxxxxxxxxxxxxxxxxx...' has over 255 bytes; take a shorter one" in capsys.readouterr().err


def test_nothing_is_told_where_nobody_listens_and_the_end_is_always_told(monkeypatch):
    tell("work", 1, 2)
    monkeypatch.setattr(progress, "EVERY", 3600.0)
    monkeypatch.setattr(progress, "_last", float("-inf"))
    told = []
    with listening(lambda *one: told.append(one)):
        for done in range(1, 6):
            tell("work", done, 5)
    tell("work", 5, 5)
    assert told == [("work", 1, 5), ("work", 5, 5)]


@pytest.mark.parametrize(("seconds", "done", "total", "words"), [
    (10, 1, 5, "about 40 s left"),
    (60, 2, 22, "about 10 min left"),
    (3, 5, 5, "about 0 s left"),
    (95, 1, 200, "time left not known yet"),
])  # fmt: skip
def test_the_time_left_follows_from_what_is_done(seconds, done, total, words):
    assert time_left(seconds, done, total) == words


def test_lines_of_a_log_say_how_far_and_how_long(monkeypatch, capsys):
    clock = itertools.count(0.0, 11.0)  # each look at the clock is eleven seconds later
    monkeypatch.setattr(displays.time, "monotonic", lambda: next(clock))
    shown = RunDisplay()
    shown.console = Console(file=io.StringIO())
    shown.working("generator of north", 0, 100)
    shown.working("generator of north", 20, 100)
    assert capsys.readouterr().err == "  generator of north: 20 of 100, about 44 s left\n"


def test_generators_tell_how_far_they_are(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    told = []

    class Shown(RunDisplay):
        def working(self, what, done, total):
            told.append((what, done, total))

    settings = {"generator.epochs": 1, "generator.width": 8, "replay.probe": False, "sites.count": 2}
    run(tiny("cwt-replay", settings, rounds=1), tmp_path / "run", display=Shown())
    assert told == [("autoencoder of site-1", 1, 1), ("autoencoder of site-2", 1, 1)]


def test_workers_tell_their_parent_before_they_answer(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as answers, os.fdopen(writer, "wb") as worker, open(os.devnull, "wb") as nothing:
        worker_process._send_progress(worker, ("prior of north", 3, 20))
        worker_process.write_frame(worker, pack({"failed": None}, [b"reply"]))
        parent = object.__new__(WorkerProcess)
        parent._spec = ""
        parent._process = SimpleNamespace(stdin=nothing, stdout=answers)
        told = []
        with listening(lambda *one: told.append(one)):
            answer = parent._converse(b"message")
    assert told == [("prior of north", 3, 20)]
    assert unpack(answer) == ({"failed": None}, [b"reply"])
