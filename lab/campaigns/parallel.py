"""Campaigns on several cores: forked workers that write what they found, line by line, and a parent that outlives them.

A worker that crashes (a segmentation fault in a decoder, say) or hangs is named with its last words, and what it found
before is kept.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

#: seconds that a worker may stay silent after its time is up
GRACE = 45.0


def in_parallel(
    work: Callable[[int, Callable[[Any], None]], None],
    workers: int,
    place: Path,
    until: float,
    note: Callable[[list[Any]], None] = lambda found: None,
) -> tuple[list[Any], list[str]]:
    """Run `work(number, tell)` in forked workers until they end; all that they told, and a word on each that crashed.

    `tell` takes a JSON value. `until`: the moment (`time.monotonic`) at which they end by themselves. `note` gets what
    is there every 20 seconds, so that nothing is lost if this process is killed.
    """
    files = [place / f"worker-{number}.jsonl" for number in range(workers)]
    children = {_forked(work, number, file): number for number, file in enumerate(files)}
    problems, noted = [], time.monotonic()
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            number, code = children.pop(child), os.waitstatus_to_exitcode(status)
            problems += [f"worker {number} ended with {code}: {_last_words(files[number])}"] if code else []
        elif time.monotonic() > until + GRACE:
            for hung, number in children.items():
                os.kill(hung, signal.SIGKILL)
                problems.append(f"worker {number} hangs: {_last_words(files[number])}")
            until += 10**6
        else:
            time.sleep(0.05)
        if time.monotonic() - noted > 20:
            note(_told(files))
            noted = time.monotonic()
    return _told(files), problems


def _forked(work: Callable[[int, Callable[[Any], None]], None], number: int, file: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with file.open("a", encoding="utf-8", buffering=1) as told:
            work(number, lambda value: print(json.dumps(value), file=told))
        code = 0
    except BaseException:
        file.with_suffix(".error").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _last_words(file: Path) -> str:
    for ending in (".error", ".last"):
        if file.with_suffix(ending).exists():
            return file.with_suffix(ending).read_bytes()[-900:].decode(errors="backslashreplace").strip("\0")
    return "no word"


def _told(files: Iterable[Path]) -> list[Any]:
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]
