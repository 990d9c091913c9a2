"""Private head: a linear head on features of a public encoder, by FedSGD in which everything that leaves is noisy.

In a round every site gives the sum of its images' gradients, each clipped, with Gaussian noise (DP-SGD, Abadi et al.
2016; all images in every step, or Poisson samples); the coordinator steps along the sum of the sites with momentum, and
releases the mean of the last rounds' heads, which costs no privacy. The features are projected on a public basis of
phantoms before, so that noise falls on few numbers. Nothing else of the images leaves but scores, where the study wants
them, with noise if it has `privacy.score_noise`.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from polyclinic.data.parts import ImageSet
from polyclinic.federation.call import Call, Reply
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.sums.site_memory import honest_sites
from polyclinic.methods.shared import reply_checks
from polyclinic.methods.shared.method import Federation, Method, Own, Site, Traits, Weights, all_sites, operation
from polyclinic.methods.shared.public_basis import is_same_basis, public_basis
from polyclinic.models import Encoded
from polyclinic.models.encoders import kept_features
from polyclinic.training import private, private_steps

#: the group of a site's state that has the basis, and where its cache has the projected features
BASIS, VECTORS = "basis", "private head vectors"
SHARED = "a coordinator that sees what single sites send: the noise is shared among them, and protects their sum only"

IN_SUM = "a coordinator that opens the secure sum with fewer than {honest} honest sites, whose noise it is"


class PrivateHead(Method):
    name: Literal["private-head"] = "private-head"
    fraction: float = all_sites()
    rounds: int = Field(100, ge=1, description="rounds of training; a round is one step")
    batch: Literal["full", "poisson"] = Field(
        "full",
        description="images (or patients) of a step: all, or each with one chance, optimizer.batch_size in the mean",
    )
    noise: Literal["each-site", "shared"] = Field(
        "each-site",
        description="every site's sum is private by itself; or the sites share the noise of one sum, which needs a "
        "coordinator that sees the sum only (federation.sum = 'secure', or simulation)",
    )
    numbers: int = Field(1500, ge=1, description="numbers of an image after projection on a public basis")
    whitening: float = Field(0.75, ge=0, le=1, description="how far variances of the public basis are made alike (0-1)")
    phantoms: int = Field(500, ge=10, description="phantoms of each of four kinds that the public basis is made of")
    bias: float = Field(0.3, gt=0, description="the constant that stands beside the numbers of an image")
    server_lr: float = Field(0.45, gt=0, description="learning rate, for a gradient as long as privacy.max_grad_norm")
    beta: float = Field(0.9, ge=0, lt=1, description="momentum of the coordinator")
    average: float = Field(0.5, ge=0, le=1, description="share of the rounds, the last ones, whose heads are averaged")

    summary: ClassVar[str] = "a linear head on a public encoder, trained with differential privacy, step by step"
    traits: ClassVar[Traits] = Traits(
        tasks=("classification", "regression"), trains="private head", batch_norm="average"
    )
    SUMMED: ClassVar[dict[str, str]] = {"give_gradient": "sum", "give_share_of_sum": "secure sum"}

    # --- the coordinator --------------------------------------------------------------------------

    def run(self, federation: Federation) -> Weights:

        def hand_out_basis() -> dict[str, Tensor]:
            basis = self._basis(federation)
            federation.ask_all("take_basis", statistics={**basis, "sites": torch.tensor(len(federation.sites))})
            return basis

        basis = federation.once("basis", hand_out_basis)
        model = _encoded(federation.trainer.model)
        zero = torch.zeros(model.outputs, basis["matrix"].shape[1] + 1)
        state = federation.state(step={"head": zero, "velocity": zero, "sum": zero}, averaged=0)
        assert federation.trainer.privacy is not None, "the study's checks want the table [privacy]"
        clip = federation.trainer.privacy.max_grad_norm
        in_secret = federation.sums.settings.sum == "secure"
        shared = "give_share_of_sum" if in_secret else "give_shared_gradient"
        operation = shared if self.noise == "shared" else "give_gradient"
        for number in federation.rounds(self.rounds, state):
            replies = federation.ask_all(operation, statistics={"head": state.step["head"]})
            images = sum(reply.metadata["expected"] for reply in replies)
            gradient = torch.stack([reply.gradients["head"].double() for reply in replies]).sum(0).float() / images
            velocity = self.beta * state.step["velocity"] + gradient
            head = state.step["head"] - self.server_lr / clip * velocity
            counts = number > (1 - self.average) * self.rounds or number == self.rounds
            total = state.step["sum"] + head if counts else state.step["sum"]
            state.step, state.averaged = {"head": head, "velocity": velocity, "sum": total}, state.averaged + counts
            if number == self.rounds:  # the mean of the heads is there at the end only
                federation.evaluate(self.weights(basis, total / state.averaged))
        return self.weights(basis, state.step["sum"] / max(1, state.averaged))

    def weights(self, basis: Weights, head: Tensor) -> dict[str, Tensor]:
        """The model with a head [T, k + 1] of projected features, in terms of all features."""
        slopes = head[:, :-1] @ basis["matrix"].T
        return {"fc.weight": slopes, "fc.bias": self.bias * head[:, -1] - slopes @ basis["mean"]}

    def check_reply(self, federation: Federation, call: Call, reply: Reply) -> None:
        if call.operation in ("give_gradient", "give_shared_gradient", "give_share_of_sum"):
            reply_checks.check_like(reply, "gradients", call.parcels["statistics"].tensors)
            if "expected" not in reply.metadata:
                raise ParcelRejected("the reply does not say how many images it is of ('expected')")

    # --- the sites --------------------------------------------------------------------------------

    @operation()
    def take_basis(self, site: Site, statistics: Weights) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in statistics.values()):
            raise ParcelRejected("the basis that came is not finite; it must be the one of public phantoms")
        if site.secret and not is_same_basis(statistics, self._basis(site)):  # a deployed site computes it itself
            raise ParcelRejected("the basis that came is not the one of the study's public phantoms")
        site.state.put(BASIS, statistics)

    def _basis(self, at: Federation | Site) -> dict[str, Tensor]:
        """The basis that the study's phantoms have, as everybody can compute it."""
        encoder = _encoded(at.trainer.model).features.encoder(at.trainer.device)
        return public_basis(encoder, self.numbers, whitening=self.whitening, each=self.phantoms)

    @operation("gradients")
    def give_gradient(self, site: Site, statistics: Weights) -> Parcel:
        """The noisy sum of clipped gradients of the head."""
        return self._noisy_gradient(site, statistics["head"], share=1.0)

    @operation("gradients", partner="simulator")
    def give_shared_gradient(self, site: Site, statistics: Weights) -> Parcel:
        """The same with a share of the noise, so that the sum of all sites has all of it."""
        sites = int(site.state.group(BASIS)["sites"])
        return self._noisy_gradient(site, statistics["head"], share=1 / math.sqrt(sites), limits=[SHARED])

    @operation("gradients")
    def give_share_of_sum(self, site: Site, statistics: Weights) -> Parcel:
        """The same in a secure sum: the noise of the fewest sites that can open it, without those that may lie, is
        enough, so that the sum is covered even if others drop out or add none."""
        honest = honest_sites(site)
        limits = [IN_SUM.format(honest=honest)]
        return self._noisy_gradient(site, statistics["head"], share=1 / math.sqrt(honest), limits=limits)

    def _noisy_gradient(self, site: Site, head: Tensor, share: float, limits: Sequence[str] = ()) -> Parcel:
        vectors, trainer = self.vectors(site), site.trainer
        targets = trainer.task.targets(torch.from_numpy(np.array(site.data.train.labels)))
        clip = private.settings_of(site).max_grad_norm

        def total(index: Tensor, patients: Tensor | None) -> Tensor:
            outputs = (vectors[index] @ head.T).requires_grad_()
            losses = trainer.task.losses(outputs, targets[index], trainer.target)
            (slopes,) = torch.autograd.grad(losses.sum(), outputs)
            return clipped_sum(slopes, vectors[index], clip, patients)

        size = None if self.batch == "full" else trainer.optimizer.batch_size
        noisy, expected = private_steps.release_sum(site, total, size, share=share)
        record = private.record_of(site, "classifier", limits=limits)
        return Parcel("gradients", {"head": noisy}, {"samples": len(site.data.train), "expected": expected}, record)

    def vectors(self, site: Site) -> Tensor:
        """Projected features of the site's training images and the constant, float32 [N, k + 1]."""
        if VECTORS not in site.cache:
            basis = site.state.group(BASIS)
            vectors = (features_of(site, site.data.train) - basis["mean"]) @ basis["matrix"]
            site.cache[VECTORS] = torch.cat([vectors, torch.full((len(vectors), 1), self.bias)], 1)
        return site.cache[VECTORS]

    def score(self, site: Site, part: ImageSet, weights: Weights, own: Own) -> dict[str, Tensor]:
        """Sums as for any method, from features that are computed once."""
        if len(part) == 0:
            return {}
        trainer = site.trainer
        output = features_of(site, part) @ weights["fc.weight"].T + weights["fc.bias"]
        targets = trainer.task.targets(torch.from_numpy(np.array(part.labels)))
        cases = None if part.cases is None else torch.from_numpy(part.cases.copy())
        observed = trainer.task.observe(output, targets, trainer.target).cpu()
        return trainer.task.sums(trainer.within_bounds(observed, targets), targets, cases, trainer.target)


