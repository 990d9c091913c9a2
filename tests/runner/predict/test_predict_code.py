"""What code a model may have run: importable networks are allowed by the user, and are those it was trained with."""

import json
import sys

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.runner.predict import model_file
from polyclinic.runner.predict import predict as prediction
from polyclinic.runner.run.run import run
from polyclinic.study import load_study

NETWORK = """
from torch import nn

print("imported")


class Net(nn.Sequential):
    def __init__(self, in_channels: int, num_classes: int, image_size: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


@pytest.fixture
def trained(tiny, tmp_path, monkeypatch):
    """A run with a network of an importable module, and the module's file."""
    file = tmp_path / "modules" / "some_nets.py"
    file.parent.mkdir()
    file.write_text(NETWORK)
    monkeypatch.syspath_prepend(file.parent)
    done = run(tiny("fedavg", {"model.backbone": "some_nets:Net"}, rounds=1), tmp_path / "run")
    yield done.folder, file
    sys.modules.pop("some_nets", None)


def test_a_model_does_not_choose_what_is_imported(trained, capsys):
    folder, _ = trained
    del sys.modules["some_nets"]
    capsys.readouterr()
    words = r"needs code of the module 'some_nets', and a model does not choose .*; .* add --allow-import some_nets$"
    for allowed in ([], ["some"], ["some_nets.further"]):
        with pytest.raises(BadInput, match=words):
            prediction.load_predictor(folder, allow_import=allowed)
    assert run_app(["predict", str(folder), str(folder)]) == 2
    assert "some_nets" not in sys.modules
    assert prediction.load_predictor(folder / "model.safetensors", allow_import=["some_nets"]).task.name
    assert run_app(["predict", str(folder), str(folder), "--allow-import", "some_nets"]) == 2
    assert "holds no image" in capsys.readouterr().err


def test_a_plugin_module_in_a_card_is_allowed_first(trained, tmp_path):
    folder, _ = trained
    card, tensors = model_file.read_model_file(folder / "model.safetensors")
    forged = card.model_copy(update={"backbones": {"": "lenet5"}, "networks": {}, "plugins": {"antigravity": "0" * 64}})
    (tmp_path / "model.safetensors").write_bytes(model_file.model_file(tensors, forged))
    with pytest.raises(BadInput, match="add --allow-import antigravity"):
        prediction.load_predictor(tmp_path / "model.safetensors")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("key", ["installed", "networks"])
def test_a_network_that_has_changed_is_refused_by_resume_audit_and_predict(trained, capsys, key):
    """`networks`: as older versions wrote it."""
    folder, file = trained
    noted = json.loads((folder / "plugins.json").read_text())["installed"]
    assert list(noted) == ["some_nets:Net"]
    (folder / "plugins.json").write_text(json.dumps({"plugins": {}, key: noted}))
    load_study(folder / "study.toml")
    file.write_text(NETWORK + "\n# another line\n")
    words = r"was made with some_nets:Net as it was then, and its package has changed"
    with pytest.raises(BadInput, match=words):
        load_study(folder / "study.toml")
    with pytest.raises(BadInput, match=words):
        prediction.load_predictor(folder, allow_import=["some_nets"])
    for command in (["audit"], ["forgetting"], ["run", "--resume", "--out"]):
        assert run_app([*command, str(folder)]) == 2
        said = capsys.readouterr().err
        assert "has changed (SHA-256 " in said
        assert said.endswith("; install that version again, or run the study in another folder\n")
