"""The study's generator at a site: built, trained (alone, or as a stack), and buffers of synthetic images of it."""

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from polyclinic.data.cache import code_digest
from polyclinic.data.parts import ImageSet
from polyclinic.data.plots import contact_sheet, label_words
from polyclinic.errors import WorkFailed
from polyclinic.federation.collaborators import Batch, TrainerLike
from polyclinic.federation.ledger.parcel import decode
from polyclinic.files import cache_folder, digest_of, lock, make_folder, write_tensors
from polyclinic.generators import Generator, GeneratorModel, private_tuning, replay_stream
from polyclinic.generators.base import FitOptions, Progress
from polyclinic.generators.gan.model import GANModel, Learner, fit_together
from polyclinic.generators.gan.settings import GAN
from polyclinic.generators.private_tuning import PrivateTuning
from polyclinic.methods.shared.gan_plans import batch_rows, stackable
from polyclinic.methods.shared.method import Federation, Parcel, Reply, Site
from polyclinic.progress import tell
from polyclinic.randomness import seeded
from polyclinic.tasks import Target
from polyclinic.training import private
from polyclinic.training.gpu.stacking import has_dropout, stacking_gans_pays


def build_generator(
    site: Site,
    state: Mapping[str, Tensor] | None = None,
    *,
    seed: int | None = None,
    with_masks: bool = False,
    shape: tuple[int, ...] | None = None,
) -> GeneratorModel:
    """The study's generator for the site's images, in a given state or with its first weights, the same at all sites
    unless `seed` is the site's own. `with_masks`: each image has its mask as one more channel. `shape` [C, H, W] is
    that of what it learns, where these are not the images.

    Where it is trained with differential privacy it computes in float32: rounded gradients have no bounded norm.
    """
    channels, *sides = shape or site.data.train.images.shape[1:]
    return generator_settings(site).build_for(
        (channels + with_masks, *sides),
        site.trainer.target,
        seed=site.seed if seed is None else seed,
        device=str(site.trainer.device),
        precision="fp32" if private.is_private(site, "generator") else site.trainer.precision,
        state=state,
    )


def generator_settings(site: Site) -> Generator:
    """The study's table [generator]."""
    assert isinstance(site.generator, Generator), "every study has one"
    return site.generator


def tuning_settings(site: Site) -> PrivateTuning | None:
    """The study's table [tuning], if its generator is trained in phases."""
    assert isinstance(site.tuning, PrivateTuning | None)
    return site.tuning


def training_stream(site: Site, images: replay_stream.ReplaySource, size: int, rng: torch.Generator) -> Iterator[Batch]:
    """Mini-batches of replayed images as the site's network takes them."""
    trainer = site.trainer
    how: dict[str, Any] = {"task": trainer.task, "augmentation": trainer.optimizer.augment, "device": trainer.device}
    return replay_stream.stream(images, size, rng, **how)


def generator_progress(site: Site) -> Progress:
    """Tells how far a generator at this site is."""
    return lambda stage, done, total, _: tell(f"{stage} of {site.name}", done, total)


# --- buffers of synthetic images (FedER; Centralized on such images) ----------------------------------

#: columns of the contact sheet
SHOWN = 12
#: where a site's state has its buffer as a parcel: a site that was sent to disk need not compress it again
SENT_BUFFER = "sent-buffer"

Tensors = Mapping[str, Tensor]


