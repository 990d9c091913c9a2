"""The result of a run: the content of `result.json`."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from polyclinic import __version__
from polyclinic.data.parts import PreparedSites
from polyclinic.federation.federation import Federation
from polyclinic.json_types import JsonObject
from polyclinic.privacy.record import summary
from polyclinic.runner.assembly import device_of
from polyclinic.runner.recorder import Recorder
from polyclinic.runner.release import Models, _flat, digest_of_weights
from polyclinic.study import Study

#: what a result says of its data, of `PreparedSites.info`
FACTS = ("source", "counts", "digests", "classes", "unit")


@dataclass(frozen=True)
class Result:
    """What a run found: the content of `result.json`, and the folder it lies in."""

    folder: Path
    values: JsonObject

    @property
    def metrics(self) -> JsonObject:
        """`test` (pooled), `mean` (over sites) and `per_site`."""
        return self.values["metrics"]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def weights(self) -> dict[str, Tensor]:
        """The released model; where each site has a model of its own, names begin with the site's."""
        return load_file(self.folder / "model.safetensors")


def result_of(
    study: Study,
    parts: PreparedSites,
    federation: Federation,
    recorder: Recorder,
    models: Models,
    metrics: JsonObject,
    timing: dict[str, float],
) -> JsonObject:
    return {
        "method": study.method.name,
        "seed": study.seed,
        "task": study.task.name,
        "metrics": metrics,
        "model": "one of each site" if "" not in models else "one for all sites",
        "selected": {"by": study.evaluation.select, "round": recorder.best_round or federation.round},
        "batch_norm": "local" if study.method.traits.batch_norm == "local" else study.model.batch_norm,
        "heterogeneity": {
            name: parts.info[name] for name in ("mean_ks", "pairwise_ks", "labels") if name in parts.info
        },
        "communication": federation.communication.summary(federation.sites),
        "privacy": summary(federation.coverage.records, federation.coverage.uncovered),
        "rounds": federation.round,
        "failures": federation.failures,
        "ledgers": federation.heads.summary(),
        **federation.reports,
        "data": {key: parts.info[key] for key in FACTS if key in parts.info},
        "timing": timing,
        "environment": environment(study, federation),
        "weights_sha256": digest_of_weights(_flat(models)),
    }


def environment(study: Study, federation: Federation) -> JsonObject:
    """What the result's last bits depend on: versions, the machine, and how steps were computed."""
    device = device_of(study.engine.device)
    return {
        "polyclinic": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "threads": study.engine.threads,
        "recorded_steps": federation.trainer.graphs,
        "weights_stay_on": federation.weights_device,
        "stacked": sorted(getattr(federation.engine, "stacked_operations", ())),
    }
