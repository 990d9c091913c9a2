"""`polyclinic compare`: several methods and seeds on one study, in one table; `polyclinic tune` searches settings."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polyclinic.cli.run import SET, STUDY, chosen_study
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.extras import picture_if_possible
from polyclinic.files import check_place
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from polyclinic.runner.compare.compare import Entry
    from polyclinic.study import Study


def compare(
    study: Path | None = STUDY,
    methods: str = typer.Option(..., help="Methods to compare, separated by commas."),
    seeds: int = typer.Option(1, min=1, help="Seeds for each method, counted up from the study's."),
    folds: int | None = typer.Option(
        None, min=2, help="Cross-validation: runs for each method and seed, each tests on another fold."
    ),
    baseline: str | None = typer.Option(
        None, help="The method that the others are tested against.  [default: the first]", show_default=False
    ),
    out: Path = typer.Option(Path("runs/comparison"), help="The folder for all runs and the comparison."),
    sets: list[str] = SET,
    tuned: Path | None = typer.Option(
        None, help="A folder of `polyclinic tune`: each method gets the settings that were chosen for it."
    ),
    over: str | None = typer.Option(
        None,
        metavar="TABLE.SETTING=VALUE,VALUE",
        help="Compare once for each value of a setting, in a folder each; comparison.png shows all side by side.",
    ),
    jobs: str | None = typer.Option(
        None, help="Runs at a time: a number, or auto, as the cores allow.  [default: auto]", show_default=False
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print the comparison as JSON, and nothing else on stdout."),
) -> None:
    """Run several methods on one study; a comparison that was interrupted goes on where it stopped.

    `--set fedprox:method.mu=0.1` changes a setting for one method only. `--over sites.target_ks=0.02,0.63,0.97`
    compares all methods at each of the values.
    """
    from polyclinic.runner.compare import compare as comparison
    from polyclinic.runner.compare import outcome
    from polyclinic.runner.compare.outcome import choose_baseline
    from polyclinic.runner.compare.tune import chosen_settings

    check_place(out / "comparison.json")
    chosen = chosen_study(study, [])
    best = chosen_settings(tuned) if tuned else None
    names = comparison.parse_methods(methods)
    against = choose_baseline(names, baseline)
    groups = {
        group: comparison.entries(chosen, names, seeds, out / group, [*sets, *more], folds, best)
        for group, more in groups_over(over).items()
    }
    every = [entry for planned in groups.values() for entry in planned]
    if jobs not in (None, "auto") and not (str(jobs).isdecimal() and int(str(jobs)) > 0):
        raise BadInput(f"--jobs {jobs}: write a number of runs from 1 on, or auto")
    at_once = comparison.default_jobs(chosen) if jobs in (None, "auto") else int(str(jobs))
    check_before_any_starts(every, quiet=quiet or as_json)
    failed: dict[Path, str] = {}
    with watched(every, quiet=quiet or as_json) as update:
        for group, planned in groups.items():
            failed |= comparison.run_all(planned, out / group, at_once, update)
    found = {group: outcome.summarise(planned, against) for group, planned in groups.items()}
    for group, summary in found.items():
        outcome.write(summary, chosen, out / group)
    if as_json:
        typer.echo(json.dumps(found if over else found[""]))
    for group, summary in found.items():
        if summary["rows"] and not as_json:
            print_table(summary, chosen, group)
            print_warnings(groups[group])
    if any(summary["rows"] for summary in found.values()):
        units = (entry.result["data"].get("unit", "") for entry in every if entry.result)
        with picture_if_possible():
            outcome.draw(found, chosen.task, out / "comparison.png", next(units, ""))
        if not as_json:
            runs = "each value's folder has its runs" if over else "the runs"
            picture = " and comparison.png" if (out / "comparison.png").is_file() else ""
            typer.echo(f"{runs}, comparison.json, comparison.csv{picture}: see {out}")
    if failed:
        raise WorkFailed("\n".join(f"{folder}: {words}" for folder, words in failed.items()))


def check_before_any_starts(planned: "list[Entry]", *, quiet: bool) -> None:
    """BadInput where a run could not start; the sites' images are prepared on the way, and the display shows it."""
    from polyclinic.cli.display import RunDisplay
    from polyclinic.runner.compare.compare import check_all

    with contextlib.closing(RunDisplay()) as display:
        check_all(planned, None if quiet else display)


