"""Site inference: from which site does an image come, and from which site an update?

Told by how much the update that was sent lowers the loss of an image. Held-out images of the site are asked about,
beside held-out images of the other sites: none of them was trained on, so that this is no membership. Where the sites'
images are alike, nothing can be told.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.attack import Capability, Verdict
from polyclinic.attacks.membership import score_all
from polyclinic.audits.attack import Attack, Finding, NotTried, Planted, Results, Seen, not_granted
from polyclinic.audits.attack_membership import FEWEST, fit, losses_of, sent_model, unsent_names
from polyclinic.audits.plots import histograms
from polyclinic.audits.truth import Truth, truth_of_images
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.roc import separation
from polyclinic.metrics.statistics.significance import chance_of_order

NEEDS = frozenset({Capability.WEIGHTS, Capability.CLASSIFIER, Capability.CANDIDATES, Capability.CANDIDATE_LABELS})
NAME, QUESTION = "site-inference", "site"
ORIGIN, ORIGIN_QUESTION = "site-of-update", "origin"
MEASURED = "how much the update lowers an image's loss, beside others' updates"
MOST_PEERS = 8  #: other sites' updates of the round that gains are held against
PASSES = 3  #: over the planted images
DARKER = 0.7  #: brightness of the planted scanner
THREAT = (
    "site-inference: the attacker has the weights that a site sent, those it started from, those that other sites sent "
    "in the same round where they were kept, and images with labels of which it asks whether they are of this site."
)


class SiteInferenceAttack(Attack):
    """Tells a site's images from other sites' by how much its update lowers their loss, and whose an update is."""

    kinds: ClassVar[tuple[str, ...]] = ("weights",)
    questions: ClassVar[tuple[str, ...]] = ("site", "origin")
    tests: ClassVar[int] = 2

    def attack(self, seen: Seen, truth: Truth) -> Results:
        if refused := not_granted(NAME, NEEDS, seen, QUESTION):
            return [refused]
        others = others_images(seen)
        if others is None or seen.sites > 1:
            return [NotTried(NAME, "no other site's images are here to compare with", QUESTION, excluded=True)]
        if unsent_names(seen):
            return [NotTried(NAME, "only a part of the network was sent", QUESTION)]
        own = truth.held_out(seen.tools.effort.candidates)[0]
        if min(len(own), len(others.images)) < FEWEST:
            return [NotTried(NAME, f"fewer than {FEWEST} held-out images", QUESTION)]
        return site_findings(seen, truth, others)

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
        words = f"an update trained on {half} images of a darker scanner; asked about are {len(images) - half} others"
        other = truth_of_images(truth, images[half:], answers[half:], 0, seen.tools.what)
        return [seen.planted("site", words, other, Parcel(seen.kind, weights, seen.parcel.metadata))]


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
    """How much lower the loss of each image is after the site's training than before it, [N]; less the mean of what
    other sites' training of the same round did, where that is there: some images gain by anybody's."""
    own = gains_by(seen, images, answers)
    whole = [peer for peer in seen.peers()[:MOST_PEERS] if not unsent_names(peer)]
    others = [gains_by(peer, images, answers) for peer in whole]
    return own - torch.stack(others).mean(0) if others else own


def gains_by(seen: Seen, images: Tensor, answers: Tensor) -> Tensor:
    """How much lower one site's training made the loss of each image, [N]."""
    unit = images.float() / 255
    after = score_all(losses_of(seen, sent_model(seen)), unit, answers)
    model = seen.tools.assembly.build_model(seen.tools.assembly.backbones.get(seen.site))
    model.load_state_dict({**sent_model(seen).cpu().state_dict(), **seen.received("weights")})
    return score_all(losses_of(seen, model), unit, answers) - after


# --- findings -------------------------------------------------------------------------------------------


