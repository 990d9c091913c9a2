"""Checkpoints: everything a run needs to go on, or nothing.

Tensors lie in files of their own; one small manifest names them and is replaced in a single step, so that a
run killed at any moment finds its last complete checkpoint.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from polyclinic.errors import Damaged
from polyclinic.federation.site import SitePosition
from polyclinic.files import atomic_write, digest_of, make_folder_durable, read_tensors, write_tensors
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


def read_manifest(path: Path) -> Manifest:
    """A manifest as it was written; Damaged if it is missing or is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        noted = content.pop("sha256", None)  # older versions noted none
        manifest = Manifest(**content)
        kinds = {"round": int, "finished": bool, "files": dict, "plain": dict, "sites": dict}
        if any(type(getattr(manifest, name)) is not kind for name, kind in kinds.items()):
            raise TypeError("a value of the manifest has another type")
        if not all(isinstance(file, str) and Path(file).name == file for file in manifest.files.values()):
            raise TypeError("a file of the manifest is no name")  # but a path, say
        if not {"round", "files", "plain", "sites"} <= content.keys():
            raise TypeError("a part of the manifest is missing")
        manifest.sites = {name: SitePosition(*position) for name, position in manifest.sites.items()}
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path}: is damaged and cannot be read") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from None
    if noted is not None and noted != digest_of(content):
        raise Damaged(f"{path}: is damaged (its SHA-256 is not the one that was noted when it was written)")
    return manifest


class Checkpoint:
    """The checkpoint folder of a run. `save` alone changes it; a run that goes on begins with `load`."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        """`durable`: what was saved survives a loss of power."""
        self.folder, self.durable = folder, durable
        #: why the last checkpoint was not taken, where the one before it was
        self.problem = ""
        #: what the folder was found or left with: the manifest, and its text
        self._last, self._text = Manifest(), ""
        self._saved: dict[str, tuple[Tensors, str]] = {}
        #: the manifest of the last checkpoint, and of the one before
        self.path, self.previous = folder / "manifest.json", folder / "previous.json"

    def load(self, check_sites: Callable[[Mapping[str, SitePosition]], None] | None = None) -> Manifest | None:
        """The last checkpoint, or the one before it where a file of the last one is damaged; None if there is none.

        Damaged if no checkpoint is whole. `check_sites` raises it where the state of a site is not whole.
        """
        if not self.path.exists() and not self.previous.exists():
            return None
        problems: list[Damaged] = []
        for path in (self.path, self.previous):
            try:
                manifest = read_manifest(path)
                for file in manifest.files.values():
                    read_tensors(self.folder / file)
                if check_sites:
                    check_sites(manifest.sites)
            except Damaged as damage:
                problems.append(damage)
                continue
            self.problem = str(problems[0]) if problems else ""
            self._last, self._text = manifest, path.read_text(encoding="utf-8")
            return manifest
        raise Damaged(f"{problems[0]}; bring the file back from a copy, or run the study again into another folder")

    def tensors(self, manifest: Manifest, name: str) -> dict[str, Tensor]:
        loaded = read_tensors(self.folder / manifest.files[name])
        self._saved[name] = (loaded, manifest.files[name])
        return loaded

    def save(self, manifest: Manifest, tensors: Mapping[str, Tensors]) -> Manifest:
        """Write the named sets of tensors that are new since the last save, then the manifest; the one before it."""
        make_folder_durable(self.folder) if self.durable else self.folder.mkdir(parents=True, exist_ok=True)
        for name, value in tensors.items():
            known, file = self._saved.get(name, (None, ""))
            if known is not value:  # the very same object need not be written again
                file = f"{name}-{manifest.round}-{'b' if file.endswith('a.safetensors') else 'a'}.safetensors"
                write_tensors(self.folder / file, value, durable=self.durable, placed=True)
                self._saved[name] = (value, file)
            manifest.files[name] = file
        before = self._last
        if self._text:
            atomic_write(self.previous, self._text, durable=self.durable)
        content = json.loads(json.dumps(vars(manifest)))  # as a reader will find it
        self._last, self._text = manifest, json.dumps({**content, "sha256": digest_of(content)})
        atomic_write(self.path, self._text, durable=self.durable)
        for path in self.folder.glob("*.safetensors"):
            if path.name not in manifest.files.values() and path.name not in before.files.values():
                path.unlink()
        return before
