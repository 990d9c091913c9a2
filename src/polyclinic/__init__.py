"""Polyclinic: hospitals train medical-imaging models together without sharing their images.

import polyclinic

study = polyclinic.load_study("study.toml")
result = polyclinic.run(study, "runs/first")
print(result.metrics["test"])

What is listed here is the public API: a notebook or a plug-in imports from `polyclinic` and from nowhere else.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from polyclinic.data.dataset import Dataset as Dataset
    from polyclinic.data.file_source import FileSource as FileSource
    from polyclinic.data.partitions.base import Plan as Plan
    from polyclinic.data.partitions.base import Sites as Sites
    from polyclinic.data.source import Source as Source
    from polyclinic.encoders.base import Encoder as Encoder
    from polyclinic.errors import BadInput as BadInput
    from polyclinic.errors import WorkFailed as WorkFailed
    from polyclinic.federation.federation import Federation as Federation
    from polyclinic.federation.leaving.kinds import Kind as Kind
    from polyclinic.federation.leaving.parcel import Parcel as Parcel
    from polyclinic.federation.operation import operation as operation
    from polyclinic.federation.site import Site as Site
    from polyclinic.generators.base import Generator as Generator
    from polyclinic.generators.base import GeneratorModel as GeneratorModel
    from polyclinic.methods.cwt import CyclicWeightTransfer as CyclicWeightTransfer
    from polyclinic.methods.fedavg import FedAvg as FedAvg
    from polyclinic.methods.shared.method import Method as Method
    from polyclinic.methods.shared.traits import Traits as Traits
    from polyclinic.models.backbone import Backbone as Backbone
    from polyclinic.runner.result import Result as Result
    from polyclinic.runner.run import run as run
    from polyclinic.study import Study as Study
    from polyclinic.study import load_study as load_study
    from polyclinic.tasks.task import Target as Target
    from polyclinic.tasks.task import Task as Task

#: public name -> the module that it lives in
_HOMES = {
    "Backbone": "models.backbone",
    "BadInput": "errors",
    "CyclicWeightTransfer": "methods.cwt",
    "Dataset": "data.dataset",
    "Encoder": "encoders.base",
    "FedAvg": "methods.fedavg",
    "Federation": "federation.federation",
    "FileSource": "data.file_source",
    "Generator": "generators.base",
    "GeneratorModel": "generators.base",
    "Kind": "federation.leaving.kinds",
    "Method": "methods.shared.method",
    "Parcel": "federation.leaving.parcel",
    "Plan": "data.partitions.base",
    "Result": "runner.result",
    "Site": "federation.site",
    "Sites": "data.partitions.base",
    "Source": "data.source",
    "Study": "study",
    "Target": "tasks.task",
    "Task": "tasks.task",
    "Traits": "methods.shared.traits",
    "WorkFailed": "errors",
    "load_study": "study",
    "operation": "federation.operation",
    "run": "runner.run",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    # torch takes a second to import: only who needs it pays
    if name not in _HOMES:
        raise AttributeError(f"module 'polyclinic' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"polyclinic.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
