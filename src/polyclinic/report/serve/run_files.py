"""Where a run stands, read from its files as they grow."""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from polyclinic.json_types import JsonObject
from polyclinic.report.serve.progress import curves, failures, seconds_left, total_bytes, what_left
from polyclinic.report.serve.reading import changed_at, numbers, parsed, read_json, read_text, table, word
from polyclinic.runner.folder_lock import LOCK, is_held


@dataclass(frozen=True)
class RunFiles:
    """A run folder, read anew at each look; what is missing or damaged reads as nothing."""

    folder: Path

    @property
    def study(self) -> JsonObject:
        try:
            return tomllib.loads(read_text(self.folder / "study.toml"))
        except ValueError:
            return {}

    @property
    def result(self) -> JsonObject | None:
        found = read_json(self.folder / "result.json")
        return found if isinstance(found, dict) else None

    @property
    def live(self) -> JsonObject:
        found = read_json(self.folder / "progress.json")
        return found if isinstance(found, dict) else {}

    @property
    def history(self) -> list[JsonObject]:
        lines = (parsed(text) for text in read_text(self.folder / "history.jsonl").splitlines())
        return [line for line in lines if isinstance(line, dict) and isinstance(line.get("round"), int)]

    @property
    def state(self) -> str:
        """`finished`, `running` or `stopped`."""
        if (self.folder / "result.json").is_file():
            return "finished"
        return "running" if (self.folder / LOCK).is_file() and is_held(self.folder) else "stopped"

    def summary(self) -> JsonObject:
        """One line of a table about the run."""
        study, result, history, state = self.study, self.result, self.history, self.state
        done = history[-1]["round"] if history else 0
        rounds = word(table(study, "method"), "rounds")
        if result is not None:
            done = rounds = word(result, "rounds")
        return {
            "method": word(table(study, "method"), "name"),
            "seed": word(study, "seed") or 0,
            "task": word(table(study, "task"), "name"),
            "source": word(table(study, "data"), "source"),
            "state": state,
            "rounds_done": done,
            "rounds": rounds,
            "metrics": self._metrics(result, history),
            "images": "test" if result and "test" in table(result, "metrics") else "validation",
            "bytes": total_bytes(result, history),
            "epsilon": word(table(result or {}, "privacy"), "epsilon"),
            "seconds_left": seconds_left(history, rounds, self._age()) if state == "running" else None,
            "changed": self._changed(),
        }

    def _metrics(self, result: JsonObject | None, history: list[JsonObject]) -> dict[str, float]:
        if result is not None and (found := numbers(table(result, "metrics").get("test"))):
            return found
        scored = [line for line in history if isinstance(line.get("validation"), dict)]
        return numbers(scored[-1]["validation"].get("pooled")) if scored else {}

    def _changed(self) -> float:
        names = ("result.json", "progress.json", "history.jsonl", "study.toml")
        return max((changed_at(self.folder / name) for name in names), default=0.0)

    def _age(self) -> float:
        """Seconds since the last round was finished."""
        return max(0.0, time.time() - changed_at(self.folder / "history.jsonl"))

    def detail(self) -> JsonObject:
        """Everything that the page of a run shows, but for its files."""
        summary, result, history, live = self.summary(), self.result or {}, self.history, self.live
        running = summary["state"] == "running"
        per_site = table(table(result, "metrics"), "per_site")
        return {
            **summary,
            "metric": self._metric(live, summary["metrics"]),
            "curves": curves(history),
            "failed": failures(history),
            "at_work": at_work(live) if running else {},
            "sites": self.sites(live, result),
            "warnings": [str(one) for one in live.get("warnings", [])[:50]] if running else [],
            "left": what_left(self.folder),
            "per_site": {site: numbers(found) for site, found in per_site.items()},
            "privacy": privacy_of(result),
            "selected_round": word(table(result, "selected"), "round"),
        }

    def _metric(self, live: JsonObject, known: dict[str, float]) -> str | None:
        """The metric that the task counts as its own, as far as the files say."""
        wanted = (word(live, "metric"), "accuracy", "mae", "dice", *known)
        return next((str(name) for name in wanted if name in known), None)

    def sites(self, live: JsonObject, result: JsonObject) -> list[str]:
        if isinstance(live.get("sites"), list):
            return [str(one) for one in live["sites"]]
        counts = table(table(result, "data"), "counts")
        return list(counts) or sorted(file.stem for file in (self.folder / "ledger").glob("*.jsonl"))


def at_work(live: JsonObject) -> JsonObject:
    """Which sites do what now, and since when."""
    sites = live.get("at_work")
    facts = {name: word(live, name) for name in ("round", "operation", "since")}
    return {**facts, "sites": [str(one) for one in sites] if isinstance(sites, list) else []}


def privacy_of(result: JsonObject) -> JsonObject | None:
    """What was spent, what that covers, and what it does not."""
    found = table(result, "privacy")
    if not found:
        return None
    lists = {name: found.get(name) for name in ("covers", "does_not_cover")}
    texts = {name: [str(one) for one in many] if isinstance(many, list) else [] for name, many in lists.items()}
    return {**{name: word(found, name) for name in ("epsilon", "delta", "accountant", "site")}, **texts}
