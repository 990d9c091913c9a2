"""What every generator is: settings (the `[generator]` table of a study) that build a model of images.

Settings are plain and frozen; the model they build learns (`fit`), makes images (`sample`) and can be sent as
tensors (`state`, `load`). A generator that works through discrete codes also encodes and decodes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import Batch
from polyclinic.federation.ledger.wire import Codes
from polyclinic.generators.latent_space import LatentSpace
from polyclinic.randomness import seeded
from polyclinic.settings import Settings
from polyclinic.tasks import Target
from polyclinic.tasks.regression import scale
from polyclinic.training.batches import SHARE
from polyclinic.training.generator_loop import LearnPrivately

#: told after each epoch: what is being fitted, epochs done, epochs in all, mean loss of the epoch
Progress = Callable[[str, int, int, float], None]

#: real images in [0, 1] and made ones [B, C, H, W] to what the generator pays besides
ExtraLoss = Callable[[Tensor, Tensor], Tensor]

Array = Tensor | np.ndarray

SMALLEST_IMAGE = 28
#: of a picture in colour with its mask; what has more are maps of a network, which may be smaller
MOST_PICTURE_CHANNELS = 4


def without_mask(images: Tensor) -> Tensor:
    """The pictures [N, 1 or 3, H, W] of what a generator learns: the last of two or of four channels is a mask
    (segmentation), which people and networks for pictures do not see."""
    return images if images.shape[1] in (1, 3) else images[:, :-1]


class Steps(Protocol):
    """A GAN in training."""

    def step(self, extra: ExtraLoss | None = None) -> object:
        """One step of discriminator and generator, which pays `extra` besides."""


@dataclass(frozen=True)
class ModelSpec:
    """What a model is built for; see `Generator.build`."""

    channels: int
    size: int
    target: Target
    seed: int
    device: str = "cpu"
    precision: str = "fp32"


@dataclass(frozen=True)
class FitOptions:
    """How a generator learns besides its images.

    With `replayed` every mini-batch is joined by the stream's next one: (images [B, C, H, W] in [0, 1], labels [B]),
    which keeps alive what was learned at earlier sites. `private` has the parts (`generator`, `prior`) that learn with
    differential privacy; their losses would tell about the images and are NaN.
    """

    replayed: Iterator[Batch] | None = None
    report: Progress = lambda *_: None
    private: Mapping[str, LearnPrivately] = field(default_factory=dict)
    #: a part of the training, counted from 1, of so many, where the generator is `resumable`; and the tensors of its
    #: optimiser, which come from the part before and are changed for the next one
    leg: tuple[int, int] = (1, 1)
    kept: dict[str, Tensor] | None = None


PLAIN = FitOptions()


class Generator(Settings):
    """One subclass per generator, with its settings as fields; its name is in the registry `GENERATORS`."""

    name: str = Field(description="which generator learns a site's images")
    batch_size: int = Field(32, ge=1, description="real images in a mini-batch; as many replayed ones join them")

    #: one sentence for lists and tables
    summary: ClassVar[str]
    #: whether the models it builds encode and decode (`CodedModel`)
    has_codes: ClassVar[bool] = False
    #: whether the models it builds are trained step by step (`GeneratorModel.begin`), as [tuning] trains them
    tunable: ClassVar[bool] = False
    #: whether it learns maps of many channels, which a network's frozen layers give
    learns_maps: ClassVar[bool] = False
    #: whether its models can be trained in parts (`FitOptions.leg`)
    resumable: ClassVar[bool] = False

    def build(
        self, *, channels: int, size: int, target: Target, seed: int, device: str = "cpu", precision: str = "fp32"
    ) -> "GeneratorModel":
        """A model for images [channels, size, size] and such labels, its first weights drawn from `seed`."""
        return self.model_for(ModelSpec(channels, size, target, seed, device, precision))

    def model_for(self, spec: ModelSpec) -> "GeneratorModel":
        raise NotImplementedError("a generator has `build`, or this")

    def build_for(
        self,
        image_shape: Sequence[int],
        target: Target,
        *,
        seed: int,
        device: str = "cpu",
        precision: str = "fp32",
        state: Mapping[str, Tensor] | None = None,
    ) -> "GeneratorModel":
        """A model for square images of a shape [C, H, W], in a given state or with its first weights."""
        channels, size, _ = image_shape
        model = self.build(channels=channels, size=size, target=target, seed=seed, device=device, precision=precision)
        if state:
            model.load(state)
        return model

    def steps_on(self, images: int) -> int | None:
        """Steps of one fit to so many images; None where it does not count steps."""
        return getattr(self, "steps", None)

    def check_images(self, size: int, task: str) -> None:
        """BadInput if it cannot learn images of this side with a task's labels."""

    def sampling_obstacle(self) -> str | None:
        """Why images cannot be sampled with these settings, in a sentence with the cure, or None."""
        return None

    @abstractmethod
    def dp_obstacle(self) -> str | None:
        """Why these settings cannot be trained with differential privacy, in a sentence with the cure, or None."""


