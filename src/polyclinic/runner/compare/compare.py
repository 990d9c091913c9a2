"""Several methods, seeds and folds on one study, side by side: each a run in its own folder and process.

A comparison that was interrupted goes on where it stopped; runs that are finished are not run again.
"""

import json
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polyclinic.errors import BadInput, WorkFailed, did_you_mean
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.methods import METHODS
from polyclinic.methods.shared.one_round import OneRound
from polyclinic.registry import notice_once
from polyclinic.run_folder import is_held, read_result
from polyclinic.runner.compare.outcome import choose_baseline, summarise, write
from polyclinic.runner.run.recorder import Display
from polyclinic.study import Study, parse_study
from polyclinic.study.reading import changed_plugins, takes_from, unknown_elsewhere
from polyclinic.study.study import apply_changes, fit_to_variants, is_default_generator, method_has_table, parse_sets

#: of a cross-validation; every method and seed runs once for each
MOST_FOLDS = 100


@dataclass(frozen=True)
class Entry:
    """One run of a comparison, or of a search; `settings` are those that a search tries."""

    method: str
    seed: int
    study: Study
    folder: Path
    fold: int | None = None
    settings: JsonMapping = field(default_factory=dict)

    @property
    def words(self) -> str:
        """The run as a person calls it."""
        tried = f", {words_of(self.settings)}" if self.settings else ""
        return f"{self.method}, seed {self.seed}" + (f", fold {self.fold}" if self.fold else "") + tried

    @property
    def rounds_done(self) -> int:
        history = self.folder / "history.jsonl"
        return history.read_bytes().count(b"\n") if history.exists() else 0

    @property
    def inner_work(self) -> str:
        """What long work within a round the run does now, and how long it will take, as its log says."""
        log = self.folder.parent / "studies" / f"{self.folder.name}.log"
        lines = log.read_bytes()[-500:].decode(errors="replace").splitlines() if log.exists() else []
        return lines[-1].strip() if lines and lines[-1].startswith("  ") else ""

    @property
    def result(self) -> JsonObject | None:
        return read_result(self.folder) if (self.folder / "result.json").exists() else None


def words_of(settings: JsonMapping) -> str:
    """Settings that a search tries, as a person writes them: `method.mu=0.1, optimizer.lr=0.01`."""
    return ", ".join(f"{path}={value}" for path, value in settings.items())


def compare(
    study: Study,
    methods: Iterable[str],
    out: str | Path = "runs/comparison",
    *,
    seeds: int = 1,
    folds: int | None = None,
    sets: Iterable[str] = (),
    tuned: Mapping[str, JsonMapping] | None = None,
    jobs: int | None = None,
    baseline: str | None = None,
) -> JsonObject:
    """Run several methods on one study, each in its own process and folder; the content of `comparison.json`.

    `folds` is the number of folds of a cross-validation: every method and seed runs once for each.
    `sets` are changes such as `optimizer.lr=0.1`, or `fedprox:method.mu=0.1` for one method. `tuned` are settings by
    method, as `{name: found["methods"][name]["chosen"]}` of what `tune` returns; `sets` stand above them.
    `baseline` is the method that the others are tested against, the first if none is named.
    """
    out = Path(out)
    names = parse_methods(",".join(methods))
    chosen = choose_baseline(names, baseline)
    planned = entries(study, names, seeds, out, list(sets), folds, tuned)
    check_all(planned)
    failed = run_all(planned, out, jobs or default_jobs(study), lambda _: None)
    summary = summarise(planned, chosen)
    write(summary, study, out)
    if failed:
        raise WorkFailed("\n".join(f"{folder}: {words}" for folder, words in failed.items()))
    return summary


def entries(
    study: Study,
    methods: list[str],
    seeds: int,
    out: Path,
    sets: list[str],
    folds: int | None = None,
    tuned: Mapping[str, JsonMapping] | None = None,
) -> list[Entry]:
    """A run for every method, seed and fold. `sets` of the form `fedprox:method.mu=0.1` hold for one method only, as
    the settings in `tuned` do."""
    common, special = sets_by_method(sets, methods)
    check_folds(folds)
    untuned = [method for method in methods if tuned is not None and method not in tuned]
    if untuned:
        raise BadInput(f"--tuned: has no settings for '{untuned[0]}'; tune it too, with the same budget")
    planned = []
    for method in methods:
        given = {**parse_sets(common), **parse_sets(special.get(method, []))}
        if folds is not None and "data.fold" in given:
            raise BadInput(f"--set data.fold: --folds {folds} sets the fold of every run; leave out one of the two")
        changes = {**(tuned or {}).get(method, {}), **given}
        first = changes.get("seed", study.seed)  # seeds are counted up from here
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise BadInput(f"--set seed={first}: must be a whole number, 0 or more")
        for seed in range(first, first + seeds):
            for fold in range(1, folds + 1) if folds else [None]:
                mine = {**changes, "seed": seed, **({"data.fold": f"{fold}/{folds}"} if fold else {})}
                folder = out / (f"{method}-seed{seed}" + (f"-fold{fold}of{folds}" if fold else ""))
                planned.append(Entry(method, seed, for_method(study, method, mine), folder, fold))
    return planned


