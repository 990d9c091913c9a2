"""A site's state: tensors that survive a restart, in versioned files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from polyclinic.federation.leaving.parcel import ParcelRejected
from polyclinic.files import read_tensors


class SitePosition(NamedTuple):
    """Where a site stands at a checkpoint: the version of its state, and the lines of its ledger."""

    version: int = 0
    lines: int = 0

    def check(self) -> None:
        """ParcelRejected unless both are whole numbers: a position comes from the coordinator, and names a file."""
        if not all(type(number) is int and number >= 0 for number in self):
            raise ParcelRejected("a position of a site is two whole numbers, and something else came")


class SiteState(MutableMapping[str, Tensor]):
    """Tensors that survive a restart. Assign new tensors; one changed in place would not be saved."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._tensors = dict(tensors or {})
        self._bytes: int | None = None
        self.changed = False

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self.changed, self._bytes = True, None
        self._tensors[name] = tensor

    def __delitem__(self, name: str) -> None:
        self.changed, self._bytes = True, None
        del self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def bytes(self) -> int:
        """Memory that the tensors take, counted once after each change: a host asks for every site at every call."""
        if self._bytes is None:
            self._bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        return self._bytes

    def put(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a whole set of tensors under one name, replacing what was there."""
        for name in [n for n in self if n.startswith(f"{group}/")]:
            del self[name]
        for name, tensor in tensors.items():
            self[f"{group}/{name}"] = tensor

    def group(self, group: str) -> dict[str, Tensor]:
        """The tensors kept by `put`; empty if there are none."""
        return {n.removeprefix(f"{group}/"): t for n, t in self.items() if n.startswith(f"{group}/")}


def state_path(folder: Path, site: str, version: int) -> Path:
    """Where a version of a site's state lies in a run folder."""
    return folder / "sites" / site / f"state-{version}.safetensors"


def read_state(folder: Path, site: str, position: SitePosition) -> SiteState:
    """A site's state as of a position; empty if it never had any."""
    return SiteState(read_tensors(state_path(folder, site, position.version)) if position.version else {})


def version_of(state: Path) -> int:
    number = state.stem.removeprefix("state-")
    return int(number) if number.isdecimal() else 0
