"""Opening a run for an audit: a run folder of `polyclinic run`, or a deployed site's part of one.

The study lies beside the run. Of a simulated run, all sites' images can be prepared again. A deployed site's part lies
in its kit (`KIT/runs/NAME`), and images are the site's own, as its `local/site.toml` says. So that part is audited at
the site, by the site.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyclinic.data.own_images import find_kit, own_data, own_source, read_toml
from polyclinic.data.partitions import Sites
from polyclinic.data.partitions.base import Iid
from polyclinic.data.parts import PreparedSites, prepare
from polyclinic.data.source import AtSites, Source
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.ledger.ledger import LedgerBroken, verify
from polyclinic.federation.policy import Incoming, Policy
from polyclinic.run_folder import check_whole
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study, load_run_study, load_study

#: settings of a site's policy that change what its operations give
OF_DRAWS = ("draws", "shares", "scores", "samples", "min_cohort")
#: what left each site, by the lines of its ledger
LedgerLines = dict[str, list[dict[str, Any]]]


def open_run(
    folder: Path, *, study: Path | None = None, plugins: Sequence[str] = (), cache: Path | None = None
) -> tuple[Assembly, LedgerLines]:
    """All that an audit of a run needs; `study` is a file that takes the place of the study beside the run.

    `plugins`: where the study's plug-ins are now. In a kit, the caller is within `only_site_plugins`.
    """
    check_whole(folder)
    kit = find_kit(folder)
    found = load_study(study) if study else read_study(folder, kit, plugins)
    lines = read_ledgers(folder)
    if found.task.name == "multilabel":
        raise BadInput(f"{folder}: runs of several labels an image are not audited yet; audit one of classes")
    if kit:
        return assembly_at_site(found, folder.resolve(), kit, lines), lines
    if isinstance(found.data, AtSites):
        raise BadInput(
            f"{folder}: images and kept parcels of this run are at its sites; each audits its own part, with "
            "`polyclinic audit KIT/runs/NAME`"
        )
    return Assembly(found, prepare(found.data, found.sites, cache=cache), folder.resolve()), lines


def read_study(folder: Path, kit: Path | None, plugins: Sequence[str] = ()) -> Study:
    if (folder / "study.toml").exists():
        return load_run_study(folder, moved=plugins)
    if kit is None or not folder.is_dir():
        raise BadInput(
            f"{folder}: is not a run folder; name one that `polyclinic run` wrote, or a site's KIT/runs/NAME"
        )
    raise BadInput(f"{folder}: holds no study; ask the coordinator for its study.toml, and name that file with --study")


def read_ledgers(folder: Path) -> LedgerLines:
    """The lines of a run's ledgers, whose chains hold."""
    try:
        return {file.stem: verify(file) for file in sorted((folder / "ledger").glob("*.jsonl"))}
    except LedgerBroken as error:
        raise WorkFailed(f"the chain is broken: {error}") from None


def assembly_at_site(study: Study, folder: Path, kit: Path, lines: LedgerLines) -> Assembly:
    """The assembly of the one site whose kit this is."""
    if not isinstance(study.data, AtSites):
        raise BadInput("data.source: a deployed study has no data of its own; it must be 'at-sites'")
    if not lines:
        raise BadInput(
            f"{folder}: has no ledger of a site; each site audits its own part, with `polyclinic audit KIT/runs/NAME`"
        )
    (site,) = lines
    names = study.sites.site_names()
    data = own_data(kit / "local" / "site.toml", study.data, site, kit / "cache")
    parts = PreparedSites(kit, names, study.data.info(names))
    own = folder / "sites" / site / "noise.key"  # a rehearsal's part of a simulated run has none
    policy = policy_in(kit / "local" / "policy.toml") if own.exists() else None
    return Assembly(study, parts, folder, policy, lambda _: data)


def images_of(folder: Path, study: Study, sites: Sequence[str]) -> tuple[Source, Sites, Path | None]:
    """Where a run's images come from, how they are spread, and their cache: a site's own, in its kit."""
    kit = find_kit(folder)
    if kit is None or not isinstance(study.data, AtSites):
        return study.data, study.sites, None
    return own_source(kit / "local" / "site.toml", study.data), Iid(partition="iid", names=tuple(sites)), kit / "cache"


def policy_in(file: Path) -> Policy | None:
    """How the site draws and what it tells; its limits and its check of what arrives do not count for an audit."""
    if not file.is_file():
        return None
    kept = {name: value for name, value in read_toml(file).items() if name in OF_DRAWS}
    return Policy(**kept, kinds=tuple(KINDS), incoming=Incoming(on=False), few_images="allow")
