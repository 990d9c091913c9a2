"""Progress in the terminal: a bar for one run, or one for each run of a comparison."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from polyclinic.federation.call import Failure
from polyclinic.json_types import JsonMapping
from polyclinic.progress import time_left
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study


def progress_bars(console: Console) -> Progress:
    """Bars that show what is going on, how far it is, and how long it will take."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=not console.is_terminal,
    )


#: seconds between two lines about long work, and the least that it must last to be worth one
LINE_EVERY = 10.0


class RunDisplay(Display):
    """Shows one run, or an audit, on stderr: a bar in a terminal, a line now and then elsewhere; and a bar of its own
    for long work within a round or an attack."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._bars: Progress | None = None
        self._task: Any = None
        self._metric = ""
        self._said = 0.0
        self._inner: Any = None
        self._work, self._begun, self._told = "", 0.0, 0.0
        #: warnings that were shown, so that the end of a run need not repeat them
        self.warnings: list[str] = []

    def preparing(self, what: str, done: int, total: int) -> None:
        self._show(what, done, total, "")

    def noted(self, sentence: str) -> None:
        self.close()
        self.console.print(sentence, highlight=False, soft_wrap=True)

    def started(self, study: Study, sites: tuple[str, ...], first_round: int) -> None:
        self._metric = study.task.metric
        self.close()
        if first_round > 1:
            self.console.print(f"resuming at round {first_round}")
        many = "1 site" if len(sites) == 1 else f"{len(sites)} sites"
        self._show(f"{study.method.name}, {many}", first_round - 1, study.method.rounds, "")

    def asking(self, operation: str, sites: Sequence[str]) -> None:
        if self._bars and self.console.is_terminal:
            who = sites[0] if len(sites) == 1 else f"{len(sites)} sites"
            self._bars.update(self._task, note=f"{operation}: {who}")

    def working(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._work or done == 0:
            self._end_work()
            self._work, self._begun, self._told = what, now, now
        if self._bars is not None:
            if self._inner not in self._bars.task_ids:
                self._inner = self._bars.add_task(f"  {what}", total=total, note="")
            self._bars.update(self._inner, completed=done)
            if done >= total:
                self._end_work()
        elif not self.console.is_terminal and now - self._told > LINE_EVERY:
            self._told = now
            left = time_left(now - self._begun, done, total)
            print(f"  {what}: {done} of {total}, {left}", file=sys.stderr, flush=True)

    def _end_work(self) -> None:
        if self._bars is not None and self._inner in self._bars.task_ids:
            self._bars.remove_task(self._inner)
        self._inner = None

    def failed(self, failure: Failure) -> None:
        self.console.print(f"site '{failure.site}' failed ({failure.operation}): {failure.reason}", style="yellow")

    def warned(self, sentence: str) -> None:
        self.warnings.append(sentence)
        self.console.print(f"warning: {sentence}", style="yellow", highlight=False, soft_wrap=True)

    def round_done(self, line: JsonMapping, rounds: int) -> None:
        value = ((line["validation"] or {}).get("pooled") or {}).get(self._metric)
        note = "" if value is None else f"validation {self._metric} {value:.3f}"
        self._show("rounds", line["round"], rounds, note)

    def auditing(self, what: str, done: int, total: int) -> None:
        self._show("audit", done, total, what)

    def finished(self, result: JsonMapping) -> None:
        self.close()

    def close(self) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None

    def _show(self, what: str, done: int, total: int, note: str) -> None:
        if not self.console.is_terminal:
            if time.monotonic() - self._said > 5 or done == total:
                self._said = time.monotonic()
                print(f"{what}: {done} of {total} {note}".rstrip(), file=sys.stderr)
            return
        if self._bars is None:
            self._bars = progress_bars(self.console)
            self._bars.start()
            self._task = self._bars.add_task(what, total=total, note=note)
        self._bars.update(self._task, completed=done, total=total, note=note)
