"""A rehearsal of a malicious coordinator: crafted weights against a site of the run's own, with and without its check.

The attacks choose weights and nothing else. A site of a simulated FedSGD deployment with the run's network and images
answers one round to each. What comes back is compared with the site's images and with as many that it never had.
"""

import copy
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyclinic.attacks.attack import LEAKS, NOT_TESTED, WITHSTOOD, Word
from polyclinic.attacks.coordinator import CoordinatorAttack, CraftedSum, Fishing, Imprint, TrapWeights
from polyclinic.attacks.crafting import difference
from polyclinic.attacks.scoring import identified
from polyclinic.audits.attack import Tools
from polyclinic.audits.truth import Truth
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Call, DataDependentRefusal, GateRefused, Suspended
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study, parse_study

MOST = 64  #: images of a batch
SLOPE = 1000.0  #: of the score at a bound of fishing
ALONE = 0.1  #: how far the count of images between two bounds may be from one
FISHED = 40  #: rounds of fishing at most, and images that the site looks at in all of them together
LOOKED_AT = 8000
#: how a site answers weights that it does not work with
REFUSALS = (ParcelRejected, DataDependentRefusal, Suspended, GateRefused)
CONTROL = "honest weights"  #: the row of a coordinator that sends what the study starts from
TABLES = ("seed", "plugins", "data", "sites", "task", "model", "optimizer")


@dataclass(frozen=True)
class Rehearsal:
    """One attack against the site: images that it identified, by chance among others, and whether it was stopped."""

    attack: str
    checked: bool
    stopped: bool
    identified: int
    by_chance: int
    of: int
    psnr: float | None
    seconds: float
    failed: str = ""  #: why the site could not answer, where that was no refusal


def rehearse(tools: Tools, site: str) -> dict[str, Any]:
    """What crafted weights give back at a site, with and without the incoming check, and a verdict on the check."""
    try:
        study = fedsgd_study(tools.assembly.study)
        victim = Victim(tools, site, study)
        rows = [victim.control()]
        rows += [row for attack in attacks_on(victim) for row in attack]
    except BadInput as error:
        return {"site": site, "verdict": NOT_TESTED, "why": str(error), "rows": []}
    word, why = judge(rows)
    return {"site": site, "verdict": word, "why": why, "rows": [vars(row) for row in rows]}


def judge(rows: list[Rehearsal]) -> tuple[Word, str]:
    """The check withstood if it stops every attack that works without it, and lets honest weights pass."""
    refused = [row for row in rows if row.attack == CONTROL and (row.stopped or row.failed)]
    if refused:
        why = refused[0].failed or "its check refuses them"
        return NOT_TESTED, f"the site does not answer honest weights either ({why}), so that a stop says nothing"
    broken = sorted({f"{row.attack} ({row.failed})" for row in rows if row.failed})
    works = {row.attack for row in rows if not row.checked and row.identified > row.by_chance}
    through = sorted({row.attack for row in rows if row.checked and row.identified > row.by_chance})
    if through:
        return LEAKS, f"{', '.join(through)}: images come back although the site checks what arrives"
    if broken:
        return NOT_TESTED, f"the site failed before its check could answer: {', '.join(broken)}"
    if not works:
        return NOT_TESTED, "no attack gets images back without the check either"
    return WITHSTOOD, f"without the incoming check images come back by {', '.join(sorted(works))}; with it by none"


def fedsgd_study(study: Study, whole: int = 0) -> Study:
    """A study of one step a round with the run's data, network and optimiser, as every attack here reads.

    `whole`: the gradient of a round is that of so many images, all that the site has, instead of a mini-batch's."""
    tables = {name: table for name, table in study.as_tables().items() if name in TABLES}
    size = whole or min(MOST, study.optimizer.batch_size)
    optimizer = {**tables.get("optimizer", {}), "augment": [], "batch_size": size}
    optimizer.pop("batch_sizes", None)
    return parse_study(
        {
            **tables,
            "optimizer": optimizer,
            "method": {"name": "fedsgd", "rounds": 100, "batch": "full" if whole else "mini"},
            "engine": {"device": "cpu", "workers": 1, "durable": False},
        }
    )


