"""Where a run stands, read from its files as they grow: state, curves, time left, failures, what has left each site.

Files may be missing, damaged, half-written or huge: they read as nothing, and never end a page.
"""

import math
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.json_types import JsonObject, parse_json
from polyclinic.report.blocks import is_number
from polyclinic.run_folder import LOCK, history_of, is_held

#: points of a curve
MOST_POINTS = 1000
#: the last rounds, by which the time left is estimated
RECENT = 5
#: bytes of a file that is read to be shown
MOST_BYTES = 50_000_000
#: files that change while a run is at work
CHANGING = ("result.json", "progress.json", "history.jsonl", "study.toml")


@dataclass(frozen=True)
class RunFiles:
    """A run folder, read anew at each look; what is missing or damaged reads as nothing."""

    folder: Path

    @property
    def state(self) -> str:
        """`finished`, `running` or `stopped`."""
        if (self.folder / "result.json").is_file():
            return "finished"
        return "running" if (self.folder / LOCK).is_file() and is_held(self.folder) else "stopped"

    def summary(self) -> JsonObject:
        """One line of a table about the run."""
        study, result, history, state = self._study(), self._table("result.json"), self._history(), self.state
        done = history[-1]["round"] if history else 0
        rounds = word(table(study, "method"), "rounds")
        carried = history[-1] if history else {}
        scored = [line["validation"] for line in history if isinstance(line.get("validation"), dict)]
        if result:
            done = rounds = word(result, "rounds")
            carried = table(result, "communication")
        age = max(0.0, time.time() - changed_at(self.folder / "history.jsonl"))
        return {
            "method": word(table(study, "method"), "name"),
            "seed": word(study, "seed") or 0,
            "task": word(table(study, "task"), "name"),
            "source": word(table(study, "data"), "source"),
            "state": state,
            "rounds_done": done,
            "rounds": rounds,
            "metrics": numbers(table(result, "metrics"), "test") or (numbers(scored[-1], "pooled") if scored else {}),
            "images": "test" if "test" in table(result, "metrics") else "validation",
            "bytes": carried.get("total_bytes", 0) if is_number(carried.get("total_bytes")) else 0,
            "epsilon": word(table(result, "privacy"), "epsilon"),
            "seconds_left": seconds_left(history, rounds, age) if state == "running" else None,
            "changed": max(changed_at(self.folder / name) for name in CHANGING),
        }

    def detail(self) -> JsonObject:
        """Everything that the page of a run shows, but for its files."""
        summary, history = self.summary(), self._history()
        result, live, known = self._table("result.json"), self._table("progress.json"), summary["metrics"]
        running, privacy = summary["state"] == "running", table(result, "privacy")
        counts, per_site = table(table(result, "data"), "counts"), table(table(result, "metrics"), "per_site")
        ledgers = sorted(file.stem for file in (self.folder / "ledger").glob("*.jsonl"))
        # the metric that the task counts as its own, as far as the files say
        wanted = (word(live, "metric"), "accuracy", "mae", "dice", *known)
        now = {**{name: word(live, name) for name in ("round", "operation", "since")}, "sites": texts(live, "at_work")}
        spent: JsonObject = {name: word(privacy, name) for name in ("epsilon", "delta", "accountant", "site")}
        spent |= {name: texts(privacy, name) for name in ("covers", "does_not_cover")}
        return {
            **summary,
            "metric": next((str(name) for name in wanted if name in known), None),
            "curves": curves(history),
            "failed": failures(history),
            "at_work": now if running else {},
            "sites": texts(live, "sites") if isinstance(live.get("sites"), list) else list(counts) or ledgers,
            "warnings": texts(live, "warnings")[:50] if running else [],
            "left": what_left(self.folder),
            "per_site": {site: numbers(per_site, site) for site in per_site},
            "privacy": spent if privacy else None,
            "selected_round": word(table(result, "selected"), "round"),
        }

    def _study(self) -> JsonObject:
        try:
            return tomllib.loads(read_text(self.folder / "study.toml"))
        except ValueError:
            return {}

    def _table(self, name: str) -> JsonObject:
        found = read_json(self.folder / name)
        return found if isinstance(found, dict) else {}

    def _history(self) -> list[JsonObject]:
        return history_of(read_text(self.folder / "history.jsonl"))


