"""Crafted weights, sent to a site with the incoming check: which are stopped, and what would have come back.

The site has X-rays of patients with and without tuberculosis (tb_cxr_64.npz in the folder that POLYCLINIC_DATA names)
and answers FedSGD. The attacker's own images are NIH's (covid_cxr_64.npz). Adaptive attackers know the check: they mix
crafted weights into honest ones, keep the convolutions honest, turn rows, use few rows, or change biases only.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attack_black_box import load
from incoming_honest import Seen, counted
from torch import Tensor, nn

from polyclinic import Study
from polyclinic.attacks import CraftedSum, Fishing, Imprint, OverflowFilter, TrapWeights, identified
from polyclinic.attacks.coordinator.crafting import (
    dense_layer,
    input_of,
    inputs_of_rows,
    invert_front,
    without_repeats,
)
from polyclinic.attacks.coordinator.fishing import change
from polyclinic.data.parts import prepare
from polyclinic.federation.call import Call
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.refusals import GateRefused
from polyclinic.randomness import torch_rng
from polyclinic.runner.assembly import Assembly

#: side of the images, and how many the attacker has
SIZE, PUBLIC = 32, 150
#: learning rate of the study
LR = 0.05
#: images that are inverted for each attack
MOST = 24

UNREAD: dict[str, Any] = {"identified": None, "of": None, "by_chance": None, "psnr": None}

Update = dict[str, Tensor]
Craft = Callable[[nn.Module, Tensor], nn.Module]
Recover = Callable[[Update, nn.Module, Tensor], Tensor]


class Variant(NamedTuple):
    """One attack at one strength: `craft` makes the network to send, `recover` images from the answer."""

    attack: str
    strength: float
    craft: Craft
    recover: Recover


class Victim:
    """A site of a FedSGD study, in a process that checks what arrives, and one that does not."""

    def __init__(
        self, backbone: str, folder: Path, *, images: int, warm: int, seed: int = 0, shares: str = "random"
    ) -> None:
        self.folder, self.backbone, self.warm = folder, backbone, warm
        #: whether it is read what an attack that is stopped would have got back: once, before the first round
        self.reads_stopped = not warm
        self.public, _ = load("covid_cxr_64.npz", PUBLIC, SIZE, seed, site="NIH_ChestXray8")
        data = {
            "source": "npz",
            "path": "$POLYCLINIC_DATA/tb_cxr_64.npz",
            "size": SIZE,
            "per_class": round(images / 0.9),
        }
        tables: dict[str, Any] = {
            "seed": seed,
            "data": {**data, "validation": 0, "test": 0.1},
            "sites": {"partition": "iid", "count": 2},
            "model": {"backbone": backbone},
            "optimizer": {"batch_size": images, "lr": LR, "momentum": 0.0},
            "method": {"name": "fedsgd", "rounds": 100},
            "evaluation": {"every": 0, "select": "last", "final": "none"},
            "engine": {"device": "cpu", "workers": 1},
            "policy": {"incoming": {"on": True}, "shares": shares},
        }
        self.study = Study(**tables)
        self.parts = prepare(self.study.data, self.study.sites, cache=folder / "cache")
        self._hosts = itertools.count()
        assembly = self._assembly()
        own, other = (assembly.open_images(name).train for name in self.parts.names)
        self.images, self.others = (torch.from_numpy(one.images.copy()).float() / 255 for one in (own, other))
        self.labels = torch.from_numpy(own.labels.copy())
        self.first = assembly.initial_weights()
        self.model = assembly.build_model()

    def _assembly(self) -> Assembly:
        return Assembly(self.study, self.parts, self.folder / f"run-{next(self._hosts)}")

    def host(self) -> tuple[SiteHost, dict[str, Tensor], int]:
        """A fresh site after `warm` honest rounds, the weights it has come to, and the next round."""
        host, weights = self._assembly().host(), self.first
        for number in range(1, self.warm + 1):
            update = self.ask(host, weights, number)
            weights = {**weights, **{name: weights[name] - LR * gradient for name, gradient in update.items()}}
        return host, weights, self.warm + 1

    def ask(self, host: SiteHost, weights: dict[str, Tensor], number: int) -> Update:
        reply = host.handle(Call(self.parts.names[0], "gradient", number, {"weights": Parcel("weights", weights)}))
        return dict(reply.parcels[0].tensors)

    def model_with(self, weights: dict[str, Tensor]) -> nn.Module:
        model = copy.deepcopy(self.model)
        model.load_state_dict(weights)
        return model


# --- adaptive attackers -------------------------------------------------------------------------------


@torch.no_grad()
def mixed(honest: nn.Module, crafted: nn.Module, share: float) -> nn.Module:
    """Crafted weights in honest ones."""
    result = copy.deepcopy(honest)
    for own, other in zip(result.parameters(), crafted.parameters(), strict=True):
        own.lerp_(other, share)
    return result


@torch.no_grad()
def dense_bins(
    model: nn.Module, public: Tensor, rows: int, reach: float, *, turned: float = 0.0, first: float | None = None
) -> nn.Module:
    """Bins in a few rows of the dense layer only; convolutions and all other rows stay honest.

    `reach`: how far a row moves, in units of its length. `turned`: length of a part of each row, drawn at random, to
    which the attacker's own images are blind, so that no two rows are parallel. `first`: the share of images below the
    threshold of the first row; evenly spread if not given.
    """
    crafted = copy.deepcopy(model)
    name, layer = dense_layer(crafted)
    inputs = input_of(crafted, name)(public)
    centred = inputs - inputs.mean(0)
    direction = torch.linalg.svd(centred, full_matrices=False).Vh[0]
    rng = torch_rng(0, "turned rows")
    basis = torch.linalg.svd(inputs, full_matrices=False).Vh
    shares = (torch.arange(rows) + 0.5) / rows if first is None else torch.full((rows,), first)
    for place, share in enumerate(shares):
        own = layer.weight[place].clone()
        length = own.norm()
        new = (1 - min(reach, 1.0)) * own + reach * length * direction
        if turned:
            blind = torch.randn(len(own), generator=rng)
            blind = blind - basis.T @ (basis @ blind)
            new = new + turned * length * blind / blind.norm()
        layer.weight[place] = new
        layer.bias[place] = -torch.quantile(inputs @ new, share)
    return crafted


@torch.no_grad()
def biased(model: nn.Module, public: Tensor, rows: int, alive: float) -> nn.Module:
    """Traps by biases alone: honest rows, each with a threshold that few images pass."""
    crafted = copy.deepcopy(model)
    name, layer = dense_layer(crafted)
    values = input_of(crafted, name)(public) @ layer.weight.T
    layer.bias[:rows] = -torch.quantile(values, 1 - alive, dim=0)[:rows]
    return crafted


def read_rows(update: Update, crafted: nn.Module, public: Tensor) -> Tensor:
    """Images of rows that one image is alone in, and of differences of neighbouring rows."""
    name, _ = dense_layer(crafted)
    weight, bias = update[f"{name}.weight"], update[f"{name}.bias"]
    pairs = torch.cat([weight, weight[:-1] - weight[1:]]), torch.cat([bias, bias[:-1] - bias[1:]])
    inputs = without_repeats(inputs_of_rows(*pairs))
    return invert_front(input_of(crafted, name), inputs[:MOST], public)


def variants(backbone: str, images: int, quick: bool) -> Iterator[Variant]:
    """The attacks that a backbone allows, from strong to weak."""
    yield Variant("honest", 0, lambda m, p: copy.deepcopy(m), read_rows if _dense(backbone) else _nothing)
    if not _dense(backbone):
        return
    strengths = (1.0, 0.1) if quick else (1.0, 0.5, 0.2, 0.1, 0.05)
    for s in strengths:
        for measure in ("brightness", "random"):
            attack = Imprint(strength=s, measure=measure)
            yield Variant(f"imprint, {measure}", s, attack.craft, attack.recover)
        if backbone != "lenet5":
            trap = TrapWeights(strength=s, alive=1 / images)
            yield Variant("trap weights", s, trap.craft, trap.recover)
        summed = CraftedSum(strength=s)
        yield Variant("crafted sum", s, summed.craft, summed.recover)
    for share in (0.5,) if quick else (0.9, 0.7, 0.5, 0.3, 0.1):
        full = Imprint()
        yield Variant(
            "imprint mixed into honest weights",
            share,
            lambda m, p, a=full, s=share: mixed(m, a.craft(m, p), s),
            read_rows,
        )
        if backbone != "lenet5":
            trap = TrapWeights(alive=1 / images)
            yield Variant(
                "traps mixed into honest weights",
                share,
                lambda m, p, a=trap, s=share: mixed(m, a.craft(m, p), s),
                read_rows,
            )
    for reach in (1.0,) if quick else (1.0, 0.6, 0.3, 0.1):
        for rows in (4,) if quick else (16, 4, 2):
            yield Variant(
                f"{rows} bins, all else honest", reach, lambda m, p, n=rows, r=reach: dense_bins(m, p, n, r), read_rows
            )
            yield Variant(
                f"{rows} bins, turned rows",
                reach,
                lambda m, p, n=rows, r=reach: dense_bins(m, p, n, r, turned=r),
                read_rows,
            )
    for rows in (4,) if quick else (32, 8, 2):
        yield Variant(
            f"{rows} biases as traps", 1 / images, lambda m, p, n=rows: biased(m, p, n, 1 / images), read_rows
        )


def _dense(backbone: str) -> bool:
    return backbone in ("lenet5", "cnn-32-64-128", "cnn-64-128-64-32")


def _nothing(update: Update, crafted: nn.Module, public: Tensor) -> Tensor:
    return public[:0]


def measure(victim: Victim, variant: Variant) -> dict[str, Any]:
    """Which checks give alarm, and what the variant identifies at a site that works all the same."""
    host, weights, number = victim.host()
    crafted = variant.craft(victim.model_with(weights), victim.public)
    with counted() as seen:
        update = victim.ask(host, dict(crafted.state_dict()), number)
    if seen.alarms and not victim.reads_stopped:
        return row(victim, variant.attack, variant.strength, seen, UNREAD)
    found = variant.recover(update, crafted, victim.public)
    return row(victim, variant.attack, variant.strength, seen, score(victim, found))


def score(victim: Victim, found: Tensor) -> dict[str, Any]:
    scored = identified(found, victim.images, victim.others)
    psnr = None if math.isnan(scored.psnr) else round(scored.psnr, 1)
    return {"identified": scored.images, "of": scored.of, "by_chance": scored.by_chance, "psnr": psnr}


def row(victim: Victim, attack: str, strength: float, seen: Seen, scored: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"backbone": victim.backbone, "honest_rounds_before": victim.warm, "attack": attack, "strength": strength},
        "alarms": sorted({figure.check for figure in seen.alarms}),
        "nearest": {name: round(value, 3) for name, value in seen.nearest.items()},
        **scored,
    }


# --- attacks over several rounds ----------------------------------------------------------------------


def walk(victim: Victim, attack: Imprint | TrapWeights, steps: int) -> dict[str, Any]:
    """Crafted weights are reached in small steps, a round each; the last answer is read."""
    host, weights, number = victim.host()
    honest = victim.model_with(weights)
    crafted = attack.craft(honest, victim.public)
    with counted() as seen:
        for step in range(1, steps + 1):
            update = victim.ask(host, dict(mixed(honest, crafted, step / steps).state_dict()), number + step)
    found = attack.recover(update, crafted, victim.public)
    return row(victim, f"{attack.name}, reached in {steps} rounds", steps, seen, score(victim, found))


def spread(victim: Victim, reach: float, rounds: int) -> dict[str, Any]:
    """One bin a round, all else honest: neighbouring thresholds in neighbouring rounds."""
    host, weights, number = victim.host()
    honest = victim.model_with(weights)
    name, _ = dense_layer(honest)
    rows = []
    with counted() as seen:
        for place in range(rounds):
            share = (place + 0.5) / rounds
            crafted = dense_bins(honest, victim.public, 1, reach, first=share)
            update = victim.ask(host, dict(crafted.state_dict()), number + place)
            rows.append((update[f"{name}.weight"][0], update[f"{name}.bias"][0]))
    weight, bias = (torch.stack(column) for column in zip(*rows, strict=True))
    inputs = without_repeats(inputs_of_rows(weight[:-1] - weight[1:], bias[:-1] - bias[1:]))
    found = invert_front(input_of(honest, name), inputs[:MOST], victim.public)
    return row(victim, f"one bin a round, {rounds} rounds", reach, seen, score(victim, found))


def fish(victim: Victim, strength: float, cuts: int) -> dict[str, Any]:
    """Fishing over several rounds, each with another bound; images are named by their features."""
    host, weights, number = victim.host()
    attack, honest = Fishing(target_class=1, strength=strength), victim.model_with(weights)
    candidates = torch.cat([victim.images, victim.others])
    named: set[int] = set()
    before: Update | None = None
    with counted() as seen:
        for cut in range(1, cuts):
            crafted = attack.craft_cut(honest, victim.public, cut / cuts)
            update = victim.ask(host, dict(crafted.state_dict()), number + cut)
            if before is not None and abs(attack.count(before, update, crafted, len(victim.images)) - 1) < 0.1:
                named.add(attack.identify(attack.read_features(change(before, update), crafted), crafted, candidates))
            before = update
    members = sum(place < len(victim.images) for place in named)
    scored = {"identified": members, "of": len(victim.images), "by_chance": len(named) - members, "psnr": None}
    return row(victim, "fishing", strength, seen, scored)


def overflow(victim: Victim, strength: float, most: int) -> dict[str, Any]:
    """Members that are called so, and others that are, by a filter for each candidate."""
    attack, answers = OverflowFilter(strength=strength), []
    with counted() as seen:
        for candidate in torch.cat([victim.images[:most], victim.others[:most]]):
            host, weights, number = victim.host()
            crafted = attack.craft(victim.model_with(weights), candidate, victim.public)
            answers.append(attack.recover(_answer(victim, host, crafted, number)))
    scored = {"identified": sum(answers[:most]), "of": most, "by_chance": sum(answers[most:]), "psnr": None}
    return row(victim, "overflow filter", strength, seen, scored)


def _answer(victim: Victim, host: SiteHost, crafted: nn.Module, number: int) -> Update | None:
    """What the site answers; None where its gate keeps it back."""
    try:
        return victim.ask(host, dict(crafted.state_dict()), number)
    except GateRefused:
        return None


def rows_of(victim: Victim, *, quick: bool) -> Iterator[dict[str, Any]]:
    """All attacks on one site."""
    for variant in variants(victim.backbone, len(victim.images), quick):
        yield measure(victim, variant)
    for strength in (1000.0,) if quick else (1000.0, 100.0, 30.0, 10.0, 3.0):
        yield fish(victim, strength, 6 if quick else 24)
    if not _dense(victim.backbone):
        return
    for strength in (3e38,) if quick else (3e38, 1e37, 1e20):
        yield overflow(victim, strength, 2 if quick else 4)
    yield walk(victim, Imprint(), 4 if quick else 20)
    if victim.backbone != "lenet5":
        yield walk(victim, TrapWeights(alive=1 / len(victim.images)), 4 if quick else 20)
    for reach in (0.6,) if quick else (1.0, 0.6, 0.3):
        yield spread(victim, reach, 4 if quick else 24)
