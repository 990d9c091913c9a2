"""FedER (Pennisi et al. 2023, Algorithm 1): models go from site to site, each with a buffer of synthetic images.

Before the first round every site trains a generator on its own images, draws a buffer of synthetic ones from it and
trains a first model. In each round a random ring is drawn: every site hands its model and its own buffer to its
successor, which fine-tunes the model it received on its real images and on the buffer (Eq. 5). There is no common
model: the federated one is the union of the sites' (section 3.3), and a prediction comes from one of them or from all.

Sites hand parcels to each other, sealed (`federation.forward`); the coordinator draws the order and keeps time.
FedER-A hands over buffers only; FedER-B, besides, trains on synthetic images alone, also at home.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.federation import Federation, State, Weights
from polyclinic.federation.layers.replies import SENT
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.files import write_tensors
from polyclinic.generators import GeneratorModel, replay_stream
from polyclinic.methods.shared import local_training, site_generator
from polyclinic.methods.shared.local_training import LocalWork
from polyclinic.methods.shared.method import OwnModels, Site, Traits, Work, all_sites, operation
from polyclinic.methods.shared.shared_images import pooled_images
from polyclinic.methods.shared.site_generator import FitGenerator, Tensors, training_stream
from polyclinic.training.batches import ReplayedBatches
from polyclinic.training.plans import Fit, FitSpec


def _of_buffer(method: "FedER", site: Site) -> int:
    return site_generator.numbers_of(site, method.buffer)


class FedER(LocalWork, OwnModels):
    name: Literal["feder"] = "feder"
    fraction: float = all_sites()
    buffer: int = Field(512, ge=0, description="synthetic images that a site hands over with its model; 0 for none")
    real_share: float = Field(0.5, gt=0, le=1, description="lambda (Eq. 5), share of real images; 1 uses no buffer")
    reuse_generators: bool = Field(False, description="cache trained generators, for equal studies and seeds")
    mode: Literal["synchronous", "asynchronous"] = Field(
        "synchronous", description="all sites in step, or each at its own pace, with a queue of what came"
    )
    turn_takes: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description="asynchronous: how long a turn takes at a site, by its name; 1 where it is not given"
    )

    summary: ClassVar[str] = "models go from site to site with buffers of synthetic images"
    no_privacy: ClassVar[str] = (
        "chooses when to stop training a generator by real images, outside any accountant; take the table [privacy] "
        "out, or choose fedavg-replay with replay.codes = 'prior'"
    )
    traits: ClassVar[Traits] = Traits(private_networks=())
    hands_over_models: ClassVar[bool] = True
    trains_on_real_images: ClassVar[bool] = True

    # --- the coordinator --------------------------------------------------------------------------

    def run(self, federation: Federation) -> Weights:
        self.check_sites(federation.sites)
        # Algorithm 1, before federated training: G_i, B_i and M_i^0 at every site
        found = federation.once("prepared", lambda: site_generator.figures_of(federation.ask_all("prepare")))
        site_generator.report_generators(federation, found)
        if self.mode == "asynchronous":
            self.run_asynchronously(federation)
        else:
            self.run_synchronously(federation)
        federation.report("handed_over_per_round", self.handed_over(federation))
        return {}

    def run_synchronously(self, federation: Federation) -> None:
        """Algorithm 1, federated training: all sites hand over, then all adapt."""
        state = federation.state()
        for _ in federation.rounds(self.rounds, state):
            for site, successor in random_ring(federation.sites, federation.rng("ring")):
                self.pass_on(federation, site, successor)
            federation.ask_all("adapt", only_newest=True)
            federation.evaluate()

    def run_asynchronously(self, federation: Federation) -> None:
        """Every site works through its queue and hands each model to a random other site, with no barrier.

        A round is as many turns as there are sites. Time is counted in the units of `turn_takes`, so that the same
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
                if not begun and not state.busy:  # the sites with work have failed, and the others have none
                    break
                if left > 0:
                    self.wait(federation, state)
            federation.evaluate()
        federation.report("asynchronous", {"time": state.now, "turns": state.turns})

    def begin_turns(self, federation: Federation, state: State, most: int) -> list[str]:
        """Start the next turn at idle sites with a non-empty queue, at most `most` of them; the sites that started."""
        ready = [site for site in federation.sites if site not in state.busy and state.queue[site] > 0][:most]
        begun = [reply.site for reply in federation.ask_all("adapt", sites=ready)] if ready else []
        for site in begun:
            state.queue[site] -= 1
            state.busy[site] = state.now + self.turn_takes.get(site, 1.0)
        state.turns += len(begun)
        return begun

    def wait(self, federation: Federation, state: State) -> None:
        """Move the clock to the end of the next turn; sites whose turn ends then hand their model on."""
        state.now = min(state.busy.values())
        done = [site for site in federation.sites if state.busy.get(site) == state.now]
        for site in done:
            del state.busy[site]
        self.finish_turns(federation, state, done)

    def finish_turns(self, federation: Federation, state: State, done: tuple[str, ...] | list[str]) -> None:
        """Each site hands model and buffer to a random other one; if that one fails, to the next one drawn."""
        for site in done:
            others = [other for other in federation.sites if other != site]
            rng = federation.rng(f"successor {state.turns} of {site}")
            for choice in torch.randperm(len(others), generator=rng).tolist():
                if self.pass_on(federation, site, others[choice]):
                    state.queue[others[choice]] += 1
                    break

    def pass_on(self, federation: Federation, site: str, successor: str) -> bool:
        """Have a site hand its buffer to another, and its model too where the two have the same network."""
        model = self.hands_over_models and federation.alike(site, successor)
        return bool(federation.forward(site, "hand_over", successor, "receive", model=model))

    def handed_over(self, federation: Federation) -> dict[str, dict[str, float]]:
        """Bytes that each site sent to others in a round, by kind: what Table 7 counts."""
        sent: dict[str, dict[str, float]] = {site: {} for site in federation.sites}
        for site, direction, kind, asked, size in federation.communication.rows():
            if (direction, asked) == (SENT, "hand_over"):
                sent[site][kind] = size / self.rounds
        return sent

    def more_metrics(self, federation: Federation, models: Mapping[str, Weights]) -> dict[str, Any]:
        """The ensemble of all sites' models, on every site's test images. Uncounted: the simulator hands them out.

        Between real institutions nobody has all models, and there is no ensemble to score.
        """
        if not federation.engine.simulation:
            return {}
        parcels: dict[str, Any] = {f"model_{n}": Parcel("weights", one) for n, one in enumerate(models.values())}
        replies = federation.ask_all("evaluate_together", counted=False, **parcels)
        task = federation.trainer.task
        sums = {reply.site: dict(reply.metrics) for reply in replies if reply.parcels}
        if not sums:
            return {}
        per_site = {site: task.finish(of_site) for site, of_site in sums.items()}
        return {"ensemble": {"test": task.finish(reduce(task.add, sums.values())), "per_site": per_site}}

    # --- at a site --------------------------------------------------------------------------------

    @operation("metrics", plan=FitGenerator)
    def prepare(self, site: Site) -> Work[Parcel]:
        """Train the generator, draw the buffer once, train the first model. Only figures about images leave."""

        def keep_buffer(model: GeneratorModel) -> None:
            write_tensors(site.folder / "generator.safetensors", model.state())  # for the site's own people
            site.state.put("buffer", site_generator.draw_buffer(site, model, self.buffer))

        figures = yield FitGenerator(site, keep_buffer, reuse=self.reuse_generators)
        yield from self.train(site, None)
        return site_generator.figures_parcel(figures)

    @operation("weights", "synthetic-images", partner="sites", repeats=True, most={"synthetic-images": _of_buffer})
    def hand_over(self, site: Site, model: bool) -> list[Parcel]:
        """The site's model and its own buffer; a buffer that was received is never relayed."""
        parcels = [Parcel("weights", site.state.group("local"))] if model and self.hands_over_models else []
        return [*parcels, site_generator.own_parcel(site)]

    @operation(partner="sites")
    def receive(self, site: Site, synthetic_images: Tensors, weights: Weights | None = None) -> None:
        """Put a received model and buffer at the end of the site's queue."""
        arrived = site.state.get("arrived", torch.tensor(0)) + 1
        site.state["arrived"] = arrived
        site.state.put(f"came-{int(arrived):09d}/buffer", synthetic_images)
        site.state.put(f"came-{int(arrived):09d}/weights", weights or {})

    @operation("statistics", repeats=True, plan=Fit)
    def adapt(self, site: Site, only_newest: bool = False) -> Work[Parcel | None]:
        """Fine-tune the oldest model in the queue on the site's own images and on the buffer that came with it.

        `only_newest`: the newest one, and drop the others, as sites that work in step do. A site with an empty queue
        skips the turn.
        """
        if not queue_of(site):
            return None
        seen = yield from self.train(site, self.take_turn(site, only_newest))
        return Parcel("statistics", {}, seen)

    def take_turn(self, site: Site, only_newest: bool) -> Tensors | None:
        """The next received model becomes the site's own; the buffer that came with it, if it holds any image."""
        places = queue_of(site) if only_newest else queue_of(site)[:1]
        buffer, weights = (site.state.group(f"{places[-1]}/{name}") for name in ("buffer", "weights"))
        for place in places:
            site.state.put(place, {})
        if weights:
            site.state.put("local", weights)
        return buffer if len(buffer["labels"]) else None

    def train(self, site: Site, buffer: Tensors | None) -> Work[dict[str, int]]:
        """Train the site's model, on the buffer as well if there is one: Eq. 5, one mean over both halves of a batch.

        As many steps as without: floor(|D_k| / b) in a pass, each on b images of the site's own.
        """
        own = site.data.train if self.trains_on_real_images else pooled_images(site.state.group("buffer"))
        steps = self.steps_at(site)
        each = min(site.trainer.optimizer.batch_size, len(own))
        more = self.synthetic_images(each) if buffer is not None else 0
        replayed = partial(self.from_buffer, site, buffer, more) if buffer is not None and more else None
        yield from local_training.plan_train(site, {}, FitSpec(steps, own, replayed=replayed))
        real = steps * each if self.trains_on_real_images else 0
        return {"steps": steps, "real_images": real, "synthetic_images": steps * (each + more) - real}

    def from_buffer(self, site: Site, buffer: Tensors, each: int) -> ReplayedBatches:
        """Batches of the buffer that join those of the site's own images, `each` images in one."""
        images = replay_stream.Buffer(buffer["images"], buffer["labels"], buffer.get("masks"))
        return ReplayedBatches(training_stream(site, images, each, site.rng("buffer batches")), each)

    def synthetic_images(self, real: int) -> int:
        """Synthetic images of the buffer that join a mini-batch of `real` images (lambda of Eq. 5)."""
        return round(real * (1 - self.real_share) / self.real_share)

    @operation("metrics", partner="simulator")
    def evaluate_together(self, site: Site, split: str = "test", **models: Weights) -> Parcel | None:
        """Score the mean of several models' predictions on the site's images."""
        part = getattr(site.data, split)
        if len(part) == 0:
            return None
        return Parcel("metrics", together(site, part, list(models.values())))

    # --- the study's checks ----------------------------------------------------------------------

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "hand_over" and "synthetic-images" not in {parcel.content for parcel in reply.parcels}:
            raise ParcelRejected("a model came without a buffer of synthetic images")

    def needs_generator(self) -> bool:
        return True

    def check_sites(self, sites: Sequence[str]) -> None:
        if len(sites) < 2:
            raise BadInput(f"sites: '{self.name}' hands models from site to site; give it two sites or more")
        unknown = sorted(set(self.turn_takes) - set(sites))
        if unknown:
            known = ", ".join(sites)
            raise BadInput(f"method.turn_takes: there is no site '{unknown[0]}'; choose from {known}")
        if self.turn_takes and self.mode == "synchronous":
            raise BadInput("method.turn_takes: sites in step wait for each other; set method.mode = 'asynchronous'")