def check_folds(folds: int | None) -> None:
    if folds is not None and not 2 <= folds <= MOST_FOLDS:
        raise BadInput(f"--folds {folds}: a cross-validation has 2 to {MOST_FOLDS} folds")


def for_method(study: Study, method: str, changes: JsonObject) -> Study:
    """The study with another method, which keeps those `[method]` settings and those tables that are for it, too."""
    tables = tables_for(study, method)
    mine = {path: value for path, value in changes.items() if has_setting(method, path)}
    if "rounds" in tables["method"] and isinstance(study.method, OneRound) and "method.rounds" not in mine:
        notice_once(
            f"{method}: {tables['method']['rounds']} rounds, its default, as '{study.method.name}' of the study has "
            f"one round only; --set {method}:method.rounds=N takes another number"
        )
    return parse_study(fit_to_variants(tables, apply_changes(tables, mine), mine))


def tables_for(study: Study, method: str) -> JsonObject:
    """The study's tables without what is only for its own method; what it does not say is the new method's default."""
    old, kind = study.method.name, METHODS[method]
    tables = {name: table for name, table in study.as_tables().items() if method_has_table(old, method, name)}
    if is_default_generator(old, method, tables["generator"]):
        del tables["generator"]
    # a default of the study's method is no choice: SCAFFOLD's own weighting is another one than FedAvg's
    defaults = {key: field.default for key, field in type(study.method).model_fields.items()}
    chosen = {key: value for key, value in tables["method"].items() if value != defaults.get(key)}
    kept = {key: value for key, value in chosen.items() if key in kind.model_fields}
    if isinstance(study.method, OneRound) and not issubclass(kind, OneRound):
        kept["rounds"] = kind.model_fields["rounds"].default
    if issubclass(kind, OneRound):
        kept.pop("rounds", None)
    tables["method"] = {**kept, "name": method}
    if tables.get("federation", {}).get("sum", "float") != "float" and kind(name=method).sum_obstacle():
        tables["federation"] = {**tables["federation"], "sum": "float"}
        notice_once(f"{method}: federation.sum of the study is left out, as each site's answer is needed by itself")
    return tables


def has_setting(method: str, path: str) -> bool:
    """Whether a method knows the setting; all methods know those outside `[method]` and `[tuning]`."""
    table, _, setting = path.partition(".")
    if table == "tuning" and setting:
        return METHODS[method](name=method).tunes_generator()
    return table != "method" or setting in METHODS[method].model_fields


def parse_methods(text: str) -> list[str]:
    """`a,b,c` as names of methods, each once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in METHODS:
            hint = did_you_mean(name, list(METHODS))
            raise BadInput(f"--methods: no such method: '{name}'{hint}; choose from {', '.join(METHODS)}")
    if not names or len(set(names)) < len(names):
        raise BadInput("--methods: name at least one method, and each only once")
    return names


def sets_by_method(sets: list[str], methods: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Changes for all methods, and those written `fedprox:method.mu=0.1` by their method."""
    common: list[str] = []
    special: dict[str, list[str]] = {}
    for text in sets:
        method, colon, rest = text.partition(":")
        if colon and "=" not in method:
            if method not in methods:
                raise BadInput(f"--set {text}: '{method}' is not among the methods compared")
            path = rest.partition("=")[0].strip()
            if not has_setting(method, path):
                known, setting = list(METHODS[method].model_fields), path.partition(".")[2]
                wrong = f"'{method}' has no setting '{setting}'{did_you_mean(setting, known)}"
                raise BadInput(f"--set {text}: {wrong}; choose from {', '.join(known)}")
            special.setdefault(method, []).append(rest)
        else:
            if not any(has_setting(one, text.partition("=")[0].strip()) for one in methods):
                raise BadInput(f"--set {text}: none of the methods compared has this setting")
            common.append(text)
    return common, special


# --- running ------------------------------------------------------------------------------------------