@contextlib.contextmanager
def watched(planned: "list[Entry]", *, quiet: bool) -> Iterator[Callable[[object], None]]:
    """One progress display for all runs, a bar each, and what brings it up to date."""
    from rich.console import Console

    from polyclinic.cli.display import progress_bars

    console = Console(stderr=True)
    bars = None if quiet or not console.is_terminal else progress_bars(console)
    finished = {entry.folder for entry in planned if entry.result is not None}
    rounds = {entry.folder: (entry.words, entry.study.method.rounds) for entry in planned}
    tasks = {place: bars.add_task(words, total=n, note="") for place, (words, n) in rounds.items()} if bars else {}

    def update(_: object) -> None:
        for entry in planned:
            if bars:
                bars.update(tasks[entry.folder], completed=entry.rounds_done, note=entry.inner_work)
            if entry.folder not in finished and entry.result is not None:
                finished.add(entry.folder)
                if not quiet and not bars:
                    console.print(f"{entry.words}: finished ({len(finished)} of {len(planned)})")

    with bars or contextlib.nullcontext():
        yield update


def groups_over(over: str | None) -> dict[str, list[str]]:
    """Changes of the study by the name of their folder: one for each value of `--over`; without it, none."""
    from polyclinic.runner.compare.tune import parse_over

    if over is None:
        return {"": []}
    ((path, values),) = parse_over([over]).items()
    groups = {f"{path}={value}".replace("/", "_"): [f"{path}={json.dumps(value)}"] for value in values}
    if len(groups) < len(values):
        raise BadInput(f"--over {over}: give each value only once")
    return groups


def print_table(summary: JsonObject, study: "Study", group: str = "") -> None:
    """Mean ± standard deviation over seeds and folds, a row for each method."""
    from polyclinic.cli import tables
    from polyclinic.files import human_bytes

    methods, statistics, guessed = summary["methods"], summary["statistics"], summary.get("without_images")
    names = [n for n in next(iter(methods.values())) if n.startswith("test_") and n != "test_loss"]
    own, main = f"mean_{study.task.metric}", f"test_{study.task.metric}" if statistics else ""
    columns = ["method"]
    for name in names:
        columns.append(name.removeprefix("test_").replace("_", " "))
        columns += ["95 % interval", f"p against {summary['baseline']}"] if name == main else []
    columns += [f"{study.task.metric}, own site", "carried", "seconds"]
    rows: list[Any] = []
    for method, values in methods.items():
        cells = [method]
        for name in [*names, own]:
            one = values.get(name)
            deviation = f" ± {one['std']:.3f}" if one and one["n"] > 1 else ""
            cells.append(f"{one['mean']:.3f}{deviation}" if one else "-")
            cells += interval_and_p(statistics.get(method, {}).get(name)) if name == main else []
        rows.append([*cells, human_bytes(values["total_bytes"]["mean"]), f"{values['seconds']['mean']:.0f}"])
    if guessed:
        rows += [None, ["a guess"]]
        for name in names:  # where tests stand beside a column, two cells stay empty
            value = guessed.get(name.removeprefix("test_"))
            rows[-1] += ["" if value is None else f"{value:.3f}", *(["", ""] if name == main else [])]
    n = next(iter(methods.values()))["seconds"]["n"]
    folds = max(row.get("fold", 0) for row in summary["rows"])
    runs = f"{n} runs of {folds} folds" if folds else f"{n} seed{'s' if n > 1 else ''}"
    ks = f"mean KS between sites {summary['rows'][0]['mean_ks']:.2f}, " if study.task.like != "segmentation" else ""
    where = f"{study.data.source}, {group}" if group else study.data.source
    tables.print_table(columns, rows, whole=1, title=f"{where}, {ks}{runs}")
    typer.echo(
        "all columns but 'own site': test images of all sites together; 'own site': mean over sites, each on its own"
        + ("; 'a guess': without a look at the images" if guessed else "")
        + ("; 'centralized': a ceiling only with settings of its own (--tuned)" if "centralized" in methods else "")
    )
    if statistics:
        typer.echo(
            "interval and p: Student's t over runs; p: runs of the same seed and fold are pairs, Holm-corrected; "
            "comparison_statistics.csv has all metrics"
        )


