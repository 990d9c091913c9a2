"""Several runs on one GPU at a time: NVIDIA's MPS lets their kernels run side by side instead of in turns."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from polyclinic.errors import BadInput

CONTROL = "nvidia-cuda-mps-control"
#: MPS keeps sockets in its folder, whose paths must be short
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
SECONDS = 30  # that the service gets to begin or to end


@contextlib.contextmanager
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
    with contextlib.ExitStack() as undone:
        for name in (PIPES, LOGS):
            os.environ[name] = str(folder)
            undone.callback(os.environ.pop, name)
        _tell(control, "-d")
        undone.callback(_tell, control, text="quit\n")
        yield


def _tell(control: str, *flags: str, text: str = "") -> None:
    """BadInput where the service answers with an error, or not at all."""
    # a service keeps its output open, so that only its end could be waited for: it gets none
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        subprocess.run([control, *flags], input=text, **nowhere, text=True, timeout=SECONDS, check=True)  # type: ignore[call-overload]
    except (OSError, subprocess.SubprocessError) as error:
        raise BadInput(f"--mps: {CONTROL} did not answer ({error}); leave --mps out") from None
