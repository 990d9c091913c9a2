"""The command line: one file a command. Each reads its flags, calls the library, and prints.

Bad input ends in one sentence on stderr and exit code 2, failed work in exit code 1; never in a traceback.
"""

from __future__ import annotations

import sys

from polyclinic.cli.app import app
from polyclinic.errors import BadInput, WorkFailed


def main() -> None:
    """Entry point of the `polyclinic` command."""
    sys.exit(run_app(sys.argv[1:]))


def run_app(arguments: list[str]) -> int:
    """Run one command line; the exit code."""
    try:
        code = app(args=arguments, prog_name="polyclinic", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BadInput as error:
        return _say(str(error), 2)
    except WorkFailed as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted; what was finished is kept", 1)
    except BrokenPipeError:  # `polyclinic ... | head`
        return 0
    except Exception as error:
        # typer's own complaints about flags and arguments know how to put themselves
        if hasattr(error, "format_message"):
            return _say(f"{error.format_message()} (`polyclinic --help` lists commands and flags)", 2)
        if type(error).__name__ == "Abort":
            return _say("interrupted; what was finished is kept", 1)
        raise


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code
