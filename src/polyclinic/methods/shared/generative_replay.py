"""Generative replay (Qu et al. 2022): sites train on their own images and on synthetic ones of all sites.

The parts that methods with replay are made of; `methods/cwt_replay.py` puts them together as Algorithm 1 does. Before
the first round the generator goes from site to site; each trains it on its own images and on what it replays of the
sites before. Then its decoder, the codes and the labels of all images go to every site. From then on each mini-batch
of real images is joined by a replayed one.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.site import Site
from polyclinic.generators import CodedModel, Generator, GeneratorModel, replay_stream
from polyclinic.generators.base import FitOptions, even_labels
from polyclinic.generators.replay_stream import Groups, SiteCodes, from_groups, source_of, to_groups
from polyclinic.methods.shared import replay_space, site_generator, site_samples
from polyclinic.methods.shared.method import Federation, Method, Parcel, ReplayMethod, Weights, operation
from polyclinic.methods.shared.reply_checks import check_growth, check_like
from polyclinic.settings import Settings
from polyclinic.training import private, private_steps
from polyclinic.training.batches import ReplayedBatches

Tensors = Mapping[str, Tensor]


class Replay(Settings):
    """The `[replay]` table."""

    codes: Literal["final-encoder", "as-trained", "prior", "samples"] = Field(
        "final-encoder",
        description="what is replayed: codes that each site makes once with the finished generator, codes re-made at "
        "every hand-over (as the algorithm is written), or samples (of the prior, or of a generator without codes), so "
        "that no codes leave a site; with 'samples' each site has a generator of its own, which stays there, and sends "
        "its samples once, after an audit of its own, as fedsamples does",
    )
    space: Literal["images", "latents"] = Field(
        "images",
        description="what the generator learns and sites replay: images, or latents of the layers that model.freeze "
        "freezes, which are public (model.weights)",
    )
    own: bool = Field(True, description="replay a site's own images to it as well, as line 3 of the algorithm has it")
    ratio: float = Field(1.0, ge=0, le=8, description="replayed images for each real one in a mini-batch; 0 for none")
    made: Literal["on-the-fly", "buffer"] = Field(
        "on-the-fly", description="make replayed images anew for each mini-batch, or once into a fixed buffer"
    )
    probe: bool = Field(True, description="have a probe tell real from replayed images, and which site made one")
    samples: int = Field(1024, ge=1, description="with codes = 'prior': labels that a site replays in one pass")
    looks: int = Field(8, ge=0, description="with codes = 'samples': times that a site's audit looks; 0 for no audit")


def replay_settings(at: Federation | Site) -> Replay:
    """The study's table [replay], at the coordinator or at a site."""
    assert isinstance(at.replay_settings, Replay), "the study has the table wherever its method replays"
    return at.replay_settings


# --- the coordinator ----------------------------------------------------------------------------------


def prepare(federation: Federation) -> None:
    """Train the generator over the sites, then give every site what it will replay."""
    settings = replay_settings(federation)
    if settings.ratio == 0:
        return
    if settings.space == "latents":
        federation.once("front", functools.partial(replay_space.hand_out_front, federation))
    if settings.codes == "samples":
        site_samples.train_at_sites(federation, "train_own_generator", settings.looks)
        samples = site_samples.collect(federation, "give_samples")
        federation.once("replay", lambda: {"sites": torch.tensor(len(_hand_out(federation, samples)))})
        return
    carried: Tensors = {}
    for site in federation.sites:
        carried = federation.once(f"generator-{site}", functools.partial(train_generator_at, federation, site, carried))
    figures = federation.once("replay", functools.partial(distribute, federation, carried))
    federation.report("replay", {name: round(float(value), 4) for name, value in figures.items()})


def _hand_out(federation: Federation, samples: Tensors) -> list[Reply]:
    return federation.ask_all("take_samples", synthetic_images=samples)


def train_generator_at(federation: Federation, site: str, carried: Tensors) -> Tensors:
    """One site's turn with the generator and the codes of the sites before (`carried`); what it hands on. Of a site
    that fails nothing is replayed."""
    groups: dict[str, Any] = _groups(carried)
    reply = federation.ask(site, "train_generator", **groups)
    return _flat({parcel.kind: parcel.tensors for parcel in reply.parcels}) if reply else carried


