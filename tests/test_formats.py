"""Formats of run folders: kept, older and newer ones, whole, damaged and locked ones."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from json_schemas import assert_valid
from PIL import Image
from processes import kill, start, stop, wait_for
from recorded_digests import RECORDED, versions
from run_folders import releases
from safetensors.torch import load_file

from polyclinic import run_folder
from polyclinic import run_folder as folder_lock
from polyclinic.cli import run_app
from polyclinic.engines.worker_process import WorkerProcess
from polyclinic.errors import BadInput, Damaged
from polyclinic.federation.call import Call
from polyclinic.runner.run.run import run
from polyclinic.study import load_run_study, load_study, parse_study

KEPT = Path(__file__).parent / "data" / "run_format_1"


@pytest.fixture(params=["as it was written", "from before there were numbers"])
def kept(request, tmp_path, monkeypatch):
    """A copy of the run folders of format 1, in the working folder."""
    shutil.copytree(KEPT, tmp_path / "kept")
    monkeypatch.chdir(tmp_path / "kept")
    if request.param == "from before there were numbers":
        for name in ("finished", "interrupted"):
            Path(name, "format.json").unlink()
            study = Path(name, "study.toml")
            study.write_text(study.read_text().replace("format = 1\n", ""))
    return tmp_path / "kept"


def fails_with(capsys, arguments: list[str]) -> str:
    assert run_app(arguments) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    return sentence


def test_an_interrupted_run_is_resumed_to_the_same_weights(kept):
    assert run_app(["run", "--resume", "--out", "interrupted", "--quiet"]) == 0
    undisturbed = run(load_study(Path("interrupted", "study.toml")), "undisturbed")
    resumed, expected = load_file("interrupted/model.safetensors"), undisturbed.weights()
    for name, tensor in expected.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-4, atol=1e-6)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    if all(recorded[name] == version for name, version in versions().items()):  # another torch may round otherwise
        assert (
            json.loads(Path("interrupted/result.json").read_text())["weights_sha256"] == undisturbed["weights_sha256"]
        )
        for site in ("site-1", "site-2"):  # the lines that the older version wrote are unsigned
            assert releases(Path("interrupted"), site) == releases(undisturbed.folder, site)
    assert json.loads(Path("interrupted/format.json").read_text())["format"] == run_folder.RUN_FORMAT


def test_a_setting_that_is_gone_is_refused_in_a_study_and_read_in_a_run_folder(kept, capsys):
    study = Path("interrupted", "study.toml")
    study.write_text(study.read_text() + ("" if "[engine]" in study.read_text() else "\n[engine]\n"))
    study.write_text(study.read_text().replace("[engine]\n", "[engine]\ncompiled = true\n"))
    assert load_run_study(Path("interrupted")).engine.name == "in-process"
    said = fails_with(capsys, ["study", "check", str(study)])
    assert said.strip().endswith("engine.compiled: is gone: training passes are not compiled any more; delete it")


def test_ledgers_without_signatures_are_read_and_called_unsigned(kept, capsys):
    assert run_app(["ledger", "verify", "finished"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("all are unsigned (written by an older version)") == 2
    assert run_app(["ledger", "finished"]) == 0
    assert "unsigned lines, written by an older version: site-1, site-2" in capsys.readouterr().out


def test_a_finished_run_is_not_run_again(kept, capsys):
    before = Path("finished/result.json").read_text()
    assert run_app(["run", "--resume", "--out", "finished", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(before)


def test_audit(kept):
    assert run_app(["audit", "finished", "--quiet"]) == 0
    assert_valid(Path("finished"))
    report = json.loads(Path("finished/audit.json").read_text())
    assert report["complete"]
    assert {parcel["kind"] for parcel in report["parcels"]} == {"weights"}


def test_predict(kept, capsys):
    Image.new("L", (16, 16), 128).save("grey.png")
    assert run_app(["predict", "finished", "grey.png", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class"] in ("0", "1")


def test_ledger(kept, capsys):
    assert run_app(["ledger", "finished", "--lines"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("train") == 2
    assert printed.count("weights") == 2


def test_forgetting(kept):
    assert run_app(["forgetting", "finished", "--quiet"]) == 0
    rounds = json.loads(Path("finished/forgetting.json").read_text())["rounds"]
    assert rounds["1"].keys() == {"site-1", "site-2"}


def test_compare(kept):
    Path("all").mkdir()
    shutil.copytree("finished", "all/cwt-seed0")
    command = ["compare", "finished/study.toml", "--methods", "cwt", "--seeds", "1", "--out", "all", "--quiet"]
    assert run_app(command) == 0
    assert_valid(Path("all"))
    (row,) = json.loads(Path("all/comparison.json").read_text())["rows"]
    assert row["weights_sha256"] == json.loads(Path("finished/result.json").read_text())["weights_sha256"]
    assert not Path("all/studies").exists()  # nothing was run again


@pytest.mark.parametrize("arguments", [
    ["run", "--resume", "--out", "finished"],
    ["run", "--resume", "--out", "interrupted"],
    ["audit", "finished"],
    ["predict", "finished", "images.npz"],
    ["ledger", "finished"],
    ["forgetting", "finished"],
    ["compare", "finished/study.toml", "--methods", "cwt", "--seeds", "1", "--out", "."],
], ids=" ".join)  # fmt: skip
def test_every_command_refuses_a_newer_run_folder_with_the_cure(arguments, tmp_path, monkeypatch, capsys):
    shutil.copytree(KEPT, tmp_path / "kept")
    monkeypatch.chdir(tmp_path / "kept")
    shutil.copytree("finished", "cwt-seed0")
    for name in ("finished", "interrupted", "cwt-seed0"):
        Path(name, "format.json").write_text('{"format": 2, "polyclinic": "0.9.0"}')
    sentence = fails_with(capsys, arguments)
    assert "format.json: has format 2" in sentence
    assert "install polyclinic 0.9.0 or newer" in sentence


def test_a_newer_study_is_refused_before_its_tables_are_looked_at(tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text('format = 2\n[hospital]\nname = "a table of tomorrow"\n')
    assert "format: has format 2" in fails_with(capsys, ["study", "check", str(file)])


def test_a_newer_model_file_is_refused_away_from_its_folder(tmp_path, capsys):
    content = (KEPT / "finished" / "model.safetensors").read_bytes()
    assert content.count(rb"{\"format\":1,") == 1
    file = tmp_path / "model.safetensors"
    file.write_bytes(content.replace(rb"{\"format\":1,", rb"{\"format\":7,"))
    assert "has format 7" in fails_with(capsys, ["predict", str(file), "image.png"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '"1"', "{"])
def test_a_damaged_format_file_is_named(text, tmp_path):
    (tmp_path / "format.json").write_text(text)
    with pytest.raises(BadInput, match=r"format\.json: is damaged"):
        run_folder.check_whole(tmp_path)


@pytest.mark.parametrize("found", [0, -1, "1", True, None, 1.0])
def test_a_format_is_a_whole_number(found):
    with pytest.raises(BadInput, match="whole number"):
        run_folder.check_format(found, 1, "format")


def test_studies_say_their_format(tmp_path, capsys, tiny):
    assert run_app(["study", "new", "-"]) == 0
    assert "\nformat = 1\n" in capsys.readouterr().out.split("[data]")[0]
    study = tiny("fedavg")
    assert study.to_toml().startswith("format = 1\n")
    without = {name: table for name, table in study.as_tables().items() if name != "format"}
    assert parse_study(without) == study


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
@pytest.mark.parametrize("name", [*run_folder.FINISHED, run_folder.DIGESTS])
def test_a_flipped_bit_is_noticed(folder, name, place):
    run_folder.check_whole(folder, *run_folder.FINISHED)
    flip(folder / name, place)
    with pytest.raises(Damaged, match=f"{name}: is damaged"):
        run_folder.check_whole(folder, *run_folder.FINISHED)


@pytest.mark.parametrize("name", run_folder.FINISHED)
def test_a_file_that_is_gone_is_noticed(folder, name):
    (folder / name).unlink()
    with pytest.raises(Damaged, match=name):
        run_folder.check_whole(folder, name)


@pytest.mark.parametrize("site", ["site-1", "site-3"])
def test_a_damaged_ledger_of_a_finished_run_is_noticed(folder, site):
    assert run(None, folder, resume=True)["rounds"] == 1
    flip(folder / "ledger" / f"{site}.jsonl", 40)
    with pytest.raises(Damaged, match=rf"ledger/{site}.jsonl: is damaged"):
        run(None, folder, resume=True)


def test_a_missing_or_damaged_hand_over_is_noticed(tiny, tmp_path):
    from polyclinic.runner.compare.forgetting import matrices

    settings = {"data.samples": 36, "evaluation.handovers": "all"}
    folder = run(tiny("cwt", settings, rounds=1), tmp_path / "run").folder
    assert matrices(folder)["rounds"].keys() == {1}
    handed = sorted((folder / "handovers" / "round-1").iterdir())
    honest = handed[0].read_bytes()
    flip(handed[0], -2)
    with pytest.raises(Damaged, match=handed[0].name):
        matrices(folder)
    handed[0].write_bytes(honest)
    handed[-1].unlink()
    with pytest.raises(Damaged, match=handed[-1].name):
        matrices(folder)


def test_a_run_killed_just_before_its_result_was_written_ends_the_same(folder, monkeypatch):
    """The digests are written first: a result without them would vouch for files that nobody checks."""
    values = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    (folder / run_folder.DIGESTS).write_text(
        '{"files": {"history.jsonl": "another"}, "sha256": "another"}'
    )  # done again
    seen = []

    def write(path, content, **options):
        seen.append((path.name, (folder / "result.json").exists()))
        return honest(path, content, **options)

    honest = run_folder.atomic_write
    monkeypatch.setattr(run_folder, "atomic_write", write)
    again = run(None, folder, resume=True)
    assert again["weights_sha256"] == values["weights_sha256"]
    assert seen[-2:] == [(run_folder.DIGESTS, False), ("result.json", False)]
    run_folder.check_whole(folder, "*")


def test_a_damaged_result_is_not_read(folder, tiny):
    values = json.loads((folder / "result.json").read_text())
    assert run_folder.read_result(folder) == values
    values["metrics"]["test"]["accuracy"] = 1.0
    (folder / "result.json").write_text(json.dumps(values))
    with pytest.raises(Damaged, match=r"result.json: is damaged"):
        run(None, folder, resume=True)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00", '{"a":' * 100_000])
def test_an_older_run_with_a_result_that_is_no_json_is_named(folder, text):
    (folder / run_folder.DIGESTS).unlink()
    (folder / "result.json").write_text(text)
    with pytest.raises(Damaged, match=r"result.json: is damaged"):
        run_folder.read_result(folder)


def test_a_run_without_noted_digests_is_of_an_older_version(folder):
    (folder / run_folder.DIGESTS).unlink()
    flip(folder / "history.jsonl", 3)
    run_folder.check_whole(folder, *run_folder.FINISHED)


WORKER = """
import os, pathlib, sys, time
from polyclinic.engines.worker_process import serve
from polyclinic.run_folder import worker_lock
class Host:
    def restore(self, positions): pass
    def handle(self, call):
        (folder / "at work").write_text(str(os.getpid()))
        time.sleep(3600)
