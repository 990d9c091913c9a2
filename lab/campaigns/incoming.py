"""The incoming check: alarms in honest rounds, and which attacks it stops, with what passing ones identify.

    python lab/campaigns/incoming.py [--quick] [--part honest|attacks] [--rounds N] [--first N] [--json FILE]

`honest` runs studies drawn at random over methods, tasks, networks and settings, and counts alarms; the run goes on.
`attacks` sends crafted weights to a site of a FedSGD study with the check on; its images are chest phantoms. Adaptive
attackers know the check: they mix crafted weights into honest ones, keep all else honest, use few rows, change biases
only, or go by small steps over many rounds. `identified` counts the site's images that come back at 20 dB or more if it
works in spite of the alarm, `by_chance` images that it never had.
"""

import argparse
import contextlib
import copy
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import polyclinic
from polyclinic.attacks import CraftedSum, Fishing, Imprint, OverflowFilter, TrapWeights, identified
from polyclinic.attacks.crafting import (
    dense_layer,
    difference,
    input_of,
    inputs_of_rows,
    invert_front,
    without_repeats,
)
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Call, GateRefused
from polyclinic.federation.layers import incoming as inspection
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods import METHODS
from polyclinic.randomness import numpy_rng
from polyclinic.runner.run.assembly import Assembly

REFUSED = "refused before the first round"  #: how a study is named that the check refuses openly, before any work


class Seen:
    """The number of figures that the check computed, and those that gave an alarm."""

    def __init__(self) -> None:
        self.figures, self.alarms = 0, []

    def take(self, figures: Any, error: type[Exception], cure: str = "") -> None:
        for figure in figures:
            if figure.check == "step" and figure.is_alarm:
                raise error(f"{REFUSED}: {figure}{cure}")
            self.figures += 1
            if figure.is_alarm:
                self.alarms.append(figure)


@contextlib.contextmanager
def counted() -> Iterator[Seen]:
    """Until the block ends, alarms are counted and refuse nothing."""
    seen, refuse = Seen(), inspection.refuse
    inspection.refuse = seen.take  # type: ignore[assignment]
    try:
        yield seen
    finally:
        inspection.refuse = refuse


TASKS = {
    "classification": (("fundus-phantom", "chest-phantom", "skin-phantom"), ("lenet5", "small-cnn", "cnn-32-64-128")),
    "regression": (("hand-phantom",), ("lenet5", "small-cnn", "cnn-64-128-64-32")),
    "segmentation": (("brain-phantom",), ("unet",)),
}
#: methods that train generators: a test runs each of them through the check
SLOW = ("feder", "feder-a", "feder-b", "felicia", "cwt-replay", "fedavg-replay")
USUAL = ("classification", "classification", "regression", "regression", "classification", "segmentation")
#: rates, of which SGD's 0.2 and Adam's 0.01 are large: most networks refuse them before the first round
RATES = (("sgd", 0.01), ("sgd", 0.05), ("adam", 0.001), ("adamw", 0.001), ("sgd", 0.2), ("adam", 0.003), ("adam", 0.01))
SITES = (
    {"partition": "iid", "count": 2},
    {"partition": "iid", "count": 4},
    {"partition": "dirichlet", "count": 3, "alpha": 0.5, "min_size": 4},
    {"partition": "quantity", "count": 3},
)