def distribute(federation: Federation, carried: Tensors) -> Tensors:
    """Have every site encode its images with the finished generator, and give the codes and labels of all to all; the
    figures of what is replayed."""
    settings = replay_settings(federation)
    groups: dict[str, Any] = _groups(carried)
    if settings.codes == "final-encoder":
        groups = {"generator": groups["generator"]}
        for reply in federation.ask_all("encode_images", generator=groups["generator"]):
            for parcel in reply.parcels:
                groups.setdefault(parcel.kind, {}).update(parcel.tensors)
    federation.ask_all("take_replay", **groups)
    privacy = federation.trainer.privacy
    if privacy is not None and privacy.cover == "all":  # nothing covers figures about real images
        return {}
    quality = [dict(reply.metrics) for reply in federation.ask_all("look_at_replay") if reply.parcels]
    names = functools.reduce(set.intersection, map(set, quality)) if quality else set()
    means = {name: torch.stack([of_site[name] for of_site in quality]).mean() for name in sorted(names)}
    # one site's probe is enough: every site replays the same images; but its scores tell about real images as well
    probing = settings.probe and privacy is None and settings.space == "images"
    probed = federation.ask(federation.sites[0], "probe_replay") if probing else None
    return {**means, **(probed.metrics if probed and probed.parcels else {})}


def check_handed_on(federation: Federation, call: Call, reply: Reply) -> None:
    """The generator is the study's, and training can have made it of the one before; the codes are of this site's
    images and of those that came. The next site could not work with others, and would be blamed for it."""
    trainer, groups = federation.trainer, {parcel.kind: parcel.tensors for parcel in reply.parcels}
    assert isinstance(federation.generator, Generator), "every study has one"
    blank = np.zeros((1, *federation.image_shape), np.uint8)
    learned = trainer.latents(blank) if replay_settings(federation).space == "latents" else blank
    model = federation.generator.build_for(learned.shape[1:], trainer.target, seed=federation.seed)
    if call.operation == "train_generator":
        before = call.parcels["generator"].tensors if "generator" in call.parcels else model.state()
        check_like(reply, "generator", before)
        trained = {name for name, _ in model.networks.named_parameters()}
        check_growth(reply.parcel("generator"), {name: one for name, one in before.items() if name in trained})
    if replay_settings(federation).codes == "prior":
        return
    came = call.parcels["labels"].tensors if "labels" in call.parcels else {}
    sites, levels = {*came, call.site}, _coded(model).codebook_sizes
    wanted = {"labels": sites, "codes": {f"{site}/{level}" for site in sites for level in levels}}
    if trainer.task.dense:
        wanted["masks"] = sites
    if any(groups.get(kind, {}).keys() != names for kind, names in wanted.items()):
        raise ParcelRejected(f"codes, labels or masks are not of {', '.join(sorted(sites))}")
    for site, one in from_groups(groups, _coded(model)).items():
        if site in came and not torch.equal(one.labels, came[site]):
            raise ParcelRejected(f"labels: those of site '{site}' are not those that came")
        if one.labels.dim() != 1 or (one.masks is not None and tuple(one.masks.shape) != (len(one), *blank.shape[2:])):
            raise ParcelRejected(f"labels or masks of site '{site}' are not one for each of its {len(one)} images")


# --- at a site ----------------------------------------------------------------------------------------


def _of_generator(method: Method, site: Site) -> int:
    return sum(map(Tensor.numel, built(site).state().values()))


def _of_codes(method: Method, site: Site) -> int:
    model = _coded(built(site))
    blank = model.encode(torch.zeros(1, model.channels, model.size, model.size, dtype=torch.uint8))
    one = to_groups({"": SiteCodes(blank, torch.zeros(1))}, model)["codes"]
    return len(site.data.train) * sum(map(Tensor.numel, one.values()))


def _of_samples(method: Method, site: Site) -> int:
    return site_samples.most_numbers(site, None)


