"""What a run leaves behind, what it refuses to begin with, how it is interrupted; only the study decides its result."""

import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from run_folders import assert_same_run, history, ledgers, result

import polyclinic
from polyclinic import cli
from polyclinic import run_folder as folder_lock
from polyclinic.errors import BadInput, Damaged, StorageFailed, WorkFailed
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.files import lock
from polyclinic.runner.predict.model_file import digest_of_weights
from polyclinic.runner.run import machine
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.study import parse_study

PERSONAL = ("fedbn", {"model.backbone": "small-cnn"})
ALL = {
    "fedavg": ("fedavg", {}),
    "fedbn": PERSONAL,
    "cwt": ("cwt", {}),
    "splitnn": ("splitnn", {}),
    "standalone": ("standalone", {}),
    "centralized": ("centralized", {}),
    "fedsgd": ("fedsgd", {}),
    "fedavg-share": ("fedavg-share", {}),
}


@pytest.fixture
def fedavg(tiny, undisturbed):
    return undisturbed(tiny("fedavg"))


@pytest.mark.parametrize("name", ["fedavg", "fedbn"])
def test_the_digest_is_that_of_the_released_model(tiny, undisturbed, name):
    method, settings = ALL[name]
    done = undisturbed(tiny(method, settings))
    weights = done.weights()
    assert digest_of_weights(weights) == done["weights_sha256"]
    first = next(iter(weights))
    weights[first] = weights[first] + 1e-3
    assert digest_of_weights(weights) != done["weights_sha256"]
    assert any(key.startswith("site-2/") for key in weights) == (name == "fedbn")


@pytest.mark.parametrize("name", ALL)
def test_ledgers_and_byte_counts_tell_the_same_story(tiny, undisturbed, name):
    method, settings = ALL[name]
    done = undisturbed(tiny(method, settings))
    released = {site: verify(done.folder / "ledger" / f"{site}.jsonl") for site in ("site-1", "site-2", "site-3")}
    communication = done["communication"]
    assert sum(line["bytes"] for lines in released.values() for line in lines) == communication["sent_bytes"]
    for table in ("by_kind", "by_operation", "per_site"):
        assert sum(communication[table].values()) == communication["total_bytes"]
    assert {line["to"] for lines in released.values() for line in lines} == {"coordinator"}
    for lines in released.values():
        assert [line["round"] for line in lines] == sorted(line["round"] for line in lines)


def test_bytes_of_fedavg_by_hand(tiny, fedavg):
    """Each round a model down and up at each site; evaluating costs none, as the site holds it from then on."""
    model = len(Parcel("weights", fedavg.weights()).encoded)
    communication = fedavg["communication"]
    # the initial model, and after each round its mean, which the next round trains on and the last is tested with
    assert communication["received_bytes"] == 3 * (3 + 1) * model
    up = [line["bytes"] for line in verify(fedavg.folder / "ledger" / "site-1.jsonl") if line["kind"] == "weights"]
    assert len(up) == 3
    assert all(model <= size < model + 300 for size in up)


def test_the_best_model_is_that_of_its_round(tiny, tmp_path):
    study = tiny("fedavg", {"evaluation.select": "best"}, rounds=4)
    best = run(study, tmp_path / "best")
    scores = [line["validation"]["pooled"]["accuracy"] for line in history(best.folder)]
    assert best["selected"] == {"by": "best", "round": scores.index(max(scores)) + 1}
    last = run(
        study.with_settings({"evaluation.select": "last", "method.rounds": best["selected"]["round"]}),
        tmp_path / "last",
    )
    assert last["weights_sha256"] == best["weights_sha256"]
    assert last.metrics["test"] == best.metrics["test"]


def test_the_study_alone_decides_the_bits(tiny, fedavg, tmp_path):
    torch.manual_seed(1234)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    run(tiny("fedavg"), tmp_path / "again")
    left = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert left == 2
    assert_same_run(tmp_path / "again", fedavg.folder)
    study = tiny("fedavg").model_copy(update={"seed": 1})
    other = run(study, tmp_path / "other")
    assert other["weights_sha256"] != fedavg["weights_sha256"]
    assert other["data"] == fedavg["data"]


