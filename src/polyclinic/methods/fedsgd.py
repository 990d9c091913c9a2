"""FedSGD (McMahan et al. 2017): the sites send gradients, the coordinator takes the steps."""

from typing import ClassVar, Literal

from pydantic import Field
from torch import nn

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.operation import AS_LARGE_AS_A_NETWORK
from polyclinic.methods.shared import aggregation, local_training, reply_checks
from polyclinic.methods.shared.method import Federation, Method, Parcel, Site, State, Traits, Weights, operation
from polyclinic.privacy.epsilon import sampling_rate_for
from polyclinic.training import private, private_steps
from polyclinic.training.optimizer import coordinator_optimizer, keep_coordinator_optimizer


class FedSGD(Method):
    name: Literal["fedsgd"] = "fedsgd"
    batch: Literal["full", "mini"] = Field("full", description="gradients are of all a site's images, or a mini-batch")
    weighting: Literal["samples", "uniform"] = Field("samples", description="count sites by their images, or all alike")

    summary: ClassVar[str] = "sites send gradients, the coordinator takes one step a round"
    traits: ClassVar[Traits] = Traits(trains="network in steps", batch_norm="average", takes_frozen_features=True)
    SUMMED: ClassVar[dict[str, str]] = {"gradient": "mean"}

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            replies = federation.ask_each("gradient", weights=state.weights)
            gradients, statistics = aggregation.averages(replies, self.weighting, "gradients", "statistics")
            state.weights = {**self.step(federation, state, gradients), **statistics}
            federation.evaluate(state.weights)
        return state.weights

    def step(self, federation: Federation, state: State, gradients: Weights) -> Weights:
        """The weights after one step of the study's optimiser along the mean gradient."""
        parameters = {name: nn.Parameter(state.weights[name].clone()) for name in gradients}
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer = coordinator_optimizer(federation, state, parameters.values())
        optimizer.step()
        keep_coordinator_optimizer(federation, state, optimizer)
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "gradient":
            model, private = federation.trainer.model, federation.trainer.privacy is not None
            learned = {name: one for name, one in model.named_parameters() if one.requires_grad}
            reply_checks.check_like(reply, "gradients", learned)
            reply_checks.check_step(call, reply, federation.trainer.optimizer.lr)
            reply_checks.check_like(reply, "statistics", {} if private else dict(model.named_buffers()))
            if self.weighting == "samples":
                aggregation.check_samples(reply)

    @operation("gradients", "statistics", most={"statistics": AS_LARGE_AS_A_NETWORK})
    def gradient(self, site: Site, weights: Weights) -> tuple[Parcel, Parcel]:
        """The mean gradient over the site's images, and the batch-norm statistics after having seen them."""
        trainer, part = site.trainer, site.data.train
        model, counted = trainer.load(weights).train(), {"samples": len(part)}
        if private.is_private(site, "classifier"):  # clipped and noisy; zero once the site's budget is spent
            rate = 1.0 if self.batch == "full" else sampling_rate_for(len(part), trainer.optimizer.batch_size)
            gradients = private_steps.gradients(site, rate)
            record = private.record_of(site, "classifier")
            # no layer keeps statistics then
            return Parcel("gradients", gradients, counted, record), Parcel("statistics", {}, counted)
        rng = site.rng("batches")
        batches = trainer.one_pass(part, rng) if self.batch == "full" else [next(trainer.batches(part, rng))]
        gradients = local_training.mean_gradient(trainer, batches)
        buffers = {n: b.detach().cpu().clone() for n, b in model.named_buffers()}
        return Parcel("gradients", gradients, counted), Parcel("statistics", buffers, counted)