def tables(number: int, rounds: int) -> dict[str, Any]:
    """The study of this number: methods in turn, all else drawn."""
    rng = numpy_rng(number, "honest study")
    pick = lambda choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    methods = [name for name in METHODS.builtin if name not in SLOW and not METHODS[name].traits.needs_encoder]
    method = methods[number % len(methods)]
    task = pick([name for name in USUAL if name in METHODS[method].traits.tasks])
    backbone = "small-cnn" if method == "fedbn" and task != "segmentation" else pick(TASKS[task][1])
    (optimizer, rate), norm = pick(RATES), "batch" if method == "fedbn" else pick(("batch", "group"))
    data = {"source": pick(TASKS[task][0]), "size": 28, "samples": pick((24, 40, 80)), "validation": 0.2, "test": 0.1}
    study: dict[str, Any] = {
        "seed": number,
        "data": data,
        "sites": dict(pick(SITES)),
        "task": {"name": task},
        "model": {"backbone": backbone, "norm": norm},
        "optimizer": {"name": optimizer, "lr": rate, "batch_size": pick((4, 8, 16))},
        "method": {"name": method, "rounds": rounds},
        "evaluation": {"every": pick((0, 1, 2)), "select": pick(("last", "best"))},
        "engine": {"workers": 1, "device": "cpu"},
        "policy": {"incoming": {"on": True}, "shares": pick(("random", "equal"))},
    }
    if method in ("fedavg", "fedprox", "cwt", "fedsgd") and norm == "group" and rng.random() < 0.2:
        study["privacy"] = {"noise_multiplier": 1.0}
    return study


def run_one(number: int, rounds: int, scratch: Path) -> dict[str, Any]:
    """Rounds, figures and alarms of one study."""
    chosen = tables(number, rounds)
    row: dict[str, Any] = {"number": number, "method": chosen["method"]["name"], "rounds": 0}
    row["optimizer"] = f"{chosen['optimizer']['name']} {chosen['optimizer']['lr']}"
    with tempfile.TemporaryDirectory(dir=scratch) as folder, counted() as seen:
        try:
            polyclinic.run(polyclinic.Study(**chosen), Path(folder) / "run", cache=scratch / "cache")
            row["rounds"] = rounds
        except (BadInput, WorkFailed) as error:
            row["refused" if REFUSED in str(error) else "failed"] = str(error)[:300]
    return row | {"figures": seen.figures, "alarms": [str(one) for one in seen.alarms]}


