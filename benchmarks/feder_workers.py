"""Runs side by side in processes that stay: on a GPU, starting one anew costs as much as a short run.

A worker reads lines from its standard input, each with a study's file and a folder, and answers each with a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from polyclinic.runner.compare import Entry
from polyclinic.runner.run import run
from polyclinic.study import load_study

#: told of each run that has ended, with what there is to say
Finished = Callable[[Entry, str], None]


def run_all(entries: list[Entry], jobs: int, seconds: float | None, finished: Finished) -> bool:
    """Run what is not finished, so many at a time; false where `seconds` were not enough."""
    waiting: queue.SimpleQueue[Entry] = queue.SimpleQueue()
    todo = [entry for entry in entries if entry.result is None]
    for entry in todo:
        waiting.put(entry)
    if jobs == 1 and seconds is None:  # here: nothing to start, and errors are seen as they are
        for entry in todo:
            run(entry.study, entry.folder, resume=True)
            finished(entry, "is done")
        return True
    workers = [Worker(waiting, finished) for _ in range(min(jobs, len(todo)))]
    stop = threading.Timer(seconds or 10**6, lambda: [worker.cut() for worker in workers])
    stop.start()
    for worker in workers:
        worker.thread.join()
        worker.end()
    stop.cancel()
    return waiting.empty() and not any(worker.cut_off for worker in workers)


class Worker:
    """A process that takes one run after the other, and the thread that talks to it."""

    telling = threading.Lock()

    def __init__(self, waiting: queue.SimpleQueue[Entry], finished: Finished) -> None:
        self.waiting, self.finished, self.cut_off = waiting, finished, False
        self.process = self._start()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, __file__]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def serve(self) -> None:
        while not self.cut_off:
            try:
                entry = self.waiting.get_nowait()
            except queue.Empty:
                return
            words = self.ask(entry)
            if self.cut_off:
                return
            if not words:  # a process that has failed on a GPU fails ever after
                self.process = self._start()
            with self.telling:
                self.finished(entry, words or "failed")

    def ask(self, entry: Entry) -> str:
        """Have a run done; what the process says of it, or nothing if it has ended."""
        study = entry.folder.with_name(f"{entry.folder.name}.toml")
        study.parent.mkdir(parents=True, exist_ok=True)
        study.write_text(entry.study.to_toml(), encoding="utf-8")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps([str(study), str(entry.folder)]), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return ""
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """A process ends by itself when nothing more can come; one that does not is ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(10)
        self.process.kill()
        self.process.wait()

    def cut(self) -> None:
        self.cut_off = True
        self.process.kill()


def work() -> None:
    """Answer on the standard output, where nothing else is written meanwhile."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        study, folder = map(Path, json.loads(line))
        result = run(load_study(study), folder, resume=True)
        print(f"is done, {result.values['timing']['seconds']:.0f} s", file=answers, flush=True)


if __name__ == "__main__":
    work()
