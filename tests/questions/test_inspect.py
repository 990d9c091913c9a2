"""Questions about images: counts of sites, and the plan of volumes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from polyclinic.cli import app
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.data.volumes.volume import Volume, rows_of
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.models.volume_plan import plan_of
from polyclinic.questions import inspect
from polyclinic.questions.fingerprint import EXTENT, SPACING, counts_of, grouped
from polyclinic.questions.inspect import Counted, InspectSites
from polyclinic.runner.evaluate.inspect import inspect_federated

HIGH = {"labels": [4, 0], "intensities": [4, 0], "sides": [4, 0], "spacings": [4, 0], "splits": [100, 20]}
LOW = {"labels": [0, 4], "intensities": [0, 4], "sides": [4, 0], "spacings": [4, 0], "splits": [99, 20]}


def part(**arrays):
    return SimpleNamespace(**{"geometry": None, "cases": None, **arrays})


def federation_of(classes=("no", "yes"), label_range=None, summed="float"):
    target = SimpleNamespace(classes=classes, label_range=label_range)
    sums = SimpleNamespace(settings=SimpleNamespace(sum=summed))
    return SimpleNamespace(trainer=SimpleNamespace(target=target), sums=sums)


def test_bins_of_values_labels_sides_and_spacings():
    values = np.array([-1.0, 0.0, 0.99, 1.0, 15.5, 16.0, 99.0])
    assert inspect.in_bins(values, 0, 16).tolist() == [0, 0, 0, 1, 15, 15, 15]
    assert inspect.in_bins(values[1:2] + 3, 3, 19).tolist() == [0]
    assert inspect.in_bins(np.array([3.0]), 3, 3).tolist() == [0]
    assert inspect.in_bins(np.array([0.5]), 0, 1).tolist() == [8]
    classes = SimpleNamespace(classes=("a", "b", "c"), label_range=None)
    bins, size = inspect.label_bins_of(np.array([2, 0]), classes)
    assert (bins.tolist(), size) == ([2, 0], 3)
    values = SimpleNamespace(classes=(), label_range=(0.0, 32.0))
    bins, size = inspect.label_bins_of(np.array([2.0, 31.0]), values)
    assert (bins.tolist(), size) == ([1, 15], 16)
    own = SimpleNamespace(classes=(), label_range=None)
    assert inspect.label_bins_of(np.array([5.0, 6.0, 7.0]), own)[0].tolist() == [0, 8, 15]
    geometry = np.array([[64, 63, 0.1, 0.05], [10, 2048, np.nan, np.nan], [63, 10, 0.01, 3.0], [10, 10, 500, 1]])
    files = part(geometry=geometry)
    assert inspect.side_bins(files).tolist() == [1, 8, 0, 0]
    assert inspect.spacing_bins(files).tolist() == [2, 9, 8, 8]

    edges = np.array([0.04, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 2.0])
    sides = np.array([63, 64, 128, 256, 384, 512, 768, 1024, 2048])
    at_edges = part(geometry=np.stack([sides, sides, edges, edges], 1))
    assert inspect.spacing_bins(at_edges).tolist() == list(range(9))
    assert inspect.side_bins(at_edges).tolist() == list(range(9))
    below = part(geometry=np.stack([sides - 1, sides - 1, edges - 0.001, edges - 0.001], 1))
    assert inspect.spacing_bins(below).tolist() == [0, *range(8)]
    assert inspect.side_bins(below).tolist() == [0, *range(8)]

    class Prepared(SimpleNamespace):
        def __len__(self):
            return 2

    prepared = Prepared(geometry=None, images=np.zeros((2, 1, 100, 130)))
    assert inspect.side_bins(prepared).tolist() == [2, 2]
    assert inspect.spacing_bins(prepared).tolist() == [9, 9]


def test_counts_of_few_patients_are_not_told():
    people = [np.arange(20), np.array([1, 1, 2]), np.arange(30, 60), np.array([])]
    counted = Counted(torch.tensor([20, 3, 30, 0]), people)
    counts, told = inspect.suppressed(counted, 0)
    assert (counts.tolist(), told.tolist()) == ([20, 3, 30, 0], [1, 1, 1, 1])
    one = Counted(torch.tensor([1]), [np.array([4])])
    assert inspect.suppressed(one, 0)[0].tolist() == [1]
    counts, told = inspect.suppressed(counted, 5)
    assert told.tolist() == [0, 0, 1, 1]  # the smallest of the others would give the second away
    assert counts.tolist() == [0, 0, 30, 0]
    tables = inspect.tables({"labels": counts, "labels told": told})
    assert tables == {"labels": [-1, -1, 30, 0]}


def test_distances_between_histograms_and_their_advice():
    assert inspect.histogram_ks([1, 1, 2], [2, 1, 1]) == 0.25
    assert inspect.histogram_ks([4, -1], [0, 4]) == 1
    assert inspect.histogram_ks([-1, -1], [0, 1]) == 1
    each = {"a": {"x": [1, 0]}, "b": {"x": [0, 1]}, "c": {"x": [2, 1]}}
    assert inspect._pairwise(each, "x") == {"a and b": 1, "a and c": 0.3333, "b and c": 0.6667}
    advise = inspect.guidance
    differ = advise({"north": HIGH, "south": LOW}, 1.0)
    assert differ[0].startswith("Labels differ (mean KS 1.00)")
    assert differ[1].startswith("Intensities differ most between north and south (KS 1.00)")
    assert differ[2:] == [
        "Fewer than 100 training images: south; these sites gain most from the others.",
        "Some labels do not occur at north, south; a model trained there alone cannot know them.",
    ]
    full = {**HIGH, "labels": [1, 1]}
    assert advise({"north": full, "south": full}, 0.19) == [
        "Labels are alike (mean KS 0.19): fedavg and its relatives are a good choice."
    ]
    assert advise({"north": full, "south": full}, 0.2)[0].startswith("Labels differ")
    assert advise({"north": full}, None, has_labels=False) == []
    assert len(advise({"north": LOW}, None)) == 1, "one site has no others to gain from"
    half = {**full, "intensities": [2, 2]}
    assert len(advise({"north": full, "south": half}, 0.0)) == 2
    close = {**full, "intensities": [51, 49]}
    assert len(advise({"north": full, "south": close}, 0.0)) == 1
    untold = {**full, "splits": [-1, 0], "labels": [-1, 3]}
    assert len(advise({"north": full, "south": untold}, 0.0)) == 1, "what is not told is not few"
    assert "Fewer than 100 training images: south" in advise({"north": full, "south": {**full, "splits": [0]}}, 0)[1]


def test_what_the_coordinator_learns_openly_and_in_a_secure_sum():
    found = inspect.about_sites({"north": HIGH, "south": {**LOW, "labels": [-1, 4]}}, federation_of())
    assert found["per_site"]["south"]["splits"] == [99, 20]
    assert found["total"]["labels"] == [4, 4]
    assert found["total"]["splits"] == [199, 40]
    assert (found["mean_ks"], found["pairwise_ks"]) == (1, {"north and south": 1})
    assert (found["classes"], found["bounds"]) == (["no", "yes"], None)
    assert found["ks"]["sides"] == {"north and south": 0}
    three = inspect.about_sites({"a": HIGH, "b": LOW, "c": LOW}, federation_of((), (0.0, 9.0)))
    assert (three["mean_ks"], three["bounds"]) == (pytest.approx(2 / 3), [0, 9])
    secure = inspect.about_sites({"all": HIGH}, federation_of(summed="secure"))
    assert (secure["per_site"], secure["mean_ks"], secure["total"]["labels"]) == ({}, None, [4, 0])
    assert "not known from totals" in secure["guidance"][0]
    assert inspect.about_sites({"all": HIGH}, federation_of())["per_site"] == {"all": HIGH}
    assert inspect.about_sites({"a": HIGH, "b": LOW}, federation_of(summed="secure"))["per_site"]


def test_tables_of_another_form_are_refused():
    sizes = {"splits": 2, "patients": 1, "labels": 2, "intensities": 16, "missing": 1, "sides": 9, "spacings": 10}
    sent = {name + end: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items() for end in ("", " told")}
    check = InspectSites().check_reply

    def refused(tensors, operation="survey"):
        reply = Reply("north", (Parcel("statistics", tensors),))
        try:
            check(federation_of(), Call("north", operation, 1), reply)
        except ParcelRejected:
            return True
        return False

    assert not refused(sent)
    assert refused({**sent, "labels": torch.zeros(3, dtype=torch.int64)})
    assert refused({**sent, "labels": torch.tensor([0, -1])})
    assert refused({**sent, "labels": torch.zeros(2)})
    assert refused({**sent, "labels": torch.zeros(2, 1, dtype=torch.int64)})
    assert refused({name: tensor for name, tensor in sent.items() if name != "missing told"})
    assert not refused({}, "score")


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
