"""`study check` and `study new` say the same with placeholders for torch as with torch itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polyclinic import plugins
from polyclinic.cli import run_app
from polyclinic.models import build
from polyclinic.study.reading import default_path
from polyclinic.without_torch import need_torch, without_torch

LATENTS = ["method.name=cwt-replay", "replay.space=latents", "model.weights=public", "optimizer.augment=[]"]
#: studies, and mistakes in them
CHECKS = [
    ["method.name=felicia"],
    ["method.name=analytic", "model.backbone=efficientnet-lite0-1024"],
    ["method.name=fedavgg", "optimizer.lrr=0.1", "method.rounds=-1"],
    ["task.name=segmentation"],
    ["model.backbone=resnet18", "model.cut=layer9"],
    ["evaluation.metric=dice"],
    ["method.name=splitnn"],
    ["method.name=fedreplay"],
    ["method.name=fedbn"],
    ["method.name=fedbn", "model.norm=group"],
    ["method.name=fedper", "method.personal_after=layer9"],
    ["privacy.noise=1.0"],
    ["privacy.noise=1.0", "model.norm=group"],
    ["method.name=private-head", "privacy.noise=1.0", "model.backbone=efficientnet-lite0-1024"],
    ["model.backbone=efficientnet-lite0", "model.weights=public"],
    ["model.backbone=lenet5", "model.weights=public"],
    [*LATENTS, "model.backbone=efficientnet-lite0", "model.freeze=block5"],
    [*LATENTS, "model.backbone=efficientnet-lite0-1024", "model.freeze=features"],
]
LIGHT = """
import contextlib, functools, io, json, sys
import typer.main
from polyclinic.cli import run_app
typer.main.get_command = functools.cache(typer.main.get_command)  # built once
from polyclinic.registry import forget_notices
from polyclinic.without_torch import is_torch_here, without_torch

def say(command):
    out, err = io.StringIO(), io.StringIO()
    forget_notices()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_app(command)
    return [code, out.getvalue(), err.getvalue(), is_torch_here()]

first, *others = json.loads(sys.argv[1])
# others at once: modules are imported once with placeholders
print(json.dumps([*map(say, first), *(one for some in others for one in without_torch(lambda: [*map(say, some)]))]))
"""
PLUGIN = """
import torch
import polyclinic

class Mine(polyclinic.FedAvg):
    name: str = "mine"
    scale: float = float(torch.ones(2).sum())

METHODS = {"mine": Mine}
"""


def in_new_process(*groups: list[list[str]]) -> list[tuple[int, str, str, bool]]:
    """The exit code, what was printed, and whether torch was imported by then, for each command."""
    command = [sys.executable, "-c", LIGHT, json.dumps(groups)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]  # type: ignore[misc]


def here(command: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    plugins.forget()  # and say again what was said once
    code = run_app(command)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_check_says_the_same_as_with_torch(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(PLUGIN)
    own = tmp_path / "own.toml"
    own.write_text('plugins = ["mine.py"]\n' + default_path().read_text().replace('name = "fedavg"', 'name = "mine"'))
    study = str(default_path())
    tensors = build("small-cnn", channels=3, outputs=2, size=32).state_dict()
    save_file(tensors, tmp_path / "weights.safetensors")
    torch.save(tensors, tmp_path / "weights.pt")
    files = [[f"model.weights={tmp_path / name}"] for name in ("weights.safetensors", "weights.pt", "nowhere.pt")]
    light = [["study", "check", study, *(word for one in sets for word in ("--set", one))] for sets in CHECKS + files]
    light += [["study", "new", "-", "--method", method] for method in ("cwt-replay",)]
    heavy = [["study", "check", str(own)]]
    found = in_new_process(light[:2], light[2:], heavy)
    for command, (*said, imported) in zip([*light, *heavy], found, strict=True):
        assert tuple(said) == here(command, capsys), command
        assert imported == (command in heavy), command
    assert {code for code, *_ in found} == {0, 2}  # both kinds were looked at


@pytest.mark.slow
def test_code_of_others_gets_torch_itself(tmp_path):
    """A plug-in first: the check begins again, and the plug-in is not left with placeholders."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    own = tmp_path / "own.toml"
    own.write_text('plugins = ["mine.py"]\n' + default_path().read_text().replace('name = "fedavg"', 'name = "mine"'))
    ((code, out, err, imported),) = in_new_process([["study", "check", str(own)]])
    assert (code, err, imported) == (0, "", True)
    assert "fine. mine for classification" in out


def test_where_torch_is_imported_the_work_uses_it(tmp_path: Path):
    need_torch("nothing is in the way")
    assert without_torch(lambda: torch.ones(2).sum().item()) == 2
