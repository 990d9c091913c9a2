"""The fingerprint of volumes: secure sums give the plan of the pooled volumes, and no site's extreme leaves."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from polyclinic.cli import app
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.data.volumes.volume import Volume, rows_of
from polyclinic.models.volume_plan import plan_of
from polyclinic.questions.fingerprint import EXTENT, SPACING, counts_of, grouped
from polyclinic.runner.evaluate.inspect import inspect_federated

BRAINS = {
    "data": {"source": "brain-volumes", "samples": 20, "shape": [40, 40, 30], "size": [16, 16, 16]},
    "sites": {"partition": "column"},
    "task": {"name": "volume-segmentation"},
    "model": {"backbone": "dynunet", "norm": "instance"},
}


def test_the_plan_of_secure_sums_is_that_of_the_pooled_volumes(tiny):
    study = tiny("fedavg", BRAINS)
    found = {kind: inspect_federated(study.with_settings({"federation.sum": kind})) for kind in ("secure", "float")}
    assert found["secure"] == found["float"]
    parts = prepare(study.data, study.sites)
    pooled = [volume for site in parts.names for volume in open_site(parts.folder, site).train.images]
    spacings = np.array([volume.origin["spacing"] for volume in pooled])
    assert len(np.unique(spacings.round(3), axis=0)) > 2  # sites differ
    extents = np.array([[n * s for n, s in zip(v.image.shape[1:], v.spacing, strict=True)] for v in pooled])
    wanted = plan_of(spacings, extents)
    plan, told = wanted.as_tables(), found["secure"]["plan"]
    assert told["data"]["size"] == plan["data"]["size"]
    assert told["optimizer"] == plan["optimizer"]
    assert json.dumps(told["model"]) == json.dumps(plan["model"])
    np.testing.assert_allclose(told["data"]["preparation"]["spacing"], wanted.spacing, atol=SPACING)
    assert found["secure"]["cases"] == len(pooled)
    inside = np.mean([np.isin(volume.mask, (1, 2, 3)).mean() for volume in pooled])
    assert found["secure"]["voxels"]["whole"] == pytest.approx(inside, rel=0.02)


def part_with(sides, spacing=(1.0, 1.0, 2.0)):
    volumes = []
    for side in sides:
        image = np.full((1, side, side, 20), 100.0, np.float16)
        mask = np.zeros(image.shape[1:], np.uint8)
        mask[:4] = 1
        volumes.append(Volume(image, mask, spacing, {"spacing": list(spacing)}))
    return ImageSet(rows_of(volumes), np.zeros(len(sides), np.float32))


def test_no_bin_holds_fewer_patients_than_the_policy_wants():
    """Eleven cases, one of them a giant: its extent leaves in none of the bins."""
    counts = counts_of(part_with([20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 200]), [[1]], least=5)
    assert counts["cases"].item() == 11
    for name, told in counts.items():
        if name.startswith(("spacing", "extent")):
            assert told.sum() == 11
            assert told[told > 0].min() >= 5, name
    assert int(counts["extent x"].nonzero().max()) * EXTENT < 60
    assert int(counts["spacing z"].argmax()) == 200
    assert counts["intensity 0"].sum() == 11 * 1000
    few = counts_of(part_with([20, 22]), [[1]], least=5)
    assert sum(int(one.sum()) for one in few.values()) == 0


def test_groups_by_hand():
    np.testing.assert_array_equal(grouped(np.array([9.0, 1, 2, 3, 100]), 2), [2, 2, 2, 9, 9])
    np.testing.assert_array_equal(grouped(np.array([3.0, 1, 2]), 1), [1, 2, 3])


def test_the_command_prints_lines_of_a_study(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text("\n".join(
        ["format = 1", *(f"[{table}]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in some.items())
                         for table, some in {**BRAINS, "method": {"name": "fedavg"}}.items())]
    ))  # fmt: skip
    done = CliRunner().invoke(app, ["data", "inspect", str(path), "--federated"])
    assert done.exit_code == 0, done.output
    assert "# cases: " in done.output
    assert "[model]" in done.output
    assert "preparation.spacing = [" in done.output