def honest(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Studies in turn until there are enough rounds."""
    rows: list[dict[str, Any]] = []
    rounds: Counter[tuple[str, str]] = Counter()
    for number in itertools.count(options.first):
        rows.append(run_one(number, options.each, scratch))
        print(json.dumps(rows[-1]), flush=True)
        rounds[rows[-1]["method"], rows[-1]["optimizer"]] += rows[-1]["rounds"]
        if rounds.total() >= options.rounds:
            break
    return {
        "rounds": rounds.total(),
        "rounds_by_method_and_optimizer": {", ".join(names): count for names, count in rounds.items()},
        "runs": len(rows),
        "figures": sum(row["figures"] for row in rows),
        "runs_with_alarms": [row for row in rows if row["alarms"] and row["rounds"]],
        "runs_refused_before_the_first_round": [row["optimizer"] for row in rows if "refused" in row],
        "runs_that_failed": [row for row in rows if "failed" in row],
    }


SIZE, PUBLIC, LR = 32, 150, 0.05  #: side of the images, images of the attacker's own, learning rate of the study
MOST = 24  #: images that are inverted for each attack
DENSE = ("cnn-64-128-64-32", "lenet5", "cnn-32-64-128")
BACKBONES = (*DENSE, "small-cnn", "resnet18")


class Victim:
    """A site of a FedSGD study that checks what arrives; all its images are behind one gradient."""

    def __init__(self, backbone: str, folder: Path, images: int, warm: int) -> None:
        self.folder, self.warm = folder, warm
        self.public = torch.from_numpy(ChestPhantom(samples=PUBLIC, size=SIZE, seed=7).load().images).float() / 255
        data = {"source": "chest-phantom", "samples": round(2 * images / 0.9), "size": SIZE}
        self.study = polyclinic.Study(
            data={**data, "validation": 0, "test": 0.1},
            sites={"partition": "iid", "count": 2},
            model={"backbone": backbone},
            optimizer={"batch_size": images, "lr": LR, "momentum": 0.0},
            method={"name": "fedsgd", "rounds": 100},
            evaluation={"every": 0, "select": "last", "final": "none"},
            engine={"device": "cpu", "workers": 1},
            policy={"incoming": {"on": True}, "shares": "random"},
        )
        self.parts = prepare(self.study.data, self.study.sites, cache=folder / "cache")
        self._runs = itertools.count()
        assembly = self._assembly()
        parts = (assembly.open_images(name).train for name in self.parts.names)
        self.images, self.others = (torch.from_numpy(one.images.copy()).float() / 255 for one in parts)
        self.first, self.model = assembly.initial_weights(), assembly.build_model()

    def _assembly(self) -> Assembly:
        return Assembly(self.study, self.parts, self.folder / f"run-{next(self._runs)}")

    def begin(self) -> None:
        """A fresh site after `warm` honest rounds; `honest` is the network that it has come to."""
        self.host, self.number, weights = self._assembly().host(), 0, self.first
        self.honest = copy.deepcopy(self.model)
        self.honest.load_state_dict(weights)
        for _ in range(self.warm):
            update = self.ask(self.honest)
            weights = {**weights, **{name: weights[name] - LR * gradient for name, gradient in update.items()}}
            self.honest.load_state_dict(weights)

    def ask(self, model: nn.Module) -> dict[str, Tensor]:
        self.number += 1
        parcel = Parcel("weights", {name: one.clone() for name, one in model.state_dict().items()})
        reply = self.host.handle(Call(self.parts.names[0], "gradient", self.number, {"weights": parcel}))
        return dict(reply.parcels[0].tensors)

    def score(self, found: Tensor) -> dict[str, Any]:
        scored = identified(found, self.images, self.others)
        return {"identified": scored.images, "of": scored.of, "by_chance": scored.by_chance}


@torch.no_grad()
def mixed(honest: nn.Module, crafted: nn.Module, share: float) -> nn.Module:
    """Crafted weights in honest ones."""
    result = copy.deepcopy(honest)
    for own, other in zip(result.parameters(), crafted.parameters(), strict=True):
        own.lerp_(other, share)
    return result


@torch.no_grad()
def dense_bins(model: nn.Module, public: Tensor, rows: int, reach: float, first: float | None = None) -> nn.Module:
    """Bins in a few rows of the dense layer, all else honest. `reach`: how far a row moves, in units of its length.
    `first`: the share of images below the threshold of the first row; evenly spread if not given."""
    crafted = copy.deepcopy(model)
    name, layer = dense_layer(crafted)
    inputs = input_of(crafted, name)(public)
    direction = torch.linalg.svd(inputs - inputs.mean(0), full_matrices=False).Vh[0]
    shares = (torch.arange(rows) + 0.5) / rows if first is None else torch.full((rows,), first)
    for place, share in enumerate(shares):
        own = layer.weight[place].clone()
        layer.weight[place] = (1 - min(reach, 1.0)) * own + reach * own.norm() * direction
        layer.bias[place] = -torch.quantile(inputs @ layer.weight[place], share)
    return crafted


@torch.no_grad()
def biased(model: nn.Module, public: Tensor, rows: int, alive: float) -> nn.Module:
    """Traps by biases alone: honest rows, each with a threshold that few images pass."""
    crafted = copy.deepcopy(model)
    name, layer = dense_layer(crafted)
    values = input_of(crafted, name)(public) @ layer.weight.T
    layer.bias[:rows] = -torch.quantile(values, 1 - alive, dim=0)[:rows]
    return crafted


def invert(victim: Victim, weight: Tensor, bias: Tensor) -> Tensor:
    """Images of rows that one image is alone in."""
    name, _ = dense_layer(victim.honest)
    return invert_front(
        input_of(victim.honest, name), without_repeats(inputs_of_rows(weight, bias))[:MOST], victim.public
    )


def read_rows(victim: Victim, update: dict[str, Tensor]) -> Tensor:
    name, _ = dense_layer(victim.honest)
    weight, bias = update[f"{name}.weight"], update[f"{name}.bias"]
    return invert(victim, torch.cat([weight, weight[:-1] - weight[1:]]), torch.cat([bias, bias[:-1] - bias[1:]]))


def at_once(victim: Victim, craft: Callable[[nn.Module, Tensor], nn.Module], recover: Any = None) -> dict[str, Any]:
    crafted = craft(victim.honest, victim.public)
    update = victim.ask(crafted)
    return victim.score(recover(update, crafted, victim.public) if recover else read_rows(victim, update))


def walk(victim: Victim, attack: Imprint | TrapWeights, steps: int) -> dict[str, Any]:
    """Crafted weights are reached in small steps, a round each; the last answer is read."""
    crafted = attack.craft(victim.honest, victim.public)
    updates = [victim.ask(mixed(victim.honest, crafted, step / steps)) for step in range(1, steps + 1)]
    return victim.score(attack.recover(updates[-1], crafted, victim.public))


def neighbours(victim: Victim, networks: list[nn.Module]) -> dict[str, Any]:
    """A network a round; the differences of the gradients of neighbouring rounds are read."""
    name, _ = dense_layer(victim.honest)
    sent = [victim.ask(one) for one in networks]
    weight, bias = (torch.stack([one[f"{name}.{kind}"] for one in sent]).diff(dim=0) for kind in ("weight", "bias"))
    return victim.score(invert(victim, weight.flatten(0, 1), bias.flatten()))


def bins_in_turn(victim: Victim, rounds: int) -> list[nn.Module]:
    """One bin a round, all else honest: neighbouring thresholds in neighbouring rounds."""
    return [dense_bins(victim.honest, victim.public, 1, 0.6, (one + 0.5) / rounds) for one in range(rounds)]


@torch.no_grad()
def lowered(victim: Victim, rounds: int) -> list[nn.Module]:
    """All biases of the dense layer a little lower each round, by two standard deviations of the rows in all."""
    name, layer = dense_layer(victim.honest)
    step = 2 * float((input_of(victim.honest, name)(victim.public) @ layer.weight.T).std()) / rounds
    made = [copy.deepcopy(victim.honest) for _ in range(rounds)]
    for place, model in enumerate(made):
        dense_layer(model)[1].bias -= step * place
    return made


def fish(victim: Victim, strength: float, cuts: int) -> dict[str, Any]:
    """Over several rounds, each with another bound; images are named by their features."""
    attack, candidates = Fishing(target_class=1, strength=strength), torch.cat([victim.images, victim.others])
    crafted = [attack.craft_cut(victim.honest, victim.public, cut / cuts) for cut in range(1, cuts)]
    named: set[int] = set()
    for (_, before), (model, update) in itertools.pairwise((one, victim.ask(one)) for one in crafted):
        if abs(attack.count(before, update, model, len(victim.images)) - 1) < 0.1:
            named.add(attack.identify(attack.read_features(difference(before, update), model), model, candidates))
    members = sum(place < len(victim.images) for place in named)
    return {"identified": members, "of": len(victim.images), "by_chance": len(named) - members}


def overflow(victim: Victim, strength: float, most: int) -> dict[str, Any]:
    """Members that are called so, and others that are, by a filter for each candidate."""
    attack, answers = OverflowFilter(strength=strength), []
    for candidate in torch.cat([victim.images[:most], victim.others[:most]]):
        update = None
        with contextlib.suppress(GateRefused):  # the gate keeps back what is not finite
            update = victim.ask(attack.craft(victim.honest, candidate, victim.public))
        answers.append(attack.recover(update))
    return {"identified": sum(answers[:most]), "of": most, "by_chance": sum(answers[most:])}


def attacks_on(backbone: str, images: int, quick: bool) -> Iterator[tuple[str, float, Callable[[Victim], Any]]]:
    """The attacks that a backbone allows, with their strengths."""
    for s in (1000.0,) if quick else (1000.0, 100.0, 10.0, 3.0):
        yield "fishing", s, lambda v, s=s: fish(v, s, 6 if quick else 24)
    if backbone not in DENSE:
        return
    yield "honest weights", 0, lambda v: at_once(v, lambda m, _: copy.deepcopy(m))
    traps = () if backbone == "lenet5" else (TrapWeights,)
    for s in (1.0,) if quick else (1.0, 0.5, 0.2, 0.05):
        crafts = [Imprint(strength=s), Imprint(strength=s, measure="random"), CraftedSum(strength=s)]
        for a in (*crafts, *(trap(strength=s, alive=1 / images) for trap in traps)):
            yield f"{a.name} {getattr(a, 'measure', '')}".strip(), s, lambda v, a=a: at_once(v, a.craft, a.recover)
        for a in (Imprint(), *(trap(alive=1 / images) for trap in traps)):
            mix = lambda m, p, a=a, s=s: mixed(m, a.craft(m, p), s)  # noqa: E731
            yield f"{a.name} mixed into honest weights", s, lambda v, mix=mix: at_once(v, mix)
        yield "4 bins, all else honest", s, lambda v, s=s: at_once(v, lambda m, p: dense_bins(m, p, 4, s))
    for n in (4,) if quick else (32, 8, 2):
        yield f"{n} biases as traps", 1, lambda v, n=n: at_once(v, lambda m, p: biased(m, p, n, 1 / images))
    for s in (3e38,) if quick else (3e38, 1e37, 1e20):
        yield "overflow filter", s, lambda v, s=s: overflow(v, s, 2 if quick else 4)
    steps = 4 if quick else 20
    for a in (Imprint(), *(trap(alive=1 / images) for trap in traps)):
        yield f"{a.name}, reached in {steps} rounds", steps, lambda v, a=a: walk(v, a, steps)
    yield "one bin a round", 0.6, lambda v: neighbours(v, bins_in_turn(v, steps + 4))
    yield "biases lowered step by step", 2 * steps, lambda v: neighbours(v, lowered(v, 2 * steps))


def attacks(options: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Every attack on every backbone, before the first round and after three honest ones."""
    rows = []
    for backbone, warm in itertools.product(BACKBONES[:1] if options.quick else options.backbones, (0, 3)):
        victim = Victim(backbone, scratch / f"{backbone}-{warm}", options.images, warm)
        for name, strength, attack in attacks_on(backbone, len(victim.images), options.quick):
            victim.begin()
            with counted() as seen:
                scored = attack(victim)
            row = {"backbone": backbone, "honest_rounds_before": warm, "attack": name, "strength": strength, **scored}
            rows.append(row | {"alarms": sorted({figure.check for figure in seen.alarms})})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="24 honest rounds, one backbone, few attacks")
    parser.add_argument("--part", choices=("honest", "attacks"), help="only this part")
    parser.add_argument("--rounds", type=int, default=3000, help="honest rounds")
    parser.add_argument("--each", type=int, default=12, help="most rounds of an honest study")
    parser.add_argument("--first", type=int, default=0, help="number of the first honest study")
    parser.add_argument("--images", type=int, default=16, help="images of the attacked site")
    parser.add_argument("--backbones", nargs="+", default=BACKBONES, help="networks that are attacked")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.rounds = min(options.rounds, 24) if options.quick else options.rounds
    found: dict[str, Any] = {"benchmark": "incoming", "quick": options.quick}
    with tempfile.TemporaryDirectory() as scratch:
        if options.part != "attacks":
            found["honest"] = honest(options, Path(scratch))
        if options.part != "honest":
            found["attacks"] = attacks(options, Path(scratch))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
