"""What training on volumes needs, before it is tried; and what needs less."""

import pytest

from polyclinic import models
from polyclinic.models.topology import topology
from polyclinic.models.volume_plan import VolumePlan
from polyclinic.runner.run.volume_memory import memory_sentence, training_gigabytes
from polyclinic.study import parse_study

STUDY = {
    "data": {"source": "brain-volumes", "size": [96, 96, 64]},
    "sites": {"partition": "iid", "count": 2},
    "task": {"name": "volume-segmentation"},
    "model": {"backbone": "dynunet", "norm": "instance"},
    "optimizer": {"batch_size": 4},
    "method": {"name": "fedavg", "rounds": 1},
    "engine": {"precision": "bf16"},
}


@pytest.fixture(scope="module")
def sizes():
    """The same network in small: what it needs at all, and for each patch, in both precisions."""

    def build():
        return models.build("dynunet", channels=4, outputs=4, size=(96, 96, 64), norm="instance", arguments={})

    return {half: training_gigabytes(build, (4, 96, 96, 64), half=half) for half in (True, False)}


def test_nnunets_network_needs_what_its_rule_of_thumb_says(sizes):
    stages = topology((96, 96, 64))
    always, each = sizes[True]
    assert always + 2 * each == pytest.approx(VolumePlan((1, 1, 1), (96, 96, 64), 2, stages).gigabytes, rel=0.2)
    assert sizes[False] == (always, 2 * each)


def test_too_little_memory_is_told_with_the_cure(sizes):
    always, each = sizes[True]
    study = parse_study(STUDY)
    assert memory_sentence(study).endswith("GB, for 4 patches at once")
    assert memory_sentence(study, always + 4.1 * each) == memory_sentence(study)
    two = memory_sentence(study, always + 2.5 * each)
    assert two.endswith("GB are free; set task.accumulate = 2: the same steps")
    assert "free" not in memory_sentence(study.with_settings({"task.accumulate": 2}), always + 2.5 * each)
    assert memory_sentence(study, always).endswith("make data.size smaller")