folder = pathlib.Path(sys.argv[1])
with worker_lock(folder):
    serve(Host())
"""


def _run(folder):
    with run_folder.run_lock(folder):
        worker = WorkerProcess([sys.executable, "-c", WORKER, str(folder)], threads=1)
        worker.restore({})
        worker.call(Call("a", "train", 1), None)


def test_a_run_waits_for_the_workers_of_one_that_was_killed(tmp_path, monkeypatch):
    """A worker that is stopped cannot notice that its run is gone: until it goes on, and ends, the folder is taken."""
    killed = start(_run, tmp_path)
    pid = int(wait_for(lambda: (tmp_path / "at work").exists() and (tmp_path / "at work").read_text()))
    with pytest.raises(BadInput, match="another run is working in it"), run_folder.run_lock(tmp_path):
        pass
    stop(pid)
    kill(killed)
    with monkeypatch.context() as patch:
        patch.setattr(folder_lock, "ENDS_WITHIN", 0.2)
        with (
            pytest.raises(BadInput, match=f"process {pid}, a worker of an earlier run, has not ended yet"),
            run_folder.run_lock(tmp_path),
        ):
            pass
    os.kill(pid, signal.SIGCONT)
    with run_folder.run_lock(tmp_path):
        assert not (tmp_path / run_folder.WORKERS).exists()


def test_a_run_leaves_no_locks_of_its_workers(tmp_path):
    with run_folder.run_lock(tmp_path), run_folder.worker_lock(tmp_path):
        assert list((tmp_path / run_folder.WORKERS).iterdir())
    assert not (tmp_path / run_folder.WORKERS).exists()
