"""What a site's policy will refuse is said before the run, each with the cure that works."""

import numpy as np
import pytest

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import GateRefusedData
from polyclinic.federation.layers.cohort import check_more_images_than
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import Site
from polyclinic.study import parse_study
from polyclinic.study.policy_check import Counts, numbers_for, refused_by

#: as in the kit of a hospital
KIT = {"min_cohort": 10, "max_scores": 1000, "deployed": True}
ENCODED = {"model": {"backbone": "efficientnet-lite0-1024"}, "evaluation": {"select": "last"}}
SITE = Counts(152, 152, {"healthy": 80, "diseased": 72})


def study(method, **tables):
    data = {"source": "at-sites", "classes": ["healthy", "diseased"]}
    return parse_study({"data": data, "sites": {"partition": "iid", "count": 3}, "method": method, **tables})


def refusals(method, own=SITE, policy=None, **tables):
    return refused_by(study(method, **tables), Policy(**{**KIT, **(policy or {})}), own)


ANALYTIC = {"name": "analytic"}
PRIVATE = {"privacy": {"on": ["classifier"], "target_epsilon": 8.0, "cover": "named"}, **ENCODED}
SMALL = {"batch_size": 4}
SECURE = {"federation": {"sum": "secure"}}
CASES = [
    (ANALYTIC, ENCODED, {}, "152 training images, sends no sums of products of 1,024", {"method.numbers": 8}),
    (ANALYTIC, {**ENCODED, **SECURE}, {}, "a secure sum does not change that", {"method.numbers": 16}),
    ({"name": "fedavg", "local_steps": 1}, {"optimizer": SMALL}, {}, "of 4 images", {"optimizer.batch_size": 16}),
    ({"name": "fedavg"}, {"optimizer": {"lr": 0.5}}, {}, "above the 0.1", {"optimizer.lr": 0.1}),
    ({"name": "fedavg"}, {}, {"kinds": ["metrics"]}, "'train' of 'fedavg' releases weights", None),
    ({"name": "fedavg"}, SECURE, {"kinds": ["metrics", "shares", "keys"]}, "releases masked", None),
    ({"name": "fedavg"}, SECURE, {"min_sites": 5}, "wants 5 or more", {"federation.sum": "float"}),
    ({"name": "fedavg"}, {}, {"samples": "hide"}, "hides how many images", {"method.weighting": "uniform"}),
    ({"name": "fedavg", "rounds": 20}, {}, {"max_scores": 6}, "would leave 21 times", {"evaluation.every": 5}),
    ({"name": "fedavg"}, {}, {"max_epsilon": 3}, "nothing in the study is private", None),
    ({"name": "private-head"}, PRIVATE, {"max_epsilon": 3}, "epsilon 8 is wanted", {"privacy.target_epsilon": 3}),
    ({"name": "centralized"}, {}, {}, "exists in simulation only", {"method.name": "fedavg"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "tables", "policy", "words", "cure"), CASES)
def test_a_refusal_is_foreseen_and_its_cure_works(method, tables, policy, words, cure):
    (found,) = refusals(method, policy=policy, **tables)
    assert words in str(found)
    if cure is None:
        return
    named = next(iter(cure)).partition(".")[0] if "method.name" in cure else next(iter(cure))
    assert named in found.cure
    cured = study(method, **tables).with_settings(cure)
    assert refused_by(cured, Policy(**{**KIT, **policy}), SITE) == []


def test_what_depends_on_images_is_a_condition_for_the_coordinator_and_marked_at_the_site():
    (few, rare) = refusals(ANALYTIC, own=None, **ENCODED)
    assert str(few).startswith("a site with 1,024 training images or fewer sends no sums")
    assert str(rare).startswith("a site with a class of fewer than 10 patients (min_cohort) sends nothing")
    assert not any(one.by_images for one in (few, rare))
    rare_class = Counts(3000, 2000, {"healthy": 2990, "diseased": 4})
    (found,) = refusals(ANALYTIC, own=rare_class, **ENCODED)
    assert (found.by_images, "class 'diseased'" in found.what, "data.merge" in found.cure) == (True, True, True)
    (found,) = refusals({"name": "fedavg"}, own=Counts(30, 6))
    assert found.by_images


def test_a_site_counts_images_patients_and_classes():
    part = ImageSet(np.zeros((4, 1, 2, 2), np.uint8), np.array([0, 0, 1, 0]), cases=np.array([5, 5, 5, 6]))
    assert Counts.of(part, ("a", "b")) == Counts(4, 2, {"a": 2, "b": 1})


@pytest.mark.parametrize("images", [9, 30, 152, 4000])
def test_the_site_itself_lets_sums_of_so_many_numbers_out(images):
    site = Site.__new__(Site)
    site.policy = Policy(**KIT)
    check_more_images_than(numbers_for(images), site, images)
    with pytest.raises(GateRefusedData, match="give the features of single images away"):
        check_more_images_than(images, site, images)
