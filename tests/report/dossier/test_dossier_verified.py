"""The dossier: what stands in it, and that it can be verified."""

import html
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from dossier_files import sealed_anew

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.files import sha256_of
from polyclinic.report import dossier as writing
from polyclinic.report.dossier import write_dossier
from polyclinic.report.dossier_check import (
    Evidence,
    NoFigure,
    at_pointer,
    figures_on,
    in_bytes,
    in_lines,
    pointer,
    shown,
    verify_dossier,
)
from polyclinic.report.evidence import Ledgers, open_run, read_ledgers
from polyclinic.run_folder import note_files
from polyclinic.runner.predict.model_file import model_file, read_model_file


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
    added = ["Model_card.md: was added", ".empty: is a folder that was added"]
    assert verify_dossier(copy) == ["model_card.md: is gone", *added]


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


def test_a_new_dossier_holds_and_says_what_it_must(whole, run_folder):
    assert verify_dossier(whole.folder, whole.digest, run_folder) == []
    page = (whole.folder / "index.html").read_text()
    short = words_of(whole.folder / "index.html").partition("In short")[2].partition("1. The model")[0]
    assert "weights of a model (" in short
    assert "weights: leaks; " in short
    assert "no differential privacy" in short
    for words in ("It does not say that a law", "1. The model", "6. What an attacker could recover", "3 of 4 images"):
        assert words in page
    assert "<script" not in page
    assert "\u202e" not in page
    assert not re.search(r"\bcomplian|\bcertified\b|\bconform", page)
    assert "# Model card" in (whole.folder / "model_card.md").read_text()
    assert "No synthetic images" in (whole.folder / "data_sheet.md").read_text()
    assert whole.files == len([path for path in whole.folder.rglob("*") if path.is_file()])


def test_every_figure_leads_to_its_file_with_its_digest(whole, run_folder):
    recorded = json.loads((whole.folder / "manifest.json").read_text())["sha256"]
    figures = json.loads((whole.folder / "figures.json").read_text())
    assert len(figures) > 40
    assert all(recorded[one["file"]] == one["sha256"] for one in figures)
    page = (whole.folder / "index.html").read_text()
    on_page = figures_on(page)
    assert [one.place for one in on_page] == [one["place"] for one in figures]
    accuracy = json.loads((run_folder / "result.json").read_text())["metrics"]["test"]["accuracy"]
    assert f"{accuracy:.4g}" in [one.text for one in on_page if one.place == "/metrics/test/accuracy"]
    for target in re.findall(r'<a [^>]*href="([^"#]+)"', page):
        assert (whole.folder / target).is_file(), target


def test_an_old_dossier_is_replaced_whole_and_not_lost(run_folder, tmp_path, monkeypatch):
    target = tmp_path / "dossier"
    first = write_dossier(run_folder, target)
    assert write_dossier(run_folder, target).digest == first.digest

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writing, "render", fail)
        with pytest.raises(BadInput, match="No space left"):
            write_dossier(run_folder, target)
    assert verify_dossier(target, first.digest) == []
    rename = Path.rename

    def fail_once(self, to):
        if self.name.endswith(".partial"):
            fail()
        return rename(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_once)
        with pytest.raises(BadInput, match="No space left"):
            write_dossier(run_folder, target)
    assert verify_dossier(target, first.digest) == []
    assert [path.name for path in tmp_path.iterdir()] == ["dossier"]


def test_a_dossier_of_a_killed_swap_comes_back(run_folder, tmp_path):
    target = tmp_path / "dossier"
    first = write_dossier(run_folder, target)
    target.rename(tmp_path / ".dossier.old")
    with pytest.raises(RuntimeError), writing.replaced_folder(target):
        raise RuntimeError
    assert verify_dossier(target, first.digest) == []


@pytest.mark.parametrize(
    ("out", "words"),
    [
        *((name, "is no dossier") for name in ("mine", "extension", "more")),
        ("mine/thesis.txt/below", "is a file, not a folder"),
    ],
)
def test_a_folder_of_somebody_else_is_left_alone(run_folder, copy, tmp_path, out, words):
    for name in ("mine", "extension"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("x")
    (tmp_path / "extension" / "manifest.json").write_text('{"sha256": {}}')
    (copy.rename(tmp_path / "more") / "thesis.txt").write_text("x")
    with pytest.raises(BadInput, match=words):
        write_dossier(run_folder, tmp_path / out)
    assert (tmp_path / out.partition("/")[0] / "thesis.txt").read_text() == "x"


def test_a_folder_that_is_no_run_or_no_dossier_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"has no study\.toml"):
        write_dossier(tmp_path)
    with pytest.raises(BadInput, match="is no dossier"):
        verify_dossier(tmp_path)


