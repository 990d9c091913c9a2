"""A deployed study of volumes: a site's own cases, what its people read, and what leaves; without NVFlare."""

import json

import nibabel
import numpy as np
import pytest
import torch
from pinned_keys import pin_keys

import polyclinic
from polyclinic.data.datasets.phantoms.brain_volumes import BrainVolumes
from polyclinic.data.own_images import own_data
from polyclinic.data.parts import prepare
from polyclinic.deployment.approval import Approvals, policy_of
from polyclinic.deployment.deployed_site import deployed_host
from polyclinic.deployment.kits import as_sent
from polyclinic.deployment.study_in_words import Asked
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.predict.model_file import preparation_of
from polyclinic.study import Study, parse_study

CHANNELS = ("flair", "t1")
TABLES = {
    "data": {
        "source": "volumes-at-sites",
        "dataset": "brains",
        "size": [16, 16, 8],
        "channels": list(CHANNELS),
        "structures": {"whole": [1, 2, 3], "core": [2, 3]},
        "preparation": {"spacing": [10.0, 10.0, 10.0]},
    },
    "sites": {"partition": "column", "names": ["north", "south"]},
    "task": {"name": "volume-segmentation", "patches": 1, "surface_distances": False},
    "model": {"backbone": "dynunet", "norm": "instance", "arguments": {"filters": [4, 8, 8]}},
    "optimizer": {"batch_size": 4},
    "method": {"name": "fedavg", "rounds": 1},
    "engine": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """The folder `scans` of a site: twelve brains in its own files."""
    folder, source = tmp_path_factory.mktemp("site") / "scans", BrainVolumes(samples=12, shape=(24, 24, 16))
    folder.mkdir()
    for number, case in enumerate(source.cases()):
        raw = source.read(number, case)
        for channel, voxels in (*zip(CHANNELS, raw.image, strict=False), ("seg", raw.mask)):
            name = folder / f"case{number:02}_{channel}.nii.gz"
            nibabel.save(nibabel.Nifti1Image(voxels.astype(np.float32), raw.affine), name)
    return folder


@pytest.fixture
def kit(tmp_path, volumes):
    local = tmp_path / "kit" / "local"
    local.mkdir(parents=True)
    (tmp_path / "server").mkdir()
    pin_keys({"north": local}, tmp_path / "server")
    (local / "site.toml").write_text(f'[datasets.brains]\nsource = "volumes"\npath = "{volumes}"\ntest = 0.4\n')
    (local / "policy.toml").write_text('kinds = ["weights", "metrics"]\nmin_cohort = 3\n')
    return tmp_path / "kit"


def of_north(kit, **changes):
    """The site's volumes for a study with other settings of [data]."""
    study = parse_study({**TABLES, "data": {**TABLES["data"], **changes}})
    return own_data(kit / "local" / "site.toml", study.data, "north", kit / "cache")


def test_a_site_trains_on_its_own_volumes_and_no_volume_leaves(kit):
    study = Study(**TABLES)
    approvals = Approvals(kit, "north")
    approvals.request("first", study, polyclinic.__version__)
    approvals.decide("first", "approve")
    told = {"study": study.as_tables(), "run": "first", "site": "north", "kit": str(kit)}
    host = deployed_host(json.loads(json.dumps(told)))
    weights = Parcel("weights", host.spec.first_weights("north"))
    sent = host.handle(Call("north", "train", 1, {"weights": weights}))
    assert sent.parcel("weights").tensors.keys() == weights.tensors.keys()
    scores = host.handle(Call("north", "evaluate", 1, {"weights": weights}, {"split": "test"}))
    assert "dice/whole" in scores.parcel("metrics").tensors
    own = torch.from_numpy(host.sites.get("north").data.train.images[0].image.astype(np.float32))
    assert host.sites.gates["north"].raw_images.found_in(own)


def test_its_people_read_how_volumes_are_prepared(kit):
    words = "\n".join(Asked(Study(**TABLES), "north", kit, policy_of(kit / "local" / "policy.toml")).sentences(None))
    assert "volumes of the channels flair, t1 with masks of whole, core" in words
    assert "resamples them to 10 x 10 x 10 mm" in words
    assert "patches of 16 x 16 x 8 voxels" in words


def test_the_study_says_how_volumes_are_prepared_and_the_site_where_they_are(kit):
    data = of_north(kit)
    assert len(data.train) + len(data.validation) + len(data.test) == 12
    assert data.train.images[0].spacing == pytest.approx((10, 10, 10))
    assert data.train.images[0].image.shape[0] == 2
    assert preparation_of(Study(**TABLES).data)["volume"].channels == CHANNELS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"channels": ["flair", "t2"]}, "has no channel 't2'"),
        ({"structures": {"whole": [1]}}, "which data.structures does not name"),
        ({"preparation": {"spacing": [0, 1, 1]}}, "from 0.05 to 100"),
        ({"preparation": {"spacing": [0.05, 0.05, 0.05]}}, "choose a coarser one"),
    ],
)
def test_volumes_that_do_not_fit_are_named_with_the_cure(kit, changes, words):
    with pytest.raises(BadInput, match=words):
        of_north(kit, **changes)


def test_images_are_no_volumes(kit):
    (kit / "local" / "site.toml").write_text('[datasets.brains]\nsource = "folder"\npath = "."\n')
    with pytest.raises(BadInput, match=r"datasets\.brains\.source: .* is not for volumes"):
        of_north(kit)


def test_a_study_of_volumes_is_sent_without_them(tmp_path):
    data = {"source": "brain-volumes", "samples": 6, "shape": [16, 16, 16], "size": [16, 16, 8]}
    study = parse_study({**TABLES, "data": data, "sites": {"partition": "iid", "count": 2}})
    parts = prepare(study.data, study.sites)
    sent = as_sent(study, parts, parts.names).data
    assert sent.source == "volumes-at-sites"
    assert sent.channels == study.data.channels
    facts = sent.info(parts.names)
    assert {name: facts[name] for name in ("channels", "size", "structures", "unit", "classes")} == {
        name: parts.info[name] for name in ("channels", "size", "structures", "unit", "classes")
    }
