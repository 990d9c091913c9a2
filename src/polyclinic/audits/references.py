"""Reference runs: a study carried out again and again, each time on a random half of every site's patients.

Every patient is in exactly half of the runs, drawn independently of all other patients, so that the order of a
patient's scores can be tested exactly. A run has the study's own recipe: its method, rounds, optimiser, privacy and
first weights; only draws (batches, noise) are its own. On a GPU the runs that go side by side train as one stack.
"""

import hashlib
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.membership import log_odds
from polyclinic.audits.truth import join
from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.engines.in_process import InProcess
from polyclinic.federation.federation import Federation
from polyclinic.federation.host import SiteHost
from polyclinic.federation.operation import carry_out
from polyclinic.models.encoders import Encoded, kept_features, remember_features
from polyclinic.randomness import seed_of, seeded, torch_rng
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.method import has_noised_scores
from polyclinic.runner.run.recorder import Display, Recorder
from polyclinic.runner.run.result import Models, released_models
from polyclinic.runner.run.run import threads
from polyclinic.training.gpu.stacking import can_stack
from polyclinic.training.loop import Trainer

#: what a reference run does not need: traces on disk, shares of a sum that nobody watches
PLAIN = {
    "engine.name": "in-process", "engine.workers": 1, "engine.durable": False, "engine.checkpoint_every": 0,
    "federation.sum": "float", "evaluation.final": "none", "evaluation.handovers": "none",
}  # fmt: skip
#: what changes no last bit of the released model
AS_IT_WAS = {name: value for name, value in PLAIN.items() if name.startswith(("engine.", "evaluation."))}
AT_ONCE = 16  #: runs side by side


