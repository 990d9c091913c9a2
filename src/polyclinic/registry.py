"""Registries: where names of methods, sources, partitions, ... are looked up. Plug-ins add names from outside.

A name is looked for among the built-in entries, then among those of the plug-ins that were loaded (`plugins.py`), then
among the entry points of installed packages (group `polyclinic.methods`, ...), which are imported when first needed.
"""

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from polyclinic.errors import BadInput, Notice

T = TypeVar("T")

#: the dict of a plug-in module -> the group of entry points; also what `polyclinic list` can list
GROUPS = {
    "METHODS": "polyclinic.methods",
    "SOURCES": "polyclinic.sources",
    "PARTITIONS": "polyclinic.partitions",
    "TASKS": "polyclinic.tasks",
    "BACKBONES": "polyclinic.backbones",
    "GENERATORS": "polyclinic.generators",
    "ENCODERS": "polyclinic.encoders",
    "ATTACKS": "polyclinic.attacks",
    "KINDS": "polyclinic.kinds",
}
#: the modules that have the registries which are not called like their group
HOMES = {
    "polyclinic.sources": "polyclinic.data.datasets",
    "polyclinic.partitions": "polyclinic.data.partitions",
    "polyclinic.backbones": "polyclinic.models",
    "polyclinic.encoders": "polyclinic.models.encoders",
    "polyclinic.attacks": "polyclinic.audits",
    "polyclinic.kinds": "polyclinic.federation.ledger.kinds",
}
#: the registries that exist in this process, by group
REGISTRIES: "dict[str, Registry[Any]]" = {}

BUILT_IN, BY_HAND = "polyclinic", "set by hand in this process"


class Registry(MutableMapping[str, T], Generic[T]):
    """Name -> class. Iterating gives names and imports nothing; looking a name up imports its entry point."""

    def __init__(self, group: str, builtin: Mapping[str, T], *, base: type | None = None) -> None:
        """`base`: what every entry must be a subclass of."""
        self.group = group
        self.kind = group.removeprefix("polyclinic.")  #: what the registry holds, in one word: `methods`
        self.builtin = dict(builtin)
        self.base = base
        self.added: dict[str, tuple[T, str]] = {}  #: of plug-ins and by hand: the entry, and where it comes from
        self.imported: dict[EntryPoint, T] = {}
        REGISTRIES[group] = self

    def __getitem__(self, name: str) -> T:
        if name in self.builtin:
            for point in self._installed().get(name, []):
                notice_once(
                    f"{distribution_of(point)}: its entry point '{name}' in {self.kind} is ignored, as polyclinic has "
                    "one of that name; give it another name"
                )
            return self.builtin[name]
        return self.added[name][0] if name in self.added else self._import(name)

    def __contains__(self, name: object) -> bool:
        return name in self.builtin or name in self.added or name in self._installed()

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.builtin, *self.added, *self._installed()]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, entry: T) -> None:
        """Add an entry by hand; other processes cannot find it, so that a run with it stays in this one."""
        self.check(name, entry, BY_HAND)
        self.added[name] = (entry, BY_HAND)

    def __delitem__(self, name: str) -> None:
        del self.added[name]

    def working(self) -> dict[str, T]:
        """All entries but those that cannot be used (a package that cannot be imported, say); a notice names them."""
        found = {}
        for name in self:
            try:
                found[name] = self[name]
            except BadInput as error:
                notice_once(f"'{name}' in {self.kind} is left out: {error}")
        return found

    def origin(self, name: str) -> str:
        """Where an entry comes from: `polyclinic`, an installed distribution with its version, or a plug-in."""
        if name in self.builtin:
            return BUILT_IN
        return self.added[name][1] if name in self.added else distribution_of(self._installed()[name][0])

    def is_installed(self, name: str) -> bool:
        """Whether the entry comes from an entry point of an installed package."""
        return name not in self.builtin and name not in self.added

    def check(self, name: str, entry: Any, origin: str) -> None:
        """BadInput unless the entry fits in here and its name is free."""
        about, base = f"{origin}: '{name}' in {self.kind}", self.base
        if base is not None and not (isinstance(entry, type) and issubclass(entry, base)):
            raise BadInput(f"{about} is no subclass of {base.__name__}; derive it from polyclinic.{base.__name__}")
        # class variables that the base declares without a value; a summary may be missing
        facts = vars(base).get("__annotations__", {}) if base else {}
        missing = sorted(getattr(entry, "__abstractmethods__", ()))
        wanted = [fact for fact, kind in facts.items() if "ClassVar" in str(kind)]  # an annotation may be a text
        missing += [fact for fact in wanted if fact != "summary" and not hasattr(entry, fact)]
        if missing:
            raise BadInput(f"{about} lacks {', '.join(missing)}; define it")
        if taken := self._taken_by(name, entry, origin):
            raise BadInput(f"{about} is taken already, by {taken}; give it another name")
        fields = getattr(entry, "model_fields", {})
        own = next((fields[field].default for field in ("name", "source", "partition") if field in fields), None)
        if origin != BY_HAND and isinstance(own, str) and own != name:
            raise BadInput(f"{about} calls itself '{own}'; give the key and the class the same name")

    def _taken_by(self, name: str, entry: Any, origin: str) -> str | None:
        """Who else uses the name; the same class, or a newer version from the same place, takes it from nobody."""
        if name in self.builtin:
            return BUILT_IN
        other, where = self.added.get(name, (entry, origin))
        if other is not entry and where != origin:
            return where
        target = f"{getattr(entry, '__module__', '')}:{getattr(entry, '__qualname__', '')}"
        points = self._installed().get(name, [])
        return next((distribution_of(point) for point in points if point.value != target), None)

    def _installed(self) -> dict[str, list[EntryPoint]]:
        """The entry points that count in this process, by name."""
        found = points_of(self.group)
        if _ALLOWED is None:
            return found
        allowed = {name: [point for point in points if _is_allowed(point)] for name, points in found.items()}
        return {name: points for name, points in allowed.items() if points}

    def _import(self, name: str) -> T:
        points = self._installed().get(name)
        if not points:
            raise KeyError(name)
        if len(points) > 1:
            both = " and ".join(distribution_of(point) for point in points)
            raise BadInput(f"{self.kind}: {both} both have an entry point '{name}'; uninstall one of them")
        point = points[0]
        if point not in self.imported:
            try:
                entry = point.load()
            except (Exception, SystemExit) as error:  # whatever a stranger's package does when it is imported
                raise BadInput(
                    f"{distribution_of(point)}: its entry point '{name}' ({point.value}) cannot be imported: "
                    f"{reason(error)}; repair or uninstall the package"
                ) from None
            self.check(name, entry, distribution_of(point))
            self.imported[point] = entry
        return self.imported[point]


