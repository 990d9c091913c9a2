"""Studies that are written for somebody: the template, and one for volumes."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from polyclinic.cli import app, run_app
from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.parts import prepare
from polyclinic.data.source import FileSource
from polyclinic.errors import BadInput
from polyclinic.models.nnunet_plans import read_plans, write_plans
from polyclinic.models.topology import topology
from polyclinic.models.volume_plan import plan_of
from polyclinic.runner.run.run import run
from polyclinic.study import load_study, parse_study
from polyclinic.study.preset import FOLDER, RULES, SMALLEST, preset, preset_names, scaled_number, summary_of
from polyclinic.study.template import RECIPE, RECIPE_FOR, template

NAMES = preset_names()
SETTING = re.compile(r"^\w+ = ")
TAG = re.compile(r"\[([a-z ]+)\]$")


def flat(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`table.setting` -> value."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def tags(name: str) -> dict[str, str]:
    """`table.setting` -> the rule by which it shrinks."""
    found, table = {}, ""
    for line in (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif SETTING.match(line) and (rule := TAG.search(line)):
            found[table + line.split(" = ")[0]] = rule[1]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_says_where_it_comes_from(name):
    lines = (FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    settings = [line for line in lines if SETTING.match(line) and line != "format = 1"]
    assert all("  # " in line for line in settings), [line for line in settings if "  # " not in line]
    assert set(tags(name).values()) <= set(RULES)
    assert re.match(r"[A-Z].*, .*[.?]$", summary_of(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_passes_study_check_in_every_size(name, tmp_path, capsys):
    for scale in ("1", "0.25", str(SMALLEST)):
        for more in ([], ["--phantom"]):
            file = tmp_path / f"{scale}{len(more)}.toml"
            assert run_app(["study", "new", str(file), "--preset", name, "--scale", scale, *more]) == 0
            # weights are fetched once by a command of its own, which the check names
            needs_weights = 'distance = "lpips-vgg"' in file.read_text()
            here = ["tuning.distance=pixels", "tuning.features=efficientnet-lite0"] if needs_weights else []
            changes = [word for one in here for word in ("--set", one)]
            assert run_app(["study", "check", str(file), "--no-images", *changes]) == 0
            assert "STUDY" not in file.read_text()
            study = load_study(file, here)
            assert parse_study(study.as_tables()) == study
            assert isinstance(study.data, FileSource) == (not more)
    assert capsys.readouterr().out.count(": fine. ") == 6


@pytest.mark.parametrize("name", NAMES)
def test_only_numbers_with_a_rule_shrink(name):
    large, small = (flat(tomllib.loads(preset(name, scale=scale))) for scale in (1, 0.1))
    rules = tags(name)
    assert {path for path in large if large[path] != small[path]} <= set(rules)
    for path, rule in rules.items():
        values = zip(*(v if isinstance(v, list) else [v] for v in (large[path], small[path])), strict=True)
        assert all(after == scaled_number(before, rule, 0.1) for before, after in values), path


def test_numbers_of_a_quarter_and_of_the_papers():
    tables = tomllib.loads(preset("qu-bone-age", scale=0.25))
    assert (tables["data"]["size"], tables["data"]["samples"]) == (64, 1644)
    assert (tables["method"]["rounds"], tables["optimizer"]["decay_every"]) == (26, 9)
    generator = tables["generator"]
    assert [generator[n] for n in ("epochs", "decay_every", "width", "code_width")] == [56, 38, 32, 16]
    assert tables["optimizer"]["lr"] == 0.001
    assert tables["sites"]["count"] == 4
    assert "size = 64  # at scale 1: 256; Section 4.1 [side]\n" in preset("qu-bone-age", scale=0.25)
    # The settings that the papers state, by hand.
    bones, tb, skin = (parse_study(tomllib.loads(preset(n))) for n in ("qu-bone-age", "feder-tb", "felicia-3"))
    assert (bones.model.backbone, bones.data.size, bones.sites.count) == ("resnet34", 256, 4)
    assert (bones.optimizer.name, bones.optimizer.lr, bones.optimizer.batch_size) == ("sgd", 0.001, 32)
    assert (bones.optimizer.decay, bones.optimizer.decay_every) == (0.1, 35)
    assert [bones.optimizer.lr_in(n) for n in (35, 36)] == pytest.approx([1e-3, 1e-4])
    assert (bones.generator.epochs, bones.generator.lr, bones.generator.decay_every) == (225, 4e-4, 150)
    assert (tb.method.rounds, tb.method.local_epochs, tb.method.buffer, tb.method.real_share) == (100, 100, 512, 0.5)
    assert [tb.optimizer.at_site(site).batch_size for site in ("Shenzhen", "Montgomery")] == [32, 8]
    assert (tb.tuning.patience, tb.tuning.growth, tb.tuning.alpha, tb.tuning.scale) == (10_000, 2.5, 1.0, "sum")
    assert (skin.sites.per_class, round(300 * skin.sites.share), skin.data.size) == (300, 10, 64)
    assert (skin.method.weight, skin.method.images, skin.method.rounds * skin.method.steps) == (3.0, 400, 200_000)


@given(value=st.integers(1, 10**6), rule=st.sampled_from(sorted(RULES)), scale=st.floats(SMALLEST, 1))
def test_no_number_grows_or_vanishes(value, rule, scale):
    smaller = scaled_number(value, rule, scale)
    assert 1 <= smaller <= value
    assert scaled_number(value, rule, 1.0) <= value


@pytest.mark.parametrize("name", NAMES)
def test_without_its_images_a_preset_says_where_to_get_them(name, tmp_path, monkeypatch):
    study = parse_study(tomllib.loads(preset(name)))
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))
    with pytest.raises(BadInput, match=r'^data.path: .*to run on drawn images instead: source = "[a-z]+-phantom"'):
        prepare(study.data, study.sites, cache=tmp_path)


def test_presets_are_listed_and_bad_names_and_scales_are_one_sentence(capsys, tmp_path):
    assert run_app(["study", "new", "--list-presets"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == NAMES
    file = str(tmp_path / "study.toml")
    for more, words in (
        (["--preset", "qu-bones"], "(did you mean 'qu-bone-age'?); choose one of dlg-lenet, "),
        (["--preset", "qu-retina", "--scale", "2"], "--scale 2: must be between 0.0001 and 1"),
        (["--preset", "qu-retina", "--scale", "0"], "--scale 0: must be between"),
        (["--scale", "0.5"], "go with --preset"),
        (["--phantom"], "go with --preset"),
    ):
        assert run_app(["study", "new", file, *more]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "study.toml").exists()


@pytest.mark.parametrize("name", [n if n == "felicia-2" else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_a_preset_runs_to_its_end_on_phantoms(name, tmp_path):
    study = parse_study(tomllib.loads(preset(name, scale=SMALLEST, phantom=True)))
    result = run(study.with_settings({"engine.workers": 1, "engine.device": "cpu"}), tmp_path / "run")
    assert result.metrics["test"]
    assert result["rounds"] == 1


EXAMPLE = Path(__file__).parents[2] / "examples" / "first_model.toml"


def tables_of(method: str) -> dict:
    return tomllib.loads(template(method=method, source="fundus-phantom", partition="label-skew"))


@pytest.mark.parametrize("method", RECIPE_FOR)
def test_a_new_study_has_the_settings_of_the_example(method):
    example, found = tomllib.loads(EXAMPLE.read_text()), tables_of(method)
    for table, settings in RECIPE.items():
        for name, value in settings.items():
            assert found[table][name] == example[table][name] == value


def test_other_methods_keep_their_defaults():
    found = tables_of("scaffold")
    assert (found["optimizer"]["name"], found["optimizer"]["lr"]) == ("sgd", 0.01)
    assert "docs/methods.md" not in template(method="scaffold", source="fundus-phantom", partition="label-skew")


def save(path, voxels, spacing):
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(voxels, np.diag([*spacing, 1.0])), path)


@pytest.fixture(scope="module")
def brains(tmp_path_factory):
    """Eight drawn brains of two hospitals, as NIfTI."""
    folder, source = tmp_path_factory.mktemp("own") / "brains", BrainVolumes(samples=8, shape=(24, 24, 16))
    for number, case in enumerate(source.cases()):
        raw = source.read(number, case)
        place = folder / ("Graz" if number % 2 else "Wien") / case.name
        for name, voxels in zip(source.channels, raw.image, strict=True):
            save(place / f"{case.name}_{name}.nii.gz", voxels.astype(np.int16), raw.spacing)
        save(place / f"{case.name}_seg.nii.gz", raw.mask, raw.spacing)
    return folder


def test_a_study_for_own_volumes_says_what_was_found_and_is_planned(brains):
    path = brains.parent / "study.toml"
    done = CliRunner().invoke(app, ["study", "new", str(path), "--for", str(brains)])
    assert done.exit_code == 0, done.output
    assert "8 volumes, channels t1, t1ce, t2, flair, values of masks 1, 2, 3" in done.output
    assert "2 hospitals by folder: Graz (4), Wien (4)" in done.output
    study = load_study(path)
    assert study.data.source == "volumes"
    assert study.data.structures == {"structure-1": (1,), "structure-2": (2,), "structure-3": (3,)}
    assert study.sites.partition == "column"
    assert study.data.preparation.spacing is not None
    assert all(side % 4 == 0 for side in study.data.size)


def test_inspect_tells_shapes_spacings_and_intensities_and_draws_planes(brains):
    path = brains.parent / "look.toml"
    assert CliRunner().invoke(app, ["study", "new", str(path), "--for", str(brains)]).exit_code == 0
    target = brains.parent / "sites.png"
    done = CliRunner().invoke(app, ["data", "inspect", str(path), "--set", "data.test=0.3", "--out", str(target)])
    assert done.exit_code == 0, done.output
    for word in ("voxels", "mm", "Graz", "Wien"):
        assert word in done.output
    assert target.is_file()
    told = CliRunner().invoke(app, ["data", "inspect", str(path), "--set", "data.test=0.3", "--json"])
    assert set(json.loads(told.stdout)["volumes"]) == {"Graz", "Wien"}


def test_ct_of_nnunet_is_clipped_to_its_own_window(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(6):
        mask = np.zeros((24, 24, 12), np.uint8)
        mask[6:12, 6:12, 3:8] = 1
        voxels = np.where(mask, 60, -1000) + rng.normal(0, 20, mask.shape)
        save(tmp_path / "ct" / "imagesTr" / f"liver_{number}_0000.nii.gz", voxels.astype(np.int16), (1, 1, 2))
        save(tmp_path / "ct" / "labelsTr" / f"liver_{number}.nii.gz", mask, (1, 1, 2))
    (tmp_path / "ct" / "dataset.json").write_text(json.dumps({"channel_names": {"0": "CT"}}))
    path = tmp_path / "study.toml"
    done = CliRunner().invoke(app, ["study", "new", str(path), "--for", str(tmp_path / "ct")])
    assert done.exit_code == 0, done.output
    data = load_study(path).data
    assert data.channels == ("ct",)
    (window,) = data.preparation.intensities
    assert -20 < window.low < 60 < window.high < 140
    assert window.mean == pytest.approx(60, abs=5)


@pytest.mark.parametrize(
    ("spacing", "shape", "cases", "patch", "batch"),
    [
        ((1, 1, 1), (137, 171, 140), 484, (128, 128, 128), 2),  # Task01, brain tumours
        ((1.25, 1.25, 1.37), (115, 320, 232), 20, (80, 192, 160), 2),  # Task02, heart
        ((1, 0.7676, 0.7676), (482, 512, 512), 131, (128, 128, 128), 2),  # Task03, liver
        ((1, 1, 1), (36, 50, 35), 260, (40, 56, 40), 9),  # Task04, hippocampus
        ((2.5, 0.8, 0.8), (93, 512, 512), 281, (40, 224, 224), 2),  # Task07, pancreas
    ],
)
def test_the_plan_is_nnunets(spacing, shape, cases, patch, batch):
    spacings = np.tile(spacing, (cases, 1))
    plan = plan_of(spacings, spacings * np.array(shape))
    assert (plan.size, plan.batch_size) == (patch, batch)


def test_coarse_axes_keep_the_finer_of_their_spacings():
    spacings = np.array([[5.0, 0.7, 0.7]] * 8 + [[3.0, 0.7, 0.7]] * 2)
    plan = plan_of(spacings, spacings * np.array([20, 320, 320]))
    assert plan.spacing == (3.0, 0.7, 0.7)


def test_nnunets_plans_are_read_and_written(brains, tmp_path):
    spacings = np.tile((0.8, 0.8, 2.5), (281, 1))
    plan = plan_of(spacings, spacings * np.array((512, 512, 93)))
    write_plans(plan, tmp_path / "nnUNetPlans.json")
    assert read_plans(tmp_path / "nnUNetPlans.json") == plan
    content = json.loads((tmp_path / "nnUNetPlans.json").read_text())
    fullres = content["configurations"]["3d_fullres"]
    assert fullres["patch_size"] == [40, 224, 224]  # z, y, x
    path = brains.parent / "planned.toml"
    command = ["study", "new", str(path), "--for", str(brains), "--plans", str(tmp_path / "nnUNetPlans.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert load_study(path).data.size == (224, 224, 40)
    fullres["architecture"]["network_class_name"] = "dynamic.ResidualEncoderUNet"
    (tmp_path / "res.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match="plans the network ResidualEncoderUNet, which is not here"):
        read_plans(tmp_path / "res.json")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(BadInput, match=r"is no nnUNetPlans\.json"):
        read_plans(tmp_path / "none.json")


def test_a_structure_that_the_last_hospital_alone_has_is_found(tmp_path):
    mask = np.zeros((16, 16, 16), np.uint8)
    mask[4:8] = 1
    for number in range(20):
        case = tmp_path / "own" / ("Graz" if number < 16 else "Wien") / f"case{number:02}"
        case.mkdir(parents=True)
        for name, voxels in (("ct", mask + 1), ("seg", mask * (5 if number > 15 else 1))):
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), case / f"{name}.nii.gz")
    done = CliRunner().invoke(app, ["study", "new", str(tmp_path / "study.toml"), "--for", str(tmp_path / "own")])
    assert "values of masks 1, 5" in done.output


def test_a_plan_is_written_by_a_command(tmp_path):
    tables = {
        "data": {"source": "brain-volumes", "size": [32, 32, 16], "preparation": {"spacing": [1.0, 1.0, 2.0]}},
        "task": {"name": "volume-segmentation"},
        "model": {"backbone": "dynunet", "norm": "instance", "arguments": {"filters": [4, 8, 16, 16]}},
        "optimizer": {"batch_size": 3},
        "sites": {"partition": "iid", "count": 2},
        "method": {"name": "fedavg"},
    }
    study = tmp_path / "study.toml"
    study.write_text(parse_study(tables).to_toml())
    plans = tmp_path / "new" / "nnUNetPlans.json"
    command = ["data", "inspect", str(study), "--plans", str(plans), "--no-picture"]
    done = CliRunner().invoke(app, [*command, "--set", "data.samples=6", "--set", "data.shape=[16,16,16]"])
    assert done.exit_code == 0, done.output
    found = read_plans(plans)
    assert (found.size, found.spacing, found.batch_size) == ((32, 32, 16), (1.0, 1.0, 2.0), 3)
    assert found.stages.filters == (4, 8, 16, 16)
    assert found.stages.strides == topology((32, 32, 16), (1.0, 1.0, 2.0)).strides
    done = CliRunner().invoke(app, [*command, "--set", "model.backbone=segresnet", "--set", "model.arguments={}"])
    assert "nnU-Net plans model.backbone = 'dynunet'" in str(done.exception)
