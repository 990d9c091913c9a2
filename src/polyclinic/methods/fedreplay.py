"""FedReplay (Qu et al. 2022, Algorithm 2): one site trains an encoder, all send latents once, the coordinator learns.

The encoder is the network up to the cut, trained at one site with the whole network on the task. Every site sends
the latents of its training images and their labels, once; the rest of the network is trained on them by the
coordinator. The released model is encoder and rest joined.

Beyond the paper: with `front = "public"` no site trains an encoder; the network up to the cut keeps its public weights.
With `flips` the latents of mirrored images are sent as well.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.ledger.wire import restore, shrink
from polyclinic.methods.shared import aggregation, local_training, reply_checks
from polyclinic.methods.shared.method import Federation, Method, Site, Traits, Weights, all_sites, operation
from polyclinic.training import optimizer as optimizers
from polyclinic.training import private, private_latents, private_steps

#: begins the names of tensors that are about mirrored images
FLIPPED = "flipped_"


class FedReplay(Method):
    name: Literal["fedreplay"] = "fedreplay"
    fraction: float = all_sites()
    front: Literal["site", "public"] = Field(
        "site",
        description="the encoder up to the cut: trained by one site, or public (model.weights) and trained by nobody",
    )
    flips: bool = Field(False, description="send the latents of each image mirrored left to right, too")
    encoder_site: str = Field("largest", description="who trains the encoder: a site's name, 'largest' or 'random'")
    encoder_passes: int | None = Field(
        None, ge=1, description="passes over images with which the encoder is trained; as many as rounds if not given"
    )
    latents: Literal["fp32", "fp16", "int8"] = Field("fp32", description="how latents travel")

    summary: ClassVar[str] = "sites send latents of their images once, the coordinator trains on them"
    traits: ClassVar[Traits] = Traits(
        trains="network in steps", batch_norm="average", private_networks=("encoder", "primary"), needs_cut=True
    )

    def run(self, federation: Federation) -> Weights:
        trainer = federation.trainer
        encoder = federation.once("encoder", lambda: self.encoder(federation))
        sent = federation.once("latents", lambda: self.collect(federation, encoder))
        latents, targets = _pooled(sent)
        private = trainer.privacy is not None and "primary" in trainer.privacy.on
        state = federation.state(weights={**federation.initial_weights(), **encoder}, privacy=None)
        if private and state.privacy is None:
            state.privacy = private_latents.open_accounts(federation, _counts(sent))
        for _ in federation.rounds(self.rounds, state):
            rest = trainer.split(trainer.load(state.weights))[1]
            optimizer = optimizers.coordinator_optimizer(federation, state, rest.parameters())
            size = min(trainer.optimizer.batch_size, len(latents))
            if private:
                state.privacy = private_latents.train(federation, state.privacy, rest, (latents, targets), optimizer)
            else:
                batches = local_training.one_pass(latents, targets, size, federation.rng("batches"), trainer.device)
                trainer.train(batches, len(latents) // size, optimizer, model=rest)
            optimizers.keep_coordinator_optimizer(federation, state, optimizer)
            state.weights = {**encoder, **trainer.weights(rest)}
            federation.evaluate(state.weights)
        return state.weights

    def encoder(self, federation: Federation) -> Weights:
        """The network up to the cut: as it is, where it is public, else trained at the chosen site."""
        if self.front == "public":
            trainer = federation.trainer
            return trainer.weights(trainer.split(trainer.load(federation.initial_weights()))[0])
        for site in self.choose(federation):
            reply = federation.ask(site, "train_encoder", weights=federation.initial_weights())
            if reply:
                federation.report("encoder", {"site": site})
                return reply.weights
        raise WorkFailed(f"site '{site}' could not train the encoder: {reply.reason}; name another method.encoder_site")

    def choose(self, federation: Federation) -> list[str]:
        """The site that trains the encoder, and those in its place if it fails; none for a site with a name."""
        if self.encoder_site == "random":
            order = torch.randperm(len(federation.sites), generator=federation.rng("encoder sites")).tolist()
            drawn = torch.randint(len(federation.sites), (1,), generator=federation.rng("encoder site"))
            return list(dict.fromkeys(federation.sites[place] for place in [int(drawn), *order]))
        if self.encoder_site == "largest":
            replies = federation.ask_all("count")
            # the first of those with equally many
            ordered = sorted(replies, key=lambda reply: reply.metadata["samples"], reverse=True)
            return [reply.site for reply in ordered]
        self.check_sites(federation.sites)
        return [self.encoder_site]

    def check_sites(self, sites: Sequence[str]) -> None:
        if self.encoder_site not in ("largest", "random", *sites):
            known = ", ".join(sites)
            raise BadInput(
                f"method.encoder_site: there is no site '{self.encoder_site}'; choose largest, random or {known}"
            )

    def collect(self, federation: Federation, encoder: Weights) -> Weights:
        """Tensors that all sites send, under the site's name."""
        replies = federation.ask_all("give_latents", weights=encoder)
        return {f"{r.site}/{name}": t for r in replies for parcel in r.parcels for name, t in parcel.tensors.items()}

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "count":
            aggregation.check_samples(reply)
        if call.operation == "train_encoder":
            reply_checks.check_front_weights(federation, reply)
        if call.operation == "give_latents":
            names = ("latents", FLIPPED + "latents") if self.flips else ("latents",)
            reply_checks.check_rows(federation, reply, "latents", *names)
            self._check_precision(reply)
            reply_checks.check_latents(federation, call.parcels["weights"].tensors, reply.parcel("latents").tensors)

    def _check_precision(self, reply: Reply) -> None:
        """ParcelRejected unless the latents came in the form that the study says."""
        sent = reply.parcel("latents").tensors
        example = shrink(sent["latents"][:1].float(), self.latents)
        prefixes = ("", FLIPPED) if self.flips else ("",)
        wanted = {prefix + name: (t.dtype, t.shape) for prefix in prefixes for name, t in example.items()}
        found = {name: t[:1] if name.endswith("latents") else t for name, t in sent.items()}
        if {name: (t.dtype, t.shape) for name, t in found.items()} != wanted:
            raise ParcelRejected(f"latents: they did not come as {self.latents} (method.latents)")

    @operation("statistics")
    def count(self, site: Site) -> Parcel:
        return Parcel("statistics", {}, {"samples": len(site.data.train)})

    @operation("weights")
    def train_encoder(self, site: Site, weights: Weights) -> Parcel:
        """Train the whole network on the task; only the part up to the cut leaves."""
        trainer, part = site.trainer, site.data.train
        model = trainer.load(weights)
        batches = trainer.batches(part, site.rng("batches"))
        kept: Weights = {}
        for number in range(1, (self.encoder_passes or self.rounds) + 1):
            optimizer = trainer.optimizer.make(model.parameters(), number)
            optimizers.restore_optimizer(optimizer, kept)
            if private.is_private(site, "encoder"):
                private_steps.train(site, trainer.steps_in(part), optimizer)
            else:
                trainer.train(batches, trainer.steps_in(part), optimizer)
            kept = optimizers.optimizer_tensors(optimizer) if trainer.optimizer.keep_state else {}
        front = trainer.weights(trainer.split(model)[0])
        return Parcel("weights", front, {"samples": len(part)}, private.record_of(site, "encoder"))

    @operation("latents", "labels", "masks", takes={"weights": "front"})
    @torch.no_grad()
    def give_latents(self, site: Site, weights: Weights) -> tuple[Parcel, Parcel]:
        trainer = site.trainer
        front = trainer.split(trainer.load(weights))[0].eval()
        examples = trainer.examples(site.data.train, site.rng("examples"))
        pairs = [(trainer.forward(x, front).float().cpu(), y.cpu()) for x, y in examples]
        latents, targets = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
        sent = shrink(latents, self.latents)
        if self.flips:
            batches = trainer.examples(site.data.train, site.rng("examples"))
            mirrored = torch.cat([trainer.forward(x.flip(-1), front).float().cpu() for x, _ in batches])
            sent |= {FLIPPED + name: tensor for name, tensor in shrink(mirrored, self.latents).items()}
        return Parcel("latents", sent), Parcel("masks" if trainer.task.dense else "labels", {"targets": targets})

    def needs_first_weights(self) -> bool:
        return self.front == "public"

    def privacy_obstacle(self) -> str | None:
        if not self.flips:
            return None
        return "method.flips: two latents of one image would count as two images; set it to false under privacy"


def _pooled(sent: Weights) -> tuple[Tensor, Tensor]:
    """All sites' latents and targets together, those of mirrored images last."""
    sites = dict.fromkeys(name.rsplit("/", 1)[0] for name in sent)
    of_site = [{n.rsplit("/", 1)[1]: t for n, t in sent.items() if n.rsplit("/", 1)[0] == site} for site in sites]
    targets = [one["targets"] for one in of_site]
    mirrored = [{n.removeprefix(FLIPPED): t for n, t in one.items() if n.startswith(FLIPPED)} for one in of_site]
    latents = [_latents(one) for one in of_site] + [_latents(one) for one in mirrored if one]
    if any(mirrored):  # a mask is mirrored with its image
        targets += [one.flip(-1) if one.dim() > 1 else one for one in targets]
    return torch.cat(latents), torch.cat(targets)


def _latents(sent: Weights) -> Tensor:
    # half precision stays half in memory: hundreds of thousands of latents must fit
    return sent["latents"] if sent["latents"].is_floating_point() else restore(sent).half()


def _counts(sent: Weights) -> dict[str, int]:
    """Latents of each site."""
    return {name.rsplit("/", 1)[0]: len(tensor) for name, tensor in sent.items() if name.endswith("/targets")}
