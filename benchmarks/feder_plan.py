"""The studies of FedER's benchmark: a row of the tables with a seed and a learning rate is a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from feder_data import SITES, prepared

from polyclinic.runner.compare import Entry
from polyclinic.study import parse_study

RATES = (1e-4, 3e-4, 1e-3)
#: what is searched; the others take the rate of the method they are a variant of
SEARCHED = ("standalone", "centralized", "fedavg", "fedprox", "fedbn", "feder")
BUFFERS = (0, 128, 256, 1024, 2048)
#: a row of the tables: the method it runs, its settings, and whose learning rate it takes
ROWS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (name, {}, name) for name in SEARCHED},
    "centralized, synthetic": ("centralized", {"images": "synthetic"}, "centralized"),
    "centralized, both": ("centralized", {"images": "both"}, "centralized"),
    "feder-a": ("feder-a", {}, "feder"),
    "feder-b": ("feder-b", {}, "feder"),
    "feder, asynchronous": ("feder", {"mode": "asynchronous"}, "feder"),
    "feder, two networks": ("feder", {}, "feder"),
    **{f"feder, buffer {size}": ("feder", {"buffer": size}, "feder") for size in BUFFERS},
}


class Plan:
    """The studies of one task: real images by source, or phantoms."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.quick = options, options.quick
        self.out = Path(options.out)
        self.base = self.images() | {
            "model": {"backbone": options.backbone, "norm": options.norm},
            "evaluation": {"every": options.evaluate_every, "select": options.select},
            "engine": {
                "device": options.device,
                "precision": options.precision,
                "graphs": True,
                "workers": 1,
                "checkpoint_every": 0,
            },
            "optimizer": {
                "name": "adam",
                "batch_size": 32,
                "decay_every": options.decay_every,
                "augment": self.augmentation,
            },
        }

    @property
    def first_site(self) -> str:
        return SITES[self.options.task][0] if self.options.data else "site-1"

    @property
    def augmentation(self) -> list[str]:
        return ["flip"] if self.options.task == "chest" else ["flip", "turn"]

    def images(self) -> dict[str, Any]:
        if self.options.data:
            options = self.options
            return prepared(options.task, Path(options.data), options.size, options.most, self.out / "images")
        samples = 120 if self.quick else 900
        data = {"source": "skin-phantom", "size": self.options.size, "samples": samples, "acquisition": 0.7}
        return {"data": data | {"test": 0.25}, "sites": {"partition": "iid", "count": 3}}

    @property
    def generator(self) -> dict[str, Any]:
        if self.quick:
            return {
                "generator": {"name": "dcgan", "width": 4, "latent": 8, "batch_size": 8},
                "tuning": {"most_steps": 4, "most_tuning_steps": 4, "check_every": 2, "patience": 2, "measured": 20},
            }
        options = self.options
        steps, table = options.generator_steps, {"name": options.generator, **json.loads(options.generator_set)}
        if not options.tuning_steps:
            return {"generator": {**table, "steps": steps}, "tuning": {"on": False}}
        phases = {
            "most_steps": steps,
            "most_tuning_steps": options.tuning_steps,
            "check_every": options.check_every,
            "patience": max(1, steps // 2),
            "measured": options.measured,
        }
        return {"generator": table, "tuning": phases}

    def entry(self, row: str, seed: int, lr: float, **changes: Any) -> Entry:
        """One run: a row of the tables with a seed. Its folder is named by all three, so that no run is run twice."""
        name, settings, _ = ROWS[row]
        rounds = self.options.rounds - (1 if name.startswith("feder") else 0)
        method = {"name": name, "rounds": rounds, **self.steps_of(name), **settings}
        tables = {**self.base, "seed": seed, **changes}
        if row == "feder, asynchronous":  # one site takes twice as long as the others
            method["turn_takes"] = {self.first_site: 2.0}
        if row == "feder, two networks":
            tables["model"] = {**self.base["model"], "backbones": {self.first_site: self.options.other_backbone}}
        if name.startswith("feder") or "images" in settings:
            method["reuse_generators"] = True
            tables |= self.generator
            if self.quick and name.startswith("feder"):
                method.setdefault("buffer", 16)
        tables["optimizer"] = {**self.base["optimizer"], "lr": lr}
        count = tables["sites"].get("count", "")
        label = f"{row.replace(', ', '-').replace(' ', '')}{count}-lr{lr:g}"
        return Entry(label, seed, parse_study({**tables, "method": method}), self.out / f"{label}-seed{seed}")

    def steps_of(self, method: str) -> dict[str, int]:
        """As many steps at each site in a round as asked for; as many in all, where images are in one place."""
        each = self.options.local_steps
        if not each:
            return {}
        return {"steps": each * self.options.sites} if method == "centralized" else {"local_steps": each}

    def generators(self, seed: int, **changes: Any) -> Entry:
        """A run that trains the generators of a seed, which others take from the cache."""
        study = self.entry("feder", seed, RATES[0], **changes).study
        ahead = study.with_settings({"method.rounds": 1, "evaluation.every": 0})
        label = f"generators{study.as_tables()['sites'].get('count', '')}"
        return Entry(label, seed, ahead, self.out / f"{label}-seed{seed}")
