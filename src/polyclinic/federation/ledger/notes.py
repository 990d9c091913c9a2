"""Files of a deployed site that only grow: a line for each note, on disk when it is made, and read once.

A coordinator may put a site's state back, and none of these. A file that is written anew for each note would cost a run
the square of its rounds.
"""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from polyclinic.errors import Damaged
from polyclinic.files import append, atomic_write, sync_file


class Notes:
    """Lists of texts by name: on each line {name: [texts]}, or {name: text}; in memory what all lines say. It is read
    again where another process has changed it."""

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
        self._known: dict[str, dict[str, None]] = {}

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
        if text in self.of(name):
            return
        line = json.dumps({name: [text]})
        if self._stamp is None:  # as a whole: what begins with half a line is damaged
            atomic_write(self.path, f"{line}\n", private=True, durable=True)
        else:
            append(self.path, f"{line}\n".encode())
            sync_file(self.path)
        self._take(line)
        self._stamp = self._found()

    def first(self, name: str, text: str) -> str:
        """The first text under a name; this one, on disk when this returns, if there was none."""
        if not self.of(name):
            self.add(name, text)
        return next(iter(self.of(name)))

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

    def _take(self, line: str) -> None:
        """Enter what a line says; ValueError for one that says nothing."""
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("no table")
        for name, texts in found.items():
            for text in map(str, texts if isinstance(texts, list) else [texts]):
                if text not in self._known.setdefault(name, {}):
                    self._known[name][text] = None
                    self.entered(name, text)

    def _found(self) -> tuple[int, int] | None:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            return None
        return state.st_size, state.st_mtime_ns

    def _read(self, data: bytes) -> None:
        whole, _, rest = data.rpartition(b"\n")
        for line in whole.splitlines():
            self._take(line.decode())
        if not rest and whole:
            return
        try:
            self._take(rest.decode())  # an older version wrote all on one line, without an end
            append(self.path, b"\n")
        except ValueError:
            if not whole:
                raise
            os.truncate(self.path, len(whole) + 1)  # half a line, as a loss of power leaves it: nothing left for it
