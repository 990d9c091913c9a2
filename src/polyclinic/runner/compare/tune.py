"""A search of settings on validation images: every method gets the same budget, and nothing is tested.

Each trial is a run in its own folder and process, as in a comparison. A search that was interrupted goes on where it
stopped; one with a larger budget, or with more values, keeps the trials that are there.
"""

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import atomic_write, digest_of
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon
from polyclinic.randomness import numpy_rng
from polyclinic.runner.compare import compare as comparison
from polyclinic.runner.compare.compare import Entry
from polyclinic.settings import RENAMED
from polyclinic.study import Study
from polyclinic.study.study import parse_sets

#: values to try, by setting: {"method.mu": [0.1, 0.01]}; "fedprox:method.mu" is for one method
Space = Mapping[str, Sequence[Any]]
#: what a search must not change: with other images or another score, scores could not be compared
FIXED = ("format", "seed", "plugins", "data", "sites", "task", "evaluation", "engine", "policy", "audit")
LARGEST_GRID = 1_000_000
CHOICES = 12  #: of settings, for each method, where nobody says a budget


@dataclass(frozen=True)
class Trial:
    """One choice of settings for one method: a run for each seed and fold."""

    method: str
    settings: JsonObject
    runs: tuple[Entry, ...]

    def values(self, failed: Mapping[Path, str]) -> JsonObject:
        """What `tuning.json` says of it: the mean score and loss over its runs, or how it failed."""
        facts: JsonObject = {"method": self.method, "settings": self.settings}
        folds = [{"fold": run.fold} if run.fold else {} for run in self.runs]
        facts["runs"] = [
            {"seed": run.seed, **fold, "folder": run.folder.name, **_validation(run)}
            for run, fold in zip(self.runs, folds, strict=True)
        ]
        found = [run for run in facts["runs"] if "score" in run]
        if len(found) == len(self.runs):
            return {**facts, **{name: statistics.fmean(run[name] for run in found) for name in ("score", "loss")}}
        words = [failed[run.folder] for run in self.runs if run.folder in failed]
        return {**facts, "failed": words[0] if words else "its validation images give no score"}


def tune(
    study: Study,
    over: Space,
    out: str | Path = "runs/tuning",
    *,
    budget: int | None = None,
    methods: Iterable[str] = (),
    seeds: int = 1,
    folds: int | None = None,
    jobs: int | None = None,
) -> JsonObject:
    """Search the best settings of a study, or of several methods on it, by validation images; the content of
    `tuning.json`.

    `over`: the values to try, by setting. `budget`: the most runs of each method, all seeds and folds counted, by
    default for twelve choices of settings; all combinations are tried where they fit, else as many as fit, drawn at
    random by the study's seed. `folds`: each
    choice is scored by cross-validation on the images that are not for testing.
    """
    out, budget = Path(out), budget or CHOICES * seeds * (folds or 1)
    trials = plan(study, over, out, budget=budget, methods=list(methods), seeds=seeds, folds=folds)
    planned = [run for trial in trials for run in trial.runs]
    comparison.check_all(planned)
    failed = comparison.run_all(planned, out, jobs or comparison.default_jobs(study), lambda _: None)
    found = summarise(study, over, trials, failed, budget=budget, seeds=seeds, folds=folds)
    write(found, study, out)
    return found


