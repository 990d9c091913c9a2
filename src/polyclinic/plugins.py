"""Plug-ins: Python files and modules that a study, or a deployed site, names to add methods, sources, ...

A plug-in module has one or more of the dicts METHODS, SOURCES, PARTITIONS, TASKS, BACKBONES, GENERATORS, ENCODERS,
ATTACKS and KINDS (name -> class). A plug-in file is read once: its SHA-256 is that of the code that runs.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from polyclinic.errors import BadInput
from polyclinic.registry import (
    GROUPS,
    PLUGGED,
    REGISTRIES,
    Registry,
    allow_only,
    forget_notices,
    is_restricted,
    reason,
    refuse_foreign_base,
)


@dataclass(frozen=True)
class Plugin:
    """A loaded plug-in; `folder` is where an import finds its package."""

    module: ModuleType
    sha256: str
    folder: Path


#: packages that our own classes come from
OWN_PACKAGES = ("polyclinic", "pydantic", "torch", "abc", "builtins", "typing")
#: the plug-ins of this process: by absolute path, or by the name of the module
LOADED: dict[str, Plugin] = {}


def resolve(names: Any, base: Path) -> tuple[str, ...]:
    """The plug-ins that a study or a site names: files as absolute paths (relative ones begin at `base`)."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise BadInput(f"plugins: must be a list of modules and files, such as ['my_methods.py'], not {names!r}")
    return tuple(str((base / Path(name).expanduser()).resolve()) if is_file(name) else name for name in names)


def is_file(name: str) -> bool:
    """Whether a plug-in is a file and not a module: `beside_the_study.py`."""
    return name.endswith(".py")


def refuse_sent_files(names: Iterable[str], folder: Path) -> None:
    """BadInput if a run folder or a model names a plug-in file that came with it: it would run its sender's code."""
    for name in names:
        path = Path(name).expanduser()
        if is_file(name) and (not path.is_absolute() or path.resolve().is_relative_to(folder.resolve())):
            raise BadInput(
                f"plugins: {folder} names '{name}', a file that came with it and is not run; read the file, put it "
                "elsewhere, and write its absolute path into plugins"
            )


def load(names: Iterable[str], digests: Mapping[str, str] | None = None) -> dict[str, str]:
    """Load plug-ins (as `resolve` gives them); their SHA-256 by name. BadInput where one is not what `digests` says."""
    found = {}
    for name in names:
        plugin = _load_file(name, digests) if is_file(name) else _load_module(name, digests)
        if not tables_of(plugin.module):
            raise BadInput(f"plugins: {name} has none of the dicts {', '.join(GROUPS)}; a plug-in adds to one of them")
        found[name] = plugin.sha256
    return found


def load_from_study(names: Sequence[str], digests: Mapping[str, str] | None = None) -> dict[str, str]:
    """`load` what a study names; a deployed site loads nothing of it: a study brings no code."""
    return {} if is_restricted() else load(names, digests)


def load_at_site(names: Any, file: Path) -> None:
    """Load what a deployed site lists in `file`, and nothing else for the rest of this process, which is the site's."""
    try:
        resolved = resolve(names, file.parent)
        _unload()
        allow_only(resolved)
        for name in resolved:
            if is_file(name):
                _load_file(name, None)
            elif not _has_entry_points(name):  # a module may be listed for its networks alone, and add nothing
                _load_module(name, None)
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None


def listed_at_site() -> dict[str, str]:
    """The SHA-256 of each plug-in that a deployed site listed and this process loaded: files by their names, modules
    with the versions of their packages. Nothing where this process works for no deployed site."""
    if not is_restricted():
        return {}
    return {Path(n).name if is_file(n) else with_version(n): plugin.sha256 for n, plugin in LOADED.items()}


def with_version(module: str) -> str:
    """`module version`, or the module alone where no installed package has its name."""
    try:
        return f"{module} {distribution(module.partition('.')[0]).version}"
    except PackageNotFoundError:
        return module


@contextlib.contextmanager
def only_of_site(names: Any, file: Path) -> Iterator[None]:
    """Within, this process knows only what a deployed site lists in `file`; afterwards it knows what it knew before."""
    loaded, plugged = dict(LOADED), {group: dict(entries) for group, entries in PLUGGED.items()}
    allowed = allow_only(())
    try:
        load_at_site(names, file)
        yield
    finally:
        _unload()
        allow_only(allowed)
        LOADED.update(loaded)
        for group, entries in plugged.items():
            PLUGGED[group].update(entries)


def forget() -> None:
    """Unload every plug-in, lift a site's restriction, and say again what was said once; for tests and notebooks."""
    allow_only(None)
    forget_notices()
    _unload()
    for registry in REGISTRIES.values():
        registry.forget_imports()


def _unload() -> None:
    LOADED.clear()
    for entries in PLUGGED.values():
        entries.clear()


def foreign_modules(kind: type) -> list[str]:
    """The modules, not our own, that a class and its parents are defined in."""
    modules = [parent.__module__ for parent in kind.__mro__]
    return [module for module in modules if module.partition(".")[0] not in OWN_PACKAGES]


