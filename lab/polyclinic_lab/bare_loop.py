"""A bare PyTorch loop that takes the very same optimiser steps as a FedAvg run, and a clock for both in turns."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyclinic.data.parts import open_site, prepare
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study

Weights = Mapping[str, Tensor]


def bare_rounds(study: Study, cache: Path) -> Callable[[], Iterator[Weights]]:
    """FedAvg in the fewest lines of PyTorch: no sites, no parcels, no files. Gives the weights after each round."""
    parts = prepare(study.data, study.sites, cache=cache)
    assembly = Assembly(study, parts, Path())
    model, initial, settings = assembly.build_model(), assembly.initial_weights(), study.optimizer
    opened = {name: open_site(parts.folder, name).train for name in parts.names}
    arrays = {name: (part.images[:], part.labels[:]) for name, part in opened.items()}

    def train(site: str, number: int, weights: Weights) -> dict[str, Tensor]:
        images, labels = arrays[site]
        model.load_state_dict(weights)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), settings.lr, momentum=settings.momentum)
        order = torch.randperm(len(images), generator=torch_rng(study.seed, site, "batches", number))
        size = min(settings.batch_size, len(images))
        for index in order[: len(images) // size * size].split(size):
            batch = torch.from_numpy(images[index.numpy()]).float().div_(255)
            targets = torch.from_numpy(labels[index.numpy()])
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def rounds() -> Iterator[Weights]:
        weights: Weights = initial
        for number in range(1, study.method.rounds + 1):
            trained = [train(site, number, weights) for site in parts.names]
            weights = {name: mean([one[name] for one in trained]) for name in trained[0]}
            yield weights

    return rounds


def mean(tensors: list[Tensor]) -> Tensor:
    """Mean of the tensors of equally large sites."""
    return torch.stack(tensors).double().mean(0).to(tensors[0].dtype)


class Clock:
    """Wall and CPU seconds spent between `start` and `stop`, added up."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall += time.perf_counter() - self._wall
        self.cpu += time.process_time() - self._cpu


class InTurns(Display):
    """Watches a run and puts a round of the bare loop between its rounds, so that both see the same busy machine."""

    def __init__(self, rounds: Iterator[Weights], *, bare_first: bool) -> None:
        self.ours, self.bare = Clock(), Clock()
        self.bare_weights: Weights = {}
        self._rounds, self._bare_first = rounds, bare_first

    def started(self, *_: Any) -> None:
        if self._bare_first:
            self._bare_round()
        self.ours.start()

    def round_done(self, line: Mapping[str, Any], rounds: int) -> None:
        self.ours.stop()
        if not self._bare_first or line["round"] < rounds:
            self._bare_round()
        self.ours.start()

    def _bare_round(self) -> None:
        self.bare.start()
        self.bare_weights = next(self._rounds)
        self.bare.stop()


def difference(a: Weights, b: Weights) -> float:
    """Largest difference between two sets of weights."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
