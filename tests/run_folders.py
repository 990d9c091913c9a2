"""Two run folders, compared to the last byte but for what clocks say."""

import json
from pathlib import Path
from typing import Any

from json_schemas import assert_valid

from polyclinic.federation.ledger.ledger import verify


def history(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def result(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in values.items() if key != "timing"}


def ledgers(folder: Path) -> dict[str, bytes]:
    paths = sorted((folder / "ledger").iterdir())
    for path in paths:
        verify(path)
    return {path.name: path.read_bytes() for path in paths}


def releases(folder: Path, site: str) -> list[dict[str, Any]]:
    """The lines of a site's ledger without signatures, which are others with other keys."""
    lines = verify(folder / "ledger" / f"{site}.jsonl")
    return [{name: value for name, value in line.items() if name != "signature"} for line in lines]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert_valid(folder)
    assert result(folder)["weights_sha256"] == result(expected)["weights_sha256"]
    assert history(folder) == history(expected)
    assert ledgers(folder) == ledgers(expected)
    found, wanted = result(folder), result(expected)
    assert [name for name in found | wanted if found.get(name) != wanted.get(name)] == []
    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def history_without_bytes(folder: Path) -> list[dict[str, Any]]:
    """A deployed site sends no training loss with its weights: some bytes less than a simulated one."""
    return [{key: value for key, value in line.items() if key != "total_bytes"} for line in history(folder)]


def left(folder: Path, site: str) -> list[tuple[Any, ...]]:
    """What left a site, with the digests of all kinds but weights, which have no training loss where it is deployed."""
    return [
        (*(line[name] for name in ("round", "operation", "kind", "to")), line["digest"] * (line["kind"] != "weights"))
        for line in releases(folder, site)
    ]


def lines_of(run: Any, site: str) -> list[dict[str, Any]]:
    """What left a site in a run, line by line."""
    return releases(run.folder, site)


def kinds_of(run: Any) -> dict[str, list[str]]:
    """The kinds of what left each site, in order."""
    sites = sorted(path.stem for path in (run.folder / "ledger").glob("*.jsonl"))
    return {site: [line["kind"] for line in lines_of(run, site)] for site in sites}
