"""Attack: learn about single patients from the counts that a site tells before training (`method.name = "inspect"`)."""

import itertools
from dataclasses import replace

import numpy as np
import torch
from attacked_site import SITE, ask

from polyclinic.questions.inspect import Counted, suppressed


def survey(kit, run, cases):
    """What a site tells whose training images belong to these patients."""
    kit.policy(min_cohort=5)
    host = kit.host(run, method={"name": "inspect"})
    site = host.sites.get(SITE)
    site.data = replace(site.data, train=replace(site.data.train, cases=cases(np.asarray(site.data.train.labels))))
    return ask(host, "survey", 1).parcels[0].tensors


def test_a_class_of_many_images_of_few_patients_is_not_told(kit):
    def two_ill_patients(labels):
        return np.where(labels == 1, np.arange(len(labels)) % 2, 10 + np.arange(len(labels)))

    told = survey(kit, "few", two_ill_patients)
    assert int(told["labels"][1]) == int(told["labels told"][1]) == 0
    many = survey(kit, "many", lambda labels: np.arange(len(labels)))
    assert int(many["labels"][1]) > 5


def test_one_image_more_or_less_in_a_bin_seldom_shows():
    """Two studies whose bins differ by a hair, or a site before and after one patient came, could be subtracted."""
    told = [int(suppressed(Counted(torch.tensor([count]), [np.arange(count)]), 10)[0]) for count in range(10, 60)]
    assert {count % 5 for count in told} == {0}
    assert sum(before != after for before, after in itertools.pairwise(told)) <= 10


def test_all_but_a_few_patients_are_not_told_either(kit):
    """A column that is missing at all patients but two tells of these two, as the number of all is told."""

    def told(run, known):
        kit.policy(min_cohort=5)
        host = kit.host(run, method={"name": "inspect"})
        site = host.sites.get(SITE)
        column = np.where(np.arange(len(site.data.train)) < known, "f", "")[:, None]
        site.data = replace(site.data, train=replace(site.data.train, columns=column))
        return ask(host, "survey", 1).parcels[0].tensors["missing told"].tolist()

    assert told("few", 2) == [0]
    assert told("many", 20) == [1]
