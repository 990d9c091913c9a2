"""Write the lock files: every package of `make demo` and `make test` with its version and the hashes of its files.

    python benchmarks/lock.py --index URL [--links FOLDER]... [--quick]

`--index` is a package index (PEP 503). Versions are those of constraints.txt; what is needed is read from the installed
packages, so run it in the environment of `make test`. All files of a version are named, for every system, from Python
3.11 on. torch is in a file of its own: `requirements-cpu.lock` has its wheels for CPUs, which lie in the folders
`--links`, `requirements-cuda.lock` those of the index and what they need on Linux. `--quick` only says which packages
there are.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import html
import json
import re
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from urllib.parse import urljoin

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
#: the extras of the README's two commands
EXTRAS = ("figures", "segmentation", "dev", "nvflare", "ray")
#: what builds the package itself
BUILD = {
    **{"hatchling": "1.32.4", "editables": "0.6", "pathspec": "1.1.1", "tomlkit": "0.15.2"},
    "trove-classifiers": "2026.9.21.13",
}
#: the interpreters of wheels that are named
PYTHONS = ("py3", "py2.py3", "py311", "cp311", "cp312", "cp313", "cp314")
#: wheels for Linux, and the packages of CUDA that they need
LINUX = ("x86_64.whl", "none-any.whl")
CUDA = ("cuda-", "nvidia-", "triton")
Markers = dict[str, set[str]]


def pinned() -> dict[str, str]:
    """The versions of constraints.txt, and of what builds the package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==")[::2] for line in lines if "==" in line]
    return BUILD | {canonicalize_name(name): version for name, version in pairs}


def needed() -> Markers:
    """All packages that are needed, directly or by another one, each with the markers under which it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    found: Markers = {}
    waiting = [Requirement(line) for line in (*project["dependencies"], *extras, *BUILD)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        found.setdefault(name, set()).add(_condition(one.marker))
        for extra in ("", *one.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += _requirements(name, extra)
    return found


def _requirements(name: str, extra: str) -> Iterator[Requirement]:
    """What an installed package needs here, or would need on another system."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # for another system
        return
    for one in map(Requirement, lines):
        chosen = one.marker is None or one.marker.evaluate({"extra": extra})
        if chosen or _condition(one.marker):
            yield one


def _condition(marker: Marker | None) -> str:
    """The marker of what another system needs; "" for what is needed here."""
    if marker is None or marker.evaluate({"extra": ""}) or "extra" in str(marker):
        return ""
    systems = ("win32", "Windows", "darwin", "Darwin", "emscripten")
    return str(marker) if any(system in str(marker) for system in systems) else ""


def files_of(index: str, name: str) -> list[tuple[str, str, str]]:
    """Address, sha256 and name of all files of a package."""
    address = f"{index.rstrip('/')}/{name}/"
    page = urllib.request.urlopen(address, timeout=120).read().decode()
    found = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"[^>]*>([^<]+)<', page)
    return [(urljoin(address, html.unescape(link)), digest, html.unescape(file)) for link, digest, file in found]


def hashes(index: str, name: str, version: str) -> list[str]:
    """The sha256 of all files of a version."""
    found = {digest for _, digest, file in files_of(index, name) if _version(file) == Version(version)}
    if not found:
        raise SystemExit(f"{name}: the index has no file of version {version}")
    return sorted(found)


def wheels_in(folders: list[Path], name: str, version: str) -> set[str]:
    """The sha256 of the wheels for CPUs in folders."""
    wheels = [path for folder in folders for path in folder.glob(f"{name}-{version}+cpu-*.whl")]
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels}


def _version(file: str) -> Version | None:
    """The version of a file; None for wheels of Pythons that the project does not run on."""
    try:
        if not file.endswith(".whl"):
            return parse_sdist_filename(file)[1]
        _, version, _, tags = parse_wheel_filename(file)
    except ValueError:  # an installer of older days
        return None
    usable = any(tag.abi == "abi3" or tag.interpreter in PYTHONS for tag in tags)
    return version if usable else None


