"""A third party's code, as a plug-in file, a module or an installed package: runs, workers, resume, audit, predict."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import ForkedWorker, run_script
from run_folders import assert_same_run, result
from test_registry import install

import polyclinic
from polyclinic import plugins
from polyclinic.cli import run_app
from polyclinic.cli.new_plugin import write_plugin
from polyclinic.engines import in_process
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.leaving.ledger import verify
from polyclinic.methods import METHODS
from polyclinic.methods.fedavg import FedAvg
from polyclinic.registry import GROUPS
from polyclinic.runner import engines, model_file
from polyclinic.runner import predict as prediction
from polyclinic.runner.recorder import Display
from polyclinic.runner.run import run
from polyclinic.study import Study, load_study

EVERYTHING = Path(__file__).with_name("plugin_everything.py")
TABLES = {
    "data": {"source": "squares", "size": 16, "samples": 60},
    "sites": {"partition": "in-turn", "count": 3},
    "task": {"name": "smoothed"},
    "model": {"backbone": "one-layer"},
    "optimizer": {"batch_size": 8},
    "method": {"name": "fed-prototypes", "rounds": 2},
    "audit": {"keep_parcels": 1},
    "policy": {"kinds": ["weights", "metrics", "statistics", "prototypes"]},
    "engine": {"workers": 1, "device": "cpu"},
}


@pytest.fixture
def plugin(tmp_path) -> Path:
    """A plug-in file beside a study."""
    return Path(shutil.copy(EVERYTHING, tmp_path / "everything.py"))


@pytest.fixture
def study(plugin) -> Study:
    return Study(plugins=[str(plugin)], **TABLES)


@pytest.fixture
def grows_at_once(monkeypatch):
    """`workers = "auto"` starts worker processes at the second call of several sites; each is a process of its own."""
    monkeypatch.setattr(in_process, "PAYS_AFTER", -1.0)
    monkeypatch.setattr(in_process, "cores", lambda: 2)
    return forked(monkeypatch)


def forked(monkeypatch) -> list:
    started = []

    class Noted(ForkedWorker):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(engines, "WorkerProcess", Noted)
    return started


def with_engine(study: Study, **changes) -> Study:
    return study.with_settings({f"engine.{name}": value for name, value in changes.items()})


class StopAfter(Display):
    """Stops a run when a round is done, as Ctrl-C would."""

    def __init__(self, round: int) -> None:
        self.round = round

    def round_done(self, line, rounds):
        if line["round"] == self.round:
            raise KeyboardInterrupt


# --- a plug-in file with one of each ------------------------------------------------------------------


def test_a_file_with_one_of_each_runs_and_its_kind_is_in_the_ledger(study, tmp_path):
    done = run(study, tmp_path / "run")
    assert done["method"] == "fed-prototypes"
    lines = verify(tmp_path / "run" / "ledger" / "site-1.jsonl")
    assert [line["kind"] for line in lines].count("prototypes") == 1
    assert done["communication"]["by_kind"]["prototypes"] > 0
    (digest,) = json.loads((tmp_path / "run" / "plugins.json").read_text())["plugins"].values()
    assert len(digest) == 64


def test_two_workers_and_workers_that_come_in_mid_run_give_the_same(study, tmp_path, monkeypatch, grows_at_once):
    run(study, tmp_path / "alone")
    run(with_engine(study, workers=2), tmp_path / "two")
    assert len(grows_at_once) == 2
    run(with_engine(study, workers="auto"), tmp_path / "auto")
    assert len(grows_at_once) == 4
    for folder in ("two", "auto"):
        assert_same_run(tmp_path / folder, tmp_path / "alone")


def test_a_resumed_run_is_the_same_run_and_can_be_audited_and_predicted_with(study, tmp_path, monkeypatch):
    run(study, tmp_path / "alone")
    forked(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(with_engine(study, workers=2), tmp_path / "run", display=StopAfter(1))
    plugins.forget()  # as in a new process
    run(None, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "alone")

    plugins.forget()
    report = polyclinic.audit(tmp_path / "run")
    found = {one["kind"]: [f["attack"] for f in one["findings"]] for one in report["parcels"]}
    assert found["prototypes"] == ["looking"]
    assert found["weights"][-1] == "looking"
    assert "gradient-inversion" in found["weights"]
    assert report["verdicts"]["prototypes"]["verdict"] == "leaks"

    plugins.forget()
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "black.png")
    with pytest.raises(BadInput, match=rf"a model does not choose what runs here; .* add --plugin {study.plugins[0]}$"):
        polyclinic.predict(tmp_path / "run", [tmp_path / "black.png"])
    assert plugins.LOADED == {}
    (said,) = polyclinic.predict(tmp_path / "run", [tmp_path / "black.png"], plugins=study.plugins)
    assert said.values["class"] in ("left", "right")


def test_a_file_that_has_changed_is_refused(study, plugin, tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "run", display=StopAfter(1))
    original = plugin.read_text()
    plugin.write_text(original + "\n# another line\n")
    words = r"^plugins: .*everything\.py has changed since the run was begun .*; bring the old file back"
    for attempt in (
        lambda: load_study(tmp_path / "run" / "study.toml"),
        lambda: polyclinic.audit(tmp_path / "run"),
        lambda: run(study, tmp_path / "run", resume=True),
    ):
        plugins.forget()
        with pytest.raises(BadInput, match=words):
            attempt()
    for command in (["run", "--resume", "--out"], ["audit"], ["forgetting"]):
        plugins.forget()
        assert run_app([*command, str(tmp_path / "run")]) == 2
        assert "has changed since the run was begun" in capsys.readouterr().err
    plugin.write_text(original)
    plugins.forget()
    run(None, tmp_path / "run", resume=True)

    plugin.write_text(original + "\n# another line\n")
    plugins.forget()
    with pytest.raises(BadInput, match=r"needs .*everything\.py as it was when the model was made"):
        polyclinic.predict(tmp_path / "run", [tmp_path], plugins=[str(plugin)])


def test_a_file_that_has_moved_may_be_named_again_if_it_is_the_same(study, plugin, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "run", display=StopAfter(1))
    moved = plugin.rename(tmp_path / "moved.py")
    plugins.forget()
    with pytest.raises(BadInput, match=r"everything\.py cannot be read"):
        load_study(tmp_path / "run" / "study.toml")
    there = load_study(tmp_path / "run" / "study.toml", [f'plugins=["{moved}"]'])
    run(there, tmp_path / "run", resume=True)
    assert result(tmp_path / "run")["rounds"] == 2


def test_commands_on_a_run_take_the_new_place_of_a_plugin(study, plugin, tmp_path, monkeypatch, capsys):
    """The run says where its plug-in was; `--plugin` where it is now, seen from the working folder."""
    done = run(study.with_settings({"method": {"name": "cwt", "rounds": 1}}), tmp_path / "run")
    (tmp_path / "new").mkdir()
    moved = plugin.rename(tmp_path / "new" / "moved.py")
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "black.png")
    monkeypatch.chdir(tmp_path / "new")
    commands = {
        "audit": ["audit", str(done.folder), "--kinds", "weights", "--quiet"],
        "forgetting": ["forgetting", str(done.folder), "--quiet"],
        "predict": ["predict", str(done.folder), str(tmp_path / "black.png")],
    }
    for name, command in commands.items():
        plugins.forget()
        assert run_app(command) == 2
        words = f"add --plugin {plugin}" if name == "predict" else "everything.py cannot be read"
        assert words in capsys.readouterr().err
    for name, command in commands.items():
        if name != "audit":  # the slow one: its way is that of forgetting
            plugins.forget()
            assert run_app([*command, "--plugin", "moved.py"]) == 0, capsys.readouterr().err
    moved.write_text(moved.read_text() + "\n# another line\n")
    for name, words in (("audit", "has changed since the run was begun"), ("predict", "none of the plug-ins is")):
        plugins.forget()
        assert run_app([*commands[name], "--plugin", "moved.py"]) == 2
        assert words in capsys.readouterr().err


def test_a_worker_refuses_a_file_that_was_edited_after_the_run_began(study, plugin, tmp_path):
    from polyclinic.data.parts import prepare
    from polyclinic.runner.assembly import Assembly, assemble_from

    spec = Assembly(study, prepare(study.data, study.sites), tmp_path / "run").worker_spec
    plugin.write_text(plugin.read_text() + "\n# another line\n")
    plugins.forget()
    with pytest.raises(BadInput, match="has changed since the run was begun"):
        assemble_from(spec)


def test_paths_of_plugins_begin_at_the_study(study, plugin, tmp_path, monkeypatch):
    tables = study.as_tables()
    assert tables["plugins"] == [str(plugin)]
    (tmp_path / "study.toml").write_text(study.to_toml().replace(str(plugin), "everything.py"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_study(Path("../study.toml")).plugins == (str(plugin),)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("mine.py", "plugins: must be a list of modules and files"),
        (["nowhere.py"], r"plugins: .*nowhere\.py cannot be read"),
        (["no_such_module_at_all"], "plugins: there is no module 'no_such_module_at_all' here"),
    ],
)
def test_mistakes_in_the_list_are_one_sentence(value, words):
    with pytest.raises(BadInput, match=words):
        Study(plugins=value, **TABLES)


# --- a new kind of parcel -----------------------------------------------------------------------------


def test_a_new_kind_that_the_policy_does_not_name_is_refused_before_the_run(study, plugin, tmp_path, capsys):
    tables = {name: table for name, table in TABLES.items() if name != "policy"}
    words = "policy.kinds: lacks 'prototypes', which 'prototypes' of 'fed-prototypes' releases; add it there"
    with pytest.raises(BadInput) as error:
        Study(plugins=[str(plugin)], **tables)
    assert str(error.value) == words
    file = tmp_path / "study.toml"
    file.write_text(study.to_toml().replace('    "prototypes",\n', ""))
    assert run_app(["study", "check", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_an_operation_that_releases_no_kind_is_refused_before_the_run(study, plugin):
    plugin.write_text(plugin.read_text().replace('@operation("prototypes")', '@operation("prototipes")'))
    plugins.forget()
    with pytest.raises(
        BadInput, match=r"releases 'prototipes', which is no kind of parcel; add a class of it to KINDS"
    ):
        Study(plugins=[str(plugin)], **TABLES)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (
            '("prototypes", "wieghts")',
            r"kinds of the attack 'looking': no such choice: 'wieghts'.*did you mean 'weights'",
        ),
        ('"weights"', "the attack 'looking' lacks kinds, a tuple with the kinds of parcel that it fits"),
    ],
)
def test_an_attack_that_fits_no_kind_is_refused_before_the_run(plugin, kinds, words):
    plugin.write_text(plugin.read_text().replace('("prototypes", "weights")', kinds))
    with pytest.raises(BadInput, match=words):
        Study(plugins=[str(plugin)], **TABLES)


def test_an_unknown_kind_is_refused_by_policy_and_parcel(tiny):
    with pytest.raises(BadInput, match=r"policy\.kinds\.0: no such choice: 'prototypes'"):
        tiny("fedavg", {"policy.kinds": ["prototypes"]})
    with pytest.raises(Exception, match="'prototypes' is not a kind of parcel"):
        polyclinic.Parcel("prototypes", {})


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


@pytest.mark.parametrize("way", ["entry points", "module"])
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
    with pytest.raises(BadInput, match=r"made with the package fed-median 0\.1 as it was then"):
        load_study(tmp_path / "run" / "study.toml")


def test_a_model_of_a_package_that_has_changed_is_refused(package, tmp_path):
    done = run(median_study().with_settings({"method.rounds": 1}), tmp_path / "run")
    card, _ = model_file.read_model_file(done.folder / "model.safetensors")
    assert list(card.installed) == ["fed-median 0.1"]
    prediction.load_predictor(done.folder)
    (package / "fed_median" / "backbone.py").open("a").write("\n# another line\n")
    with pytest.raises(BadInput, match=r"model\.safetensors was made with the package fed-median 0\.1 as it was then"):
        prediction.load_predictor(done.folder)


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
    assert "4 passed" in done.stdout


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


# --- by hand ------------------------------------------------------------------------------------------


class ByHand(FedAvg):
    name: str = "by-hand"  # type: ignore[assignment]


@pytest.fixture
def by_hand(monkeypatch, tiny) -> Study:
    monkeypatch.setitem(METHODS, "by-hand", ByHand)
    return tiny("by-hand", rounds=2)


def test_a_method_put_in_by_hand_stays_in_one_process(by_hand, tmp_path, grows_at_once):
    run(with_engine(by_hand, workers="auto"), tmp_path / "run")
    assert result(tmp_path / "run")["failures"] == []
    assert grows_at_once == []


@pytest.mark.parametrize("engine", [{"workers": 2}, {"name": "ray"}, {"name": "nvflare"}, {"deadline": 60.0}])
def test_a_method_put_in_by_hand_is_refused_before_a_run_in_other_processes(by_hand, tmp_path, engine):
    with pytest.raises(BadInput, match=r"^method\.name: 'by-hand' was put into METHODS by hand.* in plugins"):
        run(with_engine(by_hand, **engine), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(BadInput, match="was put into METHODS by hand"):
        polyclinic.compare(by_hand, ["by-hand"], tmp_path / "both")


# --- a folder or a model of somebody else -------------------------------------------------------------


MARKING = "open({mark!r}, 'a').write('x')\nMETHODS = {{}}\nfrom polyclinic import FedAvg\nMETHODS['theirs'] = FedAvg\n"


@pytest.mark.parametrize("place", ["theirs.py", "{folder}/theirs.py"])
def test_a_run_folder_runs_no_code_that_came_with_it(study, tmp_path, place):
    run(study, tmp_path / "run")
    folder, mark = tmp_path / "run", tmp_path / "mark"
    (folder / "theirs.py").write_text(MARKING.format(mark=str(mark)))
    toml = (folder / "study.toml").read_text()
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
    ("content", "words"),
    [
        ("import sys\nsys.exit(3)", r"cannot be loaded: SystemExit: 3; mend the file"),
        ("SOURCE = {}\nMETHODS = {}", r"has a dict SOURCE; did you mean SOURCES\?"),
        ("ATTACKS = [1]", r"ATTACKS in .* must be a dict of names and classes"),
        ("METHODS = {3: 4}", r"a key of METHODS in .* is no text"),
        (
            "from polyclinic import FedAvg\nMETHODS = {'other': FedAvg}",
            r"'other' in methods calls itself 'fedavg'; give",
        ),
        (
            "from polyclinic import Source\nclass S(Source): pass\nSOURCES = {'s': S}",
            r"'s' in sources lacks load; define",
        ),
    ],
)
def test_a_mistake_in_a_plugin_is_one_sentence(tmp_path, content, words):
    file = tmp_path / "wrong.py"
    file.write_text(content)
    with pytest.raises(BadInput, match=words):
        plugins.load([str(file)])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '{"head": ("flatten", "linear")}',
            '{"head": ("flatten", "lines")}',
            r"cannot take 1 x 16 x 16 .*lines",
        ),
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
        (
            "images.astype(np.uint8)",
            "images",
            WorkFailed,
            r"'squares' of a plug-in cannot be loaded: ValueError",
        ),
        (
            "index[k :: len(self.names)]",
            "index",
            BadInput,
            r"'in-turn' assigns an image twice",
        ),
        ("index[k :: len(self.names)]", "np.array([k])", BadInput, r"assigns an image twice, or one of another split"),
    ],
)
def test_images_that_a_plugin_makes_or_spreads_wrongly_are_one_sentence(plugin, old, new, error, words):
    from polyclinic.data.parts import prepare

    plugin.write_text(plugin.read_text().replace(old, new))
    study = Study(plugins=[str(plugin)], **TABLES)
    with pytest.raises(error, match=words):
        prepare(study.data, study.sites)


def test_an_attack_that_gives_no_findings_is_named(study, plugin, tmp_path):
    plugin.write_text(plugin.read_text().replace("return [Finding", "found = [Finding"))
    done = run(Study(plugins=[str(plugin)], **TABLES).with_settings({"method.rounds": 1}), tmp_path / "run")
    with pytest.raises(WorkFailed, match=r"the attack 'looking' \(plug-in .*\) gave None, and must give"):
        polyclinic.audit(done.folder, kinds=["prototypes"])


def test_a_plugin_that_is_neither_file_nor_module(tmp_path):
    with pytest.raises(BadInput, match=r"'\./good' is neither a module, such as my_package\.module, nor a file"):
        plugins.load(["./good"])


def test_a_model_names_only_the_plugins_that_its_network_and_task_come_from(study, plugin, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(
        "from polyclinic import FedAvg\nclass Mine(FedAvg):\n    name: str = 'mine'\nMETHODS = {'mine': Mine}\n"
    )
    both = study.with_settings({"plugins": [str(plugin), str(other)], "method": {"name": "mine", "rounds": 1}})
    done = run(both, tmp_path / "run")
    card, _ = model_file.read_model_file(done.folder / "model.safetensors")
    assert list(card.plugins) == [str(plugin)]
