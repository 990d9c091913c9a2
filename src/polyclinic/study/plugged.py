"""What a study takes from outside: its plug-ins and entry points, their SHA-256, and whether other processes find them.

A run folder keeps the digests in `plugins.json`, and no code: whoever audits somebody else's folder runs nothing that
came with it. The plug-in files stay where they are, and one that has changed since is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyclinic import plugins
from polyclinic.data.datasets import SOURCES
from polyclinic.data.partitions import PARTITIONS
from polyclinic.errors import BadInput
from polyclinic.federation.leaving.kinds import KINDS
from polyclinic.generators import GENERATORS
from polyclinic.methods import METHODS
from polyclinic.models import BACKBONES, is_importable
from polyclinic.registry import Registry
from polyclinic.tasks import TASKS

if TYPE_CHECKING:
    from polyclinic.study.tables import Study

FILE = "plugins.json"


def entries_of(study: Study) -> Iterator[tuple[str, Registry[Any], str]]:
    """Every name that the study looks up: (setting, registry, name)."""
    yield "data.source", SOURCES, study.data.source
    yield "sites.partition", PARTITIONS, study.sites.partition
    yield "task.name", TASKS, study.task.name
    yield "method.name", METHODS, study.method.name
    yield "generator.name", GENERATORS, study.generator.name
    for name in (study.model.backbone, *study.model.backbones.values()):
        if not is_importable(name):
            yield "model.backbone", BACKBONES, name
    for name in study.policy.kinds:
        yield "policy.kinds", KINDS, name


def unknown_elsewhere(study: Study) -> str | None:
    """Why no other process can work on this study: it has something that was put into a registry by hand."""
    for setting, registry, name in entries_of(study):
        if registry.is_by_hand(name):
            table = registry.kind.upper()
            return (
                f"{setting}: '{name}' was put into {table} by hand, where no other process finds it; put it into a "
                f"Python file with a dict {table} and name that file in plugins, or set engine.workers = 1"
            )
    return None


def digests_of(study: Study) -> dict[str, dict[str, str]]:
    """The SHA-256 of each plug-in, in order, and of each installed package whose entry points the study uses."""
    installed = {}
    for _, registry, name in entries_of(study):
        if registry.is_installed(name):
            _, sha256 = plugins.digest_of_package(registry[name].__module__)
            installed[registry.origin(name)] = sha256
    return {"plugins": plugins.load_from_study(study.plugins), "installed": installed}


def read_digests(folder: Path) -> dict[str, dict[str, str]]:
    """What a run folder was begun with; nothing where it has no such file."""
    file = folder / FILE
    if not file.exists():
        return {"plugins": {}, "installed": {}}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {kind: {str(name): str(sha) for name, sha in found[kind].items()} for kind in ("plugins", "installed")}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise BadInput(f"{file}: cannot be read; restore it, or run the study again in another folder") from None


def load_checked(names: Sequence[str], folder: Path) -> None:
    """Load the plug-ins of a study in `folder`; in a run folder each must be the one that the run was begun with.

    A file may have moved since: then `plugins` in the folder's study.toml says where it is now.
    """
    noted = list(read_digests(folder)["plugins"].values())
    if noted and len(noted) != len(names):
        raise BadInput(f"plugins: {folder} was begun with {len(noted)} plug-ins; name the same ones in the same order")
    plugins.load_from_study(names, dict(zip(names, noted, strict=False)))


def check_installed(study: Study, folder: Path) -> None:
    """BadInput if a package whose entry point the study uses is another than the run was begun with."""
    noted = read_digests(folder)["installed"]
    if not noted:
        return
    now = digests_of(study)["installed"]
    for package, sha256 in noted.items():
        if now.get(package) != sha256:
            has = ", ".join(now) or "nothing of it"
            raise BadInput(
                f"plugins: {folder} was begun with the package {package} as it was then, and {has} is installed now; "
                "install that one again, or run the study in another folder"
            )
