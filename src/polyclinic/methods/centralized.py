"""Centralized: all training images in one place, the mark that federated methods are measured against.

It pools patients' images and so exists in simulation only. With `images` sites train a generator each and give
synthetic images instead of their real ones, or besides: the baselines of FedER's Table 2.
"""

from typing import ClassVar, Literal

from pydantic import Field

from polyclinic.methods.shared import shared_images, site_generator
from polyclinic.methods.shared.method import Federation, Method, Parcel, Site, Traits, Weights, all_sites, operation
from polyclinic.training.optimizer import coordinator_optimizer, keep_coordinator_optimizer


class Centralized(Method):
    name: Literal["centralized"] = "centralized"
    fraction: float = all_sites()
    images: Literal["real", "synthetic", "both"] = Field(
        "real", description="what the sites give: their images, as many synthetic ones of a generator, or both"
    )
    reuse_generators: bool = Field(False, description="cache trained generators, for equal studies and seeds")
    steps: int | None = Field(None, ge=1, description="steps in a round; one pass, floor(|D| / b), if not given")
    local_epochs: int | None = Field(None, ge=1, description="passes over all images in a round, instead of steps")

    summary: ClassVar[str] = "all images in one place (simulation only)"
    no_privacy: ClassVar[str] = "takes all images away from the sites, which train nothing; choose a federated method"
    traits: ClassVar[Traits] = Traits(batch_norm="average", private_networks=(), takes_frozen_features=True)

    def needs_generator(self) -> bool:
        return self.images != "real"

    def run(self, federation: Federation) -> Weights:
        trainer = federation.trainer
        given = federation.once("images", lambda: self.collect(federation))
        figures = {name: value for name, value in given.items() if "/" in name}
        if figures:
            site_generator.report_generators(federation, figures)
        images = shared_images.pooled_images({name: value for name, value in given.items() if name not in figures})
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            model = trainer.load(state.weights)
            optimizer = coordinator_optimizer(federation, state, model.parameters())
            trainer.train(
                trainer.mixed(trainer.batches(images, federation.rng("batches")), federation.rng("mixup")),
                self.steps or (self.local_epochs or 1) * trainer.steps_in(images),
                optimizer,
            )
            keep_coordinator_optimizer(federation, state, optimizer)
            state.weights = trainer.weights()
            federation.evaluate(state.weights)
        return state.weights

    def collect(self, federation: Federation) -> Weights:
        """Tensors that all sites give: images pooled, and figures of their generators as `site/figure`."""
        real = federation.ask_all("give_all") if self.images != "synthetic" else []
        made = federation.ask_all("give_synthetic") if self.images != "real" else []
        return {**shared_images.pool([*real, *made]), **site_generator.figures_of(made)}

    @operation("synthetic-images", "metrics")
    def give_synthetic(self, site: Site) -> tuple[Parcel, Parcel]:
        """As many synthetic images as the site has real ones, and the figures of their generator."""
        model, figures = site_generator.train_generator(site, reuse=self.reuse_generators)
        buffer = site_generator.draw_buffer(site, model, len(site.data.train))
        return site_generator.parcel_of(buffer), site_generator.figures_parcel(figures)

    @operation("real-images", "labels", "masks", partner="simulator")
    def give_all(self, site: Site) -> tuple[Parcel, ...]:
        return shared_images.release(site.data.train)
