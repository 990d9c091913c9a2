"""Run folders written by hand, and a server that is asked in this process: for the tests of `polyclinic serve`."""

import json
from pathlib import Path
from typing import Any

from polyclinic.json_types import JsonObject

LINES = [
    {
        "round": number,
        "validation": {"pooled": {"accuracy": 0.5 + number / 10}, "per_site": {"site-1": {"accuracy": number / 10}}},
        "failed": {"site-2": "train: gone"} if number == 2 else {},
        "total_bytes": 1000 * number,
        "seconds": 2.0,
    }
    for number in (1, 2, 3)
]
RESULT: JsonObject = {
    "method": "fedavg",
    "seed": 0,
    "task": "classification",
    "metrics": {"test": {"accuracy": 0.8, "auc": float("nan")}, "per_site": {"site-1": {"accuracy": 0.7}}},
    "communication": {"total_bytes": 3000},
    "privacy": {"epsilon": 2.5, "delta": 1e-5, "covers": ["weights"], "does_not_cover": ["scores"]},
    "rounds": 3,
    "selected": {"by": "best", "round": 3},
    "data": {"counts": {"site-1": {}, "site-2": {}}},
}


def write_run(folder: Path, *, method: str = "fedavg", finished: bool = True, rounds: int = 5) -> Path:
    """A run folder, as far as a page reads it."""
    (folder / "ledger").mkdir(parents=True)
    (folder / "format.json").write_text('{"format": 1}')
    study = (
        f'seed = 0\n[data]\nsource = "fundus-phantom"\n[task]\nname = "classification"\n[method]\nname = "{method}"\n'
    )
    (folder / "study.toml").write_text(f"{study}rounds = {rounds}\n")
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    lines = [{"kind": "weights", "bytes": 400}, {"kind": "weights", "bytes": 500}, {"kind": "metrics", "bytes": 7}]
    (folder / "ledger" / "site-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "contact_sheet.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    if finished:
        (folder / "result.json").write_text(json.dumps(RESULT))
    return folder


class Served:
    """The application of a folder, asked without a socket."""

    def __init__(self, folder: Path, access: Any, jobs: Any, app: Any = None) -> None:
        from starlette.testclient import TestClient

        from polyclinic.report.serve.app import folder_app

        self.folder, self.access, self.jobs = folder, access, jobs
        self.app = app or folder_app(folder, access, jobs)
        self.client = TestClient(self.app, base_url=f"http://127.0.0.1:{access.port}", raise_server_exceptions=False)
        self.token = {"authorization": f"Bearer {access.token}"}

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(path, params=query, headers=self.token)

    def post(self, path: str, **content: Any) -> Any:
        return self.client.post(path, json=content, headers=self.token)

    def file(self, name: str, **query: Any) -> Any:
        """A file by its name, with the key that the server itself would give."""
        return self.client.get(f"/files/{name}", params={"key": self.access.key_for(name), **query})
