"""A site's audit of its own generator, counted: planted memorising is to be stopped, healthy training is not.

Each case is a flow of vectors, or of small images, trained in parts as a site does it, with a look after each. Planted:
few images, and many steps. Healthy: many images, and as many steps as teach something. A case counts as stopped where
any look found something.

    python lab/benchmarks/self_audit.py [--quick] [--json FILE]
"""

import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from measuring import finish, flags, keep
from torch import Tensor

from polyclinic.generators import Flow
from polyclinic.generators.base import FitOptions
from polyclinic.methods.shared import self_audit
from polyclinic.methods.shared.public_basis import pictures
from polyclinic.methods.shared.self_audit import Learned
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target

TARGET = Target(classes=("no", "yes"))
HELD_OUT = 120
#: training images, steps and width of the flow, and looks at it
CASES: dict[str, dict[str, Any]] = {
    "vectors, planted": {"images": 24, "steps": 1200, "width": 16, "looks": 6, "vectors": True},
    "vectors, healthy": {"images": 1000, "steps": 480, "width": 8, "looks": 6, "vectors": True},
    "images, planted": {"images": 24, "steps": 240, "width": 16, "looks": 2, "vectors": False},
    "images, healthy": {"images": 600, "steps": 80, "width": 8, "looks": 2, "vectors": False},
}


def drawn(count: int, case: int, vectors: bool) -> tuple[Tensor, Tensor]:
    """Training and held-out images of one kind, uint8, and their labels."""
    rng = torch_rng("self-audit", case)
    labels = torch.randint(2, (count,), generator=rng)
    if not vectors:
        chosen = torch.randperm(1500, generator=rng)[:count].numpy()
        return torch.from_numpy(pool()[chosen]), labels
    mixing = torch.randn(24, 32, generator=torch_rng("self-audit", "mixing"))
    rows = torch.randn(count, 24, generator=rng) @ mixing / 24**0.5 + (labels[:, None] - 0.5)
    return (128 + 21 * rows).round().clamp(0, 255).byte()[:, :, None, None], labels


@functools.cache
def pool() -> np.ndarray:
    return pictures("fundus-phantom", 1500, 28)


def looks_of(case: int, *, images: int, steps: int, width: int, looks: int, vectors: bool) -> Iterator[self_audit.Look]:
    """What each look finds while a flow is trained."""
    rows, labels = drawn(images + HELD_OUT, case, vectors)
    seen, held_out = min(images, self_audit.MOST), Learned(rows[images:], labels[images:], None)
    train = Learned(rows[:seen], labels[:seen], None)
    settings = Flow(steps=steps, batch_size=32, width=width, levels=2, blocks=1, lr=2e-3, average=0.99, sample_steps=8)
    model = settings.build(channels=rows.shape[1], size=rows.shape[-1], target=TARGET, seed=case)
    kept: dict[str, Tensor] = {}
    for leg in range(1, looks + 1):
        options = FitOptions(leg=(leg, looks), kept=kept)
        model.fit(rows[:images], labels[:images], torch_rng("self-audit", case, "fit", leg), options)
        made = model.sample(train.labels, torch_rng("self-audit", case, "samples", leg))
        yield self_audit.look(made, train, held_out, model=model, looks=looks, seed=case)


def main() -> None:
    options = flags(__doc__, "two cases of each kind").parse_args()
    figures: dict[str, Any] = {}
    cases = 2 if options.quick else 20
    for name, settings in CASES.items():
        began = time.perf_counter()
        places = [
            next((number for number, one in enumerate(looks_of(case, **settings), 1) if one.found), None)
            for case in range(cases)
        ]
        stopped = sum(place is not None for place in places)
        figures[name] = {"cases": cases, "stopped": stopped, "stopped_at_look": places}
        print(f"{name}: {stopped} of {cases} stopped, {time.perf_counter() - began:.0f} s", flush=True)
        keep(figures, options)
    finish(figures, options)


if __name__ == "__main__":
    main()
