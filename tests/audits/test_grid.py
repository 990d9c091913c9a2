"""The grid of defences, and attacks on sums over sites."""

import json
import shutil

import numpy as np
import pytest
import torch

from polyclinic.audits.audit import audit
from polyclinic.audits.grid import grid, variations
from polyclinic.audits.parcels import mean_parcel
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared.one_round import moments

SMALL = {"audit.keep_parcels": 0, "sites.count": 2, "data.test": 0.4}


@pytest.fixture(autouse=True)
def _hurried(hurry) -> None:
    hurry()


def test_sums_are_weighted_by_images_and_whole_numbers_added():
    first = Parcel("gradients", {"w": torch.tensor([1.0, 2.0])}, {"samples": 1})
    second = Parcel("gradients", {"w": torch.tensor([5.0, 2.0])}, {"samples": 3})
    mean = mean_parcel([first, second])
    assert mean.tensors["w"].tolist() == [4.0, 2.0]
    assert mean.metadata["samples"] == 4
    # What the coordinator of a one-round method opens, and what its audit attacks: whole numbers, added.
    each = [moments(np.full((count, 2), 0.5, np.float32), torch.ones(count, 1).double()) for count in (3, 5)]
    parcels = [Parcel("statistics", one.tensors(), {"samples": one.count}) for one in each]
    together = mean_parcel(parcels)
    assert together.metadata["samples"] == 8
    for name, tensor in (each[0] + each[1]).tensors().items():
        assert torch.equal(together.tensors[name], tensor)


def test_only_the_sum_is_attacked_which_sites_that_take_turns_have_not(tiny, undisturbed, tmp_path):
    done = undisturbed(tiny("fedsgd", {**SMALL, "audit.secure_sum": True}, rounds=1))
    shutil.copytree(done.folder, tmp_path / "run")
    report = audit(tmp_path / "run")
    (parcel,) = report["parcels"]
    assert parcel["site"] == "sum of 2 sites"
    assert len(parcel["digests"]) == 2
    assert [finding["attack"] for finding in parcel["findings"]] == ["gradient-inversion"]
    done = undisturbed(tiny("fedreplay", {**SMALL, "audit.secure_sum": True, "sites.count": 1}, rounds=1))
    with pytest.raises(BadInput, match=r"audit\.secure_sum: no operation was done by several sites"):
        audit(done.folder)


def test_defences_that_fit_the_method(tiny):
    plain = tiny("fedavg", {"model.backbone": "small-cnn"})
    assert list(variations(plain)) == [
        "no defence", "sparsified to 10 %", "sparsified to 1 %", "90 % pruned", "8 bits", "secure sum",
        "clip and noise, group norm",
    ]  # fmt: skip
    private = tiny("cwt", {"privacy.noise_multiplier": 1.3, "audit.defences": ["clip-and-noise", "secure-sum"]})
    found = variations(private)
    assert list(found) == ["no defence", "clip and noise"]
    assert found["no defence"].privacy is None
    assert found["clip and noise"].privacy.noise_multiplier == 1.3
    defended = variations(tiny("fedavg", {"defence.name": "quantise", "audit.defences": ["prune"]}))
    assert [study.defence and study.defence.name for study in defended.values()] == [None, "prune"]
    deeper = variations(tiny("fedreplay", {"audit.defences": ["deeper-cut"]}))
    assert [study.cut for study in deeper.values()] == ["conv1", "conv2"]
    with pytest.raises(BadInput, match="none of deeper-cut fits"):  # a shallower cut is no defence
        variations(tiny("fedreplay", {"audit.defences": ["deeper-cut"], "model.cut": "conv2"}))
    with pytest.raises(BadInput, match="fits 'splitnn'"):
        variations(tiny("splitnn", {"audit.defences": ["prune"]}))


@pytest.mark.slow
def test_a_grid_has_utility_and_leakage_of_each(tiny, undisturbed, tmp_path):
    study = tiny("fedsgd", {**SMALL, "audit.defences": ["quantise", "secure-sum"]}, rounds=1)
    shutil.copytree(undisturbed(study).folder, tmp_path / "run")
    told = []
    report = grid(tmp_path / "run", progress=lambda *what: told.append(what))
    assert [point["defence"] for point in report["points"]] == ["no defence", "8 bits", "secure sum"]
    assert told[0] == ("no defence", 0, 3)
    assert report["complete"]
    for point in report["points"]:
        assert 0 <= point["utility"] <= 1
        assert point["psnr"] > 0
        assert point["images"] == (4 if point["defence"] == "secure sum" else 8)
    assert json.loads((tmp_path / "run" / "grid.json").read_text()) == report
    assert (tmp_path / "run" / "grid.png").stat().st_size > 5000
    assert grid(tmp_path / "run") == report  # runs that are there are not run again
