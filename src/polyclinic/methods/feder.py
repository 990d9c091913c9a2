"""FedER (Pennisi et al. 2023, Algorithm 1): models go from node to node, each with a buffer of synthetic images.

Before the first round every node trains a generator on its own images, draws a buffer of synthetic ones from it and
trains a first model. In each round a random ring is drawn: every node hands its model and its own buffer to its
successor, which fine-tunes the model it received on its real images and on the buffer (Eq. 5). There is no common
model: the federated one is the union of the nodes'.

Nodes hand parcels to each other, sealed (`federation.forward`); the coordinator draws the order and keeps time.
FedER-A hands over buffers only; FedER-B, besides, trains on synthetic images alone, also at home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import Part
from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import Batch
from polyclinic.federation.communication import SENT
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.files import write_tensors
from polyclinic.generators import replay_stream
from polyclinic.methods.shared import local_training, optimizer_state
from polyclinic.methods.shared import synthetic_buffer as synthesis
from polyclinic.methods.shared.peers import PeerMethod
from polyclinic.methods.shared.synthetic_buffer import Tensors
from polyclinic.methods.shared.traits import Traits
from polyclinic.training.replayed import ReplayedBatches


class FedER(PeerMethod):
    name: Literal["feder"] = "feder"
    buffer: int = Field(512, ge=0, description="synthetic images that a node hands over with its model; 0 for none")
    real_share: float = Field(
        0.5, gt=0, le=1, description="lambda of Eq. 5: the share of real images in a mini-batch; 1 uses no buffer"
    )
    local_steps: int | None = Field(
        None, ge=1, description="steps of a node in a round; one pass, floor(|D_k| / b), if not given"
    )
    reuse_generators: bool = Field(
        False, description="keep trained generators in the cache, and take those of an equal study and seed from there"
    )
    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous", description="all nodes in step, or each at its own pace, with a queue of what came"
    )
    turn_takes: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description="asynchronous: how long a turn takes at a node, by its name; 1 where it is not given"
    )

    summary: ClassVar[str] = "models go from node to node with buffers of synthetic images"
    traits: ClassVar[Traits] = replace(PeerMethod.traits, tasks=("classification", "regression"))
    hands_over_models: ClassVar[bool] = True
    trains_on_real_images: ClassVar[bool] = True

    # --- the coordinator --------------------------------------------------------------------------

    def run(self, federation: Federation) -> Weights:
        self.check_nodes(federation)
        self.prepare_nodes(federation)
        if self.mode == "asynchronous":
            self.run_asynchronously(federation)
        else:
            self.run_in_step(federation)
        federation.report("handed_over_per_round", self.handed_over(federation))
        return {}

    def run_in_step(self, federation: Federation) -> None:
        """Algorithm 1, federated training."""
        state = federation.state()
        for _ in federation.rounds(self.rounds, state):
            for node, successor in random_ring(federation.sites, federation.rng("ring")):
                self.pass_on(federation, node, successor)
            federation.ask_all("adapt", only_newest=True)
            federation.evaluate()

    def run_asynchronously(self, federation: Federation) -> None:
        """Every node works through its queue and hands each model to a random other node, with no barrier.

        A round is as many turns as there are nodes. Time is counted in the units of `turn_takes`, so that the same
        study gives the same result wherever its sites run.
        """
        state = federation.state(now=0.0, busy={}, queue=dict.fromkeys(federation.sites, 0), turns=0)
        for number in federation.rounds(self.rounds, state):
            if number == 1:
                self.finish_turns(federation, state, federation.sites)
            left = len(federation.sites)
            while left > 0:
                begun = self.begin_turns(federation, state, left)
                left -= len(begun)
                if not begun and not state.busy:  # the nodes with work have failed, and the others have none
                    break
                if left > 0:
                    self.wait(federation, state)
            federation.evaluate()
        federation.report("asynchronous", {"time": state.now, "turns": state.turns})

    def begin_turns(self, federation: Federation, state: State, most: int) -> list[str]:
        """Idle nodes with something in their queue start, at most so many; those that did."""
        ready = [node for node in federation.sites if node not in state.busy and state.queue[node] > 0][:most]
        begun = [reply.site for reply in federation.ask_all("adapt", sites=ready)] if ready else []
        for node in begun:
            state.queue[node] -= 1
            state.busy[node] = state.now + self.turn_takes.get(node, 1.0)
        state.turns += len(begun)
        return begun

    def wait(self, federation: Federation, state: State) -> None:
        """Until the next node is done; whoever is done then hands its model on."""
        state.now = min(state.busy.values())
        done = [node for node in federation.sites if state.busy.get(node) == state.now]
        for node in done:
            del state.busy[node]
        self.finish_turns(federation, state, done)

    def finish_turns(self, federation: Federation, state: State, done: tuple[str, ...] | list[str]) -> None:
        """Nodes hand model and buffer to a random other one; to the next one drawn, if that fails."""
        for node in done:
            others = [other for other in federation.sites if other != node]
            rng = federation.rng(f"successor {state.turns} of {node}")
            for choice in torch.randperm(len(others), generator=rng).tolist():
                if self.pass_on(federation, node, others[choice]):
                    state.queue[others[choice]] += 1
                    break

    def pass_on(self, federation: Federation, node: str, successor: str) -> bool:
        """Have a node hand its buffer to another, and its model too where the two have the same network."""
        model = self.hands_over_models and federation.alike(node, successor)
        return bool(federation.forward(node, "hand_over", successor, "receive", model=model))

    def prepare_nodes(self, federation: Federation) -> None:
        """Algorithm 1, before federated training: G_i, B_i and M_i^0 at every node."""
        found = federation.once("prepared", lambda: self._prepared(federation))
        report: dict[str, dict[str, float]] = {}
        for name, value in found.items():
            node, _, figure = name.rpartition("/")
            report.setdefault(node, {})[figure] = round(float(value), 5)
        federation.report("generators", report)

    def _prepared(self, federation: Federation) -> Weights:
        replies = federation.ask_all("prepare")
        return {f"{reply.site}/{name}": value for reply in replies for name, value in reply.metrics.items()}

    def handed_over(self, federation: Federation) -> dict[str, dict[str, float]]:
        """Bytes that each node sent to others in a round, by kind: what Table 7 counts."""
        sent: dict[str, dict[str, float]] = {node: {} for node in federation.sites}
        for node, direction, kind, asked, size in federation.communication.rows():
            if (direction, asked) == (SENT, "hand_over"):
                sent[node][kind] = size / self.rounds
        return sent

    # --- at a node --------------------------------------------------------------------------------

    @operation("metrics")
    def prepare(self, site: Site) -> Parcel:
        """Train the generator, draw the buffer once, train the first model. Only figures about images leave."""
        model, figures = synthesis.train_generator(site, reuse=self.reuse_generators)
        write_tensors(site.folder / "generator.safetensors", model.state())  # nobody asks for it again but its owner
        site.state.put("buffer", synthesis.draw_buffer(site, model, self.buffer))
        self.train(site, None)
        return Parcel("metrics", {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()})

    @operation("weights", "synthetic-images")
    def hand_over(self, site: Site, model: bool) -> list[Parcel]:
        """The node's model and its own buffer; a buffer that was received is never relayed."""
        parcels = [Parcel("weights", site.state.group("local"))] if model and self.hands_over_models else []
        return [*parcels, synthesis.own_parcel(site)]

    @operation(sealed_only=True)
    def receive(self, site: Site, synthetic_images: Tensors, weights: Weights | None = None) -> None:
        """Put what came into the queue."""
        arrived = site.state.get("arrived", torch.tensor(0)) + 1
        site.state["arrived"] = arrived
        site.state.put(_place(arrived), _named("buffer", synthetic_images) | _named("weights", weights or {}))

    @operation("statistics")
    def adapt(self, site: Site, only_newest: bool = False) -> Parcel | None:
        """Fine-tune the model that came first on the node's own images and on the buffer that came with it.

        `only_newest`: what came last, and forget the rest: a node in step with the others has nothing to catch up.
        A node to which nothing came sits the turn out.
        """
        places = queue_of(site)
        if not places:
            return None
        came = site.state.group(places[-1 if only_newest else 0])
        for place in places if only_newest else places[:1]:
            site.state.put(place, {})
        if weights := _group(came, "weights"):
            site.state.put("local", weights)
        buffer = _group(came, "buffer")
        return Parcel("statistics", {}, self.train(site, buffer if len(buffer["labels"]) else None))

    def train(self, site: Site, buffer: Tensors | None) -> dict[str, int]:
        """Train the node's model, on the buffer as well if there is one: Eq. 5, one mean over both halves of a batch.

        As many steps as without: floor(|D_k| / b), each on b images of the node's own.
        """
        trainer, own = site.trainer, self.own_images(site)
        steps = self.local_steps or trainer.steps_in(site.data.train)
        model = trainer.load(local_training.assemble(site, {}))
        optimizer = optimizer_state.start_optimizer(site, model)
        trainer.train(self.batches(site, own, buffer), steps, optimizer)
        optimizer_state.keep_optimizer(site, optimizer)
        site.state.put("local", trainer.weights())
        each = min(trainer.optimizer.batch_size, len(own))
        made = self.joined(each) if buffer is not None else 0
        real = steps * each if self.trains_on_real_images else 0
        return {"steps": steps, "real_images": real, "synthetic_images": steps * (each + made) - real}

    def batches(self, site: Site, own: Part, buffer: Tensors | None) -> Iterator[Batch]:
        real = site.trainer.batches(own, site.rng("batches"))
        each = self.joined(min(site.trainer.optimizer.batch_size, len(own)))
        if buffer is None or each == 0:
            return real
        stream = replay_stream.stream(
            replay_stream.Buffer(buffer["images"], buffer["labels"]),
            each,
            site.rng("buffer batches"),
            task=site.trainer.task,
            augmentation=site.trainer.optimizer.augment,
            device=site.trainer.device,
        )
        return ReplayedBatches(stream, each).join(real)

    def joined(self, real: int) -> int:
        """Synthetic images for so many real ones."""
        return round(real * (1 - self.real_share) / self.real_share)

    def own_images(self, site: Site) -> Part:
        """What the node trains on as its own: real images, or its own buffer."""
        return site.data.train if self.trains_on_real_images else synthesis.as_part(site.state.group("buffer"))

    def needs_generator(self) -> bool:
        return True

    def privacy_obstacle(self) -> str | None:
        return (
            f"method.name: '{self.name}' chooses when to stop training a generator by real images, outside any "
            "accountant; take the table [privacy] out, or choose fedavg-replay with replay.codes = 'prior'"
        )

    def check_nodes(self, federation: Federation) -> None:
        if len(federation.sites) < 2:
            raise BadInput(f"sites: '{self.name}' hands models from node to node; give it two sites or more")
        unknown = sorted(set(self.turn_takes) - set(federation.sites))
        if unknown:
            known = ", ".join(federation.sites)
            raise BadInput(f"method.turn_takes: there is no site '{unknown[0]}'; choose from {known}")
        if self.turn_takes and self.mode == "synchronous":
            raise BadInput("method.turn_takes: nodes in step wait for each other; set method.mode = 'asynchronous'")


def random_ring(nodes: tuple[str, ...], rng: torch.Generator) -> list[tuple[str, str]]:
    """Each node with its successor: the nodes in random order, the last before the first. Nobody follows itself."""
    order = [nodes[place] for place in torch.randperm(len(nodes), generator=rng).tolist()]
    return list(zip(order, order[1:] + order[:1], strict=True))


# --- the queue of a node, in its state ----------------------------------------------------------------


def queue_of(site: Site) -> list[str]:
    """Where what came and has not been used lies in the site's state, oldest first."""
    return sorted({name.split("/")[0] for name in site.state if name.startswith("came-")})


def _place(arrived: Tensor) -> str:
    return f"came-{int(arrived):09d}"


def _named(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _group(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}/"): t for n, t in tensors.items() if n.startswith(f"{prefix}/")}
