"""Layers that a site's own people add: they refuse, they change nothing, and a site that lists one has it."""

import re
from pathlib import Path

import pytest
import torch
from attacked_site import Kit, ask, first_weights

from polyclinic import plugins
from polyclinic.errors import BadInput
from polyclinic.federation.call import GateRefused
from polyclinic.federation.layers.suspension import Suspensions

RULES = """
from pathlib import Path

import torch

from polyclinic import GateRefused, SiteLayer


class Rules(SiteLayer):
    def arriving(self, call):
        if call.round == 3:
            raise GateRefused("this site takes part in two rounds")
        spoil(call.parcels.values())

    def leaving(self, call, parcels):
        spoil(parcels)
        return ()

    def left(self, call, parcels):
        spoil(parcels)
        with Path(__file__).with_name("seen.txt").open("a") as file:
            file.write(f"{call.operation} {call.round} {len(parcels)};")


class Broken(SiteLayer):
    def leaving(self, call, parcels):
        if call.round == 2:
            raise KeyError("nobody foresaw this")


def spoil(parcels):
    for parcel in parcels:
        for tensor in parcel.tensors.values():
            tensor.zero_()
        parcel.tensors.clear()
        parcel.metadata.clear()


LAYERS = {"rules": Rules, "broken": Broken}
"""


@pytest.fixture
def kit(tmp_path):
    yield Kit(tmp_path / "kit")
    plugins.forget()


def write(kit, text, file="rules.py"):
    (kit.folder / "local" / "rules.py").write_text(text)
    site = kit.folder / "local" / "site.toml"
    site.write_text(f'plugins = ["{file}"]\n' + site.read_text())


def test_a_layer_of_the_site_refuses_and_changes_nothing(kit, tmp_path):
    plain = Kit(tmp_path / "plain" / "kit").host()
    write(kit, RULES)
    host = kit.host()
    weights = first_weights(host)
    sent, expected = (ask(one, "train", weights=weights) for one in (host, plain))
    assert sent.weights.keys() == expected.weights.keys() == weights.keys()
    assert all(bool(tensor.any()) for tensor in sent.weights.values() if tensor.dim() > 1)
    assert sent.parcels[0].metadata["samples"] == expected.parcels[0].metadata["samples"]
    assert all(torch.equal(weights[name], one) for name, one in first_weights(plain).items())
    assert (kit.folder / "local" / "seen.txt").read_text() == "train 1 1;"
    with pytest.raises(GateRefused, match="this site takes part in two rounds"):
        ask(host, "train", 3, weights=weights)
    assert not Suspensions(kit.folder).all()  # it may be told


def test_a_layer_that_raises_anything_else_suspends_the_study(kit):
    write(kit, RULES)
    host = kit.host()
    ask(host, "train", weights=first_weights(host))
    lines = host.sites.ledgers["north"].position.lines
    with pytest.raises(KeyError):
        ask(host, "train", 2, weights=first_weights(host))
    assert host.sites.ledgers["north"].position.lines == lines  # nothing has left
    [suspended] = Suspensions(kit.folder).all()
    assert "nobody foresaw this" in suspended.reason


@pytest.mark.parametrize(
    ("text", "file", "words"),
    [
        ("", "gone.py", "gone.py cannot be read"),
        ("import nothing_of_this_name", "rules.py", "cannot be loaded"),
        (RULES.replace("LAYERS =", "LAYER ="), "rules.py", "has a layer Rules that is not in its dict LAYERS"),
        (RULES + "LAYERS = [Rules, Broken]", "rules.py", "must be a dict"),
        (RULES + "LAYERS['x'] = dict", "rules.py", "'x' that is no polyclinic.SiteLayer"),
        (
            RULES + "LAYERS['x'] = type('X', (SiteLayer,), {'leave': 1})",
            "rules.py",
            "'x' with none of arriving, leaving",
        ),
        (RULES + "Rules.__init__ = lambda self: 1 / 0", "rules.py", "'rules' that cannot be made"),
    ],
)
def test_a_site_does_not_start_without_a_layer_that_it_lists(kit, text, file, words):
    write(kit, text, file)
    with pytest.raises(BadInput, match=words) as refused:
        kit.host()
    assert "\n" not in str(refused.value)


def test_the_layer_of_the_manual_refuses(kit):
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    [code] = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "LAYERS =" in one]
    write(kit, code)
    host = kit.host()
    with pytest.raises(GateRefused, match="answers of fewer than 50 images"):
        ask(host, "train", weights=first_weights(host))


def test_no_study_adds_a_layer(kit, tmp_path):
    kind = 'from polyclinic import Kind\nclass Notes(Kind):\n    "Notes."\nKINDS = {"notes": Notes}\n'
    (tmp_path / "rules.py").write_text(RULES + kind)
    assert kit.host(plugins=[str(tmp_path / "rules.py")]).spec.kit.layers == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('plugin = ["rules.py"]\n{}', "plugin: there is no such setting .did you mean 'plugins'"),
        ('{}\n[datasets.others]\nplugins = ["rules.py"]', r"stands in a table \[datasets.NAME\]"),
        ('{}\n[rules]\nplugins = ["rules.py"]', "rules: there is no such setting"),
    ],
)
def test_a_list_of_layers_in_another_place_or_under_another_name_is_refused(kit, text, words):
    (kit.folder / "local" / "rules.py").write_text(RULES)
    site = kit.folder / "local" / "site.toml"
    site.write_text(text.format(site.read_text()))
    with pytest.raises(BadInput, match=words):
        kit.host()


def test_layers_of_an_installed_package_with_entry_points_are_there(kit, tmp_path, monkeypatch):
    """Its entry points say which methods it has; its layers are needed whatever the study."""
    info = tmp_path / "hospital_rules-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hospital-rules\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[polyclinic.methods]\nours = hospital_rules:Ours\n")
    (tmp_path / "hospital_rules.py").write_text(RULES)
    monkeypatch.syspath_prepend(tmp_path)
    site = kit.folder / "local" / "site.toml"
    site.write_text('plugins = ["hospital-rules"]\n' + site.read_text())
    assert len(kit.host().spec.kit.layers) == 2