def clipped_sum(slopes: Tensor, vectors: Tensor, clip: float, patients: Tensor | None = None) -> Tensor:
    """The sum over images of slope times vector, [T, k], each of at most length `clip`, from [N, T] and [N, k].

    With `patients` int64 [N] the sum of each patient's images has at most that length, whatever that of each image is.
    An image (or patient) whose gradient is not finite counts as one without a gradient: whether a sum is finite must
    not depend on one of them.
    """
    if patients is None:
        lengths = slopes.norm(dim=1) * vectors.norm(dim=1)
        finite = lengths.isfinite()[:, None]
        slopes, vectors = (part.where(finite, 0.0) for part in (slopes, vectors))
        return (slopes * (clip / lengths.nan_to_num(clip).clamp(min=clip))[:, None]).T @ vectors
    total = torch.zeros(slopes.shape[1], vectors.shape[1])
    for patient in patients.unique():
        of_patient = slopes[patients == patient].T @ vectors[patients == patient]
        if bool(of_patient.norm().isfinite()):
            total += of_patient * (clip / of_patient.norm().clamp(min=clip))
    return total


def features_of(site: Site, part: ImageSet) -> Tensor:
    """Features of a part's images, float32 [N, D]."""
    encoder = _encoded(site.trainer.model).features.encoder(site.trainer.device)
    return torch.from_numpy(np.array(kept_features(encoder, part.images)))


def _encoded(model: object) -> Encoded:
    assert isinstance(model, Encoded), "the study's checks want an encoder"
    return model
