"""The generators of many sites and seeds ahead of the runs that use them, in threads of one process.

Each thread works on a stream of the GPU's of its own. Nine of them took 117 steps a second together on a GPU to
themselves: about what one does alone, so this saves processes rather than time. What comes out lies in the cache, where
runs with `reuse_generators` find it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from polyclinic.data.parts import prepare
from polyclinic.federation.site import Site
from polyclinic.generators import GeneratorModel
from polyclinic.methods.shared import synthetic_buffer
from polyclinic.runner.assembly import Assembly
from polyclinic.study import Study


def train_ahead(
    studies: Iterable[Study], folder: Path, at_once: int, seconds: float | None, tell: Callable[[str], None]
) -> None:
    """Train the generators of these studies' sites, so many at a time; none is begun after `seconds`."""
    waiting = [(site, synthetic_buffer.cache_file(site)) for study in studies for site in _sites(study, folder)]
    # networks are drawn with torch's global random state, so not in threads
    todo = [(site, synthetic_buffer.new_generator(site), file) for site, file in waiting if not file.exists()]
    started, ready = time.monotonic(), threading.Barrier(max(1, min(at_once, len(todo))))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # here: a thread must not wait for the whole GPU while another one records

    def train(site: Site, model: GeneratorModel, file: Path) -> None:
        if seconds is not None and time.monotonic() - started > seconds:
            return
        with _own_stream(site.trainer.device):
            figures = synthetic_buffer.fit(site, model)
            synthetic_buffer.write_trained(model, figures, file)
        shown = " ".join(f"{name} {value:.0f}" for name, value in figures.items() if "steps" in name or "fd" in name)
        tell(f"generator of {site.name}, seed {site.seed}: {shown}")

    device = todo[0][0].trainer.device if todo else torch.device("cpu")
    with ThreadPoolExecutor(ready.parties, initializer=_begin, initargs=(device, ready)) as threads:
        list(threads.map(lambda work: train(*work), todo))


def _sites(study: Study, folder: Path) -> list[Site]:
    """The sites of a study, as they are when it begins."""
    torch.set_num_threads(study.engine.threads)  # as in a run of the study, which looks for the same generator
    parts = prepare(study.data, study.sites)
    host = Assembly(study, parts, folder / f"sites-seed{study.seed}").host()
    return [host.sites.open(name) for name in parts.names]


def _begin(device: torch.device, ready: threading.Barrier) -> None:
    """A thread gets its handles of the GPU's libraries, before any other begins to record."""
    with _own_stream(device):
        images = torch.ones(8, 8, 8, 8, device=device, requires_grad=True)
        rows = torch.nn.functional.conv2d(images, torch.ones(8, 8, 1, 1, device=device)).flatten(1)
        (rows @ rows.T).sum().backward()
        float(rows.detach().sum())
    ready.wait()


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))
