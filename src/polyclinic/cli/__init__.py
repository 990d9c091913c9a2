"""The command line: one file a command. Each reads its flags, calls the library, and prints.

Bad input ends in one sentence on stderr and exit code 2, failed work in exit code 1; never in a traceback, unless
POLYCLINIC_TRACEBACK is set.
"""

import _thread
import errno
import functools
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from polyclinic.cli.app import app
from polyclinic.errors import BadInput, Notice, WorkFailed
from polyclinic.extras import missing_sentence
from polyclinic.files import storage_sentence

CLI = Path(__file__).parent
ROOMS = CLI.parent  #: where all code lies
KEPT = "interrupted; what was finished is kept"
IMPORT = "<frozen importlib._bootstrap>"  #: where Python imports
INTERRUPTED = 130  #: the exit code of a command that Ctrl-C ended


def main() -> None:
    """Entry point of the `polyclinic` command. What it writes, no other user of the machine may read."""
    os.umask(0o077)
    _note_interrupts()
    sys.exit(run_app(sys.argv[1:]))


def _note_interrupts() -> None:
    """Remember a Ctrl-C. A package that is being imported may swallow it (numpy does), or turn it into an error of its
    own: the process ends at once where no work has begun, else after the import."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # a job in the background ignores it
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        _interrupted.append(number)
        if IMPORT not in _files(frame):
            signal.default_int_handler(number, frame)
        elif not _works(frame):
            os.write(2, f"{KEPT}\n".encode())
            os._exit(1)
        threading.Thread(target=_interrupt_after_import, daemon=True).start()

    signal.signal(signal.SIGINT, interrupt)


def _files(frame: FrameType | None) -> list[str]:
    """The files of a stack, the outermost first."""
    return [] if frame is None else [one.f_code.co_filename for one, _ in traceback.walk_stack(frame)][::-1]


def _works(frame: FrameType | None) -> bool:
    """True where others than the command line wait for what is being imported."""
    files = _files(frame)
    waiting = [Path(file) for file in files[: files.index(IMPORT)]]
    return any(one.is_relative_to(ROOMS) and one.parent != CLI and one.stem != "__main__" for one in waiting)


def _interrupt_after_import() -> None:
    main = threading.main_thread().ident
    while main is not None and IMPORT in _files(sys._current_frames().get(main)):
        time.sleep(0.02)
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)  # ends a wait as well; interrupt_main does not
    else:
        _thread.interrupt_main()


#: not empty after a Ctrl-C
_interrupted: list[int] = []


def run_app(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    with warnings.catch_warnings():
        warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
        return _run_app(arguments)


def _run_app(arguments: list[str]) -> int:
    try:
        code = app(args=arguments, prog_name="polyclinic", standalone_mode=False)
        if code == INTERRUPTED:  # what typer makes of Ctrl-C by itself, without a word
            return _say(KEPT, 1)
        return code if isinstance(code, int) else 0
    except (BadInput, WorkFailed) as error:
        return _say(str(error), 2 if isinstance(error, BadInput) else 1)
    except ModuleNotFoundError as error:  # of an extra
        if (words := missing_sentence(error.name or "")) is None:
            raise
        return _say(words, 2)
    except KeyboardInterrupt:
        return _say(KEPT, 1)
    except BrokenPipeError:  # `polyclinic ... | head`
        return 0
    except OSError as error:  # a full disk, a folder where a file should be, a name that is too long
        return _say(storage_sentence(error), 2 if error.errno == errno.ENAMETOOLONG else 1)
    except Exception as error:
        # typer's own complaints about flags and arguments know how to put themselves
        if hasattr(error, "format_message"):
            path = str(getattr(getattr(error, "ctx", None), "command_path", "polyclinic")).removesuffix(" default")
            return _say(f"{error.format_message()} (`{path} --help` lists commands and flags)", 2)
        if type(error).__name__ == "Abort" or _interrupted:
            return _say(KEPT, 1)
        raise


def _say(text: str, code: int) -> int:
    if os.environ.get("POLYCLINIC_TRACEBACK"):
        traceback.print_exc()
    print(text, file=sys.stderr)
    return code


def _show_warning(others: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any) -> None:
    """A notice of ours as one sentence; a warning of other packages as Python shows it."""
    if issubclass(category, Notice):
        print(message, file=sys.stderr)
    else:
        others(message, category, *place)
