"""Tasks: one file a task, with its head, its loss and metrics that add over sites.

Tasks know torch, MONAI, `errors` and `settings`, and nothing of models, methods or sites.
"""

from polyclinic.registry import Registry
from polyclinic.tasks.classification import Classification
from polyclinic.tasks.multilabel import MultiLabel
from polyclinic.tasks.regression import Regression
from polyclinic.tasks.segmentation import Segmentation
from polyclinic.tasks.task import Sums, Target, Task
from polyclinic.tasks.volume_segmentation import VolumeSegmentation

TASKS: Registry[type[Task]] = Registry(
    "polyclinic.tasks",
    {
        "classification": Classification,
        "multilabel": MultiLabel,
        "regression": Regression,
        "segmentation": Segmentation,
        "volume-segmentation": VolumeSegmentation,
    },
    base=Task,
)

__all__ = [
    "TASKS",
    "Classification",
    "MultiLabel",
    "Regression",
    "Segmentation",
    "Sums",
    "Target",
    "Task",
    "VolumeSegmentation",
]
