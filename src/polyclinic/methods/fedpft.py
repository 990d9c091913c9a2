"""FedPFT (Beitollahi et al. 2024, "Parametric Feature Transfer"): mixtures of Gaussians of the features of each class.

Every site fits, to the features of each of its classes, a mixture of Gaussians with diagonal covariances, and sends its
parameters once. The coordinator draws as many features as the sites have images, and trains the head on them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.errors import WorkFailed
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.layers.cohort import check_classes
from polyclinic.federation.operation import AS_LARGE_AS_A_NETWORK
from polyclinic.methods.shared.local_training import one_pass
from polyclinic.methods.shared.method import Federation, Parcel, ParcelRejected, Site, Traits, Weights, operation
from polyclinic.methods.shared.one_round import OneRound, head_shape

LEAST_VARIANCE = 1e-6
IMAGES_A_COMPONENT = 10  # fewer would be single images under another name


class Mixture(NamedTuple):
    """Gaussians with diagonal covariances: shares [K], means [K, D], variances [K, D], float64."""

    shares: Tensor
    means: Tensor
    variances: Tensor

    def log_densities(self, rows: Tensor) -> Tensor:
        """Log density of each component, with its share: [N, K]."""
        inverse = 1 / self.variances
        crossed = rows @ (self.means * inverse).T
        squares = rows.square() @ inverse.T - 2 * crossed + (self.means.square() * inverse).sum(1)
        constant = self.shares.clamp(min=1e-30).log() - 0.5 * (self.variances.log() + math.log(2 * math.pi)).sum(1)
        return constant - 0.5 * squares

    def sample(self, count: int, rng: torch.Generator) -> Tensor:
        """Random rows, [count, D]."""
        chosen = torch.multinomial(self.shares, count, replacement=True, generator=rng)
        noise = torch.randn(count, self.means.shape[1], generator=rng, dtype=torch.float64)
        return self.means[chosen] + self.variances[chosen].sqrt() * noise


class FedPFT(OneRound):
    name: Literal["fedpft"] = "fedpft"
    components: int = Field(
        10, ge=1, description="Gaussians in the mixture of a class at a site; fewer where it has under 10 images each"
    )
    iterations: int = Field(50, ge=1, description="steps of expectation-maximisation at a site")
    passes: int = Field(30, ge=1, description="passes of the coordinator over the drawn features")

    summary: ClassVar[str] = "one round: sites send mixtures of Gaussians of each class's features, which are sampled"
    traits: ClassVar[Traits] = replace(OneRound.traits, label_sets=False)
    SUMMED: ClassVar[dict[str, str]] = {}

    def run(self, federation: Federation) -> Weights:
        state = federation.state(weights=federation.initial_weights())
        for _ in federation.rounds(self.rounds, state):
            features, labels = self.draw(federation)
            state.weights = self.train_head(federation, features, labels)
            federation.evaluate(state.weights)
        return state.weights

    def draw(self, federation: Federation) -> tuple[Tensor, Tensor]:
        """Features float64 [N, k] and labels of as many images as all sites have, from their mixtures."""
        rows, labels = [], []
        width, (_, classes) = self.width(federation), head_shape(federation)
        for reply in federation.ask_all("give_mixtures"):
            sent = reply.parcel("statistics")
            if any(0 < count < IMAGES_A_COMPONENT for count in sent.metadata.get("counts", [])):
                federation.warn(
                    f"site '{reply.site}': it has fewer than {IMAGES_A_COMPONENT} images of some class, so the mean "
                    "that it sends is close to features of single images; leave the site out, or choose another method"
                )
            for label, count, mixture in _received(sent, reply.site, width, classes):
                rows.append(mixture.sample(count, federation.rng(f"mixture {reply.site} {label}")))
                labels += [label] * count
        return torch.cat(rows), torch.tensor(labels)

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation == "give_mixtures":
            sent = reply.parcel("statistics")
            list(_received(sent, reply.site, self.width(federation), head_shape(federation)[1]))
            if sum(sent.metadata["counts"]) != sent.metadata.get("samples"):
                raise ParcelRejected("the numbers of images of the classes are not 'samples' together")

    def train_head(self, federation: Federation, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """A linear head, trained on features of unit variance with the study's optimiser."""
        trainer = federation.trainer
        mean, scale = features.mean(0), features.std(0, correction=0).clamp(min=math.sqrt(LEAST_VARIANCE))
        rows = ((features - mean) / scale).float()
        head = torch.nn.Linear(features.shape[1], head_shape(federation)[1], device=trainer.device)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        size = min(trainer.optimizer.batch_size, len(rows))
        for number in range(1, self.passes + 1):
            optimizer = trainer.optimizer.make(head.parameters(), number)
            batches = one_pass(rows, labels, size, federation.rng(f"batches of pass {number}"), trainer.device)
            trainer.train(batches, len(rows) // size, optimizer, model=head)
        slopes = head.weight.detach().cpu().double().T / scale[:, None]
        offset = head.bias.detach().cpu().double() - mean @ slopes
        return self.linear_head(federation, torch.cat([offset[None], slopes]))

    @operation("statistics", most={"statistics": AS_LARGE_AS_A_NETWORK})
    def give_mixtures(self, site: Site) -> Parcel:
        """The mixture of each class that the site has, and how many images it is of."""
        check_classes(site)
        features, labels = self.features(site), np.asarray(site.data.train.labels)
        tensors: dict[str, Tensor] = {}
        counts = []
        for label in range(len(site.trainer.target.classes)):
            rows = torch.from_numpy(np.array(features[labels == label])).double()
            counts.append(len(rows))
            if len(rows):
                least = max(IMAGES_A_COMPONENT, site.min_cohort)
                components = max(1, min(self.components, len(rows) // least))
                mixture = fit(rows, components, self.iterations, site.rng(f"mixture of class {label}"))
                while (mixture.shares * len(rows)).min() < site.min_cohort and components > 1:
                    components -= 1  # a component of few images would be these images under another name
                    mixture = fit(rows, components, self.iterations, site.rng(f"mixture of class {label}"))
                tensors |= {f"{label}/{part}": value.float() for part, value in mixture._asdict().items()}
        return Parcel("statistics", tensors, {"samples": len(labels), "counts": counts})


def fit(rows: Tensor, components: int, iterations: int, rng: torch.Generator) -> Mixture:
    """Expectation-maximisation from randomly chosen rows as means and the variances of all."""
    variance = rows.var(0, correction=0).clamp(min=LEAST_VARIANCE)
    if components == 1:
        return Mixture(rows.new_ones(1), rows.mean(0)[None], variance[None])
    means = rows[torch.randperm(len(rows), generator=rng)[:components]]
    mixture = Mixture(rows.new_full((components,), 1 / components), means, variance.expand(components, -1))
    for _ in range(iterations):
        weights = mixture.log_densities(rows).softmax(1)
        sizes = weights.sum(0)
        safe = sizes.clamp(min=1e-12)[:, None]
        means = (weights.T @ rows) / safe
        # some of the variance of all, so that a component of few images is not narrower than they tell
        own = (weights.T @ rows.square()) / safe - means.square()
        variances = ((own * safe + 2 * variance) / (safe + 2)).clamp(min=LEAST_VARIANCE)
        mixture = Mixture(sizes / len(rows), means, variances)
    return mixture


def _received(parcel: Parcel, site: str, width: int, classes: int) -> Iterator[tuple[int, int, Mixture]]:
    """Each class that a site has images of: its place, their number and the mixture; WorkFailed where a site sent
    something else."""
    counts = parcel.metadata.get("counts")
    if not isinstance(counts, list) or len(counts) != classes or not all(type(n) is int and n >= 0 for n in counts):
        raise WorkFailed(f"site '{site}' sent no number of images for each class; leave it out")
    for label, count in enumerate(counts):
        if count == 0:
            continue
        parts = [parcel.tensors.get(f"{label}/{part}") for part in Mixture._fields]
        known = [part.double() for part in parts if part is not None]
        if len(known) != 3 or not _is_mixture(Mixture(*known), width):
            raise WorkFailed(f"site '{site}' sent no mixture of {width} numbers for class {label}; leave it out")
        yield label, count, Mixture(*known)


def _is_mixture(mixture: Mixture, width: int) -> bool:
    count = len(mixture.shares) if mixture.shares.dim() == 1 else 0
    shapes = mixture.means.shape == mixture.variances.shape == (count, width)
    return count > 0 and shapes and bool((mixture.shares >= 0).all() and (mixture.variances > 0).all())
