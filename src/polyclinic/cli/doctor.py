"""`polyclinic doctor`: whether this machine can run Polyclinic, and what to do where it cannot. Needs no network."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import typer

from polyclinic.extras import EXTRAS, is_installed

OLDEST_PYTHON = (3, 11)
LEAST_MEMORY, LEAST_DISK = 4e9, 2e9
PORT = 8002  #: of a deployment's server, and the one after it
#: packages by the extra that brings them, and what it is for
State = Literal["fine", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is as it should be, and in words."""

    about: str
    state: State
    words: str


def doctor(
    quick: bool = typer.Option(False, "--quick", help="Do not import torch, nor look for a GPU: a second at most."),
    as_json: bool = typer.Option(False, "--json", help="Print a JSON list."),
) -> None:
    """Look at this machine: Python, torch, GPU, memory, disk, cache, extras, ports, clock, permissions."""
    found = list(examine(quick=quick))
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=1))
    else:
        marks = {"fine": "fine ", "note": "note ", "wrong": "WRONG"}
        for one in found:
            typer.echo(f"{marks[one.state]}  {one.about:<11}  {one.words}")
    if any(one.state == "wrong" for one in found):
        raise typer.Exit(1)


def examine(*, quick: bool) -> Iterator[Finding]:
    """All findings, in the order of the list; whatever a look itself cannot do is a finding, too."""
    looks: list[Callable[[], Finding]] = [look_at_python, look_at_version_of_torch if quick else look_at_torch]
    looks += [] if quick else [look_at_gpu]
    looks += [look_at_memory, look_at_disk, look_at_cache, look_at_extras, look_at_ports, look_at_clock]
    looks += [look_at_permissions]
    for look in looks:
        try:
            yield look()
        except Exception as error:
            about = look.__name__.rpartition("_")[2]
            yield Finding(about, "wrong", f"cannot be looked at: {type(error).__name__}: {error}")


def look_at_python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return Finding("Python", "wrong", f"{version}; install Python {wanted} or newer")
    return Finding("Python", "fine", f"{version}, {sys.executable}")


def look_at_version_of_torch() -> Finding:
    try:
        return Finding("torch", "fine", f"{metadata.version('torch')} (not imported: --quick)")
    except metadata.PackageNotFoundError:
        return NO_TORCH


NO_TORCH = Finding("torch", "wrong", "is not installed; pip install torch")


def look_at_torch() -> Finding:
    try:
        import torch
    except Exception as error:
        return Finding("torch", "wrong", f"cannot be imported ({error}); pip install --force-reinstall torch")
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if not bool((product == 8).all()):
        return Finding("torch", "wrong", f"{torch.__version__} computes wrongly; reinstall it for this machine")
    counts = f"{_counted(torch.get_num_threads(), 'thread')}, {_counted(os.cpu_count() or 1, 'core')}"
    return Finding("torch", "fine", f"{torch.__version__}, {counts}")


def look_at_gpu() -> Finding:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        words = f"{torch.cuda.get_device_name()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        return Finding("GPU", "fine" if free > LEAST_MEMORY else "note", words)
    if shutil.which("nvidia-smi"):
        return Finding("GPU", "note", "there is one, and torch cannot use it; install the torch build with CUDA")
    return Finding("GPU", "note", "none; small images and networks train on the CPU")


def look_at_memory() -> Finding:
    if not hasattr(os, "sysconf"):
        return Finding("memory", "note", "cannot be measured on this system")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total < LEAST_MEMORY:
        return Finding("memory", "note", f"{total / 1e9:.1f} GB are few; set engine.workers = 1 and a small data.size")
    return Finding("memory", "fine", f"{total / 1e9:.0f} GB")


def look_at_disk() -> Finding:
    from polyclinic.files import cache_folder

    places = {"here": Path(), "for the cache": _nearest(cache_folder())}
    free = {name: shutil.disk_usage(place).free for name, place in places.items()}
    words = ", ".join(f"{count / 1e9:.0f} GB free {name}" for name, count in free.items())
    if min(free.values()) < LEAST_DISK:
        return Finding("disk", "wrong", f"{words}; `polyclinic data clean` empties the cache of prepared images")
    return Finding("disk", "fine", words)


def look_at_cache() -> Finding:
    from polyclinic.files import cache_folder

    folder = cache_folder()
    place = _nearest(folder)
    if not os.access(place, os.W_OK):
        return Finding("cache", "wrong", f"{folder} cannot be written; set POLYCLINIC_CACHE to a folder that can")
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    return Finding("cache", "fine", f"{folder}, {used / 1e9:.1f} GB")


def look_at_extras() -> Finding:
    there = [name for name, (module, _) in EXTRAS.items() if is_installed(module)]
    missing = [f"{name}: {what}" for name, (_, what) in EXTRAS.items() if name not in there]
    words = f"installed: {', '.join(there) or 'none'}"
    if not missing:
        return Finding("extras", "fine", words)
    return Finding("extras", "note", f"{words}; not installed: {'; '.join(missing)} (pip install 'polyclinic[NAME]')")


def look_at_ports() -> Finding:
    taken = [port for port in (PORT, PORT + 1) if not _is_free(port)]
    if taken:
        ports = ", ".join(map(str, taken))
        return Finding("ports", "note", f"{ports} in use; a server of `polyclinic deploy` needs another --port")
    return Finding("ports", "fine", f"{PORT} and {PORT + 1} are free for a server of `polyclinic deploy`")


def look_at_clock() -> Finding:
    installed = Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if time.time() < installed - 3600:
        return Finding("clock", "wrong", f"{now} is before Polyclinic was installed; set it: certificates need it")
    return Finding("clock", "fine", f"{now}; certificates of a deployment need the right time")


def look_at_permissions() -> Finding:
    try:
        with tempfile.TemporaryDirectory(dir=Path()) as folder:
            (Path(folder) / "a").write_text("b", encoding="utf-8")
    except OSError as error:
        return Finding("permissions", "wrong", f"{Path().resolve()} cannot be written ({error.strerror}); go elsewhere")
    return Finding("permissions", "fine", f"{Path().resolve()} can be written")


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _nearest(folder: Path) -> Path:
    """The folder, or the first of those above it that exists."""
    return next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
