"""Checkpoints: everything a run needs to go on, or nothing.

Tensors lie in files of their own; one small manifest names them and is replaced in a single step, so that a
run killed at any moment finds its last complete checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from polyclinic.federation.state import SitePosition
from polyclinic.files import atomic_write, read_tensors, write_tensors
from polyclinic.json_types import JsonObject

Tensors = Mapping[str, Tensor]


@dataclass
class Manifest:
    """What a checkpoint says: how far the run is, and where everything else lies."""

    round: int = 0
    finished: bool = False
    files: dict[str, str] = field(default_factory=dict)
    plain: JsonObject = field(default_factory=dict)
    sites: dict[str, SitePosition] = field(default_factory=dict)


class Checkpoint:
    """The checkpoint folder of a run. `save` is the only thing that changes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saved: dict[str, tuple[Tensors, str]] = {}

    @property
    def path(self) -> Path:
        return self.folder / "manifest.json"

    def load(self) -> Manifest | None:
        """The last complete checkpoint, or None."""
        if not self.path.exists():
            return None
        manifest = Manifest(**json.loads(self.path.read_text()))
        manifest.sites = {name: SitePosition(*position) for name, position in manifest.sites.items()}
        return manifest

    def tensors(self, manifest: Manifest, name: str) -> dict[str, Tensor]:
        loaded = read_tensors(self.folder / manifest.files[name])
        self._saved[name] = (loaded, manifest.files[name])
        return loaded

    def save(self, manifest: Manifest, tensors: Mapping[str, Tensors]) -> None:
        """Write the named sets of tensors that are new since the last save, then the manifest."""
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest.files = {name: self._write(name, value, manifest.round) for name, value in tensors.items()}
        atomic_write(self.path, json.dumps(vars(manifest)))
        for path in self.folder.glob("*.safetensors"):
            if path.name not in manifest.files.values():
                path.unlink()

    def _write(self, name: str, value: Tensors, round: int) -> str:
        known, file = self._saved.get(name, (None, ""))
        if known is value:  # the very same object: nothing to write again
            return file
        file = f"{name}-{round}-{'b' if file.endswith('a.safetensors') else 'a'}.safetensors"
        write_tensors(self.folder / file, value)
        self._saved[name] = (value, file)
        return file
