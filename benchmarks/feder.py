"""Tables 2 to 7 and Fig. 2 of FedER, on natural sites: every method with the same steps and the same search.

Each method's learning rate is the best of a few by validation images of seed 0; then it runs with as many seeds as
asked for. A first model counts as a round, so FedER has one round less than the others. Every run is a study of its
own in a folder below --out, and a benchmark that was interrupted goes on where it stopped. What is finished is written
into --json as it comes.

POLYCLINIC_DATA (or --data) names the folder with fed_isic5_64_jpeg.npz, pneumoniamnist.npz, tb_cxr_64.npz and
covid_cxr_64.npz; without it, skin phantoms whose sites' cameras differ.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from feder_figures import draw_scalability, figures, table
from feder_generators import train_ahead
from feder_options import read_options
from feder_plan import RATES, ROWS, SEARCHED, Plan
from feder_workers import run_all

from polyclinic.runner.compare import Entry

#: what the figures depend on besides the data, for the record
ASKED = (
    *("rounds", "local_steps", "seeds", "rates", "size", "most", "backbone", "norm", "decay_every", "select"),
    *("evaluate_every", "generator", "generator_set", "generator_steps", "tuning_steps"),
)


def searched(plan: Plan, rows: list[str], **changes: Any) -> dict[str, float]:
    """The best learning rate of each method by validation images; all methods try the same ones, with seed 0."""
    rates = RATES[1:2] if plan.quick else plan.options.rates
    planned = {(row, lr): plan.entry(row, 0, lr, **changes) for row in rows for lr in rates}
    ahead = [plan.generators(0, **changes)] if needs_training(plan, rows) else []
    go(plan, ahead + list(planned.values()))
    best = {}
    for row in rows:
        scores = {lr: validation_score(planned[row, lr]) for lr in rates}
        best[row] = max(scores, key=lambda lr: scores[lr])
    print(f"{time.monotonic() - plan.options.started:.0f} s: learning rates: {best}", flush=True)
    return best


def needs_training(plan: Plan, rows: Any) -> bool:
    """Whether a run ahead must train generators, for runs side by side not to wait for each other."""
    used = any(ROWS[row][0].startswith("feder") or "images" in ROWS[row][1] for row in rows)
    return used and plan.options.jobs > 1 and not plan.options.trained


def validation_score(entry: Entry) -> float:
    """The accuracy on validation images of the round that was released."""
    if entry.result is None:
        return float("-inf")
    lines = [json.loads(line) for line in (entry.folder / "history.jsonl").read_text().splitlines()]
    scores = [line["validation"]["pooled"]["accuracy"] for line in lines if line["validation"]]
    return max(scores) if entry.study.evaluation.select == "best" else scores[-1]


def wanted(plan: Plan, rows: Any) -> list[str]:
    """Those of `rows` that were asked for, or whose learning rate one of them takes."""
    chosen = plan.options.rows
    needed = set(ROWS) if chosen is None else set(chosen) | {ROWS[row][2] for row in chosen}
    return [row for row in rows if row in needed]


def go(plan: Plan, entries: list[Entry], report: Callable[[], None] | None = None) -> None:
    """Run what is not finished, telling of each run that is; at the deadline give up with what there is."""
    options = plan.options
    left = options.seconds - (time.monotonic() - options.started) if options.seconds else None

    def finished(entry: Entry, words: str) -> None:
        print(f"{time.monotonic() - options.started:.0f} s: {entry.folder.name} {words}", flush=True)
        if report is not None:
            report()

    if not run_all(entries, options.jobs, left, finished):
        print("time is up: what is finished is reported", flush=True)


# --- Fig. 2 -------------------------------------------------------------------------------------------


def scalability(plan: Plan, found: dict[str, Any]) -> None:
    """2 to 16 equal sites on the images of one source (its own split each time), FedER beside the paper's others."""
    rows = [
        row for row in ("fedavg", "fedprox", "fedbn", "feder") if plan.options.rows is None or row in plan.options.rows
    ]
    rates = found["learning rates"] = searched(plan, rows, **equal_sites(plan, plan.options.site_counts[0]))
    planned: dict[tuple[int, str], list[Entry]] = {
        (count, row): [
            plan.entry(row, seed, rates[row], **equal_sites(plan, count)) for seed in range(plan.options.seeds)
        ]
        for count in (plan.options.site_counts[:1] if plan.quick else plan.options.site_counts)
        for row in rows
    }

    def report() -> None:
        found["equal sites"] = {}
        for (count, row), entries in planned.items():
            found["equal sites"].setdefault(str(count), {})[row] = figures(entries)
        write(plan, found)

    go(plan, by_seed(plan, planned), report)
    report()
    for count, of_count in found["equal sites"].items():
        print(f"{count} equal sites")
        table(of_count)
    if plan.options.plot:
        draw_scalability(found["equal sites"], rows, Path(plan.options.plot))


def equal_sites(plan: Plan, count: int) -> dict[str, Any]:
    data = dict(plan.base["data"])
    if plan.options.data:
        data |= {"keep": {"site": [plan.options.source]}, "site": ""}
    return {"data": data, "sites": {"partition": "iid", "count": count}}


# --- all of it ----------------------------------------------------------------------------------------


def tables(plan: Plan, found: dict[str, Any]) -> None:
    """Every row of Tables 2 to 7 that was asked for."""
    rates = found["learning rates"] = searched(plan, wanted(plan, SEARCHED))
    planned = {
        row: [plan.entry(row, seed, rates[ROWS[row][2]]) for seed in range(plan.options.seeds)]
        for row in wanted(plan, ROWS)
    }

    def report() -> None:
        found["rows"] = {row: figures(entries) for row, entries in planned.items()}
        write(plan, found)

    go(plan, by_seed(plan, planned), report)
    report()
    table(found["rows"])


def by_seed(plan: Plan, planned: Mapping[Any, list[Entry]]) -> list[Entry]:
    """First everything with the first seed: if time runs out, every row has something.

    Runs side by side find the generators of their seed trained: one of those before trained them.
    """
    order: list[Entry] = []
    for seed, of_seed in enumerate(zip(*planned.values(), strict=True), start=1):
        if seed < plan.options.seeds and not plan.options.scalability and needs_training(plan, planned):
            order.append(plan.generators(seed))
        order += of_seed
    return order


def only_generators(plan: Plan) -> None:
    """Train those of all seeds, side by side."""
    options = plan.options

    def tell(words: str) -> None:
        print(f"{time.monotonic() - options.started:.0f} s: {words}", flush=True)

    places = [equal_sites(plan, count) for count in options.site_counts] if options.scalability else [{}]
    studies = [plan.generators(seed, **place).study for seed in range(options.seeds) for place in places]
    train_ahead(studies, plan.out / "generators", options.generators_at_once, options.seconds or None, tell)


def write(plan: Plan, found: dict[str, Any]) -> None:
    if plan.options.json:
        Path(plan.options.json).write_text(json.dumps(found, indent=1))


def main() -> None:
    options = read_options(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        options.out = options.out or scratch
        plan = Plan(options)
        if options.generators_at_once:
            return only_generators(plan)
        asked = {name: getattr(options, name) for name in ASKED}
        data = f"{options.task} by source" if options.data else "skin phantoms"
        found: dict[str, Any] = {"benchmark": "feder", "quick": options.quick, "data": data, "options": asked}
        (scalability if options.scalability else tables)(plan, found)
        write(plan, found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
