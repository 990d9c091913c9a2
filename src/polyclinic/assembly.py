"""From a study and its sites' parts to the objects that do the work: workbench, host of sites, engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from polyclinic.data.parts import Parts, open_site
from polyclinic.engines.in_process import InProcess
from polyclinic.engines.worker_process import WorkerProcess
from polyclinic.errors import BadInput
from polyclinic.federation.gate import Policy
from polyclinic.federation.parcel import Expected
from polyclinic.federation.site import SiteHost
from polyclinic.methods.replay import Replaying
from polyclinic.models import Backbone, build, initial_weights
from polyclinic.randomness import seed_of
from polyclinic.study import Study, parse_study
from polyclinic.tasks import Target
from polyclinic.training import Workbench


@dataclass(frozen=True)
class Assembly:
    """Builds everything one run consists of. `folder` is the run folder."""

    study: Study
    parts: Parts
    folder: Path

    @cached_property
    def target(self) -> Target:
        info = self.parts.info
        bounds = tuple(info["label_range"]) if info["label_range"] else None
        return Target(tuple(info["classes"]), info["unit"], bounds)

    def build_model(self) -> Backbone:
        info, model = self.parts.info, self.study.model
        return build(
            model.backbone,
            channels=info["channels"],
            outputs=self.study.task.outputs(self.target),
            size=info["size"],
            norm=model.norm,
        )

    @cached_property
    def _initial(self) -> dict[str, Tensor]:
        return initial_weights(self.build_model, seed_of(self.study.seed, "initial weights"))

    def initial_weights(self) -> dict[str, Tensor]:
        """The weights every site and the coordinator start from; the same for the same study and seed."""
        return {name: tensor.clone() for name, tensor in self._initial.items()}

    def workbench(self) -> Workbench:
        study, model = self.study, self.build_model()
        device = device_of(study.engine.device)
        return Workbench(
            model,
            study.task,
            self.target,
            study.optimizer,
            cut=study.cut,
            local_names=study.method.local_names(model, study.model.batch_norm),
            initial=self._initial,
            device=device,
            precision=precision_of(study.engine.precision, device),
            privacy=study.privacy,
        )

    @cached_property
    def expected(self) -> Mapping[str, Expected]:
        """What weights and gradients look like, for whoever receives some: never more than the network has."""
        return {
            "weights": Expected.like("weights", self._initial, partial=True),
            "gradients": Expected("gradients", max_bytes=2**31),
        }

    @cached_property
    def replaying(self) -> Replaying | None:
        """The replay that wraps the method, where the study has one."""
        return Replaying(self.study.replay, self.study.generator) if self.study.replay else None

    def host(self) -> SiteHost:
        return SiteHost(
            method=self.study.method,
            seed=self.study.seed,
            bench=self.workbench(),
            folder=self.folder,
            open_data=lambda site: open_site(self.parts.folder, site),
            policy=Policy(kinds=self.study.policy.kinds),
            expected=self.expected,
            replay=self.replaying,
        )

    def engine(self, lock: int) -> InProcess:
        """The study's engine; workers share the file descriptor `lock`, and so hold the run folder's lock."""
        settings = self.study.engine
        order = json.dumps(
            {"study": self.study.as_tables(), "parts": str(self.parts.folder), "folder": str(self.folder)}
        )

        def start_worker() -> WorkerProcess:
            command = [sys.executable, "-m", "polyclinic.worker", order]
            return WorkerProcess(command, threads=settings.threads, inherit=(lock,))

        return InProcess(
            self.host(),
            self.parts.names,
            start_worker,
            workers=settings.workers,
            threads=settings.threads,
            deadline=settings.deadline,
            may_grow=device_of(settings.device) == "cpu",  # processes on one GPU only get in each other's way
        )


def assemble_from(order: str) -> Assembly:
    """The assembly a worker process was told to build, from its JSON order."""
    told = json.loads(order)
    folder = Path(told["parts"])
    info = json.loads((folder / "info.json").read_text(encoding="utf-8"))
    parts = Parts(folder, tuple(info["counts"]), info)
    return Assembly(parse_study(told["study"]), parts, Path(told["folder"]))


def device_of(name: str) -> str:
    """The device that `engine.device` means on this machine."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"engine.device: torch knows no device '{name}'; write auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"engine.device: there is no GPU for '{name}' here; set engine.device = 'cpu' or 'auto'")
    return name


def precision_of(name: str, device: str) -> str:
    return name if name != "auto" else "fp32" if device == "cpu" else "bf16"
