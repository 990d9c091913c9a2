"""Site inference: from which site does an image come? Told by how much the update that was sent lowers its loss.

Held-out images of the site are asked about, beside held-out images of the other sites: none of them was trained on, so
that this is no membership. Where the sites' images are alike, nothing can be told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

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
        if min(len(own[0]), len(others[0])) < FEWEST:
            return [NotTried(NAME, f"fewer than {FEWEST} held-out images", QUESTION)]
        return [site_finding(seen, gains(seen, *own), gains(seen, *others))]

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


def others_images(seen: Seen) -> tuple[Tensor, Tensor] | None:
    """Held-out images of all other sites with their answers; None where there are none, as at a deployed site."""
    assembly = seen.tools.assembly
    names = [name for name in assembly.prepared.names if name != seen.site]
    if assembly.open_data is not None or not names:
        return None
    each = max(1, seen.tools.effort.candidates // len(names))
    found = [Truth([], seen.tools.site_data(name), seen.tools.seed).held_out(each, seen.tools.what) for name in names]
    return torch.cat([images for images, _ in found]), torch.cat([answers for _, answers in found])


def gains(seen: Seen, images: Tensor, answers: Tensor) -> Tensor:
    """How much lower the loss of each image is after the site's training than before it, [N]."""
    unit = images.float() / 255
    after = score_all(losses_of(seen, sent_model(seen)), unit, answers)
    model = seen.tools.assembly.build_model(seen.tools.assembly.backbones.get(seen.site))
    model.load_state_dict({**sent_model(seen).cpu().state_dict(), **seen.received("weights")})
    return score_all(losses_of(seen, model), unit, answers) - after


def site_finding(seen: Seen, own: Tensor, others: Tensor) -> Finding:
    """Whether gains of the site's images are larger than those of other sites' images."""
    found = separation(own, others, confidence=1 - 2 * seen.tools.level)
    shown = separation(own, others)
    words = "can" if found.significant else "cannot"
    because = f"images of this site {words} be told from images of the other sites: {shown}"
    title = f"{seen.where}, {NAME}\nSite: the further apart, the better one tells from which site an image comes"
    groups = {"this site": own, "other sites": others}
    draw = histograms("how much the update lowers an image's loss", groups, title=title)
    return Finding(NAME, THREAT, Verdict(found.significant, because, vars(shown)), draw=draw, question=QUESTION)
