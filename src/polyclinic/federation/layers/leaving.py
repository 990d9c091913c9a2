"""Layers of what leaves: kinds are declared, differential privacy covers what the study wants covered, scores leave in
coarse steps and about one model, and numbers travel as whole numbers of a sum, in fewer digits, or as differences.

Statistics are finer than coarse scores. A coordinator that had one model scored and statistics of another one told
would learn from the difference of the two.

The transcript of calls to a deployed site is one hash in its state, from which the seeds of noise are derived. A
coordinator may put a site back to an earlier round and ask it anew. With the same noise under other weights it could
take the noise off by subtraction. So whatever a site's numbers depend on is in the digest: asked the same, a site draws
the same noise and tells nothing new; asked anything else, it draws other noise.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from polyclinic.data.parts import ImageSet
from polyclinic.data.volumes.volume import bytes_of
from polyclinic.federation.call import COORDINATOR, Call, GateRefused, base_of
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.ledger.budget import SCORES, tells_something
from polyclinic.federation.ledger.kinds import PUBLIC
from polyclinic.federation.ledger.notes import Notes
from polyclinic.federation.ledger.parcel import Parcel, shortened
from polyclinic.federation.ledger.wire import ROUNDING
from polyclinic.federation.operation import Parcels, Transaction, signature_of
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import HostSpec, Site, SiteState
from polyclinic.federation.sums.settings import ADD_FINAL_SCORES, ADD_SCORES


class CoveredByPrivacy(Layer):
    """Updates have a record of differential privacy where the study wants one; all else too, where it wants all."""

    def is_needed(self) -> bool:
        trainers = (self.spec.trainer, *self.spec.trainers.values())
        return any(one is not None and one.privacy is not None for one in trainers)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        check_private(transaction.site, transaction.call.operation, parcels)
        return parcels


def check_private(site: Site, operation: str, released: Iterable[Parcel]) -> None:
    """LookupError if an operation releases updates trained without differential privacy where the study wants it."""
    privacy = site.trainer.privacy if site.trainer else None
    if privacy is None:
        return
    if privacy.cover == "all":
        check_all_covered(operation, released, noised=privacy.score_noise is not None)
    if "classifier" not in privacy.on:
        return
    for parcel in released:
        if parcel.kind in ("weights", "gradients") and parcel.privacy is None:
            raise LookupError(
                f"'{operation}' trained {parcel.kind} without differential privacy, which privacy.on = 'classifier' "
                "asks for; the method must train with local_training.train, or take 'classifier' out of its traits"
            )


def check_all_covered(operation: str, released: Iterable[Parcel], *, noised: bool = False) -> None:
    """GateRefused if a parcel is not covered by differential privacy, or holds scores that are not `noised`, where the
    study wants all covered."""
    for parcel in released:
        if (parcel.kind == SCORES and not noised) or (parcel.privacy is None and tells_something(parcel)):
            raise GateRefused(f"'{operation}' releases {parcel.kind} that nothing covers, and privacy.cover is 'all'")


TRANSCRIPT = "trail"


class Transcript(Layer):
    """The call enters the transcript before noise is drawn for it."""

    def arriving(self, transaction: Transaction) -> None:
        if transaction.site.trainer.privacy is not None:
            extend(transaction.site, self.spec.result_settings_json, transaction.call, transaction.received)


def extend(site: Site, result_settings_json: str, call: Call, received: Mapping[str, Parcel]) -> None:
    """Enter a call, with what came along, opened; the settings of the study that results depend on; and the site's
    images, as noise must not be the same for others."""
    if TRANSCRIPT not in site.cache:
        parts = (site.data.train, site.data.validation, site.data.test)
        site.cache[TRANSCRIPT] = " ".join(_digest(part) for part in parts)
    asked = [call.operation, call.round, call.to, dict(call.arguments)]
    digests = {name: parcel.digest for name, parcel in received.items()}
    known = [transcript_of(site.state), result_settings_json, str(site.cache[TRANSCRIPT]), asked, digests]
    digest = bytearray(hashlib.sha256(json.dumps(known, sort_keys=True).encode()).digest())
    site.state[TRANSCRIPT] = torch.frombuffer(digest, dtype=torch.uint8)


def transcript_of(state: SiteState) -> str:
    """The digest of all calls up to now; empty before the first one, and at a site that keeps no trail."""
    return state[TRANSCRIPT].numpy().tobytes().hex() if TRANSCRIPT in state else ""


def _digest(part: ImageSet) -> str:
    found = hashlib.blake2b(digest_size=32)
    for array in (part.images, part.labels, part.masks, part.cases):
        if array is not None:
            found.update(f"{array.dtype} {array.shape}".encode())
            found.update(bytes_of(array))
    return found.hexdigest()


#: min_cohort of a new kit, by which scores of a simulated site are coarse
USUAL_COHORT = 10


class CoarseScores(Layer):
    """No score of training images leaves, and others as the site's policy says."""

    def is_needed(self) -> bool:
        return self.spec.policy.deployed or self.spec.policy.scores == "coarse"

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        if transaction.call.operation in (ADD_SCORES, ADD_FINAL_SCORES):
            return parcels  # in few cells, and only the sum is seen
        return tuple(without_loss(coarse_scores(self.spec.policy, transaction, parcel)) for parcel in parcels)


def without_loss(parcel: Parcel) -> Parcel:
    """The parcel without its training loss, an exact score of training images that no method needs."""
    told = {name: value for name, value in parcel.metadata.items() if name != "loss"}
    return parcel if len(told) == len(parcel.metadata) else replace(parcel, metadata=told)


