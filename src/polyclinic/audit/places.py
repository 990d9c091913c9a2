"""Where a run lies, and where its images are: a run folder of `polyclinic run`, or a deployed site's part of one.

A simulated run has its study beside it, and all sites' images can be prepared again. A deployed site's part lies in its
kit (`KIT/runs/NAME`): the study is the one that the coordinator sent for it, and images are the site's own, as its
`local/site.toml` says. So that part is audited at the site, by the site.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyclinic.assembly import Assembly
from polyclinic.data.datasets.at_sites import AtSites
from polyclinic.data.parts import Parts, prepare
from polyclinic.deployment.site_config import own_data
from polyclinic.engines.nvflare.job import plain
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger import LedgerBroken, verify
from polyclinic.study import Study, load_study, parse_study

#: what left each site, by the lines of its ledger
Lines = dict[str, list[dict[str, Any]]]

#: where NVFlare keeps, in a site's kit, what the coordinator sent for a job
ORDERS = "*/app_*/config/config_fed_client.json"


def open_run(folder: Path, *, study: Path | None = None, cache: Path | None = None) -> tuple[Assembly, Lines]:
    """All that an audit of a run needs; `study` is a file that takes the place of the study beside the run."""
    kit = kit_of(folder)
    found = load_study(study) if study else study_of(folder, kit)
    lines = lines_of(folder)
    if kit:
        return at_site(found, folder.resolve(), kit, lines), lines
    if isinstance(found.data, AtSites):
        raise BadInput(
            f"{folder}: images and kept parcels of this run are at its sites; each audits its own part, with "
            "`polyclinic audit KIT/runs/NAME`"
        )
    return Assembly(found, prepare(found.data, found.sites, cache=cache), folder.resolve()), lines


def kit_of(folder: Path) -> Path | None:
    """The kit of the deployed site whose part of a run this is."""
    kit = folder.resolve().parent.parent
    return kit if folder.resolve().parent.name == "runs" and (kit / "local" / "site.toml").is_file() else None


def study_of(folder: Path, kit: Path | None) -> Study:
    if (folder / "study.toml").exists():
        return load_study(folder / "study.toml")
    if kit is None or not folder.is_dir():
        raise BadInput(
            f"{folder}: is not a run folder; name one that `polyclinic run` wrote, or KIT/runs/NAME at a site"
        )
    orders = [order for order in orders_in(kit) if order["run"] == folder.resolve().name]
    if not orders:
        raise BadInput(
            f"{folder}: the study of this run is not in the kit any more; ask the coordinator for its study.toml, "
            "and name that file with --study"
        )
    return parse_study(orders[-1]["study"])


def orders_in(kit: Path) -> Iterator[dict[str, Any]]:
    """What the coordinator sent this site for its jobs, the latest last."""
    for file in sorted(kit.glob(ORDERS), key=lambda one: one.stat().st_mtime):
        for one in json.loads(file.read_text(encoding="utf-8")).get("executors", []):
            order = one["executor"]["args"].get("props", {}).get("order")
            if order:
                yield plain(order)


def lines_of(folder: Path) -> Lines:
    """The lines of a run's ledgers, whose chains hold."""
    try:
        return {file.stem: verify(file) for file in sorted((folder / "ledger").glob("*.jsonl"))}
    except LedgerBroken as error:
        raise WorkFailed(f"the chain is broken: {error}") from None


def at_site(study: Study, folder: Path, kit: Path, lines: Lines) -> Assembly:
    """The assembly of the one site whose kit this is."""
    if not isinstance(study.data, AtSites):
        raise BadInput("data.source: a deployed study has no data of its own; it must be 'at-sites'")
    if not lines:
        raise BadInput(f"{folder}: has no ledger, so nothing left this site in this run")
    (site,) = lines
    names = study.sites.site_names()
    data = own_data(kit / "local" / "site.toml", study.data, site, kit / "cache")
    return Assembly(study, Parts(kit, names, study.data.info(names)), folder, open_data=lambda _: data)
