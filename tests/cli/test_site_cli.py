"""`polyclinic site`, `serve` and `start` as they are typed."""

import json
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from kit_of_north import came, make_kit
from PIL import Image
from processes import start_polyclinic, wait_for
from served import write_run

from polyclinic.cli import run_app, study
from polyclinic.deployment.approval import Approvals
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.files import lock
from polyclinic.privacy.epsilon import compute_epsilon


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """The kit of site 'north', and one's own folder is the kit."""
    folder = make_kit(tmp_path)
    monkeypatch.chdir(folder)
    return folder


def site(capsys, *arguments, code=0):
    """What a command says."""
    assert run_app(["site", *arguments]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_a_study_is_seen_approved_revoked_and_approved_again(kit, capsys):
    assert site(capsys, "pending") == "nothing waits for you\n"
    came(kit)
    assert "first: waits since " in site(capsys, "pending")
    told = site(capsys, "show", "first")
    for words in (
        "on your images 'scans'",
        "The other sites are south.",
        "In short:\n1. What leaves: weights of a model; scores.\n2. What attacks have got out of such parcels: ",
        "from weights of a model: 79 of 100 images were rebuilt",
        "(step 'train'): weights of a model, to the coordinator.",
        "scores, to the coordinator",
        "Your policy stops everything after 1,000,000 bytes.",
        "There is no differential privacy",
        "No study has been approved at this site before.",
    ):
        assert words in told
    assert "first: approved" in site(capsys, "approve", "first")
    assert site(capsys, "pending") == "nothing waits for you\n"
    assert "It was approved by " in site(capsys, "show", "first")
    assert "nothing more of it leaves" in site(capsys, "revoke", "first", "--why", "asked by our board")
    assert Approvals(kit, "north").decisions("first")[-1].why == "asked by our board"
    assert "Its approval was revoked." in site(capsys, "show", "first")
    site(capsys, "approve", "first")
    assert Approvals(kit, "north").state("first") == "approved"


def test_a_refused_study_and_a_policy_that_lets_out_more(kit, capsys):
    came(kit)
    came(kit, "second", method={"name": "fedavg", "rounds": 50})
    assert "second: refused" in site(capsys, "refuse", "second")
    assert "It was refused." in site(capsys, "show", "second")
    site(capsys, "approve", "first")
    told = site(capsys, "show", "second")
    assert "What is new against the study that was approved last:\n- method.rounds was 3 and is now 50\n" in told
    (kit / "local" / "policy.toml").write_text('kinds = ["weights", "metrics", "latents"]\n')
    assert "first: waits" in site(capsys, "pending")
    told = site(capsys, "show", "first")
    assert "Your policy lets out more than when you approved it: policy.toml: kinds was" in told
    assert "policy.toml: max_bytes was 1000000 and is now not set" in told


def test_epsilon_by_the_studys_settings_and_what_it_does_not_cover(kit, capsys):
    for name in ("clear", "ill"):
        (kit.parent / "scans" / name).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(np.full((16, 16), number, np.uint8)).save(kit.parent / "scans" / name / f"{number}.png")
    came(kit, privacy={"noise_multiplier": 1.0})
    told = site(capsys, "show", "first")
    images = int(told.split(" for one of ")[1].split()[0])
    spent = compute_epsilon(10 / images, 1.0, 3 * (images // 10), 1 / images)
    assert f"it spends epsilon {spent:.3g} at delta {1 / images:.2g} for one of {images} images" in told
    assert "It does not cover scores of validation and test images; a patient with several images" in told
    came(kit, "second", privacy={"noise_multiplier": 1.0, "target_epsilon": 2.0})
    assert "training stops at epsilon 2 for one image" in site(capsys, "show", "second")


def test_what_goes_between_sites_and_what_the_policy_keeps_back(kit, capsys):
    scans = {"source": "at-sites", "dataset": "scans", "size": 28, "classes": ["clear", "ill"]}
    came(kit, data=scans, method={"name": "feder", "rounds": 3}, generator={"name": "dcgan"})
    told = site(capsys, "show", "first")
    assert "weights of a model, synthetic images, to other sites, sealed so that the coordinator cannot" in told
    assert "'hand_over' of 'feder' releases synthetic-images, which the policy keeps back; choose another" in told
    assert "Your policy keeps synthetic-images back, so this fails where it is needed." in told
    assert "- The site's public key; its private one stays (step 'give_key'): public keys" in told


def test_a_suspended_study_says_its_true_reason_and_approve_releases_it(kit, capsys):
    came(kit)
    site(capsys, "approve", "first")
    Suspensions(kit).suspend("first", "GateRefusedData: tensor 'conv1' holds NaN")
    assert "first: suspended since" in (told := site(capsys, "pending"))
    assert "tensor 'conv1' holds NaN" in told
    assert "tensor 'conv1' holds NaN" in site(capsys, "show", "first")
    site(capsys, "approve", "first")
    assert Suspensions(kit).all() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nothing"], "nothing: no study of this name came to this site"),
        (["approve", "nothing"], "no study of this name"),
        (["approve", "../../etc"], "cannot be the name"),
        (["revoke", "first"], "first: is not approved"),
        (["refuse", "approved"], "`polyclinic site revoke approved` takes the approval back"),
        (["pending", "--kit", "../server"], "is the server's kit; name that of a site"),
        (["pending", "--kit", ".."], "is no kit of a server or site"),
    ],
)
def test_mistakes_are_one_sentence(kit, capsys, arguments, words):
    came(kit)
    came(kit, "approved")
    site(capsys, "approve", "approved")
    (kit.parent / "server" / "startup").mkdir()
    (kit.parent / "server" / "startup" / "fed_server.json").write_text("{}")
    assert words in site(capsys, *arguments, code=2)


def test_status_says_what_left_and_what_is_left_of_the_budgets(kit, capsys):
    study = came(kit)
    site(capsys, "approve", "first")
    folder = kit / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "study.toml").write_text(study.to_toml())
    ledger = Ledger(folder / "ledger" / "north.jsonl")
    for number, kind, size in ((1, "weights", 3000), (1, "metrics", 40), (2, "weights", 3000)):
        ledger.append(round=number, operation="train", kind=kind, bytes=size, digest="0" * 64, to="coordinator")
    told = site(capsys, "status")
    assert "site north: not running on this machine" in told
    assert "first: not at work. It was approved by " in told
    assert "  weights: 2 parcels, 6,000 bytes left the site" in told
    assert "  last: weights by 'train' in round 2, to coordinator" in told
    assert "  bytes: 6,040 used of 1,000,000, 993,960 left (max_bytes)" in told
    assert "  scores: 1 used of 1,000, 999 left (max_scores)" in told
    assert "  epsilon: 0 used; there is no limit (max_epsilon in policy.toml)" in told
    with lock(kit / "runs" / ".first.lock"):
        assert "first: at work." in site(capsys, "status")


