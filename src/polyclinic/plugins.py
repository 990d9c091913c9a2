"""Plug-ins: Python files and modules that a study, or a deployed site, names to add methods, sources, ...

A plug-in module has one or more of the dicts METHODS, SOURCES, PARTITIONS, TASKS, BACKBONES, GENERATORS, ENCODERS,
ATTACKS and KINDS (name -> class). A plug-in file is read once: its SHA-256 is that of the code that runs.
"""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from polyclinic.errors import BadInput
from polyclinic.registry import (
    BY_HAND,
    GROUPS,
    REGISTRIES,
    Registry,
    allow_only,
    is_restricted,
    notice_once,
    reason,
    registry_of,
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
        plugin = _load(name, (digests or {}).get(name))
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
            if is_file(name) or not _has_entry_points(name):  # a module may be listed for its networks alone
                _load(name)
                continue
            # its entry points load classes when they are needed; layers, if it has any, are needed always
            package = re.sub(r"[-.]+", "_", name)
            if importlib.util.find_spec(package) and hasattr(module := _import_module(package), "LAYERS"):
                folder, sha256 = digest_of_package(package)
                LOADED[name] = Plugin(module, sha256, folder)
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None


def listed_at_site() -> dict[str, str]:
    """The SHA-256 of each plug-in that a deployed site listed and this process loaded, files by their names. Nothing
    where this process works for no deployed site."""
    return {Path(name).name: plugin.sha256 for name, plugin in LOADED.items()} if is_restricted() else {}


@contextlib.contextmanager
def only_of_site(names: Any, file: Path) -> Iterator[None]:
    """Within, this process knows only what a deployed site lists in `file`; afterwards it knows what it knew before."""
    loaded, added = dict(LOADED), {group: dict(registry.added) for group, registry in REGISTRIES.items()}
    allowed = allow_only(())
    try:
        load_at_site(names, file)
        yield
    finally:
        _unload()
        allow_only(allowed)
        LOADED.update(loaded)
        for group, entries in added.items():
            REGISTRIES[group].added.update(entries)


def forget() -> None:
    """Unload every plug-in, lift a site's restriction, and say again what was said once; for tests and notebooks."""
    allow_only(None)
    notice_once.cache_clear()
    _unload()
    for registry in REGISTRIES.values():
        registry.imported.clear()


def _unload() -> None:
    LOADED.clear()
    for registry in REGISTRIES.values():
        registry.added = {name: one for name, one in registry.added.items() if one[1] == BY_HAND}


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


def _load(name: str, expected: str | None = None) -> Plugin:
    """One plug-in, a file or a module; BadInput where its SHA-256 is not the `expected` one."""
    if is_file(name):
        folder = Path(name).parent
        try:
            source = Path(name).read_bytes()
        except OSError as error:
            raise BadInput(
                f"plugins: {name} cannot be read ({error.strerror or error}); put the file there, or name its new place"
            ) from None
        sha256 = hashlib.sha256(source).hexdigest()
    else:
        module = _import_module(name)
        folder, sha256 = digest_of_package(name)
    if expected not in (None, sha256):
        raise BadInput(
            f"plugins: {name} has changed since the run was begun (SHA-256 {sha256[:12]}, not {str(expected)[:12]}); "
            "bring the old file back, or run the study again in another folder"
        )
    if name not in LOADED or (is_file(name) and LOADED[name].sha256 != sha256):
        module = _run_file(Path(name), source) if is_file(name) else module
        _add(module, f"plug-in {name}")
        LOADED[name] = Plugin(module, sha256, folder)
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


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise BadInput(f"plugins: '{name}' is neither a module, such as my_package.module, nor a file that ends in .py")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise BadInput(
                f"plugins: there is no module '{name}' here; install its package, or name a file that ends in .py"
            ) from None
        raise BadInput(f"plugins: {name} cannot be loaded: {reason(error)}; mend or update its package") from None


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


def _add(module: ModuleType, origin: str) -> None:
    """Put what a plug-in offers into the registries, all of it or nothing; an older version of it goes."""
    tables = tables_of(module)
    for kind, table in tables.items():
        for key, entry in table.items():
            registry_of(kind).check(key, entry, origin)
    for registry in REGISTRIES.values():
        own = {key: (entry, origin) for key, entry in tables.get(registry.kind, {}).items()}
        registry.added = {key: one for key, one in registry.added.items() if one[1] != origin} | own


def tables_of(module: ModuleType) -> dict[str, Mapping[str, Any]]:
    """What a plug-in module offers, by kind of thing; BadInput for a dict that is none, has a key that is no text,
    or a misspelt name."""
    where, found = module.__file__ or module.__name__, {}
    for name, table in vars(module).items():
        if name in GROUPS and not isinstance(table, Mapping):
            raise BadInput(f"plugins: {name} in {where} must be a dict of names and classes")
        if name in GROUPS and not all(isinstance(key, str) for key in table):
            raise BadInput(f"plugins: a key of {name} in {where} is no text; a key is the name that studies use")
        if name in GROUPS and not isinstance(table, Registry):  # which is ours, imported by the module
            found[name.lower()] = table
        meant = difflib.get_close_matches(name, list(GROUPS), n=1, cutoff=0.85) if name.isupper() else []
        if meant and name not in GROUPS and isinstance(table, Mapping):
            raise BadInput(f"plugins: {where} has a dict {name}; did you mean {meant[0]}?")
    return found


def _has_entry_points(name: str) -> bool:
    """Whether this is an installed distribution whose entry points say what it adds."""
    try:
        return any(point.group in GROUPS.values() for point in distribution(name).entry_points)
    except (PackageNotFoundError, ValueError):
        return False
