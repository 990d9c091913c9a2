"""VQ-VAE-2 (Razavi et al. 2019) as Qu 2022 uses it: a two-level autoencoder with discrete codes, and a prior over them.

The autoencoder alone is enough to replay images whose codes are kept; the prior makes new ones.
"""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.data.pixels import to_uint8
from polyclinic.errors import BadInput
from polyclinic.generators import base
from polyclinic.generators.latent_space import CodeSpace
from polyclinic.generators.vqvae2.autoencoder import Autoencoder, Learning, Moved, losses, noise_images
from polyclinic.generators.vqvae2.prior import Prior, negative_log_likelihoods
from polyclinic.metrics.images import pooled_psnr
from polyclinic.randomness import device_rng, seed_of, torch_rng
from polyclinic.training.generator_loop import (
    Objective,
    Rows,
    Schedule,
    autocast,
    descend,
    own_dropout,
    steps_are_recorded,
)

LEVELS = ("top", "bottom")
NO_PRIOR = "generator.prior_epochs: without a prior nothing can be sampled; set it above 0"
START_IMAGES = 256  # whose latents a codebook starts from
CHUNK_PIXELS = 2**22  # encoded or decoded at a time
CHUNK_CODES = 2**17  # drawn at a time


class VQVAE2(base.Generator):
    """The `[generator]` table with `name = "vqvae2"`."""

    name: Literal["vqvae2"] = "vqvae2"
    epochs: int = Field(30, ge=1, description="passes of the autoencoder over a site's images")
    batch_size: int = Field(32, ge=1, description="real images in a mini-batch; as many replayed ones join them")
    lr: float = Field(4e-4, gt=0, description="learning rate of Adam")
    decay: float = Field(0.5, gt=0, le=1, description="factor of the step decay of the learning rate")
    decay_every: int = Field(150, ge=0, description="epochs after which lr is multiplied by decay; 0 for never")
    commitment: float = Field(0.25, ge=0, description="weight of the commitment loss")
    codebook: Learning = Field(
        "ema", description="how codes are learned: moving averages, or by gradient (the paper's loss; needed under DP)"
    )
    cell: Literal[1, 2, 4] = Field(
        4,
        description="pixels along a side for one code of the bottom level; the top level has one for twice as many. "
        "Smaller is finer: images come back better, and 2 has four times the codes of 4",
    )
    top_codes: int = Field(512, ge=2, le=2**15, description="codes that the top level chooses from")
    bottom_codes: int = Field(512, ge=2, le=2**15, description="codes that the bottom level chooses from")
    code_width: int = Field(16, ge=1, description="numbers in a code's vector")
    width: int = Field(64, ge=2, multiple_of=2, description="channels of the autoencoder")
    blocks: int = Field(2, ge=0, description="residual blocks in each of its parts")
    prior_epochs: int = Field(20, ge=0, description="passes of the prior over the codes; 0 for no prior, no sampling")
    prior_batch_size: int = Field(32, ge=1, description="images in a mini-batch of the prior")
    prior_lr: float = Field(2e-3, gt=0, description="learning rate of the prior (Adam); it falls evenly to zero")
    prior_width: int = Field(64, ge=2, multiple_of=2, description="channels of the prior")
    prior_layers: int = Field(5, ge=1, description="gated layers of the prior, per level")
    prior_dropout: float = Field(
        0.1, ge=0, lt=1, description="share of the prior's features left out in training, so that it memorises less"
    )
    temperature: float = Field(1.0, gt=0, description="below 1, samples keep closer to what is most likely")

    summary: ClassVar[str] = "two-level autoencoder with discrete codes, and a PixelCNN prior over them"
    has_codes: ClassVar[bool] = True
    learns_maps: ClassVar[bool] = True

    def model_for(self, spec: base.ModelSpec) -> "VQVAE2Model":
        return VQVAE2Model(self, spec)

    def sampling_obstacle(self) -> str | None:
        return None if self.prior_epochs else NO_PRIOR

    def dp_obstacle(self) -> str | None:
        if self.codebook == "ema":
            return (
                "generator.codebook: moving averages put real images into the codebook without clipping or noise; "
                "set generator.codebook = 'gradient' under differential privacy"
            )
        return None


