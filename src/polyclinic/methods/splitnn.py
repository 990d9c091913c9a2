"""SplitNN, peer-to-peer (Vepakomma et al. 2018): each site holds the network up to the cut, the coordinator the rest.

In its turn a site sends the activations at the cut and the labels of each mini-batch; the coordinator trains the
rest and sends the gradients at the cut back. After its turn the site hands its part of the network on to the next.
"""

import copy
from typing import ClassVar, Literal

from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared import reply_checks
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.method import Federation, ReplayMethod, Site, State, Traits, Weights, operation
from polyclinic.training import optimizer as optimizers


class SplitNN(LocalWork, ReplayMethod):
    name: Literal["splitnn"] = "splitnn"

    summary: ClassVar[str] = "sites hold the network up to the cut, the coordinator the rest"
    no_privacy: ClassVar[str] = (
        "sends activations and labels of real images at every step, which no noise covers; choose fedavg or cwt"
    )
    traits: ClassVar[Traits] = Traits(
        trains="network in steps", batch_norm="average", private_networks=(), needs_cut=True
    )

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            for site in federation.chosen:
                trained = self.turn(federation, site, state)
                if trained:
                    state.weights = trained
                    federation.handed_over(site, state.weights)
            federation.evaluate(state.weights)
        return state.weights

    def turn(self, federation: Federation, site: str, state: State) -> Weights | None:
        """The weights after the site's turn, or None if it failed: then the turn counts for nothing."""
        trainer = federation.trainer
        front, rest = trainer.split(trainer.load(state.weights))
        rest.train()
        optimizer = optimizers.coordinator_optimizer(federation, state, rest.parameters())
        begun = federation.ask(site, "begin", weights={name: state.weights[name] for name in front.state_dict()})
        if not begun:
            return None
        for _ in range(begun.metadata["steps"]):
            sent = federation.ask(site, "forward")
            if not sent:
                return None
            activations = sent.activations["activations"].to(trainer.device).requires_grad_()
            targets = next(p.tensors["targets"] for p in sent.parcels if p.kind in ("labels", "masks"))
            optimizer.zero_grad(set_to_none=True)
            trainer.loss(trainer.forward(activations, rest), targets.to(trainer.device)).backward()
            optimizer.step()
            if not federation.ask(site, "backward", gradients={"activations": activations.grad}):
                return None
        handed_on = federation.ask(site, "finish")
        if not handed_on:
            return None
        optimizers.keep_coordinator_optimizer(federation, state, optimizer)
        return {**handed_on.weights, **trainer.weights(rest)}

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "begin" and type(reply.metadata.get("steps")) is not int:
            raise ParcelRejected("the reply does not say how many mini-batches the turn will have ('steps')")
        if call.operation == "forward":
            reply_checks.check_rows(federation, reply, "activations", "activations")
            if not reply.activations["activations"].is_floating_point():
                raise ParcelRejected("activations: they are no floating-point numbers, so no gradient can go back")
        if call.operation == "finish":
            reply_checks.check_front_weights(federation, reply)

    @operation("statistics", takes={"weights": "front"})
    def begin(self, site: Site, weights: Weights) -> Parcel:
        """Take over the front of the network; say how many mini-batches the turn will have."""
        trainer, part = site.trainer, site.data.train
        trainer.load(weights)
        front = copy.deepcopy(trainer.split(trainer.model)[0]).train()
        batches, replayed = trainer.batches(part, site.rng("batches")), self.replayed(site)
        site.memory.update(
            front=front,
            optimizer=optimizers.start_optimizer(site, front),
            batches=replayed.join(batches) if replayed else batches,
        )
        return Parcel("statistics", {}, {"steps": self.steps_at(site), "samples": len(part)})

    @operation("activations", "labels", "masks", repeats=True)
    def forward(self, site: Site) -> tuple[Parcel, Parcel]:
        images, targets = next(site.memory["batches"])
        activations = site.trainer.forward(images, site.memory["front"])
        site.memory["activations"] = activations
        kind = "masks" if site.trainer.task.dense else "labels"
        return Parcel("activations", {"activations": activations.detach()}), Parcel(kind, {"targets": targets})

    @operation()
    def backward(self, site: Site, gradients: Weights) -> None:
        optimizer = site.memory["optimizer"]
        optimizer.zero_grad(set_to_none=True)
        site.memory.pop("activations").backward(gradients["activations"].to(site.trainer.device))
        optimizer.step()

    @operation("weights")
    def finish(self, site: Site) -> Parcel:
        optimizers.keep_optimizer(site, site.memory["optimizer"])
        weights = site.trainer.weights(site.memory["front"])
        site.memory.clear()
        return Parcel("weights", weights, {"samples": len(site.data.train)})
