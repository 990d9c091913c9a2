"""`study new --for` a folder of volumes: channels, structures, hospitals, and nnU-Net's plan."""

import json

import nibabel
import numpy as np
import pytest
from typer.testing import CliRunner

from polyclinic.cli import app
from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.errors import BadInput
from polyclinic.models.nnunet_plans import read_plans, write_plans
from polyclinic.models.volume_plan import plan_of
from polyclinic.study import load_study


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