def coarse_scores(policy: Policy, transaction: Transaction, parcel: Parcel) -> Parcel:
    """Scores as a deployed site lets them out: none of training images, others as its policy says;
    anything else as it is."""
    if parcel.kind != SCORES:
        return parcel
    if "train" in transaction.splits:  # as `test_real` does, a score's name begins with its split, or it counts as one
        known = tuple(f"{split}_" for split in transaction.splits if split != "train")  # of training images
        tensors = {name: tensor for name, tensor in parcel.tensors.items() if name.startswith(known)}
        metadata = {name: value for name, value in parcel.metadata.items() if name in PUBLIC}
        parcel = replace(parcel, tensors=tensors, metadata=metadata)
    if policy.scores == "fine" or not parcel.tensors:
        return parcel
    trainer, least = transaction.site.trainer, max(policy.min_cohort, 1 if policy.deployed else USUAL_COHORT)
    return replace(parcel, tensors=trainer.task.coarse(dict(parcel.tensors), least, trainer.target))


class Declared(Layer):
    """Nothing leaves of a kind that the operation does not declare. What passes here is what the operation made."""

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        for parcel in parcels:
            if parcel.kind not in transaction.declared.releases:
                raise LookupError(f"'{transaction.call.operation}' did not declare that it releases {parcel.kind}")
        transaction.made = parcels
        return parcels


#: in a deployed site's folder; no coordinator can put it back
TESTED = "tested.json"
STATISTICS = "statistics"


class ScoredOnce(Layer):
    """Figures of test images are about one model."""

    def arriving(self, transaction: Transaction) -> None:
        ScoredModel(transaction).check(transaction.call)

    def left(self, transaction: Transaction) -> None:
        if transaction.made:
            ScoredModel(transaction).note(transaction.call)


class ScoredModel(Notes):
    """Digests of the models that a site told figures of its test images about, by kind of parcel."""

    def __init__(self, transaction: Transaction) -> None:
        site, releases = transaction.site, transaction.declared.releases
        super().__init__(site.folder / TESTED)
        self._local = bool(site.trainer.local_names)
        kinds = [kind for kind in (SCORES, STATISTICS) if kind in releases]
        self._kind = kinds[0] if kinds and transaction.splits == ("test",) else None
        own = signature_of(transaction.work).parameters.get("own")
        self._own = "current" if own is None else str(own.default)  # where the call does not say

    def check(self, call: Call) -> None:
        """GateRefused where figures of the other kind were told about another model."""
        other = STATISTICS if self._kind == SCORES else SCORES
        told = self.read().get(other, []) if self._kind else []
        if told and self._model(call) not in told:
            raise GateRefused(
                f"'{call.operation}' came for another model than the one whose {other} of test images were told in "
                "this run; both are about the finished model"
            )

    def note(self, call: Call) -> None:
        """The site tells figures of this model."""
        if self._kind:
            self.add(self._kind, self._model(call))

    def _model(self, call: Call) -> str:
        """The weights that came, and which part of its own the site adds to them, where it has one."""
        digest = call.parcels["weights"].digest if "weights" in call.parcels else ""
        return f"{digest} {call.arguments.get('own', self._own) if self._local else 'none'}"


def was_scored(site: Site) -> bool:
    """Whether scores of the site's test images were told in this run, as they are when it is over."""
    return bool(Notes(site.folder / TESTED).read().get(SCORES))


class HiddenSamples(Layer):
    """The number of images leaves in a sum only, where the site's policy hides it."""

    def is_needed(self) -> bool:
        return self.spec.policy.samples == "hide"

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        operation, sums = transaction.call.operation, self.host.sums
        if operation in sums.covered:
            return parcels
        if not any("samples" in parcel.metadata for parcel in parcels):
            return parcels
        if sums.summed.get(operation) != "mean" or _weighting(self.spec) == "samples":
            raise GateRefused(
                f"'{operation}' tells how many images it is of, and the site's policy hides that (samples); set "
                "federation.sum = 'secure', or method.weighting = 'uniform'"
            )
        return tuple(replace(p, metadata={n: v for n, v in p.metadata.items() if n != "samples"}) for p in parcels)


class Sum(Layer):
    """What is added up leaves as whole numbers."""

    def is_needed(self) -> bool:
        return bool(self.host.sums.covered)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        call, sums = transaction.call, self.host.sums
        if call.operation not in sums.covered:
            return parcels
        return sums.outgoing(transaction.site, call, self.sites.gates[call.site], parcels, _weighting(self.spec))


def _weighting(spec: HostSpec) -> str:
    return getattr(spec.study.method, "weighting", "samples")


class Rounding(Layer):
    """The parcels have the numbers that their receiver gets."""

    def is_needed(self) -> bool:
        return self.spec.study.engine.wire in ROUNDING

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        for parcel in parcels:  # an image that is rounded is no longer found among the site's own
            self.sites.gates[transaction.call.site].check_numbers(parcel)
        return tuple(shortened(parcel, self.spec.study.engine.wire) for parcel in parcels)


class Difference(Layer):
    """What goes to the coordinator travels as a difference to the weights that came."""

    def is_needed(self) -> bool:
        return self.spec.study.engine.wire == "delta"

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        if transaction.call.to != COORDINATOR:
            return parcels
        base = base_of(transaction.received)
        return tuple(shortened(parcel, "delta", base) for parcel in parcels)