class GenerativeReplay(ReplayMethod):
    """The site half of generative replay, for any method that trains with `replayed=self.replayed(site)`.

    Write it before that method: `class FedProxReplay(GenerativeReplay, FedProx)` is FedProx with replay.
    """

    def run(self, federation: Federation) -> Weights:
        prepare(federation)
        return super().run(federation)  # type: ignore[safe-super]

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation in ("train_generator", "encode_images"):
            check_handed_on(federation, call, reply)
        if call.operation == "give_samples":
            shape = federation.image_shape
            if replay_settings(federation).space == "latents":
                shape = federation.trainer.latents(np.zeros((1, *shape), np.uint8)).shape[1:]
            site_samples.check(federation, reply, tuple(shape))
        super().check_reply(federation, call, reply)

    def replayed(self, site: Site) -> ReplayedBatches | None:
        return replayed(site)

    @operation(takes={"weights": "front"})
    def take_front(self, site: Site, weights: Weights) -> None:
        """Keep the frozen layers, whose latents are replayed."""
        site.state.put(replay_space.FRONT, weights)

    @operation("generator", "codes", "labels", "masks", most={"generator": _of_generator, "codes": _of_codes})
    def train_generator(self, site: Site, generator: Tensors | None = None, **before: Tensors) -> list[Parcel]:
        """Lines 8 to 21: train on the site's images and on what the generator replays of the sites before."""
        model, images, rng = built(site, generator), replay_space.learned(site), site.rng("generator")
        earlier = from_groups(before, _coded(model)) if before else {}
        old = copy.deepcopy(model)  # line 9
        size, draws = site_generator.generator_settings(site).batch_size, site.rng("generator replay")
        stream = replay_stream.stream(source(site, old, earlier), size, draws) if generator else None
        learners = private_steps.learners(site, "generator", "prior")
        options = FitOptions(stream, site_generator.generator_progress(site), learners)
        if replay_settings(site).codes == "prior":
            model.fit(images, site.data.train.labels, rng, options)
            return [Parcel("generator", model.state(), privacy=private.record_of(site, "generator", "prior"))]
        model, old = _coded(model), _coded(old)
        model.fit_codes(images, rng, options)
        # an earlier site's codes as the generator makes them now: through the old decoder and the new encoder
        codes = {name: replace(one, codes=model.encode(old.decode(one.codes))) for name, one in earlier.items()}
        groups = to_groups({**codes, site.name: encode(site, model)}, model)
        trained = Parcel("generator", model.state(), privacy=private.record_of(site, "generator"))
        return [trained, *(Parcel(kind, tensors) for kind, tensors in groups.items())]

    @operation("codes", "labels", "masks", most={"codes": _of_codes})
    def encode_images(self, site: Site, generator: Tensors) -> list[Parcel]:
        """The site's images as codes of the finished generator, with their labels."""
        model = _coded(built(site, generator))
        groups = to_groups({site.name: encode(site, model)}, model)
        return [Parcel(kind, tensors) for kind, tensors in groups.items()]

    @operation()
    def take_replay(self, site: Site, **groups: Tensors) -> None:
        """Keep the generator and what to replay with it in the site's state."""
        site.state.put("replay", _flat(groups))

    @operation()
    def train_own_generator(self, site: Site, leg: int, legs: int) -> None:
        """A part of the training of a generator that stays at the site, and a look of the site's audit."""
        site_samples.train(site, leg, legs, looks=replay_settings(site).looks > 0)

    @operation("synthetic-images", most={"synthetic-images": _of_samples})
    def give_samples(self, site: Site) -> Parcel:
        """Samples of that generator, about as many as the site has training images."""
        return site_samples.give(site, None, looks=replay_settings(site).looks > 0)

    @operation()
    def take_samples(self, site: Site, synthetic_images: Tensors) -> None:
        """Keep the samples of all sites in the site's state."""
        site.state.put("replay", synthetic_images)

    @operation("metrics")
    def look_at_replay(self, site: Site) -> Parcel:
        """Codes that the site's images use, and how well they come back; draws the site's contact sheet."""
        return replay_space.measure(site, received(site)[0], sampled=replay_settings(site).codes == "prior")

    @operation("metrics")
    def probe_replay(self, site: Site) -> Parcel:
        """Scores of a probe that tells real from replayed images, and which site made a replayed one."""
        model, codes = received(site)
        by_site = {name: source(site, model, {name: of_site}) for name, of_site in codes.items()}
        return replay_space.probe_images(site, model, by_site, sampled=replay_settings(site).codes == "prior")


