"""`polyclinic doctor`: whether this machine can run Polyclinic, and what to do where it cannot. It needs no network.
`polyclinic bench`: how fast this machine is, in about two minutes."""

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from polyclinic.extras import EXTRAS, is_installed

if TYPE_CHECKING:
    from polyclinic.runner.compare.bench import Measured

OLDEST_PYTHON = (3, 11)
LEAST_MEMORY, LEAST_DISK = 4e9, 2e9
PORT = 8002  #: of a deployment's server, and the one after it
State = Literal["fine", "note", "wrong"]
Found = tuple[State, str]


@dataclass(frozen=True)
class Finding:
    """A part of the machine, whether it is as it should be, and in words."""

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
    looks = {"Python": look_at_python, "torch": look_at_version_of_torch if quick else look_at_torch}
    looks |= {} if quick else {"GPU": look_at_gpu}
    looks |= {"memory": look_at_memory, "disk": look_at_disk, "cache": look_at_cache, "extras": look_at_extras}
    looks |= {"ports": look_at_ports, "clock": look_at_clock, "permissions": look_at_permissions}
    for about, look in looks.items():
        try:
            yield Finding(about, *look())
        except Exception as error:
            yield Finding(about, "wrong", f"cannot be looked at: {type(error).__name__}: {error}")


def look_at_python() -> Found:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        return "wrong", f"{version}; install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    return "fine", f"{version}, {sys.executable}"


def look_at_version_of_torch() -> Found:
    try:
        return "fine", f"{metadata.version('torch')} (not imported: --quick)"
    except metadata.PackageNotFoundError:
        return "wrong", "is not installed; pip install torch"


def look_at_torch() -> Found:
    try:
        import torch
    except Exception as error:
        return "wrong", f"cannot be imported ({error}); pip install --force-reinstall torch"
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    if not bool((product == 8).all()):
        return "wrong", f"{torch.__version__} computes wrongly; reinstall it for this machine"
    counts = {"thread": torch.get_num_threads(), "core": os.cpu_count() or 1}
    return "fine", ", ".join([torch.__version__, *(f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items())])


def look_at_gpu() -> Found:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        words = f"{torch.cuda.get_device_name()}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        return "fine" if free > LEAST_MEMORY else "note", words
    if shutil.which("nvidia-smi"):
        return "note", "there is one, and torch cannot use it; install the torch build with CUDA"
    return "note", "none; small images and networks train on the CPU"


def look_at_memory() -> Found:
    if not hasattr(os, "sysconf"):
        return "note", "cannot be measured on this system"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total < LEAST_MEMORY:
        return "note", f"{total / 1e9:.1f} GB are few; set engine.workers = 1 and a small data.size"
    return "fine", f"{total / 1e9:.0f} GB"


def look_at_disk() -> Found:
    from polyclinic.files import cache_folder

    places = {"here": Path(), "for the cache": _nearest(cache_folder())}
    free = {name: shutil.disk_usage(place).free for name, place in places.items()}
    words = ", ".join(f"{count / 1e9:.0f} GB free {name}" for name, count in free.items())
    if min(free.values()) < LEAST_DISK:
        return "wrong", f"{words}; `polyclinic data clean` empties the cache of prepared images"
    return "fine", words


def look_at_cache() -> Found:
    from polyclinic.files import cache_folder

    folder = cache_folder()
    if not os.access(_nearest(folder), os.W_OK):
        return "wrong", f"{folder} cannot be written; set POLYCLINIC_CACHE to a folder that can"
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return "fine", f"{folder}, {used / 1e9:.1f} GB"


def look_at_extras() -> Found:
    there = [name for name, (module, _) in EXTRAS.items() if is_installed(module)]
    missing = [f"{name}: {what}" for name, (_, what) in EXTRAS.items() if name not in there]
    words = f"installed: {', '.join(there) or 'none'}"
    if not missing:
        return "fine", words
    return "note", f"{words}; not installed: {'; '.join(missing)} (pip install 'polyclinic[NAME]')"


def look_at_ports() -> Found:
    taken = [str(port) for port in (PORT, PORT + 1) if not _is_free(port)]
    if taken:
        return "note", f"{', '.join(taken)} in use; a server of `polyclinic deploy` needs another --port"
    return "fine", f"{PORT} and {PORT + 1} are free for a server of `polyclinic deploy`"


def look_at_clock() -> Found:
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if time.time() < Path(__file__).stat().st_mtime - 3600:
        return "wrong", f"{now} is before Polyclinic was installed; set it: certificates need it"
    return "fine", f"{now}; certificates of a deployment need the right time"


def look_at_permissions() -> Found:
    try:
        with tempfile.TemporaryDirectory(dir=Path()) as folder:
            (Path(folder) / "a").write_text("b", encoding="utf-8")
    except OSError as error:
        return "wrong", f"{Path().resolve()} cannot be written ({error.strerror}); go elsewhere"
    return "fine", f"{Path().resolve()} can be written"


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


def bench(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    out: Path | None = typer.Option(None, "--out", help="Also write the JSON object to this file."),
) -> None:
    """Measure this machine: rounds beside a plain loop, and in two worker processes, each in a few seconds."""
    from polyclinic.files import check_place
    from polyclinic.runner.compare.bench import measure

    if out:
        check_place(out)

    def show(row: "Measured") -> None:
        if not as_json:
            typer.echo(f"{row.value:>10} {row.unit:<3} {row.what}")

    figures = measure(show)
    if as_json:
        typer.echo(json.dumps(figures))
    if out:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
