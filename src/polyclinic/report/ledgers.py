"""The ledgers in a folder of evidence: their chains, and whether they reach as far as the result says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.signing import Head, LedgerBroken, check_head, head_from_json
from polyclinic.json_types import JsonObject

Lines = dict[str, list[JsonObject]]


def read_ledgers(folder: Path, result: Mapping[str, Any], study: Mapping[str, Any]) -> tuple[Lines, dict[str, str]]:
    """Lines of each ledger that holds, by site, and what is wrong with the others.

    A ledger that the result names must be there. But the ledgers of a deployed run stay at the sites: the
    coordinator's folder has none.
    """
    files = {file.stem: file for file in sorted((folder / "ledger").glob("*.jsonl"))}
    ends = result.get("ledgers")
    ends = ends if isinstance(ends, Mapping) and (files or not _is_deployed(study)) else {}
    lines: Lines = {}
    broken = {}
    for site in [*files, *(site for site in ends if site not in files)]:
        try:
            lines[site] = _checked(folder, site, files.get(site), ends.get(site))
        except (LedgerBroken, OSError, ValueError, KeyError, TypeError) as error:
            broken[site] = " ".join(str(error).replace(f"{folder}/", "").split())
    return lines, broken


def _is_deployed(study: Mapping[str, Any]) -> bool:
    data = study.get("data")
    return isinstance(data, Mapping) and data.get("source") == "at-sites"


def _checked(folder: Path, site: str, file: Path | None, end: Any) -> list[JsonObject]:
    """The lines of a ledger; a site that has no file has none, whatever its name leads to."""
    lines = [] if file is None else verify(file)
    if end is not None:
        digests = [line["digest_of_line"] for line in lines]
        check_head(_head(end, site), folder / "ledger" / f"{site}.jsonl", digests, "result.json")
    return lines


def _head(end: Any, site: str) -> Head:
    try:
        return head_from_json([end["lines"], end["digest"], ""])
    except (ValueError, KeyError, TypeError):
        raise LedgerBroken(f"result.json: what it says about the ledger of {site} is damaged") from None
