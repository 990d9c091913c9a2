"""Evaluation only: the sites score the study's first weights (`model.weights`), and nothing is trained.

Besides the sums that every method's scores are made of, a site tells intervals and a coarse calibration, which it
computes from its own cases (`metrics/statistics/safe.py`).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.leaving.parcel import Parcel, ParcelRejected
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.json_types import JsonObject
from polyclinic.methods.shared.method import Method
from polyclinic.methods.shared.traits import Traits
from polyclinic.metrics.statistics.case_metrics import classification_metrics, regression_metrics
from polyclinic.metrics.statistics.safe import BINS, calibration_counts, mean_of_sites, safe_intervals
from polyclinic.tasks.classification import margins

#: metrics whose rounding does not follow from one patient's share, and are not told
NOT_TOLD = ("loss",)


class EvaluateOnly(Method):
    name: Literal["evaluate"] = "evaluate"
    rounds: int = Field(1, ge=1, le=1, description="one round: the model is scored once")

    summary: ClassVar[str] = "nothing is trained: the sites score a model that was brought (polyclinic deploy evaluate)"
    traits: ClassVar[Traits] = Traits(private_networks=(), samples_sites=False, has_course=False)

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            if federation.trainer.task.like != "segmentation":
                replies = federation.ask_all("give_intervals", weights=state.weights)
                federation.report("safe_statistics", joined(replies))
            federation.evaluate(state.weights)
        return state.weights

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "give_intervals":
            for name, tensor in reply.parcel("statistics").tensors.items():
                counts = name in ("bins", "right")
                wanted = (torch.int64, (BINS,)) if counts else (torch.float64, (4,))
                if (tensor.dtype, tuple(tensor.shape)) != wanted or (not counts and not bool(tensor.isfinite().all())):
                    raise ParcelRejected(f"statistics: '{name}' is no interval and no histogram")

    @operation("statistics", scores=("test",))
    def give_intervals(self, site: Site, weights: Weights) -> Parcel:
        """Intervals of the metrics on the site's test images, and a coarse calibration; no score of an image."""
        part, trainer, least = site.data.test, site.trainer, site.min_cohort
        if not len(part):
            return Parcel("statistics", {})
        trainer.load(weights)
        outputs = torch.cat([output.cpu() for output, _ in trainer.outputs(part)]).double()  # type: ignore[attr-defined]
        said, labels = trainer.task.predictions(outputs, trainer.target).numpy(), np.array(part.labels)
        tensors: dict[str, Tensor] = {}
        if trainer.task.like == "classification":
            metrics, bounds = classification_metrics(said, labels, margins(outputs).numpy()), None
            bins, right = calibration_counts(said, labels, least)
            tensors |= {"bins": torch.from_numpy(bins), "right": torch.from_numpy(right)}
        else:
            low, high = trainer.target.label_range or (float(labels.min()), float(labels.max()))
            metrics, bounds = regression_metrics(said, labels), dict.fromkeys(("mae", "rmse", "bias"), high - low)
        told = safe_intervals(metrics, len(part), part.cases, least, bounds)
        tensors |= {name: torch.tensor(one, dtype=torch.float64) for name, one in told.items() if name not in NOT_TOLD}
        return Parcel("statistics", tensors)


def joined(replies: list[Reply]) -> JsonObject:
    """What the sites told, of each and of the mean over them."""
    told = {reply.site: dict(reply.parcel("statistics").tensors) for reply in replies}
    intervals = {site: {n: t.tolist() for n, t in one.items() if t.is_floating_point()} for site, one in told.items()}
    names = sorted({name for one in intervals.values() for name in one})
    mean = {name: mean_of_sites({site: one[name] for site, one in intervals.items() if name in one}) for name in names}
    counts = {site: {n: t.tolist() for n, t in one.items() if not t.is_floating_point()} for site, one in told.items()}
    return {"columns": ["value", "low", "high", "variance"], "per_site": intervals, "mean": mean, "calibration": counts}
