"""Several runs on one GPU at a time: NVIDIA's MPS lets their kernels run side by side instead of in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyclinic.errors import BadInput

CONTROL = "nvidia-cuda-mps-control"
#: MPS keeps sockets in its folder, whose paths must be short
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 30  # that the service gets to begin or to end


@contextmanager
def mps(folder: Path) -> Iterator[None]:
    """MPS for all processes that are started within, with its files in `folder`; one that runs already is used.

    BadInput where this machine has no such service, or it does not begin.
    """
    if PIPES in os.environ:
        yield
        return
    control = shutil.which(CONTROL)
    if control is None:
        raise BadInput(f"--mps: there is no {CONTROL} on this machine; leave --mps out, or install NVIDIA's driver")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {PIPES: str(folder), LOGS: str(folder)}
    try:
        _tell(control, "-d")
        try:
            yield
        finally:
            _tell(control, text="quit\n")
    finally:
        for name in (PIPES, LOGS):
            del os.environ[name]


def _tell(control: str, *flags: str, text: str | None = None) -> None:
    """BadInput where the service answers with an error, or not at all."""
    try:
        # a service keeps its output open, so that only its end could be waited for: it gets none
        subprocess.run(
            [control, *flags],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BadInput(f"--mps: {CONTROL} did not answer ({error}); leave --mps out") from None
