"""torch's compiler (inductor) as we use it: one process, no clock, and files where nobody else can write.

What it has compiled is code that later runs load again, in seconds.
"""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from pathlib import Path
from typing import Any

import torch

from polyclinic.errors import BadInput
from polyclinic.files import cache_folder, digest_of, make_folder

#: the variable that says where torch keeps what it has compiled
TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def inductor_options() -> dict[str, Any]:
    """How torch's compiler works for us; it keeps its files where nobody else can write."""
    # torch writes its own choice there when its compiler is imported: a folder for all users
    shared = os.path.join(tempfile.gettempdir(), "torchinductor_")
    if (os.environ.get(TORCH_CACHE) or shared).startswith(shared):
        os.environ[TORCH_CACHE] = str(_private_folder())
    from torch._inductor import config

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        # up to 32 helper processes would stay with every worker, take the cores of the others, and outlive Ctrl-C
        config.compile_threads = 1
    # dropout draws as an ordinary pass does; kernels are not chosen by a clock, where torch can be told so
    options = {"fallback_random": True, "deterministic": True, "cpp_cache_precompile_headers": _move_headers()}
    return {name: value for name, value in options.items() if hasattr(config, name)}


def _move_headers() -> bool:
    """Precompiled headers halve the time of compilation, but torch keeps them in the folder for all users whatever is
    chosen. Have them beside the rest; False where this torch keeps them in another way, and they are better not used.
    """
    from torch._inductor import codecache

    if not hasattr(codecache, "_HEADER_DIR"):
        return False
    codecache._HEADER_DIR = os.path.join(os.environ[TORCH_CACHE], "precompiled_headers")
    codecache._HEADER_LOCK_DIR = os.path.join(codecache._HEADER_DIR, "locks")
    return True


def _private_folder() -> Path:
    """Where compiled code is kept, which is loaded again later: BadInput if others can write there. Code for one
    processor may not run on another that sees the same folder."""
    folder = cache_folder() / "compiled" / digest_of({"cpu": _processor(), "threads": torch.get_num_threads()})
    make_folder(folder.parent)
    make_folder(folder)
    for one in (folder.parent, folder):
        if not _is_own(one.lstat()):
            raise BadInput(
                f"'{one}' is a link, somebody else's, or can be written by others, and code is loaded from there; "
                f"delete it, or name a folder of your own in {TORCH_CACHE}"
            )
    for above in folder.resolve().parents:
        if _is_shared(above.stat()):
            raise BadInput(
                f"'{above}' can be written by others, who could put other code into it, and code is loaded from there; "
                f"name a folder of your own in {TORCH_CACHE}"
            )
    return folder


def _is_own(found: os.stat_result) -> bool:
    """Whether it is a folder, no link, that is the user's and that nobody else can write."""
    own = os.name == "nt" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return own and stat.S_ISDIR(found.st_mode)


def _is_shared(found: os.stat_result) -> bool:
    """Whether others can put another folder in the place of one in it. The user's own group may write: many systems
    make a group for each user."""
    if os.name == "nt" or found.st_mode & stat.S_ISVTX:  # in a folder like /tmp nobody moves what others own
        return False
    return bool(found.st_mode & 0o002) or bool(found.st_mode & 0o020 and found.st_gid != os.getgid())


def _processor() -> str:
    """What the processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return " ".join(sorted(set(told)))
