"""Files of a deployed site that only grow: a line for each note, on disk when it is made, and read once.

A coordinator may put a site's state back, and none of these. A file that is written anew for each note would cost a run
the square of its rounds.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from polyclinic.errors import Damaged
from polyclinic.files import append, atomic_write, sync_file


class AppendedFile:
    """A file of lines, and in memory what they say. It is read again where another process has changed it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self.clear()

    @classmethod
    @functools.lru_cache(maxsize=64)
    def at(cls, path: Path) -> Self:
        """The file at a path, which this process reads once."""
        return cls(path)

    def clear(self) -> None:
        """Forget what was read."""
        raise NotImplementedError

    def take(self, line: str) -> None:
        """Enter what a line says; ValueError for one that says nothing."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Have in memory what the file says. Damaged where it cannot be read: a site that forgot would answer again."""
        if (stamp := self._found()) == self._stamp:
            return
        self.clear()
        try:
            if stamp is not None:
                self._read(self.path.read_bytes())
        except ValueError:
            raise Damaged(f"{self.path}: is damaged; bring it back from a copy") from None
        self._stamp = self._found()

    def write(self, line: str) -> None:
        """Add a line, which is on disk when this returns."""
        self.refresh()
        if self._stamp is None:  # as a whole: what begins with half a line is damaged
            atomic_write(self.path, f"{line}\n", private=True, durable=True)
        else:
            append(self.path, f"{line}\n".encode())
            sync_file(self.path)
        self.take(line)
        self._stamp = self._found()

    def _found(self) -> tuple[int, int] | None:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            return None
        return state.st_size, state.st_mtime_ns

    def _read(self, data: bytes) -> None:
        whole, _, rest = data.rpartition(b"\n")
        for line in whole.splitlines():
            self.take(line.decode())
        if not rest and whole:
            return
        try:
            self.take(rest.decode())  # an older version wrote all on one line, without an end
            append(self.path, b"\n")
        except ValueError:
            if not whole:
                raise
            os.truncate(self.path, len(whole) + 1)  # half a line, as a loss of power leaves it: nothing left for it


class Notes(AppendedFile):
    """Lists of texts by name: on each line {name: [texts]}."""

    def clear(self) -> None:
        self._known: dict[str, dict[str, None]] = {}

    def take(self, line: str) -> None:
        for name, texts in _table(line).items():
            for text in map(str, texts):
                if text not in self._known.setdefault(name, {}):
                    self._known[name][text] = None
                    self.entered(name, text)

    def entered(self, name: str, text: str) -> None:
        """A text is new under a name."""

    def of(self, name: str) -> Mapping[str, None]:
        """The texts under a name, in their order."""
        self.refresh()
        return self._known.get(name, {})

    def read(self) -> dict[str, list[str]]:
        """All texts by name."""
        self.refresh()
        return {name: list(texts) for name, texts in self._known.items()}

    def add(self, name: str, text: str) -> None:
        """Note a text under a name, once; on disk when this returns."""
        if text not in self.of(name):
            self.write(json.dumps({name: [text]}))


class FirstUse(AppendedFile):
    """What each name stood for first: on each line {name: value}."""

    def clear(self) -> None:
        self._known: dict[str, str] = {}

    def take(self, line: str) -> None:
        for name, value in self.parsed(line):
            self._known.setdefault(name, value)

    def parsed(self, line: str) -> Iterator[tuple[str, str]]:
        """The names and values of a line."""
        return iter((name, str(value)) for name, value in _table(line).items())

    def line(self, name: str, value: str) -> str:
        """How a line is written."""
        return json.dumps({name: value})

    def first(self, name: str, value: str) -> str:
        """What a name first stood for; `value`, which is on disk when this returns, if that is now."""
        self.refresh()
        if name not in self._known:
            self.write(self.line(name, value))
        return self._known[name]


def _table(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no table")
    return found
