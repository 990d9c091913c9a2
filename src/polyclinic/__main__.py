"""`python -m polyclinic` is the `polyclinic` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the command: a Ctrl-C while it is still being imported is one sentence, too."""
    try:
        from polyclinic.cli import main as command
    except KeyboardInterrupt:
        print("interrupted; nothing was done", file=sys.stderr)
        sys.exit(1)
    command()


if __name__ == "__main__":
    main()
