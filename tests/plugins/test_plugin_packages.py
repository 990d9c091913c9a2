"""A third party's installed package, and the one that `polyclinic new-plugin` writes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from plugin_studies import StopAfter, forked, with_engine
from processes import run_script
from run_folders import assert_same_run
from test_registry import install

import polyclinic
from polyclinic import plugins
from polyclinic.cli import run_app
from polyclinic.cli.plugins import write_plugin
from polyclinic.errors import BadInput
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
