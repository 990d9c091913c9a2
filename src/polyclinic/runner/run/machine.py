"""What `[engine]` means on this machine: the device, its precision, CUDA graphs, the order of sums, memory."""

import ctypes
import functools
import os
import sys

import torch

from polyclinic.errors import BadInput
from polyclinic.study.tables import EngineSettings


def device_of(name: str) -> str:
    """The device that `engine.device` means on this machine."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"engine.device: torch knows no device '{name}'; write auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"engine.device: there is no GPU for '{name}' here; set engine.device = 'cpu' or 'auto'")
    return name


def precision_of(name: str, device: str) -> str:
    return name if name != "auto" else "fp32" if device == "cpu" else "bf16"


def record_steps(engine: EngineSettings, device: str) -> bool:
    """Whether training steps are recorded as CUDA graphs."""
    return engine.graphs is not False and device != "cpu" and not engine.reproducible


def fix_order_of_sums() -> None:
    """Have a GPU add numbers up in the same order every time, as far as it can; for the rest of this process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


#: options of glibc's `mallopt`
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
#: blocks up to so many bytes come from memory that is kept, the largest that glibc allows; and what is kept at its end
KEPT_BLOCKS, KEPT_AT_END, AHEAD = 2**25, 2**28, 2**24


@functools.cache
def keep_freed_memory(processes: int = 1) -> bool:
    """For this process, one of so many on this machine that keep their freed memory. Whether it was done."""
    set_by_user = any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ)
    if not sys.platform.startswith("linux") or set_by_user:
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018  (another C library has no such function)
        chosen = ((MMAP_THRESHOLD, KEPT_BLOCKS), (TRIM_THRESHOLD, kept_at_end(processes)), (TOP_PAD, AHEAD))
        return sum(bool(libc.mallopt(option, value)) for option, value in chosen) == len(chosen)
    except (OSError, AttributeError):
        return False


def kept_at_end(processes: int) -> int:
    """Freed bytes that each of so many processes keeps at the end of its memory: together at most a 32nd of the
    machine's, where that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(AHEAD, min(KEPT_AT_END, memory // 32 // max(1, processes)))
