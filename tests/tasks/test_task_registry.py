"""The `[task]` table of a study, and what every task promises."""

from functools import partial

import pytest
import torch
from pydantic import ValidationError

from polyclinic.errors import BadInput
from polyclinic.models import BACKBONES, build, initial_weights
from polyclinic.settings import variant
from polyclinic.tasks import TASKS, Regression, Target

TARGET = Target(classes=("a", "b"), unit="months", label_range=(0.0, 10.0))


def test_a_table_is_parsed_by_the_class_it_names():
    table = {"name": "regression", "criterion": "huber"}
    task = variant(TASKS, table, path="task", key="name")(**table)
    assert task == Regression(criterion="huber")
    assert task.model_dump() == table


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(BadInput, match=r"task\.name: no such choice: 'regresion' \(did you mean 'regression'\?\)"):
        variant(TASKS, {"name": "regresion"}, path="task", key="name")
    with pytest.raises(ValidationError, match="criterion"):
        TASKS["regression"](name="regression", criterion="l3")
    with pytest.raises(ValidationError, match="criterion"):
        TASKS["classification"](name="classification", criterion="l1")


@pytest.mark.parametrize(
    ("name", "backbone"),
    [("classification", "small-cnn"), ("regression", "small-cnn"), ("segmentation", "unet")],
)
def test_a_task_trains_and_measures_a_backbone_of_its_kind(name, backbone):
    task = TASKS[name](name=name)
    assert task.dense == BACKBONES[backbone].dense
    rng = torch.Generator().manual_seed(0)
    images = torch.randn(6, 1, 28, 28, generator=rng)
    labels, masks = torch.arange(6) % 2, (images[:, 0] > 0.5).byte()
    targets = task.targets(labels, masks)
    builder = partial(build, backbone, channels=1, outputs=task.outputs(TARGET), size=28, norm="group")
    model = builder()
    model.load_state_dict(initial_weights(builder, 0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = task.loss(model(images), targets, TARGET)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    output = model(images)
    result = task.finish(task.sums(task.observe(output, targets, TARGET), labels, None, TARGET))
    assert task.metric in result
    assert task.better in ("higher", "lower")
    assert result["loss"] == pytest.approx(task.loss(output, targets, TARGET).item(), rel=1e-5)