def seconds_left(history: list[JsonObject], rounds: Any, age: float) -> float | None:
    """Seconds for the rounds that are left, by the mean of the last ones; None before the first.

    `age` are seconds since the last round was finished: the present round has had them already."""
    recent = [line["seconds"] for line in history[-RECENT:] if is_number(line.get("seconds"))]
    if not recent or not isinstance(rounds, int):
        return None
    each = sum(recent) / len(recent)
    return round(max(0.0, each * (rounds - history[-1]["round"]) - min(age, each)), 1)


def curves(history: list[JsonObject]) -> JsonObject:
    """Rounds, seconds and bytes, and each metric of the validation images: of all sites together, and of each site.

    A long history is thinned out evenly; its last point is always there.
    """
    step = max(1, math.ceil(len(history) / MOST_POINTS))
    shown = history[::-1][::step][::-1]
    scored = [line for line in shown if isinstance(line.get("validation"), dict)]
    per_site = [table(line["validation"], "per_site") for line in scored]
    sites = sorted({site for one in per_site for site in one})
    return {
        "rounds": [line["round"] for line in shown],
        "bytes": [line.get("total_bytes") if is_number(line.get("total_bytes")) else None for line in shown],
        "scored": [line["round"] for line in scored],
        "pooled": _columns([numbers(line["validation"], "pooled") for line in scored]),
        "per_site": {site: _columns([numbers(one, site) for one in per_site]) for site in sites},
    }


def _columns(rows: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """Every name with its value in each row, None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def failures(history: list[JsonObject]) -> list[JsonObject]:
    """Sites that failed, in which round, and why: the last fifty."""
    every = [(line["round"], *failed) for line in history for failed in table(line, "failed").items()]
    return [{"round": number, "site": site, "reason": str(reason)[:1000]} for number, site, reason in every[-50:]]


def what_left(folder: Path) -> list[JsonObject]:
    """Parcels and bytes that left each site, by kind: from the ledgers as they grow."""
    rows = []
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        parcels, sizes = _sums(file) if not file.is_symlink() else ({}, {})
        of_kinds = [{"kind": kind, "parcels": parcels[kind], "bytes": sizes[kind]} for kind in sorted(sizes)]
        rows += [{"site": file.stem, **one} for one in of_kinds]
    return rows


_SUMS: dict[Path, tuple[int, Counter[str], Counter[str]]] = {}


def _sums(file: Path) -> tuple[Counter[str], Counter[str]]:
    """Parcels and bytes of a ledger by kind. Only what was added since the last look is read; a ledger only grows."""
    place, parcels, sizes = _SUMS.get(file, (0, Counter(), Counter()))
    if place > file.stat().st_size:  # a run that was begun anew
        place, parcels, sizes = 0, Counter(), Counter()
    parcels, sizes = parcels.copy(), sizes.copy()
    with file.open("rb") as opened:
        opened.seek(place)
        for raw in opened:
            if not raw.endswith(b"\n"):
                break
            place += len(raw)
            line = parsed(raw.decode("utf-8", "replace"))
            if isinstance(line, dict) and isinstance(line.get("bytes"), int):
                parcels[str(line.get("kind"))] += 1
                sizes[str(line.get("kind"))] += line["bytes"]
    _SUMS[file] = (place, parcels, sizes)
    return parcels, sizes


def read_json(file: Path) -> Any:
    """The content of a JSON file; None where it is missing, damaged, a link, or too large to be shown."""
    return parsed(read_text(file))


def read_text(file: Path) -> str:
    """The text of a file; nothing where it is missing, a link, or too large to be shown."""
    try:
        if file.is_symlink() or file.stat().st_size > MOST_BYTES:
            return ""
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def parsed(text: str) -> Any:
    """The value of a JSON text; None where it is none."""
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None


def changed_at(file: Path) -> float:
    """The time at which a file was written; 0 where there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def plain(value: Any) -> Any:
    """A value as strict JSON has it: NaN and infinity become nothing, a date of a TOML file its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def table(values: JsonObject, name: str) -> JsonObject:
    """A table inside a table; an empty one where there is none."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def numbers(values: JsonObject, name: str) -> dict[str, float]:
    """The numbers of a table inside a table: a damaged or hostile file may hold anything else."""
    return {key: one for key, one in table(values, name).items() if is_number(one)}


def texts(values: JsonObject, name: str) -> list[str]:
    """A list of a table, as texts; an empty one where there is none."""
    found = values.get(name)
    return [str(one) for one in found] if isinstance(found, list) else []


def word(values: JsonObject, name: str) -> str | int | float | None:
    """A plain value of a table, or nothing."""
    found = values.get(name)
    return found if isinstance(found, (str, int, float)) else None
