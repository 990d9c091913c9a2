"""Methods without a common model: the federated model is the union of the sites' models (FedER, section 3.3).

A prediction comes from one site's model or from all of them together. The result says how each site's model does at
every site (`metrics.across_sites`, `metrics.convergence`), and how the ensemble does (`metrics.ensemble`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from polyclinic.federation.federation import Federation, Weights
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.methods.shared.method import Method
from polyclinic.methods.shared.traits import Traits

if TYPE_CHECKING:
    from polyclinic.data.parts import ImageSet
    from polyclinic.models import Backbone


class PeerMethod(Method):
    traits: ClassVar[Traits] = Traits(mixes_backbones=True, private_networks=(), samples_sites=False)

    def local_names(self, model: Backbone, batch_norm: Literal["average", "local"]) -> frozenset[str]:
        """All of them: each site has a model of its own."""
        return frozenset(model.state_dict())

    def more_metrics(self, federation: Federation, models: Mapping[str, Weights]) -> dict[str, Any]:
        """The ensemble of all sites' models, on every site's test images. Uncounted: the simulator hands them out.

        Between real institutions nobody has all models, and there is no ensemble to score.
        """
        if not federation.engine.simulation:
            return {}
        parcels: dict[str, Any] = {
            f"model_{place}": Parcel("weights", weights) for place, weights in enumerate(models.values())
        }
        replies = federation.ask_all("evaluate_together", counted=False, **parcels)
        task = federation.trainer.task
        sums = {reply.site: dict(reply.metrics) for reply in replies if reply.parcels}
        if not sums:
            return {}
        per_site = {site: task.finish(of_site) for site, of_site in sums.items()}
        return {"ensemble": {"test": task.finish(functools.reduce(task.add, sums.values())), "per_site": per_site}}

    @operation("metrics", partner="simulator")
    def evaluate_together(self, site: Site, split: str = "test", **models: Weights) -> Parcel | None:
        """Score the mean of several models' predictions on the site's images."""
        part = getattr(site.data, split)
        if len(part) == 0:
            return None
        return Parcel("metrics", together(site, part, list(models.values())))


@torch.no_grad()
def together(site: Site, part: ImageSet, models: list[Weights]) -> dict[str, Tensor]:
    """Additive sums of the task's metrics for the ensemble: the mean of probabilities, or of predicted values."""
    outputs = [_outputs(site, part, weights) for weights in models]
    trainer = site.trainer
    mean = mean_prediction(torch.stack(outputs), values=trainer.target.label_range is not None)
    batches = list(trainer.in_order(part))
    targets = torch.cat([target.cpu() for _, target in batches])
    observed = trainer.task.observe(mean, targets, trainer.target)
    cases = None if part.cases is None else torch.from_numpy(part.cases.copy())
    return trainer.task.sums(observed.cpu(), targets, cases, trainer.target)


def _outputs(site: Site, part: ImageSet, weights: Weights) -> Tensor:
    trainer = site.trainer_for(weights)
    trainer.load(weights).eval()
    return torch.cat([trainer.forward(images).float().cpu() for images, _ in trainer.in_order(part)])


def mean_prediction(outputs: Tensor, *, values: bool) -> Tensor:
    """One output [B, ...] for those of several models [M, B, ...]: of values their mean, of logits the logarithm of
    the mean probability, which is a logit again."""
    if values:
        return outputs.mean(0)
    if outputs.shape[2] == 1:  # one logit: yes or no
        return torch.logit(outputs.sigmoid().mean(0).clamp(1e-7, 1 - 1e-7))
    return outputs.log_softmax(2).logsumexp(0) - torch.tensor(float(len(outputs))).log()
