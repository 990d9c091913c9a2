"""Lying sites: one reply of one site is changed before the coordinator sees it.

The liar must fail and be named, nobody else, and the round must go on. Where a lie is no lie after all (it changed
nothing that a method uses), the run must end as it would have.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from faults_children import Trial, in_child, tail, used

from polyclinic.cli import run_app
from polyclinic.federation.call import Call, Failure, Reply
from polyclinic.federation.federation import Federation
from polyclinic.federation.ledger.parcel import Parcel

Lie = Callable[[list[Parcel], random.Random], list[Parcel]]

#: values that no count, loss or name of an honest site has
ODD: tuple[Any, ...] = (
    *(None, "many", "", [1, 2], {"a": 1}, True, -1, -20, 0, 0.5, 1e9, 10**400, 1e308, float("nan"), float("inf")),
    *(-float("inf"), "1", b"".decode(), [[[[]]]], 2**63),
)


def change_metadata(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    place = draw.randrange(len(parcels))
    told = dict(parcels[place].metadata)
    name = draw.choice([*told, "samples", "loss", "steps", "another"])
    told[name] = draw.choice(ODD)
    return _with(parcels, place, metadata=told)


def drop_metadata(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    return _with(parcels, draw.randrange(len(parcels)), metadata={})


def change_tensor(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    place = draw.randrange(len(parcels))
    tensors = dict(parcels[place].tensors)
    if not tensors:
        return []
    name = draw.choice(sorted(tensors))
    tensors[name] = draw.choice(TENSOR_LIES)(tensors[name].clone(), draw)
    return _with(parcels, place, tensors=tensors)


def scale_all(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    place, by = draw.randrange(len(parcels)), draw.choice([1e6, -1e6, 1e20, float("nan"), float("inf")])
    return _with(parcels, place, tensors={n: (t.float() * by).to(t.dtype) for n, t in parcels[place].tensors.items()})


def drop_tensor(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    place = draw.randrange(len(parcels))
    return _with(parcels, place, tensors=dict(list(parcels[place].tensors.items())[1:]))


def add_tensor(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    place = draw.randrange(len(parcels))
    return _with(parcels, place, tensors={**parcels[place].tensors, "another": torch.zeros(3)})


def send_nothing(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    return []


def send_twice(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    return [*parcels, draw.choice(parcels)]


def send_other_kind(parcels: list[Parcel], draw: random.Random) -> list[Parcel]:
    kinds = ("latents", "weights", "gradients", "metrics", "synthetic-images", "generator", "statistics", "sealed")
    place = draw.randrange(len(parcels))
    return _with(parcels, place, kind=draw.choice([kind for kind in kinds if kind != parcels[place].kind]))


LIES: tuple[Lie, ...] = (
    *(change_metadata, change_metadata, change_tensor, change_tensor, change_tensor, scale_all),
    *(drop_metadata, drop_tensor, add_tensor, send_nothing, send_twice, send_other_kind),
)


def _poke(value: float) -> Callable[[torch.Tensor, random.Random], torch.Tensor]:
    def lie(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
        whole = 255 if tensor.dtype == torch.uint8 else -5 if value < 0 else 10**6
        if tensor.numel():
            tensor.view(-1)[draw.randrange(tensor.numel())] = value if tensor.is_floating_point() else whole
        return tensor

    return lie


TENSOR_LIES: tuple[Callable[[torch.Tensor, random.Random], torch.Tensor], ...] = (
    *(_poke(float("nan")), _poke(float("inf")), _poke(1e30), _poke(-1e30)),
    lambda tensor, draw: tensor.reshape(-1)[:-1] if tensor.numel() > 1 else tensor.reshape(1, 1, 1),
    lambda tensor, draw: tensor.unsqueeze(0),
    lambda tensor, draw: tensor.new_zeros(0),
    lambda tensor, draw: tensor.double() if tensor.dtype != torch.float64 else tensor.half(),
    lambda tensor, draw: tensor.long() if tensor.is_floating_point() else tensor.float(),
    lambda tensor, draw: tensor.to(torch.complex64),
    lambda tensor, draw: tensor > 0,
)


def _with(parcels: list[Parcel], place: int, **changes: Any) -> list[Parcel]:
    return [replace(parcel, **changes) if n == place else parcel for n, parcel in enumerate(parcels)]


def lying(site: str, number: int, lie: Lie, seed: float) -> None:
    """From now on, in this process: the so-manieth reply of the site that holds a parcel is a lie."""
    honest, left = Federation._checked, [number]

    def checked(self: Federation, call: Call, answer: Reply | Failure) -> Reply | Failure:
        if isinstance(answer, Reply) and answer.site == site and answer.parcels:
            left[0] -= 1
            if left[0] == 0:
                changed = tuple(lie(list(answer.parcels), random.Random(seed)))
                print(f"LIED {call.operation} {call.round} {_difference(answer.parcels, changed)}")
                answer = Reply(site, changed, answer.head, answer.head_soon)
        return honest(self, call, answer)

    Federation._checked = checked  # type: ignore[method-assign]


def _difference(honest: tuple[Parcel, ...], changed: tuple[Parcel, ...]) -> str:
    if len(honest) != len(changed):
        return f"{len(changed)} parcels instead of {len(honest)}"
    words = []
    for one, other in zip(honest, changed, strict=True):
        words += [
            f"{n}={str(other.metadata.get(n))[:30]}"
            for n in other.metadata
            if other.metadata[n] is not one.metadata.get(n)
        ]
        words += [f"{one.kind}->{other.kind}"] if one.kind != other.kind else []
        words += [f"{n} {t.dtype} {tuple(t.shape)}" for n, t in other.tensors.items() if t is not one.tensors.get(n)]
    return ", ".join(words)[:200]


def told_lie(study: Path, folder: Path, expected: Path, draw: random.Random) -> Iterator[Trial]:
    """Run the study with one lie of one site; no trial if the site had no such reply."""
    site, number, lie, seed = f"site-{draw.randint(1, 3)}", draw.randint(1, 5), draw.choice(LIES), draw.random()

    def work() -> int:
        lying(site, number, lie, seed)
        return run_app(["run", str(study), "--quiet", "--out", str(folder)])

    outcome = in_child(work)
    what = f"{study.stem}: reply {number} of {site}: {lie.__name__.replace('_', ' ')}"
    problem = ""
    if outcome.hung:
        problem = "hang"
    elif outcome.crashed:
        problem = "traceback"
    elif outcome.code:
        problem = "the run stopped"
    elif "LIED" in outcome.printed:
        problem = _judged(folder, site, expected)
    else:
        return
    yield Trial("lies", what, problem, tail(outcome) if problem else "", outcome.seconds)


def _judged(folder: Path, liar: str, expected: Path) -> str:
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    blamed = {site for line in history for site in line["failed"]}
    if blamed - {liar}:
        return f"an innocent site was blamed: {sorted(blamed - {liar})}"
    late = json.loads((folder / "result.json").read_text()).get("failures", [])
    named = blamed or {failure["site"] for failure in late}
    absent = _scored(folder) != _scored(expected)  # scores that a site keeps back, as everybody can see
    return "" if named or absent or used(folder) == used(expected) else "a lie was believed"


def _scored(folder: Path) -> list[list[str]]:
    """The sites whose scores each line of the history, and the result, have."""
    history = [json.loads(line)["validation"] for line in (folder / "history.jsonl").read_text().splitlines()]
    final = json.loads((folder / "result.json").read_text())["metrics"]
    return [
        [site for site, of_site in (scores or {}).get("per_site", {}).items() if of_site]
        for scores in [*history, final]
    ]