def train_generator(site: Site, *, reuse: bool = False) -> tuple[GeneratorModel, dict[str, float]]:
    """The study's generator, trained on the site's images: in two phases where the study has [tuning].

    With `reuse` it is kept in the cache, and taken from there where the very same was trained before.
    """
    model = new_generator(site)
    if not reuse:
        return model, fit(site, model)
    file = cache_folder(site.kit.cache if site.kit else None) / "generators" / f"{fingerprint(site)}.safetensors"
    make_folder(file.parent)
    with lock(file.with_suffix(".lock")):  # of two runs that want the same one, the second waits for it
        if not file.exists():
            figures = fit(site, model)
            numbers = {f"figure/{name}": torch.tensor(one, dtype=torch.float64) for name, one in figures.items()}
            write_tensors(file, {f"model/{name}": tensor for name, tensor in model.state().items()} | numbers)
            return model, figures
        tensors = load_file(file)
    model.load({name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")})
    return model, {name.removeprefix("figure/"): float(t) for name, t in tensors.items() if name.startswith("figure/")}


def new_generator(site: Site) -> GeneratorModel:
    """The study's generator before training. For segmentation it makes pairs: an image, and its mask as one more
    channel, so that both fit together."""
    return build_generator(site, with_masks=site.trainer.task.dense)


def training_images(site: Site, split: str = "train") -> np.ndarray:
    """Images that the generator learns, uint8 [N, C, H, W]: the site's, for segmentation with their masks behind."""
    part: ImageSet = getattr(site.data, split)
    if not site.trainer.task.dense:
        return np.asarray(part.images)
    assert part.masks is not None, "the study check lets no data without masks pass"
    return np.concatenate([part.images, 255 * part.masks[:, None]], 1)


def fingerprint(site: Site) -> str:
    """A digest of everything that a trained generator depends on."""
    part, trainer, tuning = site.data.train, site.trainer, tuning_settings(site)
    images = hashlib.sha256(np.ascontiguousarray(training_images(site)).data)
    images.update(np.ascontiguousarray(part.labels).data)
    return digest_of(
        {
            "generator": generator_settings(site).model_dump(mode="json"),
            "tuning": tuning.model_dump(mode="json") if tuning else None,
            "images": images.hexdigest(),
            "draws": [site.seed, site.name, site.round, *(["own"] if site.own_draws else [])],
            "device": [trainer.device.type, trainer.precision, torch.__version__, torch.get_num_threads()],
            "code": code_digest(Path(private_tuning.__file__).parent.rglob("*.py")),
        }
    )


def fit(site: Site, model: GeneratorModel) -> dict[str, float]:
    """Train a generator on the site's images; the figures of its training."""
    part, rng = site.data.train, site.rng("generator")
    images, labels = training_images(site), np.asarray(part.labels)
    tuning, told = tuning_settings(site), generator_progress(site)
    if tuning is None:
        return _figures(model.fit(images, labels, rng, FitOptions(report=told)))
    steps = generator_settings(site).steps_on(len(images))
    return private_tuning.fit(model, images, labels, rng, tuning.for_steps(steps), told)


def _figures(losses: Mapping[str, float]) -> dict[str, float]:
    return {f"loss_{name}": value for name, value in losses.items()}


def figures_parcel(figures: Mapping[str, float]) -> Parcel:
    """Figures as they leave a site."""
    return Parcel("metrics", {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()})


def figures_of(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """The figures of all sites' generators, as `site/figure`."""
    return {f"{r.site}/{name}": value for r in replies if r.parcels for name, value in r.metrics.items()}


def report_generators(federation: Federation, figures: Tensors) -> None:
    """Put figures of all sites' generators into the result, and warn where private tuning gained nothing."""
    report: dict[str, dict[str, float]] = {}
    for name, value in figures.items():
        site, _, figure = name.rpartition("/")
        report.setdefault(site, {})[figure] = float(value)
    for site, found in report.items():
        if sentence := private_tuning.warning_about(found):
            federation.warn(f"site '{site}': {sentence}")
    rounded = {site: {name: round(value, 5) for name, value in found.items()} for site, found in report.items()}
    federation.report("generators", rounded)


def draw_buffer(site: Site, model: GeneratorModel, count: int) -> dict[str, Tensor]:
    """`images` uint8 [N, C, H, W], `labels` [N] and, for segmentation, `masks` uint8 [N, H, W] of 0 and 1, drawn once;
    also the site's contact sheet."""
    labels = uniform_labels(count, site.data.train.labels, site.trainer.target, site.rng("buffer labels"))
    made = model.sample(labels, site.rng("buffer"))
    buffer = {"images": made, "labels": labels}
    if site.trainer.task.dense:
        buffer |= {"images": made[:, :-1].contiguous(), "masks": (made[:, -1] >= 128).to(torch.uint8)}
    if count:
        _draw_sheet(site, buffer)
    return buffer


def uniform_labels(count: int, own: np.ndarray, target: Target, rng: torch.Generator) -> Tensor:
    """Labels drawn alike from the classes that the site has images of, or from the public range of values.

    Of a class that it has never seen a generator would make images of something else.
    """
    if target.classes:
        known = torch.from_numpy(np.unique(own).astype(np.int64))
        return known[torch.randint(len(known), (count,), generator=rng)]
    low, high = target.label_range or (0.0, 0.0)
    return low + (high - low) * torch.rand(count, generator=rng)


def numbers_of(site: Site, count: int) -> int:
    """Numbers of so many images with labels and masks."""
    _, channels, height, width = site.data.train.images.shape
    return count * ((channels + 1) * height * width + 1)


def parcel_of(buffer: Tensors) -> Parcel:
    """A buffer as it travels: images losslessly compressed, with the labels that were asked for."""
    return Parcel("synthetic-images", dict(buffer), compressed=("images",))


def own_parcel(site: Site) -> Parcel:
    """The site's own buffer as it travels. It is the same in every round, so it is compressed once, and kept so."""
    if "buffer" not in site.cache:
        if SENT_BUFFER not in site.state:
            if not (buffer := site.state.group("buffer")):
                raise WorkFailed(f"site '{site.name}' has no buffer to hand over: it could not prepare one in round 0")
            encoded = parcel_of(buffer).encoded
            site.state[SENT_BUFFER] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        site.cache["buffer"] = decode(site.state[SENT_BUFFER].numpy().tobytes())
    return site.cache["buffer"]


def _draw_sheet(site: Site, buffer: Tensors) -> None:
    """Real images above synthetic ones of the same labels, in the site's own folder."""
    labels = buffer["labels"][:SHOWN]
    own = torch.from_numpy(np.array(site.data.train.labels))
    gaps = (own[:, None].double() - labels[None].double()).abs()
    nearest = [int(gaps[:, column].argsort(stable=True)[column]) for column in range(min(len(labels), len(own)))]
    real = torch.from_numpy(site.data.train.images[nearest].copy())
    target, many = site.trainer.target, len(buffer["images"])
    title = f"{site.name}: {len(labels)} of {many} synthetic images, and training images of the same label"
    rows = {"real": real}
    if "masks" in buffer and (masks := site.data.train.masks) is not None:
        rows["real mask"] = torch.from_numpy(255 * masks[nearest][:, None])
    rows["synthetic"] = buffer["images"][:SHOWN]
    if "masks" in buffer:
        rows["synthetic mask"] = 255 * buffer["masks"][:SHOWN, None]
    contact_sheet(rows, site.folder / "synthetic.png", label_words(labels, target.classes, target.unit), title)


# --- generators of several simulated sites, trained as one stack --------------------------------------

#: a site's generator, and the figures of its training
Trained = tuple[GeneratorModel, dict[str, float]]


@dataclass(frozen=True)
class FitGenerator:
    """Train the site's generator on its images and `keep` what comes of it; the figures of its training.

    `reuse`: it is kept in the cache, or taken from there.
    """

    site: Site
    keep: Callable[[GeneratorModel], None]
    reuse: bool

    divides: ClassVar[bool] = True

    @classmethod
    def may_group(cls, method: Any, trainer: TrainerLike, sites: int, *, noted: bool) -> bool:
        # generators of the cache are taken one by one; dropout draws from torch's global state
        return not (noted or trainer.stacked == "never" or method.reuse_generators or has_dropout(trainer.model))

    @classmethod
    def carry_out(cls, plans: Sequence[Self]) -> list[dict[str, float]]:
        if len(plans) == 1:  # it goes on with the stream of its operation, as its network's dropout does after it
            return [plans[0].alone()]
        settings, tuning = generator_settings(plans[0].site), tuning_settings(plans[0].site)
        if not isinstance(settings, GAN) or tuning is not None:
            return [plan.as_if_alone() for plan in plans]
        trained: dict[str, Trained] = {}
        ordered = sorted([plan.site for plan in plans], key=batch_rows)
        for _, alike in itertools.groupby(ordered, key=batch_rows):
            for group in stackable(list(alike)):
                trained |= {site.name: one for site, one in zip(group, _train_group(group), strict=True)}
        for plan in plans:
            plan.keep(trained[plan.site.name][0])
        return [trained[plan.site.name][1] for plan in plans]

    def alone(self) -> dict[str, float]:
        model, figures = train_generator(self.site, reuse=self.reuse)
        self.keep(model)
        return figures

    def as_if_alone(self) -> dict[str, float]:
        """A plug-in's generator may draw from torch's global state: each site has a stream of its own there."""
        with seeded(*self.site.address("prepare", self.site.round), gpus=range(torch.cuda.device_count())):
            return self.alone()


def _train_group(sites: Sequence[Site]) -> list[Trained]:
    pays = sites[0].trainer.stacked == "always" or stacking_gans_pays(len(sites), sites[0].data.train.images.shape[-1])
    if len(sites) > 1 and pays:
        try:
            models = [cast(GANModel, new_generator(site)) for site in sites]
            learners = [
                Learner(
                    model,
                    training_images(site),
                    np.asarray(site.data.train.labels),
                    site.rng("generator"),
                    generator_progress(site),
                )
                for site, model in zip(sites, models, strict=True)
            ]
            losses = fit_together(learners)
            return [(model, _figures(own)) for model, own in zip(models, losses, strict=True)]
        except RuntimeError as error:  # no memory, or no kernel
            words = "engine.stacked: generators are trained one after the other, more slowly"
            warnings.warn(f"{words}: {error}", stacklevel=4)
    return [train_generator(site) for site in sites]
