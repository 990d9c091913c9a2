"""Work that only looks at classes and their fields, without importing torch: `study check`, `study new`.

Importing torch is most of what such a command takes. Within `without_torch`, modules of polyclinic get placeholders
for it: a class can be derived from one and a function decorated with one, as Sphinx does it (`autodoc_mock_imports`).
Nothing can be computed with a placeholder: the attempt raises NeedsTorch, and the work is done again with torch
itself, from the beginning. What was imported with placeholders is forgotten at the end.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


class NeedsTorch(BaseException):
    """Something is to be computed. No `except Exception` on the way may take it for a mistake of the user's."""


def without_torch(work: Callable[[], T]) -> T:
    """What the work returns. Torch is imported only if the work computes, or loads somebody else's code."""
    if "torch" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):  # or is within another
        return work()
    try:
        with _placeholders():
            return work()
    except NeedsTorch:
        return work()


def need_torch(why: str) -> None:
    """Give up on placeholders, where they are in use: what follows is somebody else's code, and may compute."""
    if "torch" in sys.modules and not is_torch_here():
        raise NeedsTorch(why)


def is_torch_here() -> bool:
    """Whether torch itself was imported, and no placeholder for it."""
    return "torch" in sys.modules and not isinstance(sys.modules["torch"], _Module)


class _Placeholder(ABCMeta):
    """A name of torch: a class, a function, a constant or a decorator, whatever the importing module takes it for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if cls.__module__ != "torch":  # a class of ours, derived from one of torch: only torch knows what it inherits
            raise NeedsTorch(name)
        return _child(cls, name)

    def __call__(cls, *given: Any, **_: Any) -> Any:
        if not _is_importing():
            raise NeedsTorch(cls.__name__)
        if len(given) == 1 and isinstance(given[0], FunctionType):  # a decorator
            return given[0]
        return cls

    def __rmul__(cls, _: object) -> Any:
        return cls()

    def __bool__(cls) -> bool:
        if cls.__module__ == "torch" and not _is_importing():  # it may stand for a number
            raise NeedsTorch(cls.__name__)
        return True


class _Module(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 (a module has one of its own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _child(self, name)


def _child(parent: Any, name: str) -> _Placeholder:
    made = _Placeholder(name, (), {"__module__": "torch"})
    setattr(parent, name, made)  # the same object for everybody
    return made


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _by_import_system(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith("<frozen importlib")


def _is_importing() -> bool:
    """Whether a module is being executed: what it computes then is for later."""
    return any(frame.f_code.co_name == "<module>" and _by_import_system(frame.f_back) for frame in _frames())


class _Finder(MetaPathFinder, Loader):
    """Finds placeholders for `import torch` in a module of ours; anybody else gets torch itself, so we begin again."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "torch":
            return None
        who = next((f for f in _frames() if not _by_import_system(f) and f.f_globals["__name__"] != __name__), None)
        asking = "" if who is None else str(who.f_globals["__name__"])
        if asking.partition(".")[0] != "polyclinic" and asking != "safetensors.torch":
            raise NeedsTorch(asking)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    before, finder = set(sys.modules), _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget([name for name in sys.modules if name not in before and _is_ours(name)])


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("polyclinic", "torch") or name == "safetensors.torch"


def _forget(names: Sequence[str]) -> None:
    """Drop modules, and the attributes by which packages that stay would still find them."""
    for name in names:
        module = sys.modules.pop(name)
        package, _, last = name.rpartition(".")
        parent = sys.modules.get(package)
        if parent is not None and vars(parent).get(last) is module:
            delattr(parent, last)
