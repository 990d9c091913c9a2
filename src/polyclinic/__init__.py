"""Polyclinic: hospitals train medical-imaging models together without sharing their images.

import polyclinic

study = polyclinic.load_study("study.toml")
result = polyclinic.run(study, "runs/first")
print(result.metrics["test"])

What is listed here is the public API: a notebook or a plug-in imports from `polyclinic` and from nowhere else.
"""

from __future__ import annotations

__version__ = "0.1.0"

#: what type checkers take for true; `typing` takes ten milliseconds, in which a Ctrl-C would be a traceback
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from polyclinic import attacks as attacks
    from polyclinic import generators as generators
    from polyclinic import metrics as metrics
    from polyclinic import models as models
    from polyclinic.attacks.attack import Verdict as Verdict
    from polyclinic.audits.attack import Attack as Attack
    from polyclinic.audits.attack import Finding as Finding
    from polyclinic.audits.attack import NotTried as NotTried
    from polyclinic.audits.attack import Planted as Planted
    from polyclinic.audits.attack import Seen as Seen
    from polyclinic.audits.audit import audit as audit
    from polyclinic.audits.truth import Truth as Truth
    from polyclinic.data.dataset import Dataset as Dataset
    from polyclinic.data.partitions.base import Plan as Plan
    from polyclinic.data.partitions.base import Sites as Sites
    from polyclinic.data.source import FileSource as FileSource
    from polyclinic.data.source import Source as Source
    from polyclinic.errors import BadInput as BadInput
    from polyclinic.errors import WorkFailed as WorkFailed
    from polyclinic.federation.call import GateRefused as GateRefused
    from polyclinic.federation.call import Reply as Reply
    from polyclinic.federation.federation import Federation as Federation
    from polyclinic.federation.federation import Weights as Weights
    from polyclinic.federation.layers.interface import SiteLayer as SiteLayer
    from polyclinic.federation.ledger.kinds import Kind as Kind
    from polyclinic.federation.ledger.parcel import Parcel as Parcel
    from polyclinic.federation.operation import operation as operation
    from polyclinic.federation.site import Site as Site
    from polyclinic.generators.base import CodedModel as CodedModel
    from polyclinic.generators.base import Generator as Generator
    from polyclinic.generators.base import GeneratorModel as GeneratorModel
    from polyclinic.methods.cwt import CyclicWeightTransfer as CyclicWeightTransfer
    from polyclinic.methods.fedavg import FedAvg as FedAvg
    from polyclinic.methods.shared import local_training as local_training
    from polyclinic.methods.shared.method import Method as Method
    from polyclinic.methods.shared.method import Traits as Traits
    from polyclinic.models.backbone import Backbone as Backbone
    from polyclinic.models.encoders import Encoder as Encoder
    from polyclinic.randomness import numpy_rng as numpy_rng
    from polyclinic.randomness import torch_rng as torch_rng
    from polyclinic.runner.compare.compare import compare as compare
    from polyclinic.runner.compare.tune import tune as tune
    from polyclinic.runner.export.export import export as export
    from polyclinic.runner.predict.predict import predict as predict
    from polyclinic.runner.run.result import Result as Result
    from polyclinic.runner.run.run import run as run
    from polyclinic.study import Study as Study
    from polyclinic.study import load_study as load_study
    from polyclinic.tasks.classification import Classification as Classification
    from polyclinic.tasks.regression import Regression as Regression
    from polyclinic.tasks.segmentation import Segmentation as Segmentation
    from polyclinic.tasks.task import Target as Target
    from polyclinic.tasks.task import Task as Task
    from polyclinic.training.loop import Trainer as Trainer
    from polyclinic.training.loop import TrainerSpec as TrainerSpec
    from polyclinic.training.optimizer import Optimizer as Optimizer

#: packages whose own exports are public: `attacks.GradientInversion`, `metrics.Pixels`, ...
_PACKAGES = ("attacks", "generators", "metrics", "models")
#: module -> the public names that live in it
_PUBLIC = {
    "attacks.attack": ("Verdict",),
    "audits.attack": ("Attack", "Finding", "NotTried", "Planted", "Seen"),
    "audits.audit": ("audit",),
    "audits.truth": ("Truth",),
    "data.dataset": ("Dataset",),
    "data.partitions.base": ("Plan", "Sites"),
    "data.source": ("FileSource", "Source"),
    "errors": ("BadInput", "WorkFailed"),
    "federation.call": ("GateRefused", "Reply"),
    "federation.layers.interface": ("SiteLayer",),
    "federation.federation": ("Federation", "Weights"),
    "federation.ledger.kinds": ("Kind",),
    "federation.ledger.parcel": ("Parcel",),
    "federation.operation": ("operation",),
    "federation.site": ("Site",),
    "generators.base": ("CodedModel", "Generator", "GeneratorModel"),
    "methods.cwt": ("CyclicWeightTransfer",),
    "methods.fedavg": ("FedAvg",),
    "methods.shared": ("local_training",),
    "methods.shared.method": ("Method", "Traits"),
    "models.backbone": ("Backbone",),
    "models.encoders": ("Encoder",),
    "randomness": ("numpy_rng", "torch_rng"),
    "runner.compare.compare": ("compare",),
    "runner.compare.tune": ("tune",),
    "runner.export.export": ("export",),
    "runner.predict.predict": ("predict",),
    "runner.run.result": ("Result",),
    "runner.run.run": ("run",),
    "study": ("Study", "load_study"),
    "tasks.classification": ("Classification",),
    "tasks.regression": ("Regression",),
    "tasks.segmentation": ("Segmentation",),
    "tasks.task": ("Target", "Task"),
    "training.loop": ("Trainer", "TrainerSpec"),
    "training.optimizer": ("Optimizer",),
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = ["__version__", *_PACKAGES, *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    # torch takes a second to import: only who needs it pays
    import importlib

    if name in _PACKAGES:
        return importlib.import_module(f"polyclinic.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'polyclinic' has no attribute '{name}'")
    home = importlib.import_module(f"polyclinic.{_HOMES[name]}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
