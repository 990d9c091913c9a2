"""The kit of a site 'north', without NVFlare, and studies that come to it: for tests of `site` and of its page."""

import json
from pathlib import Path
from typing import Any

from pinned_keys import pin_keys

from polyclinic import __version__
from polyclinic.deployment.approval import Approvals
from polyclinic.federation.ledger.ledger import Ledger
from polyclinic.study import Study


def make_kit(parent: Path) -> Path:
    """The kit, in `parent/kit`; its images would lie in `parent/scans`."""
    folder = parent / "kit"
    for name in ("startup", "local"):
        (folder / name).mkdir(parents=True)
    (folder / "startup" / "fed_client.json").write_text(json.dumps({"client": {"fqsn": "north"}}))
    (folder / "local" / "policy.toml").write_text('kinds = ["weights", "metrics"]\nmax_bytes = 1_000_000\n')
    (folder / "local" / "site.toml").write_text('[datasets.scans]\nsource = "folder"\npath = "../../scans"\n')
    (parent / "server").mkdir()
    pin_keys({"north": folder / "local"}, parent / "server")
    return folder


def came(kit: Path, run: str = "first", **changes: Any) -> Study:
    """A study comes to the site."""
    tables: dict[str, Any] = {
        "data": {"source": "at-sites", "dataset": "scans", "size": 16, "classes": ["clear", "ill"]},
        "sites": {"partition": "column", "names": ["north", "south"]},
        "model": {"backbone": "lenet5"},
        "optimizer": {"batch_size": 10},
        "method": {"name": "fedavg", "rounds": 3},
    }
    study = Study(**{**tables, **changes})
    Approvals(kit, "north").request(run, study, __version__)
    return study


def left(kit: Path, run: str = "first", rounds: int = 2) -> Path:
    """Weights and scores leave the site for a run, by its ledger."""
    file = kit / "runs" / run / "ledger" / "north.jsonl"
    ledger = Ledger(file)
    for number in range(1, rounds + 1):
        for operation, kind, size in (("train", "weights", 2000), ("evaluate", "metrics", 30)):
            ledger.append(
                round=number,
                operation=operation,
                kind=kind,
                bytes=size,
                digest=f"{number}{kind[0]}" * 32,
                to="coordinator",
                privacy=None,
            )
    ledger.commit()
    return file
