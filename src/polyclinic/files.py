"""Atomic writes."""

from __future__ import annotations

from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
