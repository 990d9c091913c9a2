"""`polyclinic ledger`: runs that were tampered with, and sentences for an officer."""

import json
import shutil

import pytest

from polyclinic.cli import run_app
from polyclinic.cli.ledger import sentences
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