def replayed(site: Site) -> ReplayedBatches | None:
    """Replayed mini-batches that join the site's own; None if `replay.ratio` makes them empty."""
    trainer = site.trainer
    size = round(replay_settings(site).ratio * min(trainer.optimizer.batch_size, len(site.data.train)))
    if size == 0:
        return None
    stream = site_generator.training_stream(site, replayed_images(site), size, site.rng("replay"))
    if not replay_space.in_latents(site):
        return ReplayedBatches(stream, size)
    limits = replay_space.limits_of(site)
    return ReplayedBatches(((limits.to_latents(units), targets) for units, targets in stream), size)


def replayed_images(site: Site) -> replay_stream.ReplaySource:
    """Images that the site replays; put together once, and cached while the site is open."""
    if "replay" not in site.cache and replay_settings(site).codes == "samples":
        kept = site.state.group("replay")
        if not kept:
            raise WorkFailed(f"site '{site.name}' has nothing to replay: it could not prepare in round 0")
        site.cache["replay"] = replay_stream.Buffer(kept["images"], kept["labels"], kept.get("masks"))
    if "replay" not in site.cache:
        settings, (model, codes) = replay_settings(site), received(site)
        chosen = {name: of_site for name, of_site in codes.items() if settings.own or name != site.name}
        images = source(site, model, chosen)
        # a buffer is the same in every round, so the address of its draws has no round
        buffered = settings.made == "buffer"
        site.cache["replay"] = replay_stream.fill(images, site.lasting_rng("buffer")) if buffered else images
    return site.cache["replay"]


def built(site: Site, state: Tensors | None = None) -> GeneratorModel:
    """The study's generator for what it learns at the site: images or latents."""
    return site_generator.build_generator(site, state, shape=tuple(replay_space.learned(site).shape[1:]))


def received(site: Site) -> tuple[GeneratorModel, dict[str, SiteCodes]]:
    """The generator and the sites' codes that `take_replay` put into the site's state."""
    if not (groups := _groups(site.state.group("replay"))):
        raise WorkFailed(f"site '{site.name}' has nothing to replay: it could not prepare in round 0")
    model = built(site, groups.pop("generator"))
    return model, from_groups(groups, _coded(model)) if groups else {}


def source(site: Site, model: GeneratorModel, codes: Mapping[str, SiteCodes]) -> replay_stream.ReplaySource:
    """The images of the sites' codes; without codes, samples for labels spread evenly over their public range."""
    if codes:
        return source_of(codes, _coded(model))
    return replay_stream.FromSamples(model, even_labels(replay_settings(site).samples, model.target))


def encode(site: Site, model: CodedModel) -> SiteCodes:
    """The site's training images as codes, with their labels and, for segmentation, masks."""
    part = site.data.train
    masks = torch.from_numpy(part.masks[:].copy()) if site.trainer.task.dense and part.masks is not None else None
    return SiteCodes(model.encode(replay_space.learned(site)[:]), torch.from_numpy(part.labels[:].copy()), masks)


# --- any method, with replay --------------------------------------------------------------------------


def with_replay(method: Method) -> Method:
    """The same method with the same settings, and with replay: what a table [replay] makes of `cwt` or `fedprox`."""
    return _replaying(type(method)).model_validate(method.model_dump())


@functools.cache
def _replaying(kind: type[Method]) -> type[Method]:
    return type(f"{kind.__name__}WithReplay", (GenerativeReplay, kind), {"__module__": kind.__module__})


# --- small things -------------------------------------------------------------------------------------


def _coded(model: GeneratorModel) -> CodedModel:
    assert isinstance(model, CodedModel), "the study check lets codes be replayed only where the generator has some"
    return model


def _flat(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by kind and name under one name each, as a state keeps them."""
    return {f"{kind}/{name}": tensor for kind, tensors in groups.items() for name, tensor in tensors.items()}


def _groups(flat: Tensors) -> Groups:
    """The inverse of `_flat`."""
    groups: Groups = {}
    for name, tensor in flat.items():
        kind, _, rest = name.partition("/")
        groups.setdefault(kind, {})[rest] = tensor
    return groups
