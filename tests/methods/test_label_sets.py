"""Sites that know only some of the classes: their training does not touch what the model says about the others."""

import numpy as np
import pytest
import torch

from polyclinic.data.labels import unknown_classes
from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput
from polyclinic.methods import METHODS
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import run
from polyclinic.training import plans

SETS = {"site-1": ("healthy", "diseased")}


@pytest.fixture
def site_of(study_of, cache, tmp_path):
    def make(**changes):
        study = study_of({"name": "fedavg", "rounds": 1}, **changes)
        assembly = Assembly(study, prepare(study.data, study.sites, cache=cache), tmp_path)
        return assembly, assembly.host().sites.get("site-1")

    return make


def test_images_of_unknown_classes_are_left_out_and_their_outputs_stay(site_of, monkeypatch):
    """A third class that one site does not know: its row of the last layer gets no gradient there."""
    assembly, site = site_of()
    site.trainer.target = site.trainer.target.__class__(("a", "b"))
    site.unknown_classes = (1,)
    labels = torch.zeros(4, dtype=torch.long)
    images = torch.rand(4, 3, 28, 28)
    loss = plans.restricted_loss(site)(images, labels)
    loss.backward()
    last = [p for n, p in site.trainer.model.named_parameters() if n.endswith("weight") and p.shape[0] == 2][-1]
    assert torch.count_nonzero(last.grad[1]) == 0
    assert loss.item() == pytest.approx(0.0, abs=1e-6)  # with one class that can be, nothing is to be learned
    start = site.trainer.weights()
    known = plans.FitSpec(1, site.data.train.take(site.data.train.labels == 0))
    end = plans.Fit(site, start, known).alone().weights
    assert [torch.equal(end[n], one) for n, one in start.items() if n.endswith("weight") and one.shape[0] == 2] == [
        True
    ]
    assert assembly.unknown_classes == {}


def test_a_site_opens_only_images_that_it_can_label():
    from polyclinic.data.labels import without_classes
    from polyclinic.data.parts import ImageSet, SiteData

    part = ImageSet(np.zeros((6, 1, 2, 2), np.uint8), np.array([0, 1, 2, 0, 1, 2]), cases=np.arange(6))
    found = without_classes(SiteData("north", part, part, part), (1,))
    assert found.train.labels.tolist() == [0, 2, 0, 2]
    assert found.test.cases.tolist() == [0, 2, 3, 5]
    assert unknown_classes({"east": ["c", "a"]}, ("east", "west"), ("a", "b", "c")) == {"east": (1,)}


@pytest.mark.parametrize(("sets", "sentence"), [
    ({"north": ["a", "b"]}, "there is no site 'north'"),
    ({"east": ["a", "bb"]}, "there is no class 'bb'"),
    ({"east": ["a"]}, "must know two classes or more"),
    ({"east": ["a", "b"], "west": ["a", "b"]}, "no site knows 'c'"),
])  # fmt: skip
def test_label_sets_that_cannot_be_are_refused(sets, sentence):
    with pytest.raises(BadInput, match=sentence):
        unknown_classes(sets, ("east", "west"), ("a", "b", "c"))


@pytest.mark.parametrize("name", ["cwt", "fedsgd", "moon", "fedpft", "standalone", "scaffold"])
def test_methods_that_would_unlearn_classes_refuse_with_the_cure(study_of, name):
    assert not METHODS[name].traits.label_sets
    with pytest.raises(BadInput, match="choose fedavg, fedprox, gaussian-heads or analytic"):
        study_of({"name": name}, federation={"label_sets": SETS})


def test_sites_that_know_different_grades_train_together(tiny_run):
    sets = {"site-1": ("grade-0", "grade-1"), "site-2": ("grade-2", "grade-3", "grade-4")}
    data = {"grades": 5, "samples": 80}
    method = {"name": "fedavg", "rounds": 1, "local_steps": 2}
    found = tiny_run(method, data=data, sites={"partition": "iid", "count": 3}, federation={"label_sets": sets})
    without = tiny_run(method, data=data, sites={"partition": "iid", "count": 3})
    assert found.values["weights_sha256"] != without.values["weights_sha256"]
    assert set(found.metrics["per_site"]) == {"site-1", "site-2", "site-3"}


@pytest.mark.parametrize("sets", [{"site-1": ["healthy"]}, {"site-9": ["healthy", "diseased"]}])
def test_a_run_with_label_sets_that_cannot_be_is_refused_before_anything_is_written(study_of, tmp_path, cache, sets):
    study = study_of({"name": "fedavg", "rounds": 1}, federation={"label_sets": sets})
    with pytest.raises(BadInput, match="label_sets"):
        run(study, tmp_path / "run", cache=cache)
    assert not (tmp_path / "run").exists()