def site_findings(seen: Seen, truth: Truth, others: OtherSites) -> Results:
    """From which site does an image come, and from which site does the update come?"""
    count, what = seen.tools.effort.candidates, seen.tools.what
    own, theirs = gains(seen, *truth.held_out(count, what)), gains(seen, others.images, others.answers)
    cases = truth.cases(count)
    known = cases is not None and others.cases is not None
    asked = Asked(own, theirs, others.sites, cases[1] if known else None, others.cases if known else None)  # type: ignore[index]
    without = len(seen.tools.assembly.prepared.names) - 1 - len(set(others.sites))
    return [image_finding(seen, asked), origin_finding(seen, asked, without)]


@dataclass(frozen=True)
class Asked:
    """Gains of held-out images of the site and of other sites, whose the latter are, and patients where known."""

    own: Tensor
    others: Tensor
    sites: list[str]
    own_cases: np.ndarray | None
    other_cases: np.ndarray | None

    def chance(self) -> float:
        """How likely a lot puts the site's images as far above all others."""
        return chance_of_order(self.own, self.others, self.own_cases, self.other_cases)

    def rows_of(self, site: str) -> list[int]:
        return [place for place, of in enumerate(self.sites) if of == site]

    def chance_beside(self, site: str) -> float:
        """The same beside the images of one other site."""
        rows = self.rows_of(site)
        cases = None if self.other_cases is None else self.other_cases[rows]
        return chance_of_order(self.own, self.others[rows], self.own_cases, cases)

    def place(self) -> int:
        """The place of the true site when sites are ordered by the mean gain of their images. Number 1 is where an
        attacker would look."""
        means = [float(self.others[self.rows_of(site)].mean()) for site in dict.fromkeys(self.sites)]
        return 1 + sum(mean >= float(self.own.mean()) for mean in means)


def image_finding(seen: Seen, asked: Asked) -> Finding:
    """Whether gains of the site's images are larger than those of other sites' images."""
    chance, shown = asked.chance(), separation(asked.own, asked.others)
    leak = chance <= seen.tools.level
    because = f"images of this site {'can' if leak else 'cannot'} be told from images of the other sites: {shown}"
    title = f"{seen.where}, {NAME}\nSite: the further apart, the better one tells from which site an image comes"
    draw = histograms(MEASURED, {"this site": asked.own, "other sites": asked.others}, title=title)
    evidence = {**vars(shown), "order_by_chance": chance}
    return Finding(NAME, THREAT, Verdict(leak, because, evidence), draw=draw, question=QUESTION)


def origin_finding(seen: Seen, asked: Asked, without: int = 0) -> Finding:
    """Whether the update points to its own site: images of this site gain more than those of each other site.

    Every other site must be excluded, so the largest of the chances counts (an intersection-union test). `without`:
    how many other sites have no images to compare with."""
    chances = {site: asked.chance_beside(site) for site in dict.fromkeys(asked.sites)}
    nearest = max(chances, key=lambda site: chances[site])
    place, leak = asked.place(), chances[nearest] <= seen.tools.level
    because = (
        f"the update {'points' if leak else 'does not point'} to the site that it comes from: by the mean gain of "
        f"their images, this site is number {place} of {1 + len(chances)}; images of {nearest}, the nearest other, lie "
        f"as far below by chance in {chances[nearest]:.2g} of cases"
    )
    if without:
        because += f"; {without} other sites have no held-out images, and were not compared"
    theirs = asked.others[asked.rows_of(nearest)]
    evidence: dict[str, float | int | str] = {
        "auc": separation(asked.own, theirs).auc, "order_by_chance": chances[nearest], "place_of_site": place,
        "sites_compared": 1 + len(chances), "nearest_site": nearest,
    }  # fmt: skip
    title = f"{seen.where}, {ORIGIN}\nOrigin: the further apart, the better one tells whose update this is"
    draw = histograms(MEASURED, {"this site": asked.own, nearest: theirs}, title=title)
    return Finding(ORIGIN, THREAT, Verdict(leak, because, evidence), draw=draw, question=ORIGIN_QUESTION)
