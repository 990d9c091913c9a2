"""Generative replay (Qu et al. 2022, Algorithm 1): sites train on their own images and on replayed ones of all.

A wrapper for any method that trains at the sites, not a method of its own. Before the first round the generator goes
from site to site, each training it on its own images and on what it replays of the sites before; then its decoder, the
codes and the labels of all images go to every site. From then on each mini-batch of real images is joined by a
replayed one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.contact_sheet import contact_sheet
from polyclinic.errors import WorkFailed
from polyclinic.federation.collaborators import Batch
from polyclinic.federation.federation import Federation
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.federation.operation import operation
from polyclinic.federation.site import Site
from polyclinic.generators import CodedModel, Generator, GeneratorModel, probe, replay_stream
from polyclinic.generators.labels import even_labels
from polyclinic.generators.site_codes import Groups, Share, from_groups, source_of, to_groups
from polyclinic.metrics.images import pooled_psnr
from polyclinic.settings import Settings
from polyclinic.training import private as at_site

#: columns of the contact sheet
SHOWN = 10
#: replayed images of each site that the probe looks at
PROBED = 400

Tensors = Mapping[str, Tensor]


class Replay(Settings):
    """The `[replay]` table."""

    codes: Literal["final-encoder", "as-trained", "prior"] = Field(
        "final-encoder",
        description="what is replayed: codes that each site makes once with the finished generator, codes re-made at "
        "every hand-over (as the algorithm is written), or samples (of the prior, or of a generator without codes), so "
        "that no codes leave a site",
    )
    own: bool = Field(True, description="replay a site's own images to it as well, as line 3 of the algorithm has it")
    ratio: float = Field(1.0, ge=0, le=8, description="replayed images for each real one in a mini-batch; 0 for none")
    made: Literal["on-the-fly", "buffer"] = Field(
        "on-the-fly", description="make replayed images anew for each mini-batch, or once into a fixed buffer"
    )
    probe: bool = Field(True, description="have a probe tell real from replayed images, and which site made one")
    samples: int = Field(1024, ge=1, description="with codes = 'prior': labels that a site replays in one pass")


@dataclass(frozen=True)
class Replaying:
    """The wrapper at work: a coordinator half (`prepare`), operations of the sites, and `mix` for mini-batches."""

    settings: Replay
    generator: Generator

    name: ClassVar[str] = "replay"

    # --- the coordinator --------------------------------------------------------------------------

    def prepare(self, federation: Federation) -> None:
        """Algorithm 1, t = 1: train the generator over the sites, then give every site what it will replay."""
        if self.settings.ratio == 0:
            return
        carried: Tensors = {}
        for site in federation.sites:
            carried = federation.once(f"generator-{site}", functools.partial(self.turn, federation, site, carried))
        found = federation.once("replay", functools.partial(self.distribute, federation, carried))
        federation.report("replay", {name: round(float(value), 4) for name, value in found.items()})

    def turn(self, federation: Federation, site: str, carried: Tensors) -> Tensors:
        """One site's turn with the generator and the codes so far; what it hands on."""
        groups: dict[str, Any] = _groups(carried)
        reply = federation.ask(site, "train_generator", **groups)
        if not reply:
            raise WorkFailed(f"site '{site}' could not train the generator: {reply.reason}")
        return _flat({parcel.kind: dict(parcel.tensors) for parcel in reply.parcels})

    def distribute(self, federation: Federation, carried: Tensors) -> Tensors:
        """Give every site the generator and what to replay with it; what a probe makes of the replayed images."""
        groups: dict[str, Any] = _groups(carried)
        if self.settings.codes == "final-encoder":
            groups = {"generator": groups["generator"]}
            for reply in federation.ask_all("encode_images", generator=groups["generator"]):
                for parcel in reply.parcels:
                    groups.setdefault(parcel.kind, {}).update(parcel.tensors)
        federation.ask_all("take_replay", **groups)
        usages = [dict(reply.metrics) for reply in federation.ask_all("look_at_replay")]
        found = {name: torch.stack([usage[name] for usage in usages]).mean() for name in usages[0]}
        # one site's probe tells enough: every site replays the same images; but it tells about real ones as well
        probing = self.settings.probe and federation.trainer.privacy is None
        probed = federation.ask(federation.sites[0], "probe_replay") if probing else None
        return {**found, **(probed.metrics if probed else {})}

    # --- at a site --------------------------------------------------------------------------------

    @operation("generator", "codes", "labels", "masks")
    def train_generator(self, site: Site, generator: Tensors | None = None, **before: Tensors) -> list[Parcel]:
        """Train on the site's images and on what the generator replays of the sites before."""
        model, part, rng = self.model(site, generator), site.data.train, site.rng("generator")
        size = self.generator.batch_size
        shares = from_groups(before, _coded(model)) if before else {}
        old = copy.deepcopy(model)
        stream = (
            replay_stream.stream(self.source(old, shares), size, site.rng("generator replay")) if generator else None
        )
        private = at_site.learners(site, "generator", "prior")
        if self.settings.codes == "prior":
            model.fit(part.images, part.labels, rng, replayed=stream, private=private)
            return [Parcel("generator", model.state(), privacy=at_site.record_of(site, "generator", "prior"))]
        model, old = _coded(model), _coded(old)
        model.fit_codes(part.images, rng, replayed=stream, private=private)
        remade = {name: self.remade(old, model, share) for name, share in shares.items()}
        groups = to_groups({**remade, site.name: self.share(site, model)}, model)
        trained = Parcel("generator", model.state(), privacy=at_site.record_of(site, "generator"))
        return [trained, *(Parcel(kind, tensors) for kind, tensors in groups.items())]

    @operation("codes", "labels", "masks")
    def encode_images(self, site: Site, generator: Tensors) -> list[Parcel]:
        """The site's images as codes of the finished generator, with their labels."""
        model = _coded(self.model(site, generator))
        groups = to_groups({site.name: self.share(site, model)}, model)
        return [Parcel(kind, tensors) for kind, tensors in groups.items()]

    @operation()
    def take_replay(self, site: Site, **groups: Tensors) -> None:
        """Keep the generator and what to replay with it."""
        site.state.put("replay", _flat({kind: dict(tensors) for kind, tensors in groups.items()}))

    @operation("metrics")
    def look_at_replay(self, site: Site) -> Parcel:
        """How many codes the site's images use and how well they come back; draws the site's contact sheet."""
        model, _ = self.kept(site)
        images, replayed = self.real_and_replayed(site, model)
        self._draw(site, model, images[:SHOWN], replayed[:SHOWN])
        if self.settings.codes == "prior":  # what real images look like to the generator would tell about them
            return _metrics({})
        used = _coded(model).usage(_coded(model).encode(images))
        return _metrics(
            {"psnr": pooled_psnr(images, replayed, data_range=255)}
            | {f"code_usage_{level}": share for level, share in used.items()}
        )

    def _draw(self, site: Site, model: GeneratorModel, images: Tensor, replayed: Tensor) -> None:
        """The site's contact sheet: real images, the same through the codes, and samples with the same labels."""
        rows = {"real": images}
        if isinstance(model, CodedModel):
            rows["reconstructed"] = model.decode(model.encode(images))
        if self.settings.codes == "prior":
            rows["sampled"] = replayed
        labels = site.data.train.labels[: len(images)]
        contact_sheet(rows, site.folder / "replay.png", [f"{label:g}" for label in labels])

    @operation("metrics")
    def probe_replay(self, site: Site) -> Parcel:
        """How well a probe tells real from replayed images, and which site made a replayed one."""
        model, shares = self.kept(site)
        rng, device = site.rng("probe"), str(site.trainer.device)
        paired = self.settings.codes != "prior"
        told = probe.real_or_replayed(*self.real_and_replayed(site, model), rng, paired=paired, device=device)
        return _metrics({"real_or_replayed_auc": told["auc"], **self._which_site(model, shares, rng, device)})

    def real_and_replayed(self, site: Site, model: GeneratorModel) -> tuple[Tensor, Tensor]:
        """Some of the site's images, and the same (or, of a prior, others with the same labels) replayed."""
        part, some = site.data.train, slice(0, PROBED)
        images = torch.from_numpy(part.images[some].copy())
        if self.settings.codes == "prior":
            return images, model.sample(part.labels[some].copy(), site.rng("samples"))
        return images, _coded(model).decode(_coded(model).encode(images))

    def _which_site(
        self, model: GeneratorModel, shares: Mapping[str, Share], rng: torch.Generator, device: str
    ) -> dict[str, float]:
        if len(shares) < 2 or min(len(share) for share in shares.values()) < probe.FOLDS:
            return {}
        groups = {}
        for site, share in shares.items():
            chosen = torch.randperm(len(share), generator=rng)[:PROBED]
            groups[site] = self.source(model, {site: share}).images(chosen, rng)
        told = probe.which_site(groups, rng, device=device)
        return {"which_site_accuracy": told["accuracy"], "which_site_chance": told["chance"]}

    # --- replayed mini-batches --------------------------------------------------------------------

    def mix(self, site: Site, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Each mini-batch of real images with a replayed one behind it."""
        trainer, size = site.trainer, self.joined(site)
        if size == 0:
            return batches
        stream = replay_stream.stream(
            self.replayed(site),
            size,
            site.rng("replay"),
            task=trainer.task,
            augmentation=trainer.optimizer.augment,
            device=trainer.device,
        )
        return replay_stream.mixed(batches, stream)

    def joined(self, site: Site) -> int:
        """How many replayed images a mini-batch has."""
        return round(self.settings.ratio * min(site.trainer.optimizer.batch_size, len(site.data.train)))

    def replayed(self, site: Site) -> replay_stream.Source:
        """What the site replays; put together once, and kept while the site is open."""
        if "replay" not in site.cache:
            model, shares = self.kept(site)
            wanted = {name: share for name, share in shares.items() if self.settings.own or name != site.name}
            source = self.source(model, wanted)
            # a buffer is the same in every round, so it is drawn from an address without one
            site.cache["replay"] = replay_stream.fill(source, site.lasting_rng("buffer")) if self._buffered else source
        return site.cache["replay"]

    def kept(self, site: Site) -> tuple[GeneratorModel, dict[str, Share]]:
        """The generator and the sites' shares that `take_replay` put into the site's state."""
        groups = _groups(site.state.group("replay"))
        model = self.model(site, groups.pop("generator"))
        return model, from_groups(groups, _coded(model)) if groups else {}

    @property
    def _buffered(self) -> bool:
        return self.settings.made == "buffer"

    def source(self, model: GeneratorModel, shares: Mapping[str, Share]) -> replay_stream.Source:
        """The images of the sites' codes; without codes, samples for labels spread evenly over their public range."""
        if shares:
            return source_of(shares, _coded(model))
        return replay_stream.FromSamples(model, even_labels(self.settings.samples, model.target))

    def share(self, site: Site, model: CodedModel) -> Share:
        part = site.data.train
        masks = torch.from_numpy(part.masks[:].copy()) if site.trainer.task.dense and part.masks is not None else None
        return Share(model.encode(part.images[:]), torch.from_numpy(part.labels[:].copy()), masks)

    @staticmethod
    def remade(before: CodedModel, now: CodedModel, share: Share) -> Share:
        """An earlier site's share as the generator codes it now: through the old decoder and the new encoder."""
        return Share(now.encode(before.decode(share.codes)), share.labels, share.masks)

    def model(self, site: Site, state: Tensors | None) -> GeneratorModel:
        """The study's generator at a site, in a given state or as it is in the beginning."""
        channels, size, _ = site.data.train.images.shape[1:]
        trainer = site.trainer
        model = self.generator.build(
            channels=channels,
            size=size,
            target=trainer.target,
            seed=site.seed,
            device=str(trainer.device),
            precision="fp32" if at_site.is_private(site, "generator") else trainer.precision,
        )
        if state:
            model.load(state)
        return model


def _coded(model: GeneratorModel) -> CodedModel:
    assert isinstance(model, CodedModel), "the study check lets codes be replayed only where the generator has some"
    return model


def _metrics(values: Mapping[str, float]) -> Parcel:
    return Parcel("metrics", {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})


def _flat(groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by kind and name under one name each, as a state keeps them."""
    return {f"{kind}/{name}": tensor for kind, tensors in groups.items() for name, tensor in tensors.items()}


def _groups(flat: Tensors) -> Groups:
    """What `_flat` was given."""
    groups: Groups = {}
    for name, tensor in flat.items():
        kind, _, rest = name.partition("/")
        groups.setdefault(kind, {})[rest] = tensor
    return groups
