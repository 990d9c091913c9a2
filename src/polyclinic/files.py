"""Files: atomic writes of files, tensors and folders, locks between processes, digests, the cache folder.

What is written atomically lies under its name as a whole or not at all, whenever the writing process is killed. It is
written beside its place, as `<name>.partial`, and renamed: so two processes that may write the same file hold a lock.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from polyclinic.errors import BadInput, Damaged, StorageFailed
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

#: how the names of unfinished files and folders end
PARTIAL = ".partial"
#: so many files are brought to disk with one call for all files of the machine instead of one call each
SYNC_ALL_FROM = 16
#: bytes of a file's name that systems allow
LONGEST_NAME = 255
#: where the header of a safetensors file has the digest of its tensors
_DIGEST = "sha256"
#: and where it has the folder and name that it was written under, where another file's content is no less than damage
_PLACE = "place"
#: what a system says of a disk that is full, may not be written, or is broken, and the cure
STORAGE_ERRORS = {
    errno.ENOSPC: "make room",
    getattr(errno, "EDQUOT", errno.ENOSPC): "make room",
    errno.EFBIG: "the system allows no file of this size",
    errno.EROFS: "the disk cannot be written",
    errno.EIO: "check the disk",
}

# --- atomic writes ------------------------------------------------------------------------------------


def atomic_write(path: Path, content: str | bytes, *, private: bool = False, durable: bool = False) -> None:
    """Write a file atomically; text becomes UTF-8. `private`: no other user of this machine may read it. `durable`: it
    is on disk when this returns, and survives a loss of power."""
    with atomic_file(path) as partial:
        if private:
            partial.unlink(missing_ok=True)
            partial.touch(mode=0o600)
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        if durable:
            sync_file(partial)
    if durable:
        sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Write at the end of a file, which is made if there is none. Without a buffer, which takes a while to make."""
    with open(path, "ab", buffering=0) as file:
        while content:  # a disk that is nearly full takes a part
            content = content[file.write(content) :]


def sync_file(path: Path) -> None:
    """Have the content of a file on disk when this returns (fsync)."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_files(paths: Sequence[Path]) -> None:
    """Have the content and the names of several files on disk when this returns."""
    if len(paths) > SYNC_ALL_FROM and hasattr(os, "sync"):
        os.sync()
        return
    for path in paths:
        sync_file(path)
    for folder in dict.fromkeys(path.parent for path in paths):
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk when this returns; Windows does that by itself."""
    if os.name == "nt":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def make_folder_durable(folder: Path) -> None:
    """Create a folder and those above it; all their names are on disk when this returns."""
    if folder.exists():
        return
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for new in missing:
        sync_folder(new.parent)


def storage_sentence(error: OSError) -> str:
    """What a failed read or write means to a user: the file, the reason, the cure."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes | os.PathLike) else ""
    if error.errno == errno.ENAMETOOLONG:
        longest = max(name.split(os.sep), key=len)
        return f"the name '{longest[:20]}...' has over {LONGEST_NAME} bytes; take a shorter one"
    place = f"{name}: " if name else ""
    cure = STORAGE_ERRORS.get(error.errno or 0)
    return f"{place}{error.strerror or error}" + (
        f"; {cure}, then do this again or go on with --resume" if cure else ""
    )


def read_json(path: Path) -> JsonObject:
    """A file that holds a JSON object; Damaged if it is missing or holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except (ValueError, RecursionError):
        raise Damaged(f"{path}: is damaged (it is not JSON); bring it back from a copy") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror}); bring it back from a copy") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path}: is damaged (it holds no JSON object); bring it back from a copy")
    return found


