"""How much disk `pip install polyclinic` takes beside torch, and what each extra adds.

    python benchmarks/package_size.py [--quick] [--json FILE]

Adds up the files of the installed packages that each one needs, in this environment; an extra that is not installed is
left out. `compiled` are the .pyc files that pip makes after the installation (`pip install --no-compile` leaves them
out). The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("figures", "segmentation", "serve", "export", "dicom-seg", "logging", "nvflare", "ray", "docs", "dev")
LIMIT_MB = 350  # what Polyclinic may add to torch, with what pip compiles


def closure(name: str, extras: frozenset[str] = frozenset()) -> Iterator[Distribution]:
    """The distribution and all that it requires on this machine, each once."""
    seen: set[str] = set()
    waiting = [(name, extras)]
    while waiting:
        one, wanted = waiting.pop()
        if normal(one) in seen:
            continue
        seen.add(normal(one))
        try:
            found = distribution(one)
        except PackageNotFoundError:
            continue
        yield found
        for text in found.requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted or {""}):
                waiting.append((requirement.name, frozenset(requirement.extras)))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sizes(name: str, extras: frozenset[str] = frozenset(), *, compiled: bool = False) -> dict[str, int]:
    """Bytes on disk of each package that `name` needs: of the files that it brings, or of those that pip compiles."""
    return {normal(one.metadata["Name"]): bytes_of(one, compiled) for one in closure(name, extras)}


def bytes_of(found: Distribution, compiled: bool) -> int:
    files = (Path(str(found.locate_file(file))) for file in found.files or [] if (file.suffix == ".pyc") == compiled)
    return sum(file.stat().st_size for file in files if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same: nothing here takes long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch, core = sizes("torch"), sizes("polyclinic")
    added = {name: size for name, size in core.items() if name not in torch}
    compiled = {name: size for name, size in sizes("polyclinic", compiled=True).items() if name not in torch}
    figures = {
        "benchmark": "package_size",
        "torch_mb": mega(torch),
        "added_mb": mega(added),
        "limit_mb": LIMIT_MB,
        "compiled_mb": mega(compiled),
        "largest_mb": {name: round(added[name] / 1e6, 1) for name in sorted(added, key=lambda one: -added[one])[:8]},
        "extras_mb": {},
    }
    for extra in EXTRAS:
        more = {name: size for name, size in sizes("polyclinic", frozenset({extra})).items() if name not in core}
        figures["extras_mb"][extra] = mega(more)
    print(f"torch: {figures['torch_mb']} MB; polyclinic adds {figures['added_mb']} MB")
    print(f"pip compiles {figures['compiled_mb']} MB more from it (both together: at most {LIMIT_MB})")
    text = json.dumps(figures)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)


def mega(packages: dict[str, int]) -> float:
    return round(sum(packages.values()) / 1e6, 1)


if __name__ == "__main__":
    main()
