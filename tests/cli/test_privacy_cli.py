"""`polyclinic privacy`, as a user types it."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import matplotlib.image

from polyclinic.cli import run_app
from polyclinic.privacy.epsilon import compute_epsilon
from polyclinic.study import parse_study

PAPER = ["privacy", "--samples", "1144", "--batch", "32", "--noise", "0.7", "--epochs", "225", "--delta", "8.7e-4"]


def test_it_prints_epsilon_and_what_it_covers(capsys):
    assert run_app(PAPER) == 0
    printed = capsys.readouterr().out
    assert "epsilon 39.64 at delta 0.00087 (RDP) for 8044 steps: 225 epochs of 1144 images" in printed
    assert re.search("It covers .*DP-SGD.* It does not cover .*codes, latents, batch-norm statistics", printed)


def test_prv_and_json_and_delta_is_one_over_the_samples_unless_given(capsys):
    assert run_app([*PAPER, "--accountant", "prv", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["epsilon"], 1) == 36.2
    assert (found["steps"], found["delta"], found["accountant"]) == (8044, 8.7e-4, "prv")
    assert run_app(["privacy", "--samples", "500", "--noise", "1", "--epochs", "10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["delta"], found["epsilon"]) == (1 / 500, compute_epsilon(32 / 500, 1.0, 157, 1 / 500))


def test_a_target_gives_the_noise_or_the_epochs_or_both(capsys):
    common = ["privacy", "--samples", "1144", "--delta", "8.7e-4", "--target-epsilon", "17.8"]
    assert run_app([*common, "--epochs", "225"]) == 0
    assert "noise 0.96" in capsys.readouterr().out
    assert run_app([*common, "--noise", "0.7"]) == 0
    assert "66.48 epochs (2377 steps)" in capsys.readouterr().out
    assert run_app([*common, "--noise", "0.7", "--epochs", "225", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for key in ("noise_for_target", "epochs_for_target"):
        one = found[key]
        assert compute_epsilon(found["sampling_rate"], one["noise"], one["steps"], 8.7e-4) <= 17.8


def test_the_curve_is_drawn(tmp_path, capsys):
    picture = tmp_path / "curve.png"
    assert run_app(["privacy", "--curve", str(picture), "--sizes", "200,1000", "--epochs", "20"]) == 0
    assert capsys.readouterr().out == f"drawn in {picture}\n"
    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[1] > 500
    assert pixels[..., :3].std() > 0.05


GUIDE = Path(__file__).parents[2] / "docs" / "privacy.md"


def test_the_guides_command_prints_what_the_guide_says(capsys):
    typed, printed = re.search(r"\$ polyclinic (privacy .*)\n(.*)\n", GUIDE.read_text(encoding="utf-8")).groups()
    assert run_app(shlex.split(typed)) == 0
    assert capsys.readouterr().out.splitlines()[0] == printed


def test_the_guides_tables_make_a_study():
    block = re.search(r"```toml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL).group(1)
    rest = {
        "data": {"source": "fundus-phantom"},
        "sites": {"partition": "iid", "count": 2},
        "method": {"name": "fedavg"},
    }
    assert parse_study({**rest, **tomllib.loads(block)}).privacy.target_epsilon == 8.0