class GeneratorModel(ABC):
    """Learns images and makes new ones. Whatever is random comes from the `rng` that is passed in.

    Images come and go as uint8 [N, C, H, W] on the CPU; labels are class indices or values (ages), [N].
    """

    def __init__(self, networks: dict[str, nn.Module], *, channels: int, size: int, target: Target, device: str):
        if size < SMALLEST_IMAGE and channels <= MOST_PICTURE_CHANNELS:
            raise BadInput(f"data.size: generators need images of {SMALLEST_IMAGE} px or more, and these have {size}")
        self.device = torch.device(device)
        self.networks = nn.ModuleDict(networks).to(self.device)
        self.channels = channels
        self.size = size
        self.target = target

    @abstractmethod
    def fit(self, images: Array, labels: Array, rng: torch.Generator, options: FitOptions = PLAIN) -> dict[str, float]:
        """Learn from images, starting from the present weights; gives the last mean losses by name."""

    @abstractmethod
    def sample(self, labels: Array, rng: torch.Generator) -> Tensor:
        """A new image for every label."""

    def begin(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Steps:
        """The model ready to learn from images uint8 [N, C, H, W], one step at a time; only where it is `tunable`."""
        raise BadInput(f"tuning: {type(self).__name__} is not trained step by step; choose a GAN, or drop [tuning]")

    def losses(self, images: Array, labels: Array, rng: torch.Generator) -> Tensor | None:
        """The loss of each image at several levels of noise, [N, levels], by which members can be told; None where it
        has no such loss."""
        return None

    def latent_space(self) -> LatentSpace | None:
        """The space that the model makes images from, for attacks to search in; None if it offers none."""
        return None

    def state(self) -> dict[str, Tensor]:
        """A copy, on the CPU, of everything the model knows."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.networks.state_dict().items()}

    def load(self, state: Mapping[str, Tensor], *, partial: bool = False) -> None:
        """Take over what `state()` gave elsewhere; with `partial` what is left out keeps its values."""
        own = self.networks.state_dict()
        unknown, missing = sorted(set(state) - set(own)), sorted(set(own) - set(state))
        if unknown or (missing and not partial):
            raise BadInput(
                f"generator: the state is not of this generator: unknown {unknown[:3]}, missing {missing[:3]}; "
                "load a state made with the same [generator] table"
            )
        for name, tensor in state.items():
            if own[name].shape != tensor.shape:
                raise BadInput(
                    f"generator: '{name}' of the state has shape {tuple(tensor.shape)} and ours has "
                    f"{tuple(own[name].shape)}; load a state made with the same [generator] table"
                )
            own[name].copy_(tensor)

    # --- for subclasses ---------------------------------------------------------------------------

    def accept_images(self, images: Array) -> Tensor:
        """Images as a uint8 tensor, or BadInput."""
        found = as_tensor(images)
        shape = (self.channels, self.size, self.size)
        if found.dtype != torch.uint8 or tuple(found.shape[1:]) != shape or not len(found):
            wanted = ", ".join(map(str, shape))
            raise BadInput(f"generator: images are {found.dtype} {tuple(found.shape)}; give uint8 [N, {wanted}]")
        return found

    def to_unit(self, images: Tensor) -> Tensor:
        """uint8 images as float32 in [0, 1] on the device."""
        return self.on_device(images).float().div_(255)

    def near(self, images: Tensor) -> Tensor:
        """Images uint8 where batches are best taken from: on a GPU, up to a quarter of its memory."""
        if self.device.type != "cuda":
            return images
        room = SHARE * torch.cuda.get_device_properties(self.device).total_memory
        return self.on_device(images) if images.nbytes <= room else images

    def on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)


class CodedModel(GeneratorModel):
    """A model whose images go through discrete codes, which can be kept or sent instead of images."""

    #: how many codes each level has to choose from
    codebook_sizes: dict[str, int]

    @abstractmethod
    def fit_codes(self, images: Array, rng: torch.Generator, options: FitOptions = PLAIN) -> float:
        """`fit` without what only `sample` needs: learn to encode and decode; the last mean loss."""

    @abstractmethod
    def encode(self, images: Array) -> dict[str, Tensor]:
        """The codes of images, by level, int16 [N, h, w]."""

    @abstractmethod
    def decode(self, codes: Codes) -> Tensor:
        """The images of codes."""

    @abstractmethod
    def usage(self, codes: Codes) -> dict[str, float]:
        """Which share of each level's codes occurs at all in these."""


def as_tensor(array: Array) -> Tensor:
    """The same numbers as a tensor; a read-only array (a memory map) is copied."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def count(codes: Codes) -> int:
    """Of how many images these are the codes."""
    return len(next(iter(codes.values())))


def initial_networks(builder: Callable[[], dict[str, nn.Module]], seed: int) -> dict[str, nn.Module]:
    """The networks that `builder` makes when torch is seeded with `seed`; the global random state stays as it was."""
    with seeded(seed), torch.device("cpu"):
        return builder()


class RandomSource:
    """Draws from `rng`, wherever that lives, and gives tensors on `device`."""

    def __init__(self, rng: torch.Generator, device: torch.device) -> None:
        self.rng, self.device = rng, device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng, device=self.rng.device).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.rng, device=self.rng.device).to(self.device)

    def integers(self, bound: int, *shape: int) -> Tensor:
        """From 0 up to, and without, `bound`."""
        return torch.randint(bound, shape, generator=self.rng, device=self.rng.device).to(self.device)


# --- labels ---------------------------------------------------------------------------------------


#: the finest tells values apart that lie a sixteenth of the public range from each other
WAVES = 8


class LabelEmbedding(nn.Module):
    """Labels [B] to vectors [B, width]: of classes where the target has some, of values where it has a range,
    and the same vector for every image where it has neither."""

    def __init__(self, target: Target, width: int) -> None:
        super().__init__()
        self.classes = len(target.classes)
        self.values = not target.classes and target.label_range is not None
        if self.values:
            self.middle, self.reach = scale(target)
            self.embed: nn.Module = nn.Sequential(nn.Linear(2 * WAVES + 1, width), nn.ReLU(), nn.Linear(width, width))
        else:
            self.embed = nn.Embedding(max(1, self.classes), width)

    def forward(self, labels: Tensor) -> Tensor:
        if self.values:
            return self.embed(self._waves(labels))
        return self.embed(labels.long() if self.classes else torch.zeros_like(labels, dtype=torch.long))

    def _waves(self, labels: Tensor) -> Tensor:
        at = ((labels.to(self.embed[0].weight.dtype) - self.middle) / self.reach)[:, None]  # type: ignore[index]
        angle = at * torch.arange(1, WAVES + 1, device=labels.device) * (math.pi / 2)
        return torch.cat([at, angle.sin(), angle.cos()], 1)


def even_labels(count: int, target: Target) -> Tensor:
    """Labels spread evenly over the classes, or over the public range of values: nothing of any site is in them."""
    if target.classes:
        return torch.arange(count) % len(target.classes)
    low, high = target.label_range or (0.0, 0.0)
    return torch.linspace(low, high, count)


def check_labels(labels: Tensor, count: int, target: Target) -> Tensor:
    """The labels, or BadInput where they are not one per image or not of the target's classes."""
    if tuple(labels.shape) != (count,):
        raise BadInput(f"generator: {count} images came with labels of shape {tuple(labels.shape)}; give one each")
    if target.classes and count and not 0 <= int(labels.min()) <= int(labels.max()) < len(target.classes):
        found = f"{int(labels.min())} to {int(labels.max())}"
        raise BadInput(f"generator: labels run from {found}, but there are {len(target.classes)} classes from 0 on")
    return labels
