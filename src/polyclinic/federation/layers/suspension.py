"""Suspension: a deployed site answers no more until a person there has looked.

A refusal that depends on a site's images is itself an answer about them: "this holds NaN" may mean "this patient is
among yours". So such a refusal tells the coordinator nothing but that the call failed, and stops every study at the
site, as the next study could be the coordinator's next question. A file in the kit says why; a person at the site
reads it and releases it. The coordinator then learns at most one bit each time.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from polyclinic.data.allowed_paths import folder_name
from polyclinic.errors import Damaged
from polyclinic.federation.call import Suspended
from polyclinic.federation.layers.interface import Layer
from polyclinic.federation.operation import Parcels, Transaction
from polyclinic.federation.site import Kit
from polyclinic.files import atomic_write, read_json

FOLDER = "suspended"


@dataclass(frozen=True)
class Suspension:
    """One study that waits for a person. `since` is local time."""

    study: str
    reason: str
    since: str


class Suspensions:
    """The suspended studies of a kit, a file each in `KIT/suspended`."""

    def __init__(self, kit: Path) -> None:
        self.folder = kit / FOLDER

    def suspend(self, study: str, reason: str) -> None:
        """Stop the site's answers; the first reason is kept."""
        if self._file(study).exists():
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = Suspension(study, reason, time.strftime("%Y-%m-%d %H:%M:%S"))
        atomic_write(self._file(study), json.dumps(asdict(found), indent=1) + "\n", private=True, durable=True)

    def all(self) -> list[Suspension]:
        """The studies that wait for a person, by name; also where the file that says why is damaged."""
        return [_read(file) for file in sorted(self.folder.glob("*.json"))]

    def release(self, study: str) -> bool:
        """A person at the site lets the study go on; false if it was not suspended."""
        waited = self._file(study).exists()
        self._file(study).unlink(missing_ok=True)
        return waited

    def refuse_while_any(self) -> None:
        """Suspended if any study of this site waits for a person."""
        for one in self.all():
            raise Suspended(f"study '{one.study}' is suspended since {one.since}: {one.reason}")

    def _file(self, study: str) -> Path:
        return self.folder / f"{folder_name(study)}.json"


def _read(file: Path) -> Suspension:
    try:
        told = read_json(file)
        return Suspension(file.stem, str(told["reason"]), str(told["since"]))
    except (Damaged, KeyError):
        return Suspension(file.stem, f"{file} is damaged; failures.log of the kit may say why", "a time not known")


def refuse_while_stopped(kit: Kit) -> None:
    """Suspended if the people of a deployed site have stopped the study, or must look at it first."""
    kit.require_approval()
    kit.suspensions.refuse_while_any()


class Stopped(Layer):
    """Nothing is done, and nothing leaves, that the people of the site do not let run."""

    def is_needed(self) -> bool:
        return self.spec.kit is not None

    def arriving(self, transaction: Transaction) -> None:
        assert self.spec.kit
        refuse_while_stopped(self.spec.kit)

    def leaving(self, transaction: Transaction, parcels: Parcels) -> Parcels:
        assert self.spec.kit
        refuse_while_stopped(self.spec.kit)
        return parcels
