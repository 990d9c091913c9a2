"""FedAvg+Share (Zhao et al. 2018): FedAvg after every site has given a small share of its images to all others.

The shared images are real ones: they leave the site as parcels of kind real-images, which a site's policy must
allow explicitly.
"""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.methods.fedavg import FedAvg
from polyclinic.methods.shared import local_training, shared_images
from polyclinic.methods.shared.method import Call, Federation, Parcel, Reply, Site, Traits, Weights, operation
from polyclinic.training.plans import FitSpec

if TYPE_CHECKING:
    pass


class FedAvgShare(FedAvg):
    name: Literal["fedavg-share"] = "fedavg-share"  # type: ignore[assignment]
    share: float = Field(0.05, gt=0, le=1, description="share of each site's training images given to all")

    summary: ClassVar[str] = "FedAvg after a small share of real images was given to all sites"
    no_privacy: ClassVar[str] = (
        "gives real images away, which no noise in training covers; choose fedavg or fedavg-replay"
    )
    traits: ClassVar[Traits] = replace(FedAvg.traits, label_sets=False)

    def run(self, federation: Federation) -> Weights:
        federation.once("shared", lambda: self.exchange(federation))
        return super().run(federation)

    def exchange(self, federation: Federation) -> dict[str, Tensor]:
        """Give every site what all the others share. The coordinator keeps only how many images that were."""
        replies = federation.ask_all("give_share")
        for site in federation.sites:
            others = [reply for reply in replies if reply.site != site]
            if others:
                federation.ask(site, "take_shared", **shared_images.parcels_of(shared_images.pool(others)))
        return {"count": torch.tensor(sum(len(reply.real_images["images"]) for reply in replies))}

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        super().check_reply(federation, call, reply)
        if call.operation == "give_share":
            shared_images.check_shared(federation, reply)

    @operation("real-images", "labels", "masks", partner="simulator")
    def give_share(self, site: Site) -> tuple[Parcel, ...]:
        count = max(1, round(self.share * len(site.data.train)))
        chosen = torch.randperm(len(site.data.train), generator=site.rng("share"))[:count]
        return shared_images.release(site.data.train, chosen.sort().values.numpy())

    @operation(partner="simulator")
    def take_shared(self, site: Site, real_images: Weights, labels: Weights, masks: Weights | None = None) -> None:
        site.state.put("shared", {**real_images, **labels, **(masks or {})})

    @operation("weights", partner="simulator")
    def train(self, site: Site, weights: Weights) -> Parcel:
        part, shared = site.data.train, site.state.group("shared")
        if shared:  # by the others
            part = shared_images.union(part, shared_images.pooled_images(shared))
        spec = FitSpec(self.steps_at(site, part), part, replayed=partial(self.replayed, site))
        return local_training.train(site, weights, spec)