def registry_of(kind: str) -> Registry[Any]:
    """The registry of a kind of things (`methods`, ...); its module is imported first."""
    group = f"polyclinic.{kind}"
    if group not in REGISTRIES:
        importlib.import_module(HOMES.get(group, group))
    return REGISTRIES[group]


def summary_of(entry: Any) -> str:
    """One sentence about an entry: its own `summary`, else the first line of its docstring, else an inherited one."""
    own = vars(entry).get("summary") or (vars(entry).get("__doc__") or "").strip().split("\n")[0]
    return str(own or getattr(entry, "summary", "")).removesuffix(".")


@functools.cache
def notice_once(text: str) -> None:
    """Warn, once in a process, or until `notice_once.cache_clear()`."""
    warnings.warn(text, Notice, stacklevel=3)


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# --- entry points, and those of them that a deployed site allows ------------------------------------------

#: packages and modules that this process may load, of all its threads; None: all that are installed
_ALLOWED: frozenset[str] | None = None


def allow_only(packages: Collection[str] | None) -> frozenset[str] | None:
    """Let only entry points of these packages count, in the whole process, until it is called again; None: all count.

    A package is named by its distribution or by its module. Returns what held before (`plugins.only_of_site`).
    """
    global _ALLOWED
    before, _ALLOWED = _ALLOWED, None if packages is None else frozenset(packages)
    return before


def is_restricted() -> bool:
    """Whether this process works for a deployed site, which loads only what its own people listed."""
    return _ALLOWED is not None


def allows_module(module: str) -> bool:
    """Whether a module, or a package that it lies in, was listed; always true where nothing is restricted."""
    return _ALLOWED is None or any(module == one or module.startswith(f"{one}.") for one in _ALLOWED)


def _is_allowed(point: EntryPoint) -> bool:
    """Whether its module or its distribution was listed, by any spelling: My_Package and my.package are my-package."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    return allows_module(point.module) or bool(point.dist and plain(point.dist.name) in map(plain, _ALLOWED or ()))


def points_of(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group that installed packages add, by name; nothing is imported."""
    return _points_on(tuple(sys.path), group)


@functools.lru_cache(maxsize=64)
def _points_on(path: tuple[str, ...], group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name, for this `sys.path`; a package that is found twice counts once."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, {})[distribution_of(point), point.value] = point
    return {name: list(points.values()) for name, points in found.items()}


def distribution_of(point: EntryPoint) -> str:
    """The distribution of an entry point, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.module
