"""What every generator is: settings (the `[generator]` table of a study) that build a model of images.

Settings are plain and frozen; the model they build learns (`fit`), makes images (`sample`) and can be sent as
tensors (`state`, `load`). A generator that works through discrete codes also encodes and decodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.errors import BadInput
from polyclinic.federation.collaborators import Batch
from polyclinic.federation.ledger.code_packing import Codes
from polyclinic.generators.gan.losses import GANLoss
from polyclinic.generators.latent_space import LatentSpace
from polyclinic.randomness import seeded
from polyclinic.settings import Settings
from polyclinic.tasks import Target
from polyclinic.training.batches import SHARE
from polyclinic.training.generator_loop import LearnPrivately

#: told after each epoch: what is being fitted, epochs done, epochs in all, mean loss of the epoch
Progress = Callable[[str, int, int, float], None]

#: real images in [0, 1] and made ones [B, C, H, W] to what the generator pays besides
ExtraLoss = Callable[[Tensor, Tensor], Tensor]

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

    @abstractmethod
    def build(
        self, *, channels: int, size: int, target: Target, seed: int, device: str = "cpu", precision: str = "fp32"
    ) -> GeneratorModel:
        """A model for images [channels, size, size] and such labels, its first weights drawn from `seed`."""

    def build_for(
        self,
        image_shape: Sequence[int],
        target: Target,
        *,
        seed: int,
        device: str = "cpu",
        precision: str = "fp32",
        state: Mapping[str, Tensor] | None = None,
    ) -> GeneratorModel:
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
    def fit(
        self,
        images: Tensor | np.ndarray,
        labels: Tensor | np.ndarray,
        rng: torch.Generator,
        *,
        replayed: Iterator[Batch] | None = None,
        progress: Progress | None = None,
        private: Mapping[str, LearnPrivately] | None = None,
    ) -> dict[str, float]:
        """Learn from images, starting from the present weights; gives the last mean losses by name.

        With `replayed` every mini-batch is joined by the stream's next one: (images [B, C, H, W] in [0, 1],
        labels [B]), which keeps alive what was learned at earlier sites. `private` has the parts (`generator`,
        `prior`) that learn with differential privacy; their losses would tell about the images and are NaN.
        """

    @abstractmethod
    def sample(self, labels: Tensor | np.ndarray, rng: torch.Generator) -> Tensor:
        """A new image for every label."""

    def begin(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Steps:
        """The model ready to learn from images uint8 [N, C, H, W], one step at a time; only where it is `tunable`."""
        raise BadInput(f"tuning: {type(self).__name__} is not trained step by step; choose a GAN, or drop [tuning]")

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

    def accept_images(self, images: Tensor | np.ndarray) -> Tensor:
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
    def fit_codes(
        self,
        images: Tensor | np.ndarray,
        rng: torch.Generator,
        *,
        replayed: Iterator[Batch] | None = None,
        progress: Progress | None = None,
        private: Mapping[str, LearnPrivately] | None = None,
    ) -> float:
        """`fit` without what only `sample` needs: learn to encode and decode; the last mean loss."""

    @abstractmethod
    def encode(self, images: Tensor | np.ndarray) -> dict[str, Tensor]:
        """The codes of images, by level, int16 [N, h, w]."""

    @abstractmethod
    def decode(self, codes: Codes) -> Tensor:
        """The images of codes."""

    @abstractmethod
    def usage(self, codes: Codes) -> dict[str, float]:
        """Which share of each level's codes occurs at all in these."""


def as_tensor(array: Tensor | np.ndarray | Any) -> Tensor:
    """The same numbers as a tensor; a read-only array (a memory map) is copied."""
    if isinstance(array, Tensor):
        return array
    array = np.asarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def select(codes: Codes, index: Tensor) -> dict[str, Tensor]:
    """The codes of some of the images."""
    return {level: values[index] for level, values in codes.items()}


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


# --- GANs for FELICIA -----------------------------------------------------------------------------


class AdversarialSteps(Protocol):
    """A GAN in training, each step in two halves: others judge the images that are made in between."""

    #: steps that were taken
    taken: int

    @property
    def random(self) -> RandomSource:
        """What it draws from."""

    @property
    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Real images [B, C, H, W] in [-1, 1] and their labels [B], without end."""

    @property
    def of_generator(self) -> torch.optim.Optimizer: ...
    @property
    def of_discriminator(self) -> torch.optim.Optimizer: ...

    def discriminator_half(self) -> Tensor:
        """The discriminator's step; the labels of the real batch."""

    def make(self, labels: Tensor, noise: RandomSource | None = None) -> Tensor:
        """New images in [-1, 1] with gradients; `noise` is where their noise comes from, if not from `random`.

        They may be larger than real ones: what is more to the right and below is cut off."""

    def generator_half(self, fake: Tensor, labels: Tensor, image_gradient: Tensor | None = None) -> None:
        """The generator's step for images of `make`, with the gradient of a further loss w.r.t. those images."""

    def counters(self) -> Mapping[str, Tensor]:
        """What training keeps from round to round besides networks, optimisers and `taken`; often nothing."""

    def restore_counters(self, kept: Mapping[str, Tensor]) -> None:
        """Put back what `counters` gave."""


class AdversarialModel(GeneratorModel):
    """A GAN that trains in halves of a step. `GANModel` is none: methods train it by its own parts, and in stacks."""

    @abstractmethod
    def begin_halves(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> AdversarialSteps:
        """The networks ready to learn from images uint8 [N, C, H, W], from where they stand."""


class AdversarialGenerator(Generator):
    """Settings of a generator that is trained against a discriminator. It builds a `GANModel` or an
    `AdversarialModel`."""

    #: whether simulated sites' GANs can be trained as one stack; then it builds a `GANModel`
    stackable: ClassVar[bool] = False

    @property
    def balances_classes(self) -> bool:
        """Whether a real batch has as many images of each class as of any other, repeated where a site has few."""
        return False

    @property
    def takes_turns(self) -> bool:
        """Whether labels of made images are the classes in turns (0, 1, 0, 1, ...) where a site has all of them."""
        return False

    @property
    @abstractmethod
    def gan_loss(self) -> GANLoss:
        """The measure phi."""

    @property
    @abstractmethod
    def separates_classes(self) -> bool:
        """Whether each class has networks of its own."""

    @property
    @abstractmethod
    def ignores_labels(self) -> bool:
        """Whether images are made without regard to labels."""

    @abstractmethod
    def central_discriminator(
        self, *, channels: int, size: int, target: Target, sites: int, per_class: bool = False
    ) -> nn.Module:
        """The discriminator with an output for each site instead of one, and without labels as an input.

        It takes images [B, C, H, W] in [-1, 1] and labels [B], and gives logits [B, sites]. `per_class`: there is a
        network for each class, and labels choose it; otherwise labels change nothing. Its weights are drawn from
        torch's global state.
        """

    @abstractmethod
    def central_optimizer(
        self, parameters: Iterable[nn.Parameter], lr: float | None, *, capturable: bool
    ) -> torch.optim.Optimizer:
        """The optimiser that this generator's discriminator has, with another learning rate where one is given."""