class FedERA(FedER):
    """FedER-A (Fig. 5a): buffers are handed over, but no models; every site keeps a model of its own."""

    name: Literal["feder-a"] = "feder-a"  # type: ignore[assignment]

    summary: ClassVar[str] = "FedER that hands over buffers, but no models"
    hands_over_models: ClassVar[bool] = False


class FedERB(FedERA):
    """FedER-B (Fig. 5b): FedER-A whose models see synthetic images only, also at home."""

    name: Literal["feder-b"] = "feder-b"  # type: ignore[assignment]
    buffer: int = Field(512, ge=1, description="synthetic images that a site trains on, and hands over")

    summary: ClassVar[str] = "FedER-A that trains on synthetic images only, also at home"
    trains_on_real_images: ClassVar[bool] = False


def random_ring(sites: tuple[str, ...], rng: torch.Generator) -> list[tuple[str, str]]:
    """Each site with its successor: the sites in random order, the last before the first. Nobody follows itself."""
    shuffled = [sites[place] for place in torch.randperm(len(sites), generator=rng).tolist()]
    return list(zip(shuffled, shuffled[1:] + shuffled[:1], strict=True))


# --- the queue of a site, in its state ----------------------------------------------------------------


def queue_of(site: Site) -> list[str]:
    """Groups of the site's state that hold received models and buffers not yet used, oldest first."""
    return sorted({name.split("/")[0] for name in site.state if name.startswith("came-")})