def check_all(planned: list[Entry], display: Display | None = None) -> None:
    """BadInput before any run starts, with all that the runs would say of their images, weights and budgets."""
    from polyclinic.runner.run.run import assemble

    found: dict[str, list[str]] = {}
    # of unfinished runs that differ in their seed only, which no check looks at, one
    unfinished = [entry for entry in planned if entry.result is None]
    different = {json.dumps({**entry.study.as_tables(), "seed": 0}): entry for entry in unfinished}
    for entry in different.values():
        try:
            assemble(entry.study, entry.folder, display=display)
        except BadInput as error:
            found.setdefault(str(error), []).append(entry.words)
    told = [words if len(who) == len(different) else f"{'; '.join(who)}: {words}" for words, who in found.items()]
    if told:
        raise BadInput("\n".join(told))


def run_all(
    planned: list[Entry],
    out: Path,
    jobs: int,
    watch: Callable[[list[Entry]], None],
    ended: Callable[[Entry, float], None] = lambda entry, cpu: None,
) -> dict[Path, str]:
    """Run what is not finished, `jobs` at a time, each in a process; what the failed ones said last.

    `watch` is called a few times a second, `ended` when a process has ended, with its CPU seconds. Where a run still
    works in a folder, left by a comparison that was killed, it is waited for.
    """
    check_folders(planned, out)
    waiting = [entry for entry in planned if entry.result is None]
    running: dict[int, tuple[Entry, subprocess.Popen]] = {}
    failed: list[Entry] = []
    try:
        while waiting or running:
            waiting = [entry for entry in waiting if entry.result is None]
            for entry in [one for one in waiting if not is_held(one.folder)][: jobs - len(running)]:
                waiting.remove(entry)
                process = _start(entry, out, alone=jobs == 1)
                running[process.pid] = (entry, process)
            time.sleep(0.25)
            for pid, (entry, process) in list(running.items()):
                before = _children_seconds()
                if process.poll() is not None:
                    ended(entry, _children_seconds() - before)
                    del running[pid]
                    if process.returncode:
                        (waiting if is_held(entry.folder) else failed).append(entry)
            watch(planned)
    finally:
        for _, process in running.values():
            process.terminate()
    last_words = {}
    for entry in failed:
        log = out / "studies" / f"{entry.folder.name}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
        last_words[entry.folder] = lines[-1] if lines else "ended without a word"
    return last_words


def _children_seconds() -> float:
    """CPU seconds of all child processes that have ended; it grows by those of a child when that is waited for."""
    return sum(os.times()[2:4])


def check_folders(planned: list[Entry], out: Path) -> None:
    """BadInput before any work if a folder holds a run of another study.

    A run that was begun with a plug-in as it was before somebody mended it is put aside, to be made anew, where it took
    something out of that plug-in or had not ended; others stay.
    """
    from polyclinic.runner.run.run import check_same, check_same_tables
    from polyclinic.study import load_run_study

    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file; name a folder")
    for problem in filter(None, (unknown_elsewhere(entry.study) for entry in planned)):
        raise BadInput(problem)
    outdated: dict[Path, tuple[Entry, str]] = {}
    for entry in planned:
        begun = entry.folder / "study.toml"
        if not begun.exists():
            continue
        if changed := changed_plugins(entry.folder, entry.study):
            check_same_tables(parse_study(tomllib.loads(begun.read_text(encoding="utf-8"))), entry.study, entry.folder)
            if is_held(entry.folder):
                raise BadInput(f"{entry.folder}: a run works there with {changed[0]} as it was; end it first")
            if entry.result is None or takes_from(entry.study, changed):
                outdated[entry.folder] = entry, ", ".join(changed)
        else:
            check_same(load_run_study(entry.folder), entry.study, entry.folder)
    for folder, (entry, changed_names) in outdated.items():
        place = out / "outdated" / f"{folder.name}-{time.time_ns()}"
        place.parent.mkdir(exist_ok=True)
        folder.rename(place)
        notice_once(f"{entry.words}: made anew, as {changed_names} has changed; the run before lies in {place}")


def _start(entry: Entry, out: Path, *, alone: bool) -> subprocess.Popen:
    studies = out / "studies"
    studies.mkdir(parents=True, exist_ok=True)
    file = studies / f"{entry.folder.name}.toml"
    file.write_text(entry.study.to_toml(), encoding="utf-8")
    command = [sys.executable, "-m", "polyclinic", "run", str(file), "--out", str(entry.folder)]
    command += ["--resume", "--no-report"]
    # runs side by side fill the cores already
    command += [] if alone else ["--set", "engine.workers=1"]
    with file.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def default_jobs(study: Study) -> int:
    """As many runs at a time as there are cores for their threads."""
    return max(1, (os.cpu_count() or 1) // study.engine.threads)
