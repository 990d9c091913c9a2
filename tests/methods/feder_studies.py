"""Small studies of FedER."""

from typing import Any

from polyclinic.runner.run.run import run
from polyclinic.study import Study, parse_study

TABLES: dict[str, Any] = {
    "data": {"source": "fundus-phantom", "size": 28, "samples": 80, "validation": 0.2, "test": 0.2},
    "sites": {"partition": "label-skew", "count": 3, "target_ks": 0.3},
    "model": {"backbone": "lenet5"},
    "optimizer": {"lr": 0.05, "batch_size": 8, "augment": ["flip"]},
    "evaluation": {"every": 0, "select": "last"},
    "engine": {"workers": 1, "device": "cpu"},
    # two steps are enough to see what goes where
    "generator": {"name": "dcgan", "steps": 2, "batch_size": 8, "width": 2, "latent": 4},
    "tuning": {"on": False},
}
SITES = ("site-1", "site-2", "site-3")


def study_of(name: str = "feder", method: dict[str, Any] | None = None, **changes: dict[str, Any]) -> Study:
    tables = {table: {**settings, **changes.get(table, {})} for table, settings in TABLES.items()}
    return parse_study({**tables, "method": {"name": name, "rounds": 2, "buffer": 16, **(method or {})}})


def runner(tmp_path, cache):
    """Runs a tiny study of FedER; each call in a folder of its own."""
    count = iter(range(100))
    return lambda *given, **changes: run(study_of(*given, **changes), tmp_path / str(next(count)), cache=cache)