def code_of(kind: type) -> list[str]:
    """The SHA-256 of the code of a class that is not our own: of its plug-in files and packages."""
    files = {plugin.module.__name__: plugin.sha256 for plugin in LOADED.values()}
    found = []
    for module in foreign_modules(kind):
        with contextlib.suppress(ImportError, ValueError, OSError):  # a notebook's own class has no file
            found.append(files.get(module) or digest_of_package(module)[1])
    return found


def folders(names: Iterable[str]) -> list[str]:
    """Where another process finds the modules among these plug-ins."""
    return sorted({str(LOADED[name].folder) for name in names if name in LOADED and not is_file(name)})


# --- one plug-in --------------------------------------------------------------------------------------


def _load_file(name: str, digests: Mapping[str, str] | None) -> Plugin:
    path = Path(name)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"plugins: {path} cannot be read ({error.strerror or error}); put the file there, or name its new place"
        ) from None
    sha256 = hashlib.sha256(source).hexdigest()
    _check_digest(name, sha256, digests)
    if name not in LOADED or LOADED[name].sha256 != sha256:
        _add(name, Plugin(_run_file(path, source), sha256, path.parent))
    return LOADED[name]


def _run_file(path: Path, source: bytes) -> ModuleType:
    """The module of a file, made from the bytes that were hashed and not from a cached .pyc."""
    module = ModuleType(f"polyclinic_plugin_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where pydantic looks up the names in annotations
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(f"plugins: {path} cannot be loaded: {reason(error)}; mend the file") from None
    return module


def _load_module(name: str, digests: Mapping[str, str] | None) -> Plugin:
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadInput(f"plugins: '{name}' is neither a module, such as my_package.module, nor a file that ends in .py")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise BadInput(f"plugins: {name} cannot be loaded: {reason(error)}") from None
        raise BadInput(
            f"plugins: there is no module '{name}' here; install its package, or name a file that ends in .py"
        ) from None
    except (Exception, SystemExit) as error:
        raise BadInput(f"plugins: {name} cannot be loaded: {reason(error)}; mend or update its package") from None
    folder, sha256 = digest_of_package(name)
    _check_digest(name, sha256, digests)
    if name not in LOADED:
        _add(name, Plugin(module, sha256, folder))
    return LOADED[name]


def digest_of_package(module: str) -> tuple[Path, str]:
    """The folder that the module's package lies in, and the SHA-256 of all Python files of the package."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None, "whoever asks has found the module"
    places = [Path(place) for place in spec.submodule_search_locations or []]
    files = sorted(file for place in places for file in place.rglob("*.py")) or [Path(str(spec.origin))]
    root = (places[0] if places else files[0]).parent
    digest = hashlib.sha256()
    for file in files:
        name, content = file.relative_to(root) if file.is_relative_to(root) else file.name, file.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return root, digest.hexdigest()


def _check_digest(name: str, sha256: str, digests: Mapping[str, str] | None) -> None:
    expected = (digests or {}).get(name)
    if expected is not None and expected != sha256:
        raise BadInput(
            f"plugins: {name} has changed since the run was begun (SHA-256 {sha256[:12]}, not {expected[:12]}); "
            "bring the old file back, or run the study again in another folder"
        )


def _add(name: str, plugin: Plugin) -> None:
    """Put what a plug-in offers into the registries, all of it or nothing; an older version of it goes."""
    tables, origin = tables_of(plugin.module), f"plug-in {name}"
    for group, table in tables.items():
        for key, entry in table.items():
            if group in REGISTRIES:
                REGISTRIES[group].check(key, entry, origin)
            else:
                refuse_foreign_base(group, key, origin)
    for group, entries in PLUGGED.items():
        kept = {key: (entry, where) for key, (entry, where) in entries.items() if where != origin}
        entries.clear()
        entries.update(kept, **{key: (entry, origin) for key, entry in tables.get(group, {}).items()})
    LOADED[name] = plugin


def tables_of(module: ModuleType) -> dict[str, Mapping[str, Any]]:
    """What a plug-in module offers, by group."""
    _check_tables(module)
    offered = {group: getattr(module, name, None) for name, group in GROUPS.items()}
    return {
        group: table
        for group, table in offered.items()
        if isinstance(table, Mapping) and not isinstance(table, Registry)  # ours, imported by the module
    }


def _check_tables(module: ModuleType) -> None:
    """BadInput where a dict of a plug-in is no dict, has a key that is no text, or a misspelt name."""
    where = module.__file__ or module.__name__
    for name, table in vars(module).items():
        if name in GROUPS and not isinstance(table, Mapping):
            raise BadInput(f"plugins: {name} in {where} must be a dict of names and classes")
        if name in GROUPS and not all(isinstance(key, str) for key in table):
            raise BadInput(f"plugins: a key of {name} in {where} is no text; a key is the name that studies use")
        if name.isupper() and name not in GROUPS and isinstance(table, Mapping):
            meant = difflib.get_close_matches(name, list(GROUPS), n=1, cutoff=0.85)
            if meant:
                raise BadInput(f"plugins: {where} has a dict {name}; did you mean {meant[0]}?")


def _has_entry_points(name: str) -> bool:
    """Whether this is an installed distribution whose entry points say what it adds."""
    try:
        points = distribution(name).entry_points
    except (PackageNotFoundError, ValueError):
        return False
    return any(point.group in GROUPS.values() for point in points)
