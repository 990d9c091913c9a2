"""End this process when another one ends: a process that was killed cannot end those that it started."""

from __future__ import annotations

import os
import threading
import time

#: seconds between looks at the other process
LOOK = 0.2


def end_with(pid: int) -> None:
    """From now on, end this process at once when process `pid` is gone; now, if it is gone already."""
    import psutil

    def gone() -> bool:
        try:
            return not other.is_running() or other.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def watch() -> None:
        while not gone():
            time.sleep(LOOK)
        os._exit(1)

    try:
        other = psutil.Process(pid)
    except psutil.NoSuchProcess:
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()
