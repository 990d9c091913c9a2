"""Dossiers for tests."""

import json
from pathlib import Path

from polyclinic.files import sha256_of

HOSTILE = "<script>alert(1)</script>\u202e\n\"'|"


def sealed_anew(folder: Path, digests) -> None:
    """Put digests into the manifest of a dossier, and seal it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"] |= digests
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    (folder / "manifest.sha256").write_text(sha256_of(folder / "manifest.json") + "\n")
