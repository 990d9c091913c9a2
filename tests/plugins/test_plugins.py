"""A plug-in file beside a study: runs, workers, resume, audit, predict; and a method put in by hand."""

import json

import numpy as np
import pytest
import tomli_w
from PIL import Image
from plugin_studies import TABLES, StopAfter, forked, with_engine
from run_folders import assert_same_run, result

import polyclinic
from polyclinic import plugins
from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.ledger import verify
from polyclinic.methods import METHODS
from polyclinic.methods.fedavg import FedAvg
from polyclinic.runner.run.run import run
from polyclinic.study import Study, load_study

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


def test_a_plugin_begins_at_the_study_or_on_the_command_line_at_the_working_folder(plugin, tmp_path, monkeypatch):
    (tmp_path / "studies").mkdir()
    file = tmp_path / "studies" / "study.toml"
    name, tables = plugin.relative_to(tmp_path), tomli_w.dumps(TABLES)
    file.write_text(f'plugins = ["../{name}"]\n{tables}')
    monkeypatch.chdir(tmp_path)
    assert load_study(file).plugins == (str(plugin),)
    file.write_text(tables)
    assert load_study(file, [f'plugins=["{name}"]']).plugins == (str(plugin),)


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
    from polyclinic.runner.run.assembly import Assembly, assemble_from

    spec = Assembly(study, prepare(study.data, study.sites), tmp_path / "run").worker_spec
    plugin.write_text(plugin.read_text() + "\n# another line\n")
    plugins.forget()
    with pytest.raises(BadInput, match="has changed since the run was begun"):
        assemble_from(spec)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("mine.py", "plugins: must be a list of modules and files"),
        (["nowhere.py"], r"plugins: .*nowhere\.py cannot be read"),
        (["no_such_module_at_all"], "plugins: there is no module 'no_such_module_at_all' here"),
        (["./good"], r"'\./good' is neither a module"),
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
