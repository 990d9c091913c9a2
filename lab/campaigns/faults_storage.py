"""Faults of storage: `kill -9` at changes of files, power cuts that lose what was not synced, a disk that is full.

One run is recorded. At each change of a file the folder is copied twice: as a killed process leaves it, and as a loss
of power may leave it. The loss follows POSIX and no kinder file system: the content of a file is sure as of its last
fsync, the names in a folder as of the folder's last fsync; what came later may be there, in part, or not at all.
"""

import errno
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from faults_children import Outcome, Trial, in_child, problem_of, resume, tail

from polyclinic.cli import run_app

#: changes that Python tells its audit hooks before they happen
CHANGES = ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir")


def watch_changes(folder: Path, act: Callable[[str], None]) -> None:
    """From now on, in this process, call `act` before every change of a file or name in the folder."""
    inside = f"{folder}/"

    def hook(event: str, arguments: tuple) -> None:
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not _writes(arguments):
            return
        name = os.fspath(arguments[1 if event == "os.rename" else 0])
        if isinstance(name, str) and f"{name}/".startswith(inside):
            act(f"{event} {name.removeprefix(inside)}")

    sys.addaudithook(hook)


def _writes(arguments: tuple) -> bool:
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


class Disk:
    """What of a folder is surely on disk, while a process writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.synced: dict[int, bytes] = {}  # inode -> content at its last fsync
        self.listings: dict[int, list[dict[str, int]]] = {}  # inode of a folder -> what its names may be after a cut
        self._fsync, self._sync = os.fsync, getattr(os, "sync", lambda: None)
        os.fsync = self._on_fsync
        if hasattr(os, "sync"):
            os.sync = self._on_sync

    def _on_fsync(self, file: int) -> None:
        found = os.fstat(file)
        path = os.readlink(f"/proc/self/fd/{file}")
        if os.path.isdir(path):
            self.listings[found.st_ino] = [_names(path)]
        else:
            self.synced[found.st_ino] = Path(path).read_bytes()
        self._fsync(file)

    def _on_sync(self) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            if path.is_dir():
                self.listings[path.stat().st_ino] = [_names(path)]
            elif path.is_file():
                self.synced[path.stat().st_ino] = path.read_bytes()

    def note_names(self) -> None:
        """Remember the names as they are now: a cut may leave any state since the last sync."""
        for path in [self.folder, *(found for found in self.folder.rglob("*") if found.is_dir())]:
            known = self.listings.setdefault(path.stat().st_ino, [{}])
            if (now := _names(path)) != known[-1]:
                known.append(now)

    def after_cut(self, target: Path, draw: random.Random) -> None:
        """Write what a loss of power leaves of the folder."""
        places = {path.stat().st_ino: path for path in self.folder.rglob("*")}
        self._leave(self.folder.stat().st_ino, target, places, draw)

    def _leave(self, inode: int, target: Path, places: dict[int, Path], draw: random.Random) -> None:
        target.mkdir(parents=True, exist_ok=True)
        listings = self.listings.get(inode, [{}])
        chosen = draw.choice([listings[0], listings[-1], draw.choice(listings)])
        for name, file in chosen.items():
            now = places.get(file)
            if file in self.listings or (now and now.is_dir()):
                self._leave(file, target / name, places, draw)
            elif now is not None or file in self.synced:  # else it was removed and its blocks are free
                content = _torn(self.synced.get(file, b""), now.read_bytes() if now else None, draw)
                (target / name).write_bytes(content)


def _names(path: str | Path) -> dict[str, int]:
    with os.scandir(path) as found:
        return {entry.name: entry.inode() for entry in found if not entry.is_symlink()}


def _torn(synced: bytes, now: bytes | None, draw: random.Random) -> bytes:
    """The content of a file after a cut: as synced, as it is now, or something between."""
    if now is None or now == synced:
        return synced
    if now.startswith(synced):
        kept = draw.choice([len(synced), len(now), draw.randint(len(synced), len(now))])
        filled = draw.random() < 0.3  # the length is there, the blocks are not
        return now[:kept] + (bytes(len(now) - kept) if filled else b"")
    return draw.choice([synced, now, now[: draw.randint(0, len(now))]])


def record(arguments: list[str], folder: Path, images: Path, draw: random.Random, share: float = 1.0) -> Outcome:
    """Run a command and copy its folder at a share of its changes: `images/<n>-killed`, `images/<n>-cut`."""
    seed = draw.random()

    def work() -> int:
        own, count = random.Random(seed), iter(range(10**6))
        folder.mkdir(parents=True, exist_ok=True)
        disk = Disk(folder)
        busy = []

        def act(change: str) -> None:
            if busy:
                return
            busy.append(change)
            disk.note_names()
            if own.random() < share:
                place = images / f"{next(count):04d}"
                shutil.copytree(folder, f"{place}-killed", ignore_dangling_symlinks=True)
                disk.after_cut(Path(f"{place}-cut"), own)
                Path(f"{place}-change").write_text(change)
            busy.clear()

        images.mkdir(parents=True)
        watch_changes(folder, act)
        return run_app(arguments)

    return in_child(work)


def resumed_images(images: Path, expected: str, ending: str, kind: str, study: Path) -> Iterator[Trial]:
    """Resume what each recorded kill or cut left; a run that had not begun yet begins."""
    for image in sorted(images.glob(f"*-{ending}")):
        change = Path(str(image).replace(f"-{ending}", "-change")).read_text()
        yield resumed(image, expected, kind, change, study)
        shutil.rmtree(image, ignore_errors=True)


def resumed(folder: Path, expected: str, kind: str, what: str, study: Path) -> Trial:
    """Resume with the study, as a user does who begins a run again, or, in every second folder, without."""
    if not (folder / "study.toml").exists():
        outcome = in_child(lambda: run_app(["run", str(study), "--resume", "--quiet", "--out", str(folder)]))
    else:
        outcome = resume(folder)
    problem = problem_of(outcome, folder, expected)
    return Trial(kind, what, problem, tail(outcome) if problem else "", outcome.seconds)


def killed_anywhere(study: Path, folder: Path, seconds: float) -> bool:
    """Run the study and `kill -9` it after so many seconds; whether it was still at work."""
    work = lambda: run_app(["run", str(study), "--quiet", "--out", str(folder)])  # noqa: E731
    return in_child(work, kill_after=seconds).code == -signal.SIGKILL


def killed_at_change(study: Path, folder: Path, number: int) -> bool:
    """Run the study and `kill -9` it just before its so-manieth change of a file; whether it had as many."""
    left = [number]

    def act(change: str) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> int:
        watch_changes(folder, act)
        return run_app(["run", str(study), "--quiet", "--out", str(folder)])

    return in_child(work).code == -signal.SIGKILL


def full_disk(study: Path, folder: Path, expected: str, draw: random.Random) -> list[Trial]:
    """The disk is full from a random change on, or for files above a size; then there is room again: resume."""
    # what a child prints is a file, too, and must be allowed
    change, size = draw.randint(1, 120), draw.choice([1000, 3000, 20_000, 100_000, 200_000])
    by_size = draw.random() < 0.5
    what = f"files above {size} bytes" if by_size else f"full from change {change} on"

    def work() -> int:
        if by_size:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        else:
            watch_changes(folder, full_from(change))
        code = run_app(["run", str(study), "--quiet", "--out", str(folder)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return code

    outcome = in_child(work)
    problem = problem_of(outcome, folder, expected)
    first = Trial("full disk", what, problem, tail(outcome) if problem else "", outcome.seconds)
    if not folder.exists():
        return [first]
    return [first, resumed(folder, expected, "resumed after a full disk", what, study)]


def full_from(change: int) -> Callable[[str], None]:
    left = [change]

    def act(what: str) -> None:
        left[0] -= 1
        if left[0] <= 0 and not what.startswith(("os.remove", "os.rmdir")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return act