class Victim:
    """A site of the rehearsal, new for each attack, with or without its check."""

    def __init__(self, tools: Tools, site: str, study: Study) -> None:
        self.site, self.study, self.assembly = site, study, tools.assembly
        truth = Truth([], tools.site_data(site), tools.seed)
        held_out = truth.held_out(2 * len(truth.data.train) + MOST)[0].float() / 255
        self.images = truth.images(torch.arange(len(truth.data.train)))
        self.public, self.others = held_out[::2], held_out[1::2]
        if min(len(self.public), len(self.others)) < 2:
            raise BadInput("the site has no held-out images that could be the attacker's own")
        self.model = self._assembly(False, Path()).build_model()
        self.model.load_state_dict(tools.assembly.initial_weights())

    def _assembly(self, checked: bool, folder: Path) -> Assembly:
        study = self.study.with_settings({"policy.incoming": {"on": checked}})
        return Assembly(study, self.assembly.prepared, folder, open_data=self.assembly.open_data)

    def attack(self, attack: CoordinatorAttack, checked: bool) -> Rehearsal:
        begin = time.perf_counter()
        crafted = attack.craft(self.model, self.public)  # type: ignore[attr-defined]
        updates, failed = self.ask([crafted], checked)
        update = updates[0] if updates else None
        found = self.public[:0] if update is None else attack.recover(update, crafted, self.public)  # type: ignore
        count = min(len(self.images), len(self.others))
        scored = identified(found[: 2 * MOST], self.images[:count], self.others)
        psnr = scored.psnr if scored.images else None
        took = round(time.perf_counter() - begin, 1)
        stopped = update is None and not failed
        return Rehearsal(attack.name, checked, stopped, scored.images, scored.by_chance, scored.of, psnr, took, failed)

    def control(self) -> Rehearsal:
        """The site's answer to the weights that the study starts from, with its check: it must give one."""
        begin = time.perf_counter()
        updates, failed = self.ask([self.model], True)
        took = round(time.perf_counter() - begin, 1)
        return Rehearsal(CONTROL, True, not updates and not failed, 0, 0, len(self.images), None, took, failed)

    def ask(self, sent: Sequence[nn.Module], checked: bool) -> tuple[list[dict[str, Tensor]], str]:
        """The site's answers to weights in its first rounds, up to the first that it refuses; and why it failed, where
        it did."""
        found: list[dict[str, Tensor]] = []
        with tempfile.TemporaryDirectory() as folder:
            host = self._assembly(checked, Path(folder)).host()
            for number, crafted in enumerate(sent, 1):
                weights = Parcel("weights", dict(crafted.state_dict()))
                try:
                    reply = host.handle(Call(self.site, "gradient", number, {"weights": weights}))
                except REFUSALS:
                    return found, ""
                except WorkFailed as error:
                    return found, str(error)
                found += [dict(reply.parcels[0].tensors)] if reply.parcels else []
        return found, ""


def attacks_on(victim: Victim) -> Iterator[list[Rehearsal]]:
    """What each attack that fits the network gets, without and with the check; BadInput where none does."""
    tried: list[CoordinatorAttack] = [Imprint(), TrapWeights(alive=0.1), CraftedSum()]
    reasons = []
    for attack in tried:
        try:
            attack.craft(victim.model, victim.public)  # type: ignore[attr-defined]
        except BadInput as error:
            reasons.append(str(error))
            continue
        yield [victim.attack(attack, checked) for checked in (False, True)]
    try:
        yield [fish(victim, checked) for checked in (False, True)]
    except BadInput:
        if len(reasons) == len(tried):
            raise BadInput(reasons[0]) from None


# --- fishing --------------------------------------------------------------------------------------------


def fish(victim: Victim, checked: bool) -> Rehearsal:
    """Fishing over several rounds: the images between two bounds are behind the change from one round to the next.

    The gradient of each round is that of all images of the site. A single image's features are read off exactly; they
    name it among the site's images and others. BadInput where the network is no classifier."""
    if victim.study.task.like != "classification":
        raise BadInput("attack: fishing needs classes")
    begin, images = time.perf_counter(), len(victim.images)
    whole = copy.copy(victim)
    whole.study = fedsgd_study(victim.study, images)
    attack = Fishing(strength=SLOPE)
    sent = [attack.craft_cut(victim.model, victim.public, share) for share in bounds(images)]
    updates, failed = whole.ask(sent, checked)
    candidates, named = torch.cat([victim.images, victim.others[:images]]), set[int]()
    for crafted, before, after in zip(sent[1:], updates[:-1], updates[1:], strict=False):
        if abs(attack.count(before, after, crafted, images) - 1) < ALONE:
            features = attack.read_features(difference(before, after), crafted)
            named |= {attack.identify(features, crafted, candidates)}
    own = sum(place < images for place in named)
    stopped, took = len(updates) < len(sent) and not failed, round(time.perf_counter() - begin, 1)
    return Rehearsal(attack.name, checked, stopped, own, len(named) - own, images, None, took, failed)


def bounds(images: int) -> list[float]:
    """Shares of images that lie below the bound of each round: one image between two of them, the largest first."""
    rounds = max(6, min(FISHED, LOOKED_AT // images))
    return [min(0.99, max(0.01, 1 - (number + 0.5) / max(images, rounds))) for number in range(rounds)]