# --- the ensemble of the sites' models ---------------------------------------------------------------


@torch.no_grad()
def together(site: Site, part: ImageSet, models: list[Weights]) -> dict[str, Tensor]:
    """Additive sums of the task's metrics for the ensemble: the mean of probabilities, or of predicted values."""
    outputs = []
    for weights in models:
        trainer = site.trainer_for(weights)
        trainer.load(weights).eval()
        answers = [trainer.forward(images).float().cpu() for images, _ in trainer.in_order(part)]
        outputs.append(torch.cat(answers))
    trainer = site.trainer
    mean = mean_prediction(torch.stack(outputs), values=trainer.target.label_range is not None)
    targets = torch.cat([target.cpu() for _, target in trainer.in_order(part)])
    observed = trainer.task.observe(mean, targets, trainer.target)
    cases = None if part.cases is None else torch.from_numpy(part.cases.copy())
    return trainer.task.sums(observed.cpu(), targets, cases, trainer.target)


def mean_prediction(outputs: Tensor, *, values: bool) -> Tensor:
    """One output [B, ...] for those of several models [M, B, ...]: of values their mean, of logits the logarithm of
    the mean probability, which is a logit again."""
    if values:
        return outputs.mean(0)
    if outputs.shape[2] == 1:  # one logit: yes or no
        return torch.logit(outputs.sigmoid().mean(0).clamp(1e-7, 1 - 1e-7))
    return outputs.log_softmax(2).logsumexp(0) - torch.tensor(float(len(outputs))).log()