def test_a_finished_run_is_not_run_again(tiny, fedavg):
    before = {path: path.stat().st_mtime_ns for path in fedavg.folder.rglob("*")}
    assert run(tiny("fedavg"), fedavg.folder, resume=True).values == fedavg.values
    assert run(None, fedavg.folder, resume=True).values == fedavg.values
    assert {path: path.stat().st_mtime_ns for path in fedavg.folder.rglob("*")} == before


def test_a_folder_with_something_else_in_it_is_refused_and_left_alone(tiny, fedavg, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("")
    told = {fedavg.folder: "add --resume to see its result", tmp_path / "other": "holds other files"}
    for folder, words in (told | {tmp_path / "file": "is a file"}).items():
        with pytest.raises(BadInput, match=words):
            run(tiny("fedavg"), folder)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("arguments", [{}, {"resume": True}, {"out": "somewhere"}, {"out": ".", "resume": True}])
def test_without_a_study_there_must_be_a_run_to_resume(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"study: give one, or the folder of a run to resume|no such file"):
        run(None, **arguments)


class Stop(Display):
    """Ctrl-C when a round is done."""

    def __init__(self, round):
        self.round = round

    def round_done(self, line, rounds):
        if line["round"] == self.round:
            raise KeyboardInterrupt


@pytest.fixture
def interrupted(tiny, tmp_path):
    """A run that was interrupted in its second round."""
    with pytest.raises(KeyboardInterrupt):
        run(tiny("fedavg"), tmp_path / "run", display=Stop(2))
    return tmp_path / "run"


@pytest.mark.parametrize(("change", "table"), [
    ({"optimizer.lr": 0.06}, "optimizer"),
    ({"method.rounds": 9}, "method"),
    ({"data.samples": 95}, "data"),
    ({"seed": 1}, "seed"),
    ({"policy.kinds": ["weights", "metrics"]}, "policy"),
    ({"engine.threads": 2}, "engine.threads"),
    ({"engine.precision": "bf16"}, "engine.precision"),
    ({"engine.device": "auto"}, "engine.device"),
])  # fmt: skip
def test_a_run_goes_on_only_with_its_own_study(tiny, interrupted, change, table):
    before = ledgers(interrupted)
    with pytest.raises(BadInput, match=f"^{table}: "):
        run(tiny("fedavg").with_settings(change), interrupted, resume=True)
    assert ledgers(interrupted) == before


def test_a_run_may_go_on_with_another_number_of_checkpoints_or_quorum(tiny, interrupted, fedavg):
    study = tiny("fedavg").with_settings({"engine.checkpoint_every": 3, "engine.quorum": 0.9, "engine.workers": "auto"})
    run(study, interrupted, resume=True)
    assert_same_run(interrupted, fedavg.folder)


@pytest.mark.parametrize("left", [[".lock"], [".lock", "study.toml.partial"], [".lock", ".workers/7.lock"]])
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_killed_at_its_very_beginning_can_be_begun(tiny, tmp_path, fedavg, left, resume):
    (tmp_path / "run").mkdir()
    for name in left:
        (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / name).touch()
    run(tiny("fedavg"), tmp_path / "run", resume=resume)
    assert_same_run(tmp_path / "run", fedavg.folder)


def test_two_runs_do_not_work_in_one_folder(interrupted):
    with lock(interrupted / ".lock"):
        before = ledgers(interrupted)
        with pytest.raises(BadInput, match="another run is working in it"):
            run(None, interrupted, resume=True)
        assert ledgers(interrupted) == before
    run(None, interrupted, resume=True)


@pytest.mark.parametrize(("name", "change", "error", "words"), [
    ("ledger/site-3.jsonl", ('"kind": "weights"', '"kind": "metrics"'), StorageFailed, "line 1: was changed"),
    ("ledger/site-3.jsonl", None, StorageFailed, "line 1: is not signed by the site's key"),
    ("study.toml", ("lr = 0.05", "lr = 0.06"), Damaged, "is damaged"),
], ids=["changed line", "ledger of another site", "study"])  # fmt: skip
def test_damage_is_named_when_a_run_goes_on(interrupted, name, change, error, words):
    source = interrupted / (name if change else "ledger/site-1.jsonl")
    (interrupted / name).write_text(source.read_text().replace(*(change or ("", "")), 1))
    with pytest.raises(error, match=f"{name}[:,] .*{words}" if change is None else words):
        run(None, interrupted, resume=True)


def test_a_lost_state_is_named_when_a_run_goes_on(tiny, tmp_path):
    method, settings = PERSONAL
    with pytest.raises(KeyboardInterrupt):
        run(tiny(method, settings), tmp_path / "run", display=Stop(2))
    for path in (tmp_path / "run" / "sites" / "site-2").iterdir():
        path.unlink()
    with pytest.raises(Damaged, match=r"site-2.*state-1\.safetensors: is missing; bring the file back"):
        run(tiny(method, settings), tmp_path / "run", resume=True)


def test_a_run_goes_on_from_the_checkpoint_before_where_a_state_is_damaged(tiny, tmp_path, undisturbed):
    method, settings = PERSONAL
    with pytest.raises(KeyboardInterrupt):
        run(tiny(method, settings), tmp_path / "run", display=Stop(3))
    newest = max((tmp_path / "run" / "sites" / "site-2").glob("state-*.safetensors"))
    content = newest.read_bytes()
    newest.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    result = run(tiny(method, settings), tmp_path / "run", resume=True)
    assert result["weights_sha256"] == undisturbed(tiny(method, settings))["weights_sha256"]
    assert any(f"{newest}: is damaged" in sentence for sentence in result["warnings"])


def test_a_kind_that_no_site_lets_out_stops_the_run_with_the_reason(tiny, tmp_path):
    with pytest.raises(
        WorkFailed, match="kept back metrics of 'evaluate': the site's policy does not let this kind out"
    ):
        run(tiny("fedavg", {"policy.kinds": ["weights"]}), tmp_path / "run")
    for path in (tmp_path / "run" / "ledger").iterdir():
        assert {line["kind"] for line in verify(path)} == {"weights"}


def test_a_run_without_validation_or_evaluation_releases_its_last_model(tiny, tmp_path, fedavg):
    done = run(tiny("fedavg", {"evaluation.every": 0}), tmp_path / "run")
    assert done["weights_sha256"] == fedavg["weights_sha256"]
    assert [line["validation"] for line in history(done.folder)] == [None, None, None]
    assert result(done.folder)["metrics"] == result(fedavg.folder)["metrics"]


def test_checkpoints_are_not_needed_to_end_well(tiny, tmp_path, fedavg):
    run(tiny("fedavg", {"engine.checkpoint_every": 0}), tmp_path / "run")
    assert_same_run(tmp_path / "run", fedavg.folder)


def test_a_run_does_not_go_on_with_other_images(tiny, tmp_path):
    rng, file = np.random.default_rng(0), tmp_path / "images.npz"

    def write_images():
        np.savez(file, images=rng.integers(0, 256, (60, 28, 28), dtype=np.uint8), labels=np.arange(60) % 2)

    write_images()
    tables = tiny("fedavg", rounds=1).as_tables() | {"data": {"source": "npz", "path": str(file), "size": 28}}
    study = parse_study(tables)
    run(study, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    run(study, tmp_path / "run", resume=True)
    (tmp_path / "run" / "result.json").unlink()
    write_images()
    with pytest.raises(BadInput, match=r"data: the images are not those that .* was begun with"):
        run(study, tmp_path / "run", resume=True)


SOURCES = Path(polyclinic.__file__).parents[1]


@pytest.mark.slow
def test_without_checkpoints_only_the_newest_state_of_a_site_stays(tiny, tmp_path):
    """Two workers write a state after every call."""
    settings = {"engine.checkpoint_every": 0, "engine.workers": 2, "sites.count": 2, "evaluation.every": 0}
    done = run(tiny("scaffold", settings, rounds=4), tmp_path / "run")
    for site in ("site-1", "site-2"):
        states = list((done.folder / "sites" / site).glob("state-*.safetensors"))
        assert 1 <= len(states) <= 2, states


def test_a_worker_that_does_not_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "ENDS_WITHIN", 0.05)
    (tmp_path / folder_lock.WORKERS).mkdir()
    with (
        lock(tmp_path / folder_lock.WORKERS / "4711.lock"),
        pytest.raises(BadInput, match=r"process 4711, a worker of an earlier run, has not ended yet"),
        folder_lock.run_lock(tmp_path),
    ):
        pass


def test_an_error_that_a_package_made_of_ctrl_c_is_an_interruption(monkeypatch, capsys):
    def app(**_):
        raise ImportError("numpy: initialization failed")

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(ImportError):
        cli.run_app(["run"])
    monkeypatch.setattr(cli, "_interrupted", [2])
    assert cli.run_app(["run"]) == 1
    assert capsys.readouterr().err == "interrupted; what was finished is kept\n"


def ended_by_ctrl_c(places):
    """How to start a command that Ctrl-C ends, also where the tests are a job in the background, which ignores it."""
    takes_it = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return {"env": places, "capture_output": True, "text": True, "preexec_fn": takes_it}


@pytest.mark.parametrize("way", [["-m", "polyclinic"], ["-c", "from polyclinic.__main__ import main; main()"]])
def test_ctrl_c_while_the_command_is_imported(way, tmp_path):
    """A package that makes its own error of an interruption: the command says its sentence all the same."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n"
        "    raise ImportError('initialization failed')\n"
    )
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, *way, "list", "methods"], **ended_by_ctrl_c(places))
    assert (ended.returncode, ended.stderr) == (1, "interrupted; nothing was done\n")


@pytest.mark.parametrize("works", [False, True])
def test_a_package_that_swallows_ctrl_c_while_it_is_imported_does_not_stop_it(works, tmp_path):
    """As numpy does: the command would have gone on as if nobody had pressed a key. Where work waits for the package,
    it is interrupted after the import."""
    (tmp_path / "swallows.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    (tmp_path / "command.py").write_text(
        "import sys, time\nfrom polyclinic import cli\ndef app(**_):\n    import swallows\n    time.sleep(60)\n"
        f"cli.app = app\nsys.argv = ['polyclinic']\nif {works}:\n    cli.ROOMS = {str(tmp_path)!r}\ncli.main()\n"
    )
    places = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, tmp_path / "command.py"], **ended_by_ctrl_c(places))
    assert (ended.returncode, ended.stderr) == (1, "interrupted; what was finished is kept\n")


def test_the_command_waits_for_ctrl_c_before_it_imports_anything():
    """Ten milliseconds of imports were ten milliseconds in which Ctrl-C was a traceback."""
    words = "import os, sys; before = set(sys.modules); import polyclinic.__main__; print(set(sys.modules) - before)"
    loaded = subprocess.run([sys.executable, "-S", "-c", words], env={"PYTHONPATH": str(SOURCES)}, capture_output=True)
    assert set(re.findall(r"'(.+?)'", loaded.stdout.decode())) <= {"__future__", "polyclinic", "polyclinic.__main__"}


def test_a_finished_run_with_a_damaged_history_is_not_called_finished(tiny, tmp_path):
    """Found by the fault campaign: `run --resume` looked at result.json only."""
    folder = run(tiny("fedavg"), tmp_path / "run").folder
    history = folder / "history.jsonl"
    history.write_bytes(bytes(40) + history.read_bytes()[40:])
    with pytest.raises(Damaged, match=r"history\.jsonl: is damaged"):
        run(None, folder, resume=True)


HEAVY = ("matplotlib", "nibabel", "pydicom", "opacus", "monai", "ray", "nvflare", "scipy.stats", "scipy.optimize")
PROGRAM = f"""
import sys
import polyclinic.runner.run.worker
print(*[name for name in {HEAVY} if name in sys.modules])
"""


def test_a_worker_imports_nothing_that_most_runs_do_without():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ["MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_a_user_chose_for_memory_stays(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert not machine.keep_freed_memory.__wrapped__()


def test_many_processes_keep_no_more_than_a_share_of_the_memory(monkeypatch):
    values = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * 2**30 // 4096}
    monkeypatch.setattr(machine.os, "sysconf", values.__getitem__)
    found = [machine.kept_at_end(processes) for processes in (1, 16, 10_000)]
    assert found == [machine.KEPT_AT_END, 2**30 // 32, machine.AHEAD]
