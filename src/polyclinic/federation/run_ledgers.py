"""All ledgers of a run folder, checked with everything that the folder, its kit and the coordinator say about them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from polyclinic.data.allowed_paths import COORDINATOR
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.leaving.anchor_file import LedgerBroken
from polyclinic.federation.leaving.key_ring import PUBLIC_FILE, SIGNING_FILE, KitKeys, PublicKeys, SeedKeys
from polyclinic.federation.ledger_check import (
    Checked,
    Evidence,
    VerifyingKeys,
    Witness,
    check_ledger,
    witnesses_at_site,
    witnesses_in,
)
from polyclinic.federation.received import RECEIVED_FILE
from polyclinic.files import check_noted
from polyclinic.formats import check_run_format


def check_run(run: Path, keys: Path | None = None, against: Path | None = None) -> dict[str, Checked]:
    """The ledgers of a run that hold, by site; WorkFailed, with all faults, if one does not.

    `run` is a run folder or one ledger file, `keys` a file of public keys, `against` the coordinator's run folder.
    """
    check_run_format(run)
    try:
        evidence = evidence_about(run, keys, against)
    except LedgerBroken as error:
        raise WorkFailed(f"the ledger cannot be checked: {error}") from None
    found, faults = {}, []
    for site, file in _files(run, evidence).items():
        try:
            found[site] = check_ledger(file, site, evidence)
        except LedgerBroken as error:
            faults.append(f"the ledger of site '{site}' does not hold: {error}")
    if faults:
        raise WorkFailed("\n".join(faults))
    return found


def evidence_about(run: Path, keys: Path | None = None, against: Path | None = None) -> Evidence:
    """What the ledgers of a run are compared with."""
    folder = _folder_of(run)
    witnesses = [*(witnesses_in(folder) if folder else []), *_witnesses_of_kit(folder)]
    if against is not None:
        if not (against / RECEIVED_FILE).exists():
            raise BadInput(f"--against {against}: holds no {RECEIVED_FILE}; name the coordinator's folder of this run")
        witnesses += witnesses_in(against)
    public, strict = _keys_for(folder, keys)
    return Evidence(public, strict, witnesses, against, folder.resolve().name if folder else "")


def _folder_of(run: Path) -> Path | None:
    """The run folder; None for a ledger file that lies in none."""
    if not run.is_file():
        return run
    return run.resolve().parent.parent if run.resolve().parent.name == "ledger" else None


def _keys_for(folder: Path | None, keys: Path | None) -> tuple[VerifyingKeys | None, bool]:
    """The public keys to check signatures with, and whether every line must have one.

    Those named; those of the kit; those that follow from a simulated study's seed, where lines that an older version
    wrote have none.
    """
    kit = _kit_of(folder)
    if keys is None and kit:
        keys = kit / "local" / PUBLIC_FILE
    if keys is not None:
        return PublicKeys(keys), True
    if folder:
        check_noted(folder, "study.toml")
    study = folder / "study.toml" if folder else None
    if study is None or not study.exists():
        return None, False
    tables = tomllib.loads(study.read_text(encoding="utf-8"))
    deployed = tables.get("data", {}).get("source") == "at-sites"
    return (None if deployed else SeedKeys(int(tables.get("seed", 0)))), False


def _kit_of(folder: Path | None) -> Path | None:
    """The kit with keys that a folder with ledgers lies in: KIT/runs/NAME, KIT/approvals/NAME or KIT/keys/rotations."""
    kit = folder.resolve().parent.parent if folder else None
    return kit if kit and (kit / "local" / PUBLIC_FILE).exists() else None


def _owner_of(kit: Path, folder: Path) -> str | None:
    """The site, or coordinator, whose kit it is; of a site that has left and deleted its key, by the ledger's name."""
    if (kit / "local" / SIGNING_FILE).exists():
        return KitKeys(kit / "local").owner()
    names = [file.stem for file in (folder / "ledger").glob("*.jsonl")]
    return names[0] if len(names) == 1 else None


def _witnesses_of_kit(folder: Path | None) -> list[Witness]:
    """What the site's own anchor of this folder says."""
    kit = _kit_of(folder)
    if folder is None or kit is None or (owner := _owner_of(kit, folder)) in (None, COORDINATOR):
        return []
    place = folder.resolve()
    return witnesses_at_site(kit / "anchors" / place.parent.name / f"{place.name}.json", owner)


def _files(run: Path, evidence: Evidence) -> dict[str, Path]:
    """The ledger files of a run by site, those included that are gone although somebody has seen them."""
    if run.is_file():
        return {run.stem: run}
    files = {file.stem: file for file in sorted((run / "ledger").glob("*.jsonl"))}
    if not files and (run / RECEIVED_FILE).exists():
        raise BadInput(f"{run}: the ledgers of this run are at its sites; name KIT/runs/NAME, and --against {run}")
    kit = _kit_of(run)
    owner = _owner_of(kit, run) if kit else None
    seen = [witness.site for witness in evidence.witnesses if owner in (None, witness.site)]
    if not files and not seen:
        raise BadInput(f"{run}: holds no ledger; name a run folder or a ledger file")
    return {site: run / "ledger" / f"{site}.jsonl" for site in sorted({*seen, *files})}