def cuda_packages(index: str, torch: str) -> dict[str, str]:
    """What torch's own wheel for Linux needs, package by package, by the metadata in the index (PEP 658)."""
    found: dict[str, str] = {}
    allowed = {"torch": SpecifierSet(f"=={torch}")}
    waiting = [Requirement("torch")]
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        found[name], needs = _chosen(index, name, allowed[name])
        for more in needs:
            wanted = more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in ("", *one.extras))
            other = canonicalize_name(more.name)
            known = allowed.setdefault(other, SpecifierSet())
            if wanted and other.startswith(CUDA) and (other not in found or known & more.specifier != known):
                allowed[other] = known & more.specifier
                waiting.append(more)
    del found["torch"]
    return found


def _chosen(index: str, name: str, allowed: SpecifierSet) -> tuple[str, list[Requirement]]:
    """The latest version that is allowed and whose metadata is in the index, and what it needs."""
    wheels = [(_version(file), link) for link, _, file in files_of(index, name) if file.endswith(LINUX)]
    for version, link in sorted(((v, link) for v, link in wheels if v and v in allowed), reverse=True):
        with contextlib.suppress(urllib.error.HTTPError):  # not every file has its metadata beside it
            told = urllib.request.urlopen(f"{link}.metadata", timeout=120).read().decode()
            return str(version), list(map(Requirement, re.findall(r"^Requires-Dist: (.*)$", told, re.MULTILINE)))
    raise SystemExit(f"{name}: no file {allowed} in the index says what it needs")


def lock(index: str, versions: dict[str, str], markers: Markers) -> str:
    """The lines of a lock file."""
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda one: hashes(index, *one), versions.items())
    lines = []
    for (name, version), digests in zip(versions.items(), found, strict=True):
        conditions = markers.get(name, {""})
        marker = "" if "" in conditions else f" ; {' or '.join(f'({one})' for one in sorted(conditions))}"
        lines.append(entry(name, version, marker, digests))
    return "".join(lines)


def entry(name: str, version: str, marker: str, digests: list[str]) -> str:
    return " \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{one}" for one in digests)]) + "\n"


def write_locks(index: str, wanted: dict[str, str], markers: Markers, links: list[Path]) -> dict[str, int]:
    """The three lock files; how many packages and files of torch there are."""
    torch = wanted.pop("torch")
    (ROOT / "requirements.lock").write_text(lock(index, wanted, markers))
    built = wheels_in(links, "torch", torch)
    (ROOT / "requirements-cpu.lock").write_text(entry("torch", f"{torch}+cpu", "", sorted(built)))
    cuda = {name: version for name, version in cuda_packages(index, torch).items() if name not in wanted}
    linux = {name: {'platform_system == "Linux"'} for name in cuda}
    (ROOT / "requirements-cuda.lock").write_text(lock(index, {"torch": torch, **dict(sorted(cuda.items()))}, linux))
    return {"cuda_packages": len(cuda), "cpu_wheels": len(built)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", default="", help="address of a package index")
    parser.add_argument("--links", type=Path, action="append", default=[], help="a folder with further wheels")
    parser.add_argument("--quick", action="store_true", help="say which packages there are, and write nothing")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    markers, versions = needed(), pinned()
    for one in metadata.distributions():  # the base of an environment, such as setuptools
        versions.setdefault(canonicalize_name(one.name), one.version)
    wanted = {name: versions[name] for name in sorted(markers) if name in versions}
    found: dict[str, object] = {"packages": len(wanted), "unknown": sorted(set(markers) - set(wanted))}
    if not chosen.quick:
        if not chosen.index:
            raise SystemExit("--index: give the address of a package index")
        found |= write_locks(chosen.index, wanted, markers, chosen.links)
    if chosen.json:
        chosen.json.write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