def test_evidence_is_whole_or_refused(run_folder, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(run_folder, broken)
    (broken / "audit.json").write_text("{")
    with pytest.raises(BadInput, match=r"audit\.json: is damaged"):
        write_dossier(broken)
    (broken / "audit.json").unlink()
    (broken / "audit.json").symlink_to(run_folder / "audit.json")
    with pytest.raises(BadInput, match=r"audit\.json: is a link"):
        write_dossier(broken)
    (broken / "audit.json").unlink()
    assert "nobody attacked what left" in (write_dossier(broken).folder / "index.html").read_text()


def test_places_and_forms():
    assert at_pointer({"a/b~": [1, {"c": 2}]}, pointer("a/b~", 1, "c")) == 2
    lines = [{"kind": "weights", "bytes": 5}, {"kind": "metrics", "bytes": 1}, {"kind": "weights", "bytes": 7}]
    assert (in_lines(lines, "lines"), in_lines(lines, "sum bytes kind=weights")) == (3, 12)
    assert in_lines(lines, "count kind=weights") == 2
    assert [in_bytes(n) for n in (0, 999, 1000, 1234567, 5e12)] == ["0 B", "999 B", "1 kB", "1.23 MB", "5e+03 GB"]
    assert shown([], "list") == "nothing"
    for place in ("/x", "/0", "nonsense"):
        with pytest.raises(NoFigure):
            at_pointer({"a": 1}, place) if place.startswith("/") else in_lines(lines, place)
    with pytest.raises(NoFigure):
        shown(True, "number")
    assert Evidence(Path("nowhere")).figure("x.json", "/a") is None


def test_the_commands_write_and_verify(run_folder, tmp_path, capsys):
    target = str(tmp_path / "d o s")
    assert run_app(["report", str(run_folder), "--dossier", "--out", target]) == 0
    printed = capsys.readouterr().out
    digest = printed.split()[-1]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert run_app(["report", "verify", target, "--digest", digest, "--run", str(run_folder)]) == 0
    assert "holds" in capsys.readouterr().out
    (Path(target) / "model_card.md").write_text("better")
    assert run_app(["report", "verify", target]) == 1
    found = capsys.readouterr()
    assert "model_card.md: was changed" in found.out
    assert "does not hold: 1 problem" in found.err
    assert run_app(["report", str(run_folder), "--dossier", "--pdf"]) == 2
    assert "--dossier: takes no --pdf" in capsys.readouterr().err


def test_a_task_of_a_plugin_needs_no_plugin(run_folder, tmp_path):
    """A dossier reads a folder as data: it runs no code that the folder names."""
    sent = Path(shutil.copytree(run_folder, tmp_path / "run"))
    card, tensors = read_model_file(sent / "model.safetensors")
    other = card.model_copy(update={"task": {"name": "focal <b>"}, "plugins": {"theirs.py": "0" * 64}})
    (sent / "model.safetensors").write_bytes(model_file(tensors, other))
    result = json.loads((sent / "result.json").read_text())
    result["model_sha256"] = sha256_of(sent / "model.safetensors")
    (sent / "result.json").write_text(json.dumps(result))
    note_files(sent)
    done = write_dossier(sent)
    assert r"does the task focal \<b\>" in (done.folder / "model_card.md").read_text()
    assert verify_dossier(done.folder, done.digest) == []


def rewritten(run_folder: Path, folder: Path, change) -> Path:
    """A copy of a run whose result was changed and noted anew."""
    shutil.copytree(run_folder, folder)
    result = json.loads((folder / "result.json").read_text())
    change(result)
    (folder / "result.json").write_text(json.dumps(result))
    note_files(folder)
    return folder


def words_of(page: Path) -> str:
    """A page without its tags."""
    return re.sub("<[^>]*>", "", page.read_text())


def test_codes_and_latents_of_patients_are_not_called_synthetic(run_folder, tmp_path):
    by_kind = {"weights": 9, "latents": 5}
    sent = rewritten(run_folder, tmp_path / "latents", lambda result: result["communication"].update(by_kind=by_kind))
    done = write_dossier(sent)
    for text in (words_of(done.folder / "index.html"), (done.folder / "data_sheet.md").read_text()):
        assert "No synthetic images, and nothing that makes them" in text
        assert "latents left: computed from real training images, and an attacker may rebuild these" in text
        assert "Made by" not in text
    by_kind["generator"] = 7
    both = rewritten(run_folder, tmp_path / "both", lambda result: result["communication"].update(by_kind=by_kind))
    done = write_dossier(both)
    assert "Made by" in words_of(done.folder / "index.html")
    sheet = (done.folder / "data_sheet.md").read_text()
    assert "| generator | 7 B |" in sheet
    assert "| latents |" not in sheet
    assert "latents left: computed from real" in sheet
    assert verify_dossier(done.folder, done.digest) == []


@pytest.mark.parametrize("gone", ["its end", "a ledger", "all ledgers"])
def test_a_ledger_that_ends_before_the_result_says_is_found(run_folder, tmp_path, gone):
    sent = tmp_path / "run"
    shutil.copytree(run_folder, sent)
    ledger = sorted((sent / "ledger").iterdir())[0]
    if gone == "its end":
        ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    elif gone == "a ledger":
        ledger.unlink()
    else:
        shutil.rmtree(sent / "ledger")
    done = write_dossier(sent)
    problems = verify_dossier(done.folder, done.digest)
    assert len(problems) == (len(list((run_folder / "ledger").iterdir())) if gone == "all ledgers" else 1)
    assert "is missing" in problems[0]
    page = words_of(done.folder / "index.html")
    assert f"The ledger of {ledger.stem} does not hold: ledger/{ledger.name}, line" in page
    assert ledger.stem in open_run(sent).ledgers.broken


def test_a_deployed_coordinators_folder_has_no_ledgers(run_folder, tmp_path):
    result = json.loads((run_folder / "result.json").read_text())
    assert read_ledgers(tmp_path, result, {"data": {"source": "at-sites"}}) == Ledgers({}, {})
    assert len(read_ledgers(tmp_path, result, {}).broken) == len(result["ledgers"])
    for damaged in ("x", {"lines": "3", "digest": ""}, {"lines": 0, "digest": ""}):
        [why] = read_ledgers(tmp_path, {"ledgers": {"../site": damaged}}, {}).broken.values()
        assert "result.json: what it says about the ledger" in why


def test_an_interval_stands_beside_its_own_value_only(run_folder, tmp_path):
    """Where each site has a model, `metrics.test` is a mean over models, and the interval is of something else."""

    def change(result, model):
        ends = {"value": 0.812345, "low": 0.7, "high": 0.9}
        intervals = {"split": "test", "unit": "image", "pooled": {"accuracy": ends}, "per_site": {}}
        result["metrics"] |= {"test": {"accuracy": 0.31}, "intervals": intervals}
        result["model"] = model

    one, own = "one for all sites", "one of each site"
    of_one = write_dossier(rewritten(run_folder, tmp_path / "one", lambda result: change(result, one))).folder
    of_each = write_dossier(rewritten(run_folder, tmp_path / "each", lambda result: change(result, own))).folder
    card = (of_one / "model_card.md").read_text()
    assert "(intervals: bootstrap by image)" in card
    assert "| accuracy | 0.31 | 0.7 to 0.9 |" in card
    assert "(bootstrap by image)" in words_of(of_one / "index.html")
    card = (of_each / "model_card.md").read_text()
    assert "| accuracy | 0.31 |\n" in card
    assert "| accuracy | 0.8123 | 0.7 to 0.9 |" in card
    assert "Each image by its own site's model" in card
    page = words_of(of_each / "index.html")
    assert "the mean over the sites' models" in html.unescape(page)
    figures = [one["place"] for one in json.loads((of_each / "figures.json").read_text())]
    at = figures.index("/metrics/test/accuracy")
    assert figures[at + 1] == "/metrics/intervals/unit"
    assert "/metrics/intervals/pooled/accuracy/value" in figures
    assert verify_dossier(of_each) == []


@pytest.mark.parametrize("name", ["evidence/../../outside.json", "../outside.json", "/outside.json"])
def test_names_that_lead_outside_are_not_followed(copy, run_folder, name):
    sealed_anew(copy, {name: "0" * 64})
    assert verify_dossier(copy, run=run_folder) == ["manifest.json: is damaged"]


@pytest.mark.parametrize("content", [None, "{", "1"])
def test_a_result_that_is_gone_or_damaged_is_a_problem_and_no_traceback(copy, run_folder, content):
    result = copy / "evidence" / "result.json"
    result.unlink() if content is None else result.write_text(content)
    assert any("was not compared" in text for text in verify_dossier(copy, run=run_folder))


@pytest.mark.parametrize(
    ("rehearsal", "words"),
    [(True, "This was a rehearsal: one hand drew the keys of all sites"), (False, "compared with another site on")],
)
def test_a_dossier_at_a_site_says_whether_its_keys_were_its_own(run_folder, tmp_path, rehearsal, words):
    run = tmp_path / "kit" / "runs" / "run"
    shutil.copytree(run_folder, run)
    (tmp_path / "kit" / "local").mkdir()
    (tmp_path / "kit" / "local" / "site.toml").write_text("")
    told = {"rehearsal": rehearsal, "at": "2026-11-18 20:00:00", "roster": {"sites": {"graz": {}, "linz": {}}}}
    (tmp_path / "kit" / "local" / "confirmed.json").write_text(json.dumps(told))
    made = write_dossier(run, tmp_path / "dossier")
    assert words in (made.folder / "index.html").read_text()
    assert verify_dossier(made.folder, made.digest, run) == []