def refused(capsys, *arguments):
    """The one sentence with which a command is refused."""
    assert run_app(["serve", *map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing"], "there is no such folder"),
        (["file"], "there is no such folder"),
        ([".", "--kit", "."], "give one of the two"),
        (["--kit", "."], "is no kit"),
        (["--kit", "server"], "is the server's kit"),
    ],
)
def test_folders_that_cannot_be_served(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "server" / "startup").mkdir(parents=True)
    (tmp_path / "server" / "startup" / "fed_server.json").write_text("{}")
    assert words in refused(capsys, *arguments)


def test_an_address_that_cannot_be_used(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "is taken already" in refused(capsys, tmp_path, "--port", taken.getsockname()[1])
    assert "cannot be used" in refused(capsys, tmp_path, "--host", "192.0.2.1", "--port", 0)  # of no machine


def test_without_its_packages(capsys, tmp_path, monkeypatch):
    monkeypatch.delattr("polyclinic.report.serve.server", raising=False)
    monkeypatch.delitem(sys.modules, "polyclinic.report.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'polyclinic[serve]'" in refused(capsys, tmp_path)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_server_starts_answers_and_ends(tmp_path, end):
    write_run(tmp_path / "runs" / "first")
    process = start_polyclinic("serve", tmp_path, "--port", 0)
    try:
        address, token = re.search(r"open (http://127\.0\.0\.1:\d+/)#token=(\S+)", process.stdout.readline()).groups()
        request = urllib.request.Request(f"{address}api/overview", headers={"authorization": f"Bearer {token}"})
        found = wait_for(lambda: _answer(request))
        assert [run["name"] for run in found["runs"]] == ["runs/first"]
        process.send_signal(end)
        assert process.wait() == 0
        assert "the server has ended" in process.stdout.read()
    finally:
        process.kill()
        process.wait()


def _answer(request):
    """The content of an answer; nothing while the server is not there yet."""
    try:
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())
    except ConnectionError:
        return None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionError):
            return None
        raise


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty-eight dark and as many bright images, a folder for each class: enough for sums over a class."""
    rng = np.random.default_rng(0)
    for name, level in (("ill", 60), ("well", 140)):
        (tmp_path / "scans" / name).mkdir(parents=True)
        for number in range(48):
            pixels = rng.integers(level - 50, level + 50, (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "scans" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "scans"


def test_images_become_a_study_a_model_and_a_report(scans, capsys):
    assert run_app(["start", str(scans)]) == 0
    said = capsys.readouterr().out
    assert "runs/scans/study.toml: fine." in said
    assert "predict runs/scans/run" in said
    page = Path("runs/scans/run/report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert json.loads(Path("runs/scans/run/result.json").read_text())["metrics"]["test"]["accuracy"] > 0.5
    assert run_app(["start", str(scans)]) == 2
    assert "holds a run that has ended; see its report.html" in capsys.readouterr().err


def test_who_says_no_gets_the_study_and_goes_on_with_it_later(scans, tiny, monkeypatch, capsys):
    monkeypatch.setattr(study.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(study.typer, "confirm", lambda words, default: False)
    assert run_app(["start", str(scans), "--out", "mine"]) == 0
    assert sorted(path.name for path in Path("mine").iterdir()) == ["study.toml"]
    Path("mine/study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    assert run_app(["start", str(scans), "--out", "mine", "--yes"]) == 0
    assert json.loads(Path("mine/run/result.json").read_text())["method"] == "fedavg"


@pytest.mark.parametrize(("flags", "written"), [([], True), (["--no-report"], False), (["--quiet"], False)])
def test_a_run_writes_its_report_unless_told_not_to(tiny, tmp_path, flags, written):
    (tmp_path / "study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    assert run_app(["run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "run"), *flags]) == 0
    assert (tmp_path / "run" / "report.html").exists() == written


def test_without_the_extra_a_run_ends_with_a_hint(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("polyclinic.extras.find_spec", lambda package: None)
    (tmp_path / "study.toml").write_text(tiny("fedavg", rounds=1).to_toml())
    assert run_app(["run", str(tmp_path / "study.toml"), "--out", str(tmp_path / "run")]) == 0
    assert "no report was written: it needs matplotlib, which is not installed" in capsys.readouterr().err
