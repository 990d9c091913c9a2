"""`python -m polyclinic` is the `polyclinic` command.

This file imports only what Python has loaded at its start. So a Ctrl-C is noticed a few milliseconds after the start.
"""

import _signal  # type: ignore[import-not-found, unused-ignore]  # built in; `signal` itself takes milliseconds
import os


def main() -> None:
    """Entry point of the command: a Ctrl-C while it is still being imported is one sentence, too."""
    waits = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # a job in the background ignores it
    if waits:
        _signal.signal(_signal.SIGINT, _end)
    from polyclinic.cli import main as command

    try:
        if waits:  # the command has its own handler
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        command()
    except KeyboardInterrupt:  # before the command could catch it
        _end()


def _end(*_: object) -> None:
    """End the process at once: a package that is being imported would turn an exception into an error of its own."""
    os.write(2, b"interrupted; nothing was done\n")
    os._exit(1)


if __name__ == "__main__":
    main()
