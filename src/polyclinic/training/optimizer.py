"""The `[optimizer]` table: optimiser, learning rate and its decay."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, PrivateAttr
from torch import nn

from polyclinic.optimizers import SGD, Adam, AdamW, moments_fit, zero_moments
from polyclinic.settings import Settings
from polyclinic.training.augmentation import Augmentation

#: where a fused Adam is kept
KEPT = "fused optimiser"


class Optimizer(Settings):
    """The `[optimizer]` table: how a site takes its steps."""

    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="sgd, adam or adamw")
    lr: float = Field(0.01, gt=0, description="learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(0.0, ge=0, description="weight decay")
    batch_size: int = Field(32, ge=1, description="images in a mini-batch")
    batch_sizes: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {}, description="images in a mini-batch at sites that have another number: { north = 8 }"
    )
    schedule: Literal["step", "cosine"] = Field(
        "step", description="how lr falls: in steps (decay, decay_every), or along a cosine from lr to nearly 0"
    )
    warmup: int = Field(0, ge=0, description="rounds at the beginning in which lr rises evenly to its full value")
    decay_every: int = Field(35, ge=0, description="rounds after which lr is multiplied by decay; 0 for never")
    decay: float = Field(0.1, gt=0, le=1, description="factor of the step decay")
    keep_state: bool = Field(
        False,
        description="keep momentum (or Adam's moments) at a site from round to round instead of starting anew",
    )
    augment: tuple[Augmentation, ...] = Field(
        (),
        description="random augmentation of training images: flip (left-right), turn (by 90 degrees), crop (a window, "
        "enlarged), rotate (up to 15 degrees), brightness, contrast, noise, mixup (of two images and their labels)",
    )
    balanced_batches: bool = Field(
        False, description="draw the classes that a site has equally often, by the site's own counts"
    )

    _rounds: int = PrivateAttr(0)
    _fused: bool = PrivateAttr(True)

    def over(self, rounds: int, *, fused: bool = True) -> Self:
        """The same settings for a run of so many rounds, which a cosine must know.

        `fused`: on a GPU, steps may be computed by one kernel for all parameters, which rounds differently.
        """
        known = self.model_copy()
        known._rounds, known._fused = rounds, fused
        return known

    def at_site(self, site: str) -> Self:
        """The same settings with the site's own batch size as `batch_size`."""
        size = self.batch_sizes.get(site, self.batch_size)
        return self if size == self.batch_size else self.model_copy(update={"batch_size": size})

    def make(
        self, parameters: Iterable[nn.Parameter], round: int, kept: dict[str, Any] | None = None
    ) -> torch.optim.Optimizer:
        """A fresh optimiser, its learning rate decayed for `round` (rounds count from 1).

        `kept`: on a GPU, where to make one takes long, a fused Adam of the same parameters is kept there, and is made
        fresh again. Nobody may use the one of before any more.
        """
        lr, given = self.lr_in(round), list(parameters)
        # a fused step wants its state to lie in memory as the parameters do, and a kept one does not
        fused = (self._fused and not self.keep_state and bool(given) and all(one.is_cuda for one in given)) or None
        if self.name == "sgd":
            return SGD(given, lr, momentum=self.momentum, weight_decay=self.weight_decay, fused=fused)
        kind = Adam if self.name == "adam" else AdamW
        if not fused or not moments_fit(given):
            return kind(given, lr, weight_decay=self.weight_decay, fused=fused)
        key = (kind, self.weight_decay, tuple((id(one), one.requires_grad) for one in given))
        known = (kept or {}).get(KEPT)
        if known is None or known[0] != key:
            made = kind(given, lr, weight_decay=self.weight_decay, fused=True)
            known = (key, made, zero_moments(made))
        else:
            known[2].zero_()
            for group in known[1].param_groups:
                group["lr"] = lr
        if kept is not None:
            kept[KEPT] = known
        return known[1]

    def lr_in(self, round: int) -> float:
        """The learning rate of a round (rounds count from 1): warming up first, then falling."""
        done = max(round, 1) - 1
        if done < self.warmup:
            return self.lr * (done + 1) / (self.warmup + 1)
        if self.schedule == "cosine":
            share = (done - self.warmup) / max(self._rounds - self.warmup, 1)
            return self.lr * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        return self.lr * self.decay ** (done // self.decay_every if self.decay_every else 0)
