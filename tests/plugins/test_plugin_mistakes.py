"""Mistakes in a plug-in are one sentence, and a stranger's folder or model runs no code."""

from __future__ import annotations

import re

import pytest
from plugin_studies import TABLES

import polyclinic
from polyclinic.cli import run_app
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.runner.predict import model_file
from polyclinic.runner.predict import predict as prediction
from polyclinic.runner.run.run import run
from polyclinic.study import Study

# --- a folder or a model of somebody else -------------------------------------------------------------


MARKING = "open({mark!r}, 'a').write('x')\nMETHODS = {{}}\nfrom polyclinic import FedAvg\nMETHODS['theirs'] = FedAvg\n"


@pytest.mark.parametrize("place", ["theirs.py", "{folder}/theirs.py"])
def test_a_run_folder_runs_no_code_that_came_with_it(study, tmp_path, place):
    run(study, tmp_path / "run")
    folder, mark = tmp_path / "run", tmp_path / "mark"
    (folder / "theirs.py").write_text(MARKING.format(mark=str(mark)))
    toml = (folder / "study.toml").read_text().split("\n", 1)[1]  # the first line is the digest of the others
    (folder / "study.toml").write_text(toml.replace(str(study.plugins[0]), place.format(folder=folder)))
    (folder / "plugins.json").unlink()
    for command in (["audit", str(folder)], ["run", "--resume", "--out", str(folder)]):
        assert run_app(command) == 2
    with pytest.raises(BadInput, match=r"a file that came with it and is not run; read the file, put it elsewhere"):
        polyclinic.audit(folder)
    assert not mark.exists()


def test_a_model_runs_no_code_that_came_with_it(study, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    done = run(study, tmp_path / "run")
    (tmp_path / "sent").mkdir()
    (tmp_path / "sent" / "theirs.py").write_text(MARKING.format(mark=str(mark)))
    card, tensors = model_file.read_model_file(done.folder / "model.safetensors")
    forged = card.model_copy(update={"plugins": {"theirs.py": "0" * 64}})
    (tmp_path / "sent" / "model.safetensors").write_bytes(model_file.model_file(tensors, forged))
    monkeypatch.chdir(tmp_path / "sent")
    with pytest.raises(BadInput, match="a file that came with it and is not run"):
        prediction.load_predictor(tmp_path / "sent" / "model.safetensors")
    assert not mark.exists()


# --- mistakes in a plug-in ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('{"head": ("flatten", "linear")}', '{"head": ("flatten", "lines")}', r"cannot take 1 x 16 x 16 .*lines"),
        ("nn.Linear(channels * size * size, outputs)", "nn.Linear(channels * size * size, 5)", r"gives \(2, 5\) for 2"),
        ("    stages: ClassVar", "    parts: ClassVar", r"'one-layer' in backbones lacks stages; define it"),
        ("    kinds: ClassVar", "    fits: ClassVar", r"'looking' in attacks lacks kinds; define it"),
        ("    width: ClassVar[int] = 3\n", "", r"'means' in encoders lacks width; define it"),
    ],
)
def test_a_mistake_in_a_class_is_found_when_the_study_is_checked(plugin, old, new, words):
    text = plugin.read_text()
    assert old in text
    plugin.write_text(text.replace(old, new))
    with pytest.raises(BadInput, match=words):
        Study(plugins=[str(plugin)], **TABLES)


def test_a_source_or_a_partition_that_was_edited_makes_other_images(study, plugin):
    from polyclinic.data.parts import prepare

    before = prepare(study.data, study.sites)
    again = Study(plugins=[str(plugin)], **TABLES)
    assert prepare(again.data, again.sites).folder == before.folder
    for old, new in (("= 250", "= 200"), ("index[k ::", "index[::-1][k ::")):
        plugin.write_text(plugin.read_text().replace(old, new))
        edited = Study(plugins=[str(plugin)], **TABLES)
        now = prepare(edited.data, edited.sites)
        assert now.folder != before.folder
        before = now


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ("images.astype(np.uint8)", "images", WorkFailed, r"'squares' of a plug-in cannot be loaded: ValueError"),
        ("index[k :: len(self.names)]", "index", BadInput, r"'in-turn' assigns an image twice"),
        ("index[k :: len(self.names)]", "np.array([k])", BadInput, r"assigns an image twice, or one of another split"),
    ],
)
def test_images_that_a_plugin_makes_or_spreads_wrongly_are_one_sentence(plugin, old, new, error, words):
    from polyclinic.data.parts import prepare

    plugin.write_text(plugin.read_text().replace(old, new))
    study = Study(plugins=[str(plugin)], **TABLES)
    with pytest.raises(error, match=words):
        prepare(study.data, study.sites)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "return [Finding",
            "found = [Finding",
            r"the attack \(plug-in .*\) gave None, and must give a list of Finding",
        ),
        ("return [Finding", "1 / 0; return [Finding", r"the attack \(plug-in .*\) failed: .*division by zero"),
        (
            "    def attack(",
            "    def planted(self, seen, truth):\n        return 1 / 0\n\n    def attack(",
            "code of a plug-in",  # nothing is planted where no reference says what the parcel should be
        ),
    ],
)
def test_an_attack_that_fails_leaves_its_kind_not_tested(study, plugin, tmp_path, old, new, why):
    plugin.write_text(plugin.read_text().replace("Verdict(True", "Verdict(False").replace(old, new))
    done = run(Study(plugins=[str(plugin)], **TABLES).with_settings({"method.rounds": 1}), tmp_path / "run")
    report = polyclinic.audit(done.folder, kinds=["prototypes"])
    assert report["complete"]
    assert report["verdicts"]["prototypes"]["verdict"] == "not tested"
    assert any(re.search(why, gap["why"]) for gap in report["parcels"][0]["not_tried"])


def test_a_model_names_only_the_plugins_that_its_network_and_task_come_from(study, plugin, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(
        "from polyclinic import FedAvg\nclass Mine(FedAvg):\n    name: str = 'mine'\nMETHODS = {'mine': Mine}\n"
    )
    both = study.with_settings({"plugins": [str(plugin), str(other)], "method": {"name": "mine", "rounds": 1}})
    done = run(both, tmp_path / "run")
    card, _ = model_file.read_model_file(done.folder / "model.safetensors")
    assert list(card.plugins) == [str(plugin)]