def plan(
    study: Study,
    over: Space,
    out: Path,
    *,
    budget: int,
    methods: Sequence[str] = (),
    seeds: int = 1,
    folds: int | None = None,
) -> list[Trial]:
    """The trials of every method, each a valid study; BadInput before any work where one is not."""
    chosen = comparison.parse_methods(",".join(methods)) if methods else [study.method.name]
    _check(study, over, chosen, budget, seeds, folds)
    trials = []
    for method in chosen:
        for settings in choose(space_of(over, method), budget // (seeds * (folds or 1)), study.seed):
            changed = comparison.for_method(study, method, settings).with_settings({"evaluation.final": "validation"})
            runs = []
            for seed in range(study.seed, study.seed + seeds):
                for fold in range(1, folds + 1) if folds else [None]:
                    mine = {"seed": seed, **({"data.tuning_fold": f"{fold}/{folds}"} if fold else {})}
                    name = f"{method}-{digest_of(settings)[:10]}-seed{seed}" + (f"-fold{fold}of{folds}" if fold else "")
                    runs.append(Entry(method, seed, changed.with_settings(mine), out / name, fold, settings))
            trials.append(Trial(method, settings, tuple(runs)))
    return trials


def _check(study: Study, over: Space, methods: list[str], budget: int, seeds: int, folds: int | None) -> None:
    comparison.check_folds(folds)
    if budget < (runs := seeds * (folds or 1)) or seeds < 1:
        of_folds = f" and {folds} folds" if folds else ""
        raise BadInput(
            f"--budget {budget}: {seeds} seeds{of_folds} of one choice of settings need {runs} runs; give more"
        )
    if folds and study.data.tuning_fold is not None:
        raise BadInput(f"data.tuning_fold: --folds {folds} sets the fold of every run; leave out one of the two")
    if study.data.validation == 0 and not folds:
        raise BadInput("data.validation: a search needs validation images; set it to 0.15, say, or use --folds 5")
    for name, values in over.items():
        method, colon, path = name.rpartition(":")
        if colon and method not in methods:
            raise BadInput(f"--over {name}: '{method}' is not among the methods, {', '.join(methods)}")
        if path == "method.name" or (path != "data.size" and path.partition(".")[0] in FIXED):
            raise BadInput(f"--over {name}: a search cannot change it, since scores could not be compared then")
        if not any(comparison.has_setting(one, path) for one in ([method] if colon else methods)):
            raise BadInput(f"--over {name}: none of the methods has this setting")
        if not values or any(value in values[:place] for place, value in enumerate(values)):
            raise BadInput(f"--over {name}: give at least one value, and each only once")


def space_of(over: Space, method: str) -> dict[str, Sequence[Any]]:
    """The values to try for one method, by setting; a setting that it does not have is left out."""
    common = {path: values for path, values in over.items() if ":" not in path and comparison.has_setting(method, path)}
    special = {path.partition(":")[2]: values for path, values in over.items() if path.partition(":")[0] == method}
    return {**common, **special}


def choose(space: Mapping[str, Sequence[Any]], count: int, seed: int) -> list[JsonObject]:
    """All combinations of a space where there are at most `count`; else so many, drawn by the seed.

    A larger count draws the same ones, and more. Spaces with the same number of combinations get the same draw.
    """
    total = math.prod(len(values) for values in space.values())
    if total > LARGEST_GRID:
        raise BadInput(f"--over: {total} combinations are too many to choose from; give at most {LARGEST_GRID}")
    combinations = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    if total <= count:
        return combinations
    return [combinations[i] for i in sorted(numpy_rng(seed, "tune", total).permutation(total)[:count])]


def parse_over(texts: Iterable[str]) -> dict[str, list[Any]]:
    """`method.mu=0.1,0.01` texts as a space; values are read as TOML where they are, else as text."""
    over: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not path or not values:
            raise BadInput(f"--over {text}: write it as table.setting=value,value, for example method.mu=0.1,0.01")
        if path in over:
            raise BadInput(f"--over {text}: {path} is given twice; write all its values after one --over")
        try:
            over[path] = tomllib.loads(f"values = [{values}]")["values"]
        except tomllib.TOMLDecodeError:
            over[path] = [parse_sets([f"{path}={value}"])[path] for value in values.split(",")]
    return over


# --- summing up ---------------------------------------------------------------------------------------


def _validation(run: Entry) -> dict[str, float]:
    """The score and the loss of a finished run on validation images; nothing where it has none."""
    pooled = (run.result or {}).get("metrics", {}).get("validation", {}).get("pooled", {})
    score, loss = pooled.get(run.study.task.metric, math.nan), pooled.get("loss", 0.0)
    return {"score": score, "loss": loss} if math.isfinite(score) and math.isfinite(loss) else {}


def summarise(
    study: Study,
    over: Space,
    trials: Sequence[Trial],
    failed: Mapping[Path, str],
    *,
    budget: int,
    seeds: int,
    folds: int | None = None,
) -> JsonObject:
    """The content of `tuning.json`: every trial with its score, the budget, and what is best for each method."""
    rows = [trial.values(failed) for trial in trials]
    methods = {}
    for method in dict.fromkeys(trial.method for trial in trials):
        mine = [row for row in rows if row["method"] == method]
        possible = math.prod(len(values) for values in space_of(over, method).values())
        search = {"search": "all" if possible == len(mine) else "random", "possible": possible, "tried": len(mine)}
        methods[method] = {**search, "runs": len(mine) * seeds * (folds or 1), **best_of(mine, study)}
    cost = cost_of_search(run for trial in trials for run in trial.runs)
    return {
        "task": study.task.name,
        "metric": study.task.metric,
        "better": study.task.better,
        "scored_on": "validation",
        "budget": {
            "runs_of_each_method": budget,
            "seeds": seeds,
            **({"folds": folds} if folds else {}),
            "rounds": study.method.rounds,
        },
        "over": {path: list(values) for path, values in over.items()},
        "methods": methods,
        **({"privacy": cost} if cost else {}),
        "trials": rows,
        "study": study.as_tables(),
    }


def best_of(rows: Iterable[JsonMapping], study: Study) -> JsonObject:
    """The `chosen` settings with `score` and `loss`: the best score, then the lower loss, then the first.

    Nothing if all failed.
    """
    sign = -1 if study.task.better == "higher" else 1
    finished = [row for row in rows if "score" in row]
    if not finished:
        return {}
    best = min(finished, key=lambda row: (sign * row["score"], row["loss"]))
    return {"chosen": best["settings"], "score": best["score"], "loss": best["loss"]}


def write(found: JsonMapping, study: Study, out: Path) -> None:
    """`tuning.json`, and for each method `best-<method>.toml`, a study with the settings that were chosen; `best.toml`
    is that of the best method. WorkFailed, after all this, where a method has no finished trial."""
    atomic_write(out / "tuning.json", json.dumps(found, indent=2) + "\n")
    ranked = {name: facts for name, facts in found["methods"].items() if "chosen" in facts}
    for name, facts in ranked.items():
        atomic_write(out / f"best-{name}.toml", _best_study(found, study, name, facts))
    sign = -1 if study.task.better == "higher" else 1
    if ranked:
        first = min(ranked, key=lambda name: (sign * ranked[name]["score"], ranked[name]["loss"]))
        atomic_write(out / "best.toml", _best_study(found, study, first, ranked[first]))
    lost = [name for name in found["methods"] if name not in ranked]
    if lost:
        why = next(row["failed"] for row in found["trials"] if row["method"] == lost[0])
        raise WorkFailed(f"{out}: no trial of {', '.join(lost)} has a score: {why}")


def _best_study(found: JsonMapping, study: Study, method: str, facts: JsonMapping) -> str:
    chosen = comparison.for_method(study, method, facts["chosen"])
    words = f"{found['metric']} {facts['score']:.4f} on validation images, the best of {facts['tried']} settings"
    return f"# Written by `polyclinic tune`: {words} of {method}; tuning.json lists all.\n{chosen.to_toml()}"


def chosen_settings(path: Path) -> dict[str, JsonObject]:
    """The settings that a search chose, by method: from `tuning.json` or the folder that holds it."""
    file = path / "tuning.json" if path.is_dir() else path
    try:
        methods = parse_json(file.read_text(encoding="utf-8"))["methods"]
        found = {name: dict(facts["chosen"]) for name, facts in methods.items() if "chosen" in facts}
    except FileNotFoundError:
        raise BadInput(
            f"--tuned {path}: there is no {file.name}; name the folder that `polyclinic tune` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"--tuned {file}: is not a tuning.json; name the folder that `polyclinic tune` wrote") from None
    for old in [path for settings in found.values() for path in settings if path in RENAMED]:
        raise BadInput(f"--tuned {file}: {old} is now called '{RENAMED[old]}', as in Opacus; rename it there")
    return found


def cost_of_search(runs: Iterable[Entry]) -> JsonObject | None:
    """Epsilon of all finished private runs together, at the site where it is largest; None where no run was private.

    Settings that were picked by the scores of these runs have used their training images so much.
    """
    by_site: dict[str, list[JsonObject]] = {}  # what a site had spent at the end of each run, by its ledgers
    private = set()
    for run in runs:
        for file in sorted((run.folder / "ledger").glob("*.jsonl")) if run.result is not None else []:
            lines = (parse_json(line) for line in file.read_text(encoding="utf-8").splitlines())
            spent = [line["privacy"] for line in lines if line.get("privacy") and line["privacy"]["mechanisms"]]
            if spent:
                private.add(run.folder)
                by_site.setdefault(file.stem, []).append(max(spent, key=lambda record: record["steps"]))
    costs = []
    for records in by_site.values():
        history = [Mechanism(**one) for record in records for one in record["mechanisms"]]
        delta, accountant = min(record["delta"] for record in records), records[0]["accountant"]
        epsilon = composed_epsilon(history, delta, accountant)
        costs.append({"epsilon": epsilon, "delta": delta, "accountant": accountant})
    return {"runs": len(private), **max(costs, key=lambda cost: cost["epsilon"])} if costs else None


def sentence(cost: JsonObject) -> str:
    return (
        f"privacy: the {cost['runs']} private runs of this search have spent epsilon {cost['epsilon']:.3g} together, "
        f"at delta {cost['delta']:.3g}. Settings picked by them are not free: count that, or pick them on other images."
    )