def print_warnings(planned: "list[Entry]") -> None:
    """A line for each method whose runs warned: the last thing that one said, and how many more there are."""
    from rich.console import Console

    for method in dict.fromkeys(entry.method for entry in planned):
        results = [entry.result for entry in planned if entry.method == method and entry.result]
        if said := [sentence for result in results for sentence in result.get("warnings", [])]:
            more = f" ({len(said) - 1} more in result.json of its runs)" if len(said) > 1 else ""
            line = f"warning: {method}: {said[-1]}{more}"
            Console().print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)


def interval_and_p(entry: JsonObject | None) -> list[str]:
    """The interval of a mean, and p against the baseline, as cells."""
    if entry is None:
        return ["-", "-"]
    test = entry.get("against_baseline")
    p = "-" if test is None else "< 0.001" if test["p_holm"] < 0.001 else f"{test['p_holm']:.3f}"
    return [f"{entry['low']:.3f} to {entry['high']:.3f}", p]


def tune(
    study: Path | None = STUDY,
    over: list[str] = typer.Option(
        ..., "--over", metavar="TABLE.SETTING=VALUE,VALUE", help="Values to try for a setting; may be repeated."
    ),
    budget: int | None = typer.Option(
        None,
        min=1,
        help="The most runs of each method, all seeds and folds counted.  [default: for 12 choices of settings]",
        show_default=False,
    ),
    methods: str = typer.Option("", help="Methods to tune, separated by commas.  [default: the study's]"),
    seeds: int = typer.Option(1, min=1, help="Seeds for each choice of settings, counted up from the study's."),
    folds: int | None = typer.Option(
        None, min=2, help="Cross-validation: each choice is scored on so many folds of the images not for testing."
    ),
    out: Path = typer.Option(Path("runs/tuning"), help="The folder for all runs, tuning.json and best.toml."),
    sets: list[str] = SET,
    jobs: int | None = typer.Option(
        None, min=1, help="Runs at a time.  [default: as the cores allow]", show_default=False
    ),
    quiet: bool = typer.Option(False, "--quiet", help="Show no progress."),
    as_json: bool = typer.Option(False, "--json", help="Print tuning.json, and nothing else on stdout."),
) -> None:
    """Search the best settings on validation images; test images are not looked at.

    Every method gets the same budget. All combinations are tried where they fit into it, else some drawn by the seed.
    `--over fedprox:method.mu=0.1,0.01` is for one method. A search that was interrupted goes on where it stopped.
    """
    from polyclinic.runner.compare import tune as search
    from polyclinic.runner.compare.compare import default_jobs, run_all

    check_place(out / "tuning.json")
    chosen, space = chosen_study(study, sets), search.parse_over(over)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    budget = budget or search.CHOICES * seeds * (folds or 1)
    trials = search.plan(chosen, space, out, budget=budget, methods=names, seeds=seeds, folds=folds)
    planned = [run for trial in trials for run in trial.runs]
    check_before_any_starts(planned, quiet=quiet or as_json)
    with watched(planned, quiet=quiet or as_json) as update:
        failed = run_all(planned, out, jobs or default_jobs(chosen), update)
    found = search.summarise(chosen, space, trials, failed, budget=budget, seeds=seeds, folds=folds)
    try:
        search.write(found, chosen, out)
    finally:
        if as_json:
            typer.echo(json.dumps(found))
        else:
            print_trials(found)
    if not as_json:
        typer.echo(f"runs, tuning.json, best.toml and best-<method>.toml are in {out}")


def print_trials(found: JsonObject) -> None:
    """A row for each trial; a star marks what is chosen."""
    from rich.console import Console

    from polyclinic.cli.tables import table_of
    from polyclinic.runner.compare.compare import words_of
    from polyclinic.runner.compare.tune import sentence

    rows = []
    for row in found["trials"]:
        settings = words_of(row["settings"]) or "as in the study"
        star = "*" if found["methods"][row["method"]].get("chosen") == row["settings"] else ""
        cells = (f"{row['score']:.4f}", f"{row['loss']:.4f}") if "score" in row else ("failed", "-")
        rows.append((row["method"], settings, *cells, star))
    runs = found["budget"]["seeds"] * found["budget"].get("folds", 1)
    over = f", mean over {runs} runs" if runs > 1 else ""
    title = f"{found['metric']} on validation images ({found['better']} is better){over}"
    columns = ("method", "settings", found["metric"], "loss", "chosen")
    Console().print(table_of(columns, rows, words=("settings",), whole=1, title=title))
    if "privacy" in found:
        typer.echo(sentence(found["privacy"]))