class VQVAE2Model(base.CodedModel):
    """`autoencoder` and `prior` are its networks; whoever trains them otherwise (with differential privacy, say)
    takes them, with the per-image losses in `autoencoder.losses` and `prior.negative_log_likelihoods`."""

    def __init__(self, settings: VQVAE2, spec: base.ModelSpec) -> None:
        def networks() -> dict[str, nn.Module]:
            autoencoder = Autoencoder(settings, spec.channels, spec.size)
            prior = {"prior": Prior(settings, spec.target, autoencoder.grid)} if settings.prior_epochs else {}
            return {"autoencoder": autoencoder, **prior}

        made = base.initial_networks(networks, seed_of(spec.seed, "generator"))
        super().__init__(made, channels=spec.channels, size=spec.size, target=spec.target, device=spec.device)
        self.settings, self.precision = settings, spec.precision
        self.chunk = max(1, CHUNK_PIXELS // self.size**2)
        self.codebook_sizes = {"top": settings.top_codes, "bottom": settings.bottom_codes}
        if settings.codebook == "gradient":
            rng = torch_rng(spec.seed, "generator", "codes")
            self.autoencoder.start(self.on_device(noise_images(START_IMAGES, spec.channels, spec.size, rng)), rng)

    @property
    def autoencoder(self) -> Autoencoder:
        return cast(Autoencoder, self.networks["autoencoder"])

    def latent_space(self) -> CodeSpace:
        """The codes, through the decoder: what whoever receives decoder and codes can search in."""
        network = self.autoencoder.eval().requires_grad_(False)
        codebooks = [network.top_codebook.vectors.weight, network.bottom_codebook.vectors.weight]

        def decode(vectors: Sequence[Tensor]) -> Tensor:
            return network.decode(*vectors)

        return CodeSpace(decode, codebooks, (network.grid, 2 * network.grid))

    @property
    def prior(self) -> Prior:
        if "prior" not in self.networks:
            raise BadInput(NO_PRIOR)
        return cast(Prior, self.networks["prior"])

    # --- learning ---------------------------------------------------------------------------------

    def fit(
        self, images: base.Array, labels: base.Array, rng: torch.Generator, options: base.FitOptions = base.PLAIN
    ) -> dict[str, float]:
        """The autoencoder on the images, then the prior on their codes (unless `prior_epochs` is 0)."""
        found = {"autoencoder": self.fit_codes(images, rng, options)}
        if self.settings.prior_epochs:
            found["prior"] = self.fit_prior(self.encode(images), labels, rng, options)
        return found

    def fit_codes(self, images: base.Array, rng: torch.Generator, options: base.FitOptions = base.PLAIN) -> float:
        images, net, settings = self.near(self.accept_images(images)), self.autoencoder.train(), self.settings
        if net.top_codebook.learning == "ema" and not bool(net.top_codebook.counts.any()):
            first = torch.randperm(len(images), generator=rng)[:START_IMAGES]
            net.start(self.to_unit(images[first.to(images.device)]), rng)

        def batch_of(index: Tensor, seeds: Tensor | None = None) -> Rows:
            batch = self.to_unit(images[index.to(images.device)])
            if options.replayed is not None:
                batch = torch.cat([batch, self.on_device(next(options.replayed)[0])])
            return (batch,)

        def passed(batch: Tensor) -> tuple[Tensor, list[Moved]]:
            with autocast(self.device, self.precision):
                made = net(batch)
            return losses(batch, made, settings.commitment), net.move_codebooks(made)

        def losses_of(batch: Tensor) -> Tensor:
            found, moved = passed(batch)
            net.revive_codes(moved, rng)
            return found

        schedule = Schedule(settings.epochs, settings.batch_size, settings.lr, settings.decay, settings.decay_every)
        if "generator" in options.private:
            joined = settings.batch_size if options.replayed else 0
            options.private["generator"](net, losses_of, batch_of, schedule, joined)
            return float("nan")

        # faster on a GPU; never for private learning, since Opacus computes wrong gradients from this layout
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        recorded = steps_are_recorded(list(net.parameters()))
        drawn = device_rng(self.device, int(torch.randint(2**62, (), generator=rng))) if recorded else None

        def loss_of(batch: Tensor) -> tuple[Tensor, list[Moved]]:
            found, moved = passed(batch.contiguous(memory_format=layout))
            if drawn is not None:
                net.revive_codes(moved, drawn)
            return found.mean(), moved

        def after(moved: list[Moved]) -> None:
            if drawn is None:
                net.revive_codes(moved, rng)

        objective = Objective(net.parameters(), batch_of, loss_of, after, [drawn] if drawn is not None else [])
        net.to(memory_format=layout)  # type: ignore[call-overload]
        try:
            return descend(objective, len(images), schedule, rng, partial(options.report, "autoencoder"))
        finally:
            net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]

    def fit_prior(
        self, codes: base.Codes, labels: base.Array, rng: torch.Generator, options: base.FitOptions = base.PLAIN
    ) -> float:
        """Learn the distribution of codes, given labels; the last mean loss in nats per code, both levels added."""
        labels = base.check_labels(base.as_tensor(labels), base.count(codes), self.target)
        net, settings = self.prior.train(), self.settings
        books = (self.autoencoder.top_codebook, self.autoencoder.bottom_codebook)
        net.know(*(book.vectors.weight.detach() for book in books))

        if "prior" not in options.private:  # batches by index are taken on the device
            codes, labels = {level: self.on_device(codes[level]) for level in LEVELS}, self.on_device(labels)

        def batch_of(index: Tensor, seeds: Tensor | None = None) -> Rows:
            batch = [self.on_device(codes[level][index]).long() for level in LEVELS]
            wanted = self.on_device(labels[index])
            if options.replayed is not None:
                images, more = next(options.replayed)
                with torch.no_grad():
                    again = [one.codes for one in self.autoencoder.quantised(self.on_device(images))]
                batch = [torch.cat(pair) for pair in zip(batch, again, strict=True)]
                wanted = torch.cat([wanted, self.on_device(more)])
            return (*batch, wanted)

        def losses_of(top: Tensor, bottom: Tensor, wanted: Tensor) -> Tensor:
            with autocast(self.device, self.precision):
                logits = net(top, bottom, wanted)
            return negative_log_likelihoods(top, bottom, logits)

        schedule = Schedule(settings.prior_epochs, settings.prior_batch_size, settings.prior_lr, fade=True)

        def loss_of(*rows: Tensor) -> tuple[Tensor, None]:
            return losses_of(*rows).mean(), None

        with own_dropout(self.device, rng):
            if "prior" in options.private:
                joined = settings.batch_size if options.replayed else 0
                options.private["prior"](net, losses_of, batch_of, schedule, joined)
                return float("nan")
            objective = Objective(net.parameters(), batch_of, loss_of)
            return descend(objective, base.count(codes), schedule, rng, partial(options.report, "prior"))

    # --- making images ----------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, labels: base.Array, rng: torch.Generator) -> Tensor:
        return self.decode(self.sample_codes(labels, rng))

    @torch.no_grad()
    def sample_codes(self, labels: base.Array, rng: torch.Generator) -> dict[str, Tensor]:
        """New codes from the prior, one image for every label."""
        labels, prior = base.as_tensor(labels), self.prior.eval()
        base.check_labels(labels, len(labels), self.target)
        size = max(1, CHUNK_CODES // (5 * self.autoencoder.grid**2))
        drawn = [prior.sample(self.on_device(some), rng, self.settings.temperature) for some in labels.split(size)]
        return _kept(drawn)

    @torch.no_grad()
    def encode(self, images: base.Array) -> dict[str, Tensor]:
        net, pieces = self.autoencoder.eval(), self.accept_images(images).split(self.chunk)
        return _kept([[one.codes for one in net.quantised(self.to_unit(some))] for some in pieces])

    @torch.no_grad()
    def decode(self, codes: base.Codes) -> Tensor:
        net, found = self.autoencoder.eval(), []
        books = (net.top_codebook, net.bottom_codebook)
        for level, side, book in zip(LEVELS, (net.grid, 2 * net.grid), books, strict=True):
            known = codes[level]
            inside = not known.numel() or (int(known.min()) >= 0 and int(known.max()) < book.size)
            if tuple(known.shape[1:]) != (side, side) or not inside:
                raise BadInput(
                    f"generator: {level} codes of shape {tuple(known.shape)} do not fit a codebook of {book.size} on "
                    f"{side}x{side}; decode with the generator that made them"
                )
        for some in zip(*(codes[level].split(self.chunk) for level in LEVELS), strict=True):
            vectors = [book.lookup(self.on_device(one).long()) for book, one in zip(books, some, strict=True)]
            found.append(to_uint8(net.decode(*vectors)))
        return torch.cat(found)

    # --- how good it is ---------------------------------------------------------------------------

    def usage(self, codes: base.Codes) -> dict[str, float]:
        """Which share of each level's codes occurs at all in these."""
        return {level: len(codes[level].unique()) / size for level, size in self.codebook_sizes.items()}

    def quality(self, images: base.Array) -> dict[str, float]:
        """How well images come back (psnr, in dB) and which share of the codes they use (usage_top, usage_bottom)."""
        images = self.accept_images(images)
        codes = self.encode(images)
        shares = {f"usage_{level}": share for level, share in self.usage(codes).items()}
        return {"psnr": pooled_psnr(images, self.decode(codes), data_range=255), **shares}


def _kept(pieces: list) -> dict[str, Tensor]:
    """Codes of consecutive pieces of images as they are kept: on the CPU, in two bytes each."""
    levels = zip(LEVELS, zip(*pieces, strict=True), strict=True)
    return {level: torch.cat(parts).to("cpu", torch.int16) for level, parts in levels}
