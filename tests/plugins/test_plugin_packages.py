"""Plug-ins in packages, and their mistakes."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from plugin_studies import TABLES, StopAfter, forked, with_engine
from processes import run_script
from run_folders import assert_same_run
from test_registry import install

import polyclinic
from polyclinic import plugins
from polyclinic.cli import run_app
from polyclinic.cli.plugins import write_plugin
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.registry import GROUPS
from polyclinic.runner.predict import model_file
from polyclinic.runner.predict import predict as prediction
from polyclinic.runner.run.run import run
from polyclinic.study import Study, load_study

# --- an installed package -----------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """The package that `polyclinic new-plugin fed-median` writes, installed: on sys.path here and in new processes."""
    write_plugin(tmp_path / "fed-median")
    packages = tmp_path / "fed-median" / "src"
    text = (tmp_path / "fed-median" / "pyproject.toml").read_text()
    points = {}
    for group in ("methods", "sources", "backbones"):
        section = text.split(f'"polyclinic.{group}"]\n')[1].split("\n")[0]
        points[f"polyclinic.{group}"] = section.replace('"', "")
    install(packages, "fed-median", points)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *sys.path]))
    yield packages
    for name in [name for name in sys.modules if name.split(".")[0] == "fed_median"]:
        del sys.modules[name]


def median_study(**changes) -> Study:
    tables = {
        "data": {"source": "fed-median-stripes", "size": 16, "samples": 60},
        "sites": {"partition": "iid", "count": 3},
        "model": {"backbone": "fed-median-net"},
        "optimizer": {"batch_size": 8},
        "method": {"name": "fed-median", "rounds": 2},
        "audit": {"keep_parcels": 1},
        "engine": {"workers": 1, "device": "cpu"},
    }
    return Study(**tables, **changes)


@pytest.mark.parametrize("way", ["entry points", pytest.param("module", marks=pytest.mark.slow)])
def test_an_installed_package_works_everywhere(package, tmp_path, monkeypatch, way):
    study = median_study(**({"plugins": ["fed_median"]} if way == "module" else {}))
    run(study, tmp_path / "alone")
    started = forked(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(with_engine(study, workers=2), tmp_path / "run", display=StopAfter(1))
    assert len(started) == 2
    plugins.forget()
    run(None, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "alone")
    assert polyclinic.audit(tmp_path / "run")["complete"]
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "black.png")
    allowed = ["fed_median"] if way == "module" else []
    (said,) = polyclinic.predict(tmp_path / "run", [tmp_path / "black.png"], allow_import=allowed)
    assert said.values["class"] in ("across", "down")


def test_a_package_that_has_changed_is_refused(package, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(median_study(), tmp_path / "run", display=StopAfter(1))
    (package / "fed_median" / "method.py").open("a").write("\n# another line\n")
    with pytest.raises(BadInput, match=r"made with fed-median 0\.1 as it was then"):
        load_study(tmp_path / "run" / "study.toml")


def test_a_model_of_a_package_that_has_changed_is_refused(package, tmp_path):
    done = run(median_study().with_settings({"method.rounds": 1}), tmp_path / "run")
    card, _ = model_file.read_model_file(done.folder / "model.safetensors")
    assert list(card.installed) == ["fed-median 0.1"]
    prediction.load_predictor(done.folder)
    (package / "fed_median" / "backbone.py").open("a").write("\n# another line\n")
    with pytest.raises(BadInput, match=r"model\.safetensors was made with fed-median 0\.1 as it was then"):
        prediction.load_predictor(done.folder)


@pytest.mark.slow
def test_from_the_command_line_in_processes_of_their_own(package, tmp_path):
    """`compare` starts `polyclinic run`, which was not told of the package."""
    summary = polyclinic.compare(median_study(), ["fed-median"], tmp_path / "both", jobs=1)
    assert set(summary["methods"]) == {"fed-median"}
    run(median_study(), tmp_path / "alone")
    assert_same_run(tmp_path / "both" / "fed-median-seed0", tmp_path / "alone")


def test_the_tests_of_the_new_package_pass(tmp_path):
    write_plugin(tmp_path / "my-plugin")
    script = tmp_path / "run_pytest.py"
    script.write_text(
        "import os, sys, pytest\n"
        f"os.chdir({str(tmp_path / 'my-plugin')!r})\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'no:xdist']))\n"
    )
    done = run_script(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def test_the_new_package_says_how_each_of_the_other_kinds_is_added(tmp_path):
    write_plugin(tmp_path / "my-plugin")
    files = (tmp_path / "my-plugin" / "README.md", *(tmp_path / "my-plugin").rglob("*.toml"))
    said = "".join(file.read_text() for file in (*files, tmp_path / "my-plugin" / "src" / "my_plugin" / "__init__.py"))
    for table, group in GROUPS.items():
        assert table in said
        assert f'[project.entry-points."{group}"]' in said
    named = re.findall(r"`([A-Z][a-z]\w+)`", files[0].read_text())
    assert {"Sites", "Task", "Attack"} <= set(named)
    assert all(hasattr(polyclinic, name) for name in named)


def test_new_plugin_says_what_to_do_next_and_overwrites_nothing(tmp_path, capsys):
    assert run_app(["new-plugin", str(tmp_path / "my-plugin")]) == 0
    assert "pip install -e ." in capsys.readouterr().out
    assert run_app(["new-plugin", str(tmp_path / "my-plugin")]) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err
    assert run_app(["new-plugin", str(tmp_path / "9 lives")]) == 2
    assert "cannot be the name of a package" in capsys.readouterr().err


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