def write_tensors(path: Path, tensors: "Mapping[str, Tensor]", *, durable: bool = False, placed: bool = False) -> None:
    """Write tensors atomically, as a safetensors file whose header has their digest; `durable` as in `atomic_write`.
    `placed`: they are read again under this name, in a folder of this name, or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    copies = contiguous_cpu_copies(tensors)
    with atomic_file(path) as partial:
        try:
            place = {_PLACE: f"{path.parent.name}/{path.name}"} if placed else {}
            save_file(copies, partial, {_DIGEST: digest_of_tensors(copies)} | place)
        except SafetensorError as error:  # a full disk, say
            raise StorageFailed(f"{path}: cannot be written ({error}); make room, then go on with --resume") from None
        if durable:
            sync_file(partial)
    if durable:
        sync_folder(path.parent)


def read_tensors(path: Path) -> "dict[str, Tensor]":
    """The tensors of a safetensors file, in memory: the file may be removed or replaced from now on.

    Damaged if it is missing, or if its tensors are not those that `write_tensors` wrote.
    `safetensors.torch.load_file` maps the file instead, and Windows removes no file that is mapped.
    """
    from safetensors import SafetensorError

    try:
        content = path.read_bytes()
        tensors = decode_tensors(content)
        metadata = _header(content).get("__metadata__") or {}
        noted, place = metadata.get(_DIGEST), metadata.get(_PLACE)
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except (SafetensorError, ValueError, KeyError, AttributeError, OverflowError, RecursionError, TypeError) as error:
        raise Damaged(f"{path}: is damaged and cannot be read ({error})") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror})") from None
    if noted is not None and digest_of_tensors(tensors) != noted:
        raise Damaged(f"{path}: is damaged (its SHA-256 is not the one that was noted when it was written)")
    if place not in (None, f"{path.parent.name}/{path.name}"):
        raise Damaged(f"{path}: is damaged (it holds what was written as {place})")
    return tensors


def digest_of_tensors(tensors: "Mapping[str, Tensor]") -> str:
    """SHA-256 of names, types, shapes and bytes of contiguous tensors on the CPU, in the order of their names."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def decode_tensors(content: bytes) -> "dict[str, Tensor]":
    """The tensors of safetensors bytes, in the order of the file: `safetensors.torch.load` gives them in another order
    in every process."""
    from safetensors.torch import load

    tensors = load(content)
    header = _header(content)
    names = sorted(tensors, key=lambda name: (header[name]["data_offsets"], name))
    return {name: tensors[name] for name in names}


def _header(content: bytes) -> dict:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def contiguous_cpu_copies(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Tensors as safetensors writes them: on the CPU, contiguous, copied where they share memory."""
    seen: set[int] = set()
    result = {}
    for name, given in tensors.items():
        tensor = given.detach().cpu().contiguous()
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return result


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A place to write a file to, which becomes `path` when the block ends well and vanishes when it does not."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `folder` when the block ends well and vanishes when it does not."""
    partial = folder.with_name(f".{folder.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --- locks --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lock(path: Path, wait: float | None = None) -> Iterator[None]:
    """Hold a lock file: one process at a time, until the block or the process ends, however it ends.

    `wait`: seconds to wait for another process that holds it, then TimeoutError; None: as long as it takes.
    """
    with FileLock(path, timeout=-1 if wait is None else wait):
        yield


# --- the cache folder, digests ------------------------------------------------------------------------


def cache_folder(chosen: Path | None = None) -> Path:
    """The folder chosen, else $POLYCLINIC_CACHE, else polyclinic in the user's cache folder."""
    if chosen is not None:
        return Path(chosen)
    if given := os.environ.get("POLYCLINIC_CACHE"):
        return Path(given)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "polyclinic"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyclinic"


def make_folder(folder: Path) -> None:
    """Creates the folder, for its owner alone, and its parents, or says which setting names a better place."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise BadInput(f"POLYCLINIC_CACHE: cannot write in '{folder.parent}' ({reason}); set it elsewhere") from None


def check_place(place: Path, flag: str = "--out") -> None:
    """BadInput where no file or folder can be made at `place`, which need not be there, nor the folders above it. The
    flag that names it is '' for an argument."""
    for part in place.parts:
        if len(os.fsencode(part)) > LONGEST_NAME:
            start = f"{flag or 'path'}: the name '{part[:20]}...'"
            raise BadInput(f"{start} has over {LONGEST_NAME} bytes; take a shorter one")
    named = f"{flag} {place}".strip()
    nearest = next((above for above in (place, *place.parents) if above.exists()), Path())
    if nearest != place and not nearest.is_dir():
        raise BadInput(f"{named}: {nearest} is a file, not a folder; name another place")
    try:
        writable = os.access(nearest, os.W_OK)
        with tempfile.TemporaryFile(dir=nearest) if nearest.is_dir() else contextlib.nullcontext():
            pass
    except OSError:  # a place such as /proc, in which nobody makes a file
        writable = False
    if not writable:
        raise BadInput(f"{named}: {nearest} cannot be written; name another place, or change its permissions")


def make_private(folder: Path) -> None:
    """No other user of this machine may read the folder, or anything in it."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)


def digest_of(description: object) -> str:
    """A name of 32 hex digits for a description in plain values (dicts, lists, strings, numbers)."""
    text = json.dumps(description, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def human_bytes(count: float) -> str:
    """`1.4 MB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, or "" if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
