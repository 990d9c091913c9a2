"""Python loads this file at its start, in this process and in those it starts, when its folder is on PYTHONPATH.

From then on polyclinic's own modules see Python as on Windows: no `fcntl`, no `fork`, no POSIX signals, no `select` on
pipes, no inherited descriptors, a parent's number that never changes. In the folder $NO_POSIX_IN, nobody renames onto a
file that exists, and nobody removes or replaces a file that one of these processes has open or mapped into memory.
"""

import builtins
import os
import signal
import subprocess
import types
from pathlib import Path

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog", "_posixsubprocess"}
PARENT = os.getppid()
KEPT = {"SIGINT", "SIGTERM", "SIGABRT", "SIG_DFL", "SIG_IGN"}
NOT_IN_OS = """
fork forkpty getuid geteuid getgid getpgid setsid setpgid killpg waitid uname sysconf sched_getaffinity set_blocking
mkfifo chown nice getloadavg O_NONBLOCK O_CLOEXEC register_at_fork pipe2 posix_spawn posix_spawnp openpty
"""
NOT_IN_SIGNAL = "alarm setitimer pthread_kill pthread_sigmask sigwait pause"
ATTRIBUTES = {
    "os": set(NOT_IN_OS.split()),
    "signal": {name for name in dir(signal) if name.startswith("SIG")} - KEPT | set(NOT_IN_SIGNAL.split()),
    "select": {"select", "poll", "epoll"},
    "multiprocessing": {"get_context"},
}


class Popen(subprocess.Popen):
    def __init__(self, *arguments, **keywords):
        if keywords.get("pass_fds") or keywords.get("preexec_fn"):
            raise ValueError("pass_fds and preexec_fn are not supported on Windows")
        super().__init__(*arguments, **keywords)


INSTEAD = {("os", "getppid"): lambda: PARENT, ("subprocess", "Popen"): Popen}


class Without(types.ModuleType):
    """A module as polyclinic sees it."""

    def __init__(self, module):
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name):
        if name in ATTRIBUTES.get(self.__name__, ()):
            raise AttributeError(f"{self.__name__}.{name} is hidden")
        return INSTEAD.get((self.__name__, name)) or getattr(self._module, name)


real_import = builtins.__import__


def import_as_on_windows(name, globals=None, locals=None, fromlist=(), level=0):
    importer = f"{(globals or {}).get('__package__') or (globals or {}).get('__name__')}."
    if level == 0 and importer.startswith("polyclinic."):
        if name.split(".")[0] in MODULES:
            raise ImportError(f"{name} is hidden")
        module = real_import(name, globals, locals, fromlist, level)
        seen = {*ATTRIBUTES, *(of for of, _ in INSTEAD)}
        return Without(module) if module.__name__ in seen else module
    return real_import(name, globals, locals, fromlist, level)


builtins.__import__ = import_as_on_windows

# --- files --------------------------------------------------------------------------------------------

IN = os.environ["NO_POSIX_IN"]


def in_use(path):
    """Whether a process that this file was loaded in has a file open, or mapped into memory."""
    return any(uses(process, path) for process in Path("/proc").glob("[0-9]*"))


def uses(process, path):
    try:
        if f"NO_POSIX_IN={IN}".encode() not in (process / "environ").read_bytes().split(b"\0"):
            return False
        mapped = any(line.endswith(f" {path}\n") for line in (process / "maps").open())
        return mapped or any(os.path.realpath(file) == path for file in (process / "fd").iterdir())
    except OSError:  # it has ended meanwhile
        return False


def guarded(function, *, onto=None):
    def checked(source, *arguments, **keywords):
        places = [source, *arguments[:1]] if onto else [source]
        for place in places:
            path = os.path.realpath(place) if not keywords.get("dir_fd") else ""
            if path.startswith(IN) and os.path.isfile(path) and in_use(path):
                raise PermissionError(13, "is in use", str(place))
        if onto == "absent" and os.path.realpath(arguments[0]).startswith(IN) and os.path.exists(arguments[0]):
            raise FileExistsError(17, "exists", str(arguments[0]))
        return function(source, *arguments, **keywords)

    return checked


os.replace = guarded(os.replace, onto="present")
os.rename = guarded(os.rename, onto="absent")
os.unlink = guarded(os.unlink)
os.remove = guarded(os.remove)
