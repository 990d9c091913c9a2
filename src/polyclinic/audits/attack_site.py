"""Site inference: from which site does an image come? Told by how much the update that was sent lowers its loss.

Held-out images of the site are asked about, beside held-out images of the other sites: none of them was trained on, so
that this is no membership. Where the sites' images are alike, nothing can be told.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability
from polyclinic.attacks.membership.scores import score_all
from polyclinic.attacks.verdict import Verdict
from polyclinic.audits.attack import Attack
from polyclinic.audits.attack_membership import FEWEST, fit, losses_of, sent_model, unsent_names
from polyclinic.audits.planting import site_of
from polyclinic.audits.plots import histograms
from polyclinic.audits.views import Finding, NotTried, Planted, Seen, Truth
from polyclinic.federation.leaving.parcel import Parcel
from polyclinic.metrics.exchange import chance_of_order
from polyclinic.metrics.roc import separation

NEEDS = frozenset({Capability.WEIGHTS, Capability.CLASSIFIER, Capability.CANDIDATES, Capability.CANDIDATE_LABELS})
NAME, QUESTION = "site-inference", "site"
PASSES = 3  #: over the planted images
DARKER = 0.7  #: brightness of the planted scanner
THREAT = (
    "site-inference: the attacker has the weights that a site sent, and those it started from, and images with labels "
    "of which it asks whether they are of this site."
)


class SiteInferenceAttack(Attack):
    """Tells a site's images from other sites' by how much its update lowers their loss."""

    kinds: ClassVar[tuple[str, ...]] = ("weights",)

    def attack(self, seen: Seen, truth: Truth) -> list[Finding | NotTried]:
        missing = NEEDS - seen.tools.threat.granted
        if missing:
            why = f"the threat model does not grant {', '.join(sorted(missing))}"
            return [NotTried(NAME, why, QUESTION, excluded=True)]
        others = others_images(seen)
        if others is None or seen.sites > 1:
            return [NotTried(NAME, "no other site's images are here to compare with", QUESTION, excluded=True)]
        if unsent_names(seen):
            return [NotTried(NAME, "only a part of the network was sent", QUESTION)]
        own = truth.held_out(seen.tools.effort.candidates, seen.tools.what)
        if min(len(own[0]), len(others.images)) < FEWEST:
            return [NotTried(NAME, f"fewer than {FEWEST} held-out images", QUESTION)]
        return [site_finding(seen, truth, gains(seen, *own), gains(seen, *others.asked), others)]

    def planted(self, seen: Seen, truth: Truth) -> list[Planted]:
        """The sent model, trained further on half of the site's held-out images, all taken by a darker scanner; asked
        about is the other half, which it never saw: else it would be membership, which is easier."""
        images, answers = truth.held_out(seen.tools.effort.candidates, seen.tools.what)
        half = len(images) // 2
        if unsent_names(seen) or half < FEWEST:
            return []
        images = darker(images)
        model = sent_model(seen)
        size = seen.tools.assembly.study.optimizer.at_site(seen.site).batch_size
        fit(seen, model, images[:half].float() / 255, answers[:half], PASSES * max(1, half // size), seen.round)
        state = model.cpu().state_dict()
        weights = {name: state[name].detach().clone() for name in seen.parcel.tensors if name in state}
        data = site_of(truth.data, images[half:], answers[half:], members=0, what=seen.tools.what)
        words = f"an update trained on {half} images of a darker scanner; asked about are {len(images) - half} others"
        parcel = Parcel(seen.kind, weights, seen.parcel.metadata)
        return [Planted("site", words, replace(seen, parcel=parcel, together=()), Truth([], data, truth.seed))]


def darker(images: Tensor) -> Tensor:
    """uint8 images as a scanner with less light would take them."""
    return (images.float() * DARKER).round().to(images.dtype)


@dataclass(frozen=True)
class OtherSites:
    """Held-out images of all other sites with their answers, whose they are, and their patients where known."""

    images: Tensor
    answers: Tensor
    sites: list[str]
    cases: np.ndarray | None

    @property
    def asked(self) -> tuple[Tensor, Tensor]:
        return self.images, self.answers


def others_images(seen: Seen) -> OtherSites | None:
    """What is there of the other sites; None where there is nothing, as at a deployed site."""
    assembly = seen.tools.assembly
    names = [name for name in assembly.prepared.names if name != seen.site]
    if assembly.open_data is not None or not names:
        return None
    each = max(1, seen.tools.effort.candidates // len(names))
    truths = [Truth([], seen.tools.site_data(name), seen.tools.seed) for name in names]
    found = [truth.held_out(each, seen.tools.what) for truth in truths]
    cases = [truth.cases(each) for truth in truths]
    known = [one[1] for one in cases if one is not None]
    return OtherSites(
        torch.cat([images for images, _ in found]),
        torch.cat([answers for _, answers in found]),
        [name for name, (images, _) in zip(names, found, strict=True) for _ in images],
        np.concatenate(known) if len(known) == len(cases) else None,
    )


def gains(seen: Seen, images: Tensor, answers: Tensor) -> Tensor:
    """How much lower the loss of each image is after the site's training than before it, [N]."""
    unit = images.float() / 255
    after = score_all(losses_of(seen, sent_model(seen)), unit, answers)
    model = seen.tools.assembly.build_model(seen.tools.assembly.backbones.get(seen.site))
    model.load_state_dict({**sent_model(seen).cpu().state_dict(), **seen.received("weights")})
    return score_all(losses_of(seen, model), unit, answers) - after


def site_finding(seen: Seen, truth: Truth, own: Tensor, others: Tensor, of_others: OtherSites) -> Finding:
    """Whether gains of the site's images are larger than those of other sites' images, and whose the update seems."""
    own_cases = truth.cases(seen.tools.effort.candidates)
    known = own_cases is not None and of_others.cases is not None
    cases = (own_cases[1], of_others.cases) if known else (None, None)  # type: ignore[index]
    chance = chance_of_order(own, others, *cases)
    leak, shown = chance <= seen.tools.level, separation(own, others)
    place, sites = place_of_own_site(own, others, of_others.sites)
    because = (
        f"images of this site {'can' if leak else 'cannot'} be told from images of the other sites: {shown}; by their "
        f"mean gain, this site is number {place} of the {sites} sites that the update may come from"
    )
    title = f"{seen.where}, {NAME}\nSite: the further apart, the better one tells from which site an image comes"
    groups = {"this site": own, "other sites": others}
    draw = histograms("how much the update lowers an image's loss", groups, title=title)
    evidence = {**vars(shown), "order_by_chance": chance, "place_of_site": place, "sites_compared": sites}
    return Finding(NAME, THREAT, Verdict(leak, because, evidence), draw=draw, question=QUESTION)


def place_of_own_site(own: Tensor, others: Tensor, sites: list[str]) -> tuple[int, int]:
    """Update to site: the place of the true site when sites are ordered by the mean gain of their images, and how many
    sites there are. Number 1 is where an attacker would look."""
    means = [float(others[[place for place, of in enumerate(sites) if of == name]].mean()) for name in set(sites)]
    return 1 + sum(mean >= float(own.mean()) for mean in means), 1 + len(means)