@dataclass(frozen=True)
class Pool:
    """A site's images that reference runs may train on, its training images first, then those of its test patients.

    patients int64 [N]: whose each image is, by place; those below `members` have training images."""

    part: ImageSet
    patients: np.ndarray
    members: int
    names: Sequence[str]  #: of the patients, as the prepared data numbers them; of images where nobody is known

    @classmethod
    def of(cls, data: SiteData) -> "Pool":
        known = data.train.cases is not None and (data.test.cases is not None or not len(data.test))
        part = join(data.train, data.test) if len(data.test) else data.train
        whose = with_twins(np.asarray(part.cases) if known else np.arange(len(part)), part.images)
        names, first, places = np.unique(whose, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")  # in the order of first images: training patients come first
        places = np.argsort(order)[places]
        texts = [str(name) if known else f"{data.name}, image {name}" for name in names[order]]
        return cls(part, places, len(np.unique(places[: len(data.train)])), texts)

    @property
    def count(self) -> int:
        return len(self.names)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The mean over each patient's images, [..., P] from [..., N]."""
        sums = [np.bincount(self.patients, row) for row in np.atleast_2d(values)]
        return (np.stack(sums) / np.bincount(self.patients)).reshape(*values.shape[:-1], self.count)

    def strongest(self, values: np.ndarray) -> np.ndarray | None:
        """The largest of each patient's images, [S, P] from [S, N], each in deviations from its mean over all models:
        a mean over many images hides one that is remembered. None where every patient has one image."""
        if self.count == len(self.patients):
            return None
        apart = (values - values.mean(0)) / np.maximum(values.std(0), 1e-12)
        found = np.full((len(values), self.count), -np.inf)
        for image, patient in enumerate(self.patients):
            found[:, patient] = np.maximum(found[:, patient], apart[:, image])
        return found


def with_twins(whose: np.ndarray, images: np.ndarray) -> np.ndarray:
    """Owners [N] in which those who have the very same image are one: a copy under another name, which stays when the
    first is left out, would hide what a model remembers."""
    known: dict[bytes, int] = {}
    joined = whose.copy()
    for place, image in enumerate(images):
        first = known.setdefault(hashlib.sha256(image.tobytes()).digest(), place)
        one, other = joined[first], joined[place]
        if one != other:
            joined[joined == other] = one
    return joined


def halves(count: int, names: Sequence[str], *address: str | int) -> np.ndarray:
    """Which patients each of `count` runs trains on, bool [count, P]: every patient in exactly half of them, whoever
    else is there. Who is at two sites is in or out at both."""
    drawn = [torch.randperm(count, generator=torch_rng(*address, "halves", count, name)) for name in names]
    return (torch.stack(drawn).numpy() < count // 2).T


class References:
    """Carries out the study again. `pools` by site: whose images are exchanged; `keep`: bool [count, P] by site."""

    def __init__(
        self,
        assembly: Assembly,
        pools: Mapping[str, Pool],
        inside: Mapping[str, np.ndarray],
        plain: Mapping[str, Any] = PLAIN,
    ) -> None:
        self.given = assembly
        scored = assembly.study.evaluation.select == "best" or getattr(assembly.study.method, "patience", None)
        scored = scored or plain is AS_IT_WAS or has_noised_scores(assembly.study)
        study = assembly.study.with_settings(plain if scored else {**plain, "evaluation.every": 0})
        self.assembly = replace(assembly, study=study)
        self.pools, self.inside = pools, inside
        self.spec = replace(self.assembly.host_spec(), archive=None, policy=self.assembly._simulated_policy())
        self.trainer = cast("Trainer", self.spec.trainer)
        model = self.trainer.model
        encoder = model.features.encoder(self.trainer.device) if isinstance(model, Encoded) else None
        self.features: dict[str, np.ndarray] = {}
        for site, pool in pools.items():
            if encoder is not None:
                self.features[site] = kept_features(encoder, pool.part.images)
                remember_features(pool.part.images, self.features[site])

    @property
    def stacked(self) -> bool:
        """Whether runs go side by side: on a GPU, where a stack pays, or where the study wants it."""
        wanted = self.trainer.device.type == "cuda" or self.assembly.study.engine.stacked == "always"
        return wanted and can_stack(self.trainer, AT_ONCE * len(self.pools))

    def models(self, numbers: Sequence[int]) -> Iterator[Models]:
        """The released models of these runs."""
        with tempfile.TemporaryDirectory() as folder, threads(self.assembly.study.engine.threads):
            if self.stacked and len(numbers) > 1:
                yield from _side_by_side([self._begin(number, Path(folder)) for number in numbers])
            else:
                for number in numbers:
                    yield self._begin(number, Path(folder))(carry_out)

    def as_it_was(self) -> Models:
        """The released models of the study itself, carried out again on all training images with its own draws."""
        with tempfile.TemporaryDirectory() as folder, threads(self.assembly.study.engine.threads):
            return References(self.given, self.pools, self.inside, AS_IT_WAS)._begin(None, Path(folder))(carry_out)

    def _begin(self, number: int | None, folder: Path) -> Callable[[Any], Models]:
        own, study = folder / str(number), self.assembly.study
        own.mkdir()
        if number is not None:  # other noise than the run's, which nobody outside knows
            study = study.with_settings({"seed": seed_of(study.seed, "reference", number) >> 32})

        def half(site: str) -> SiteData:
            data, pool = self.spec.open_data(site), self.pools[site]
            if number is None:
                return data.without_test()
            rows = np.flatnonzero(self.inside[site][number][pool.patients])
            train = pool.part.take(rows)
            if site in self.features:
                remember_features(train.images, self.features[site][rows])
            return replace(data, train=train).without_test()

        def work(carried_out: Any) -> Models:
            host = SiteHost(replace(self.spec, study=study, folder=own, open_data=half))
            host.carry_out = carried_out
            together = carried_out is not carry_out
            engine = InProcess(host, tuple(self.pools), NotImplemented, workers=1, may_grow=False, stacked=together)
            recorder = Recorder(study, own, has_local=bool(self.trainer.local_names), display=Display())
            whole = self.assembly.federation_spec(self.trainer)
            spec = replace(whole, study=study, sites=tuple(self.pools), folder=own)
            federation = Federation(spec, engine, recorder)
            try:
                federation.resume()
                return released_models(federation, recorder, study.method.run(federation))
            finally:
                engine.close()

        return work

    def scores(self, site: str, weights: Mapping[str, Tensor]) -> np.ndarray:
        """How well the model with these weights knows each image of a site's pool, float64 [N]: the log odds of its
        class, which never saturate as a loss does; minus the loss where there are no classes."""
        trainer, part = cast("Trainer", self.spec.trainers.get(site, self.trainer)), self.pools[site].part
        model = trainer.load({**trainer.initial_local, **weights}).eval()
        with torch.no_grad():
            if site in self.features and isinstance(model, Encoded):
                rows = torch.from_numpy(np.array(self.features[site])).to(trainer.device)
                targets = trainer.task.targets(torch.from_numpy(np.array(part.labels)).to(trainer.device))
                pairs = iter([(model.run_stage("head", rows), targets)])
            else:
                pairs = trainer.outputs(part)
            if trainer.task.like == "classification":
                found = [log_odds(output, targets) for output, targets in pairs]
            else:
                found = [-trainer.task.losses(output.double(), targets, trainer.target) for output, targets in pairs]
        return torch.cat(found).double().cpu().numpy()


def _side_by_side(works: Sequence[Callable[[Any], Models]]) -> list[Models]:
    """Runs in threads, of which one works at a time until its sites wait for a plan to be carried out. When all do, the
    plans of all are carried out at once."""
    turn, back = [threading.Semaphore(0) for _ in works], threading.Semaphore(0)
    asked: dict[int, Sequence[Any]] = {}
    answers: dict[int, Any] = {}

    def whole(place: int) -> Models:
        def together(begun: Sequence[Any]) -> Any:
            asked[place] = begun
            back.release()
            turn[place].acquire()
            answer = answers.pop(place)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        turn[place].acquire()
        try:
            return works[place](together)
        finally:
            back.release()

    with seeded("reference runs"), ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(whole, place) for place in range(len(works))]
        running = list(range(len(works)))
        while running:
            for place in running:
                turn[place].release()
                back.acquire()
            running = list(asked)
            begun = [one for place in running for one in asked[place]]
            try:
                made: Any = iter(carry_out(begun))
            except BaseException as error:  # every run ends with it
                answers |= dict.fromkeys(running, error)
            else:
                answers |= {place: list(itertools.islice(made, len(asked[place]))) for place in running}
            asked.clear()
    return [future.result() for future in futures]
