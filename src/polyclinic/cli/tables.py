"""Tables in the terminal: results of a run, answers of sites before training, verdicts of an audit.

Tables of an audit fit into 80 columns without breaking a word: names stand as they are, and only sentences are wrapped.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyclinic.errors import BadInput
from polyclinic.files import human_bytes
from polyclinic.json_types import JsonMapping
from polyclinic.runner.run.result_display import few_images, image_counts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from polyclinic.runner.run.result import Result

Rows = Iterable[Sequence[Any] | None]


def table_of(columns: Sequence[str], rows: Rows, *, words: Sequence[str] = (), whole: int = 0, **look: Any) -> Table:
    """A table with figures on the right, but for the first column and those of `words`; `look` is rich's.

    The first `whole` columns are never wrapped. A row that is None is a line across.
    """
    table = Table(**look)
    for number, column in enumerate(columns):
        justify: Any = "left" if number == 0 or column in words else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=number < whole)
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*(cell if isinstance(cell, Text) else str(cell) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Rows, *, console: Console | None = None, **how: Any) -> None:
    """Print `table_of` these; where a terminal is too narrow to show every word whole, as several tables below each
    other, each with the first column."""
    console, all_rows = console or Console(), list(rows)

    def letters(cell: Any) -> int:  # figures stay on one line, long texts wrap between words
        return len(str(cell)) if len(str(cell)) <= SHORT else max(map(len, str(cell).split()))

    cells = [[columns[n], *(row[n] for row in all_rows if row and n < len(row))] for n in range(len(columns))]
    wide = [max(map(letters, column)) + 3 for column in cells]  # with the line beside it, and two blanks
    wide[0] = max(len(str(cell)) for cell in cells[0]) + 3 if how.get("whole") else wide[0]
    groups: list[list[int]] = [[0]]
    for n in range(1, len(columns)):
        if len(groups[-1]) > 1 and sum(wide[k] for k in (*groups[-1], n)) + 1 > console.width:
            groups.append([0])
        groups[-1].append(n)
    for number, group in enumerate(groups):
        some = [row and [row[n] for n in group if n < len(row)] for row in all_rows]
        look = how if number == 0 else {name: value for name, value in how.items() if name != "title"}
        console.print(table_of([columns[n] for n in group], some, **look))


#: letters of a cell that is not wrapped, if there is room in a row for it alone
SHORT = 20


# --- results of a run ---------------------------------------------------------------------------------


def print_result(result: "Result", shown: Sequence[str] = ()) -> None:
    """The metrics of a run, pooled, as a mean over sites, and of each site: test images, or validation images only.

    Of warnings that were `shown` while it ran, it says only how many there are.
    """
    metrics, images = result.metrics, "test"
    if scored := metrics.get("validation"):
        metrics, images = {"test": scored["pooled"], **scored}, "validation"
    names = [name for name in metrics["test"] if name != "loss"]
    counts = image_counts(result.values, images)
    # of deployed sites, whose policies round scores: what a figure lies between, in its place
    rounded: JsonMapping = metrics.get("rounding", {})
    told, mean, sites = (metrics["test"], metrics["mean"], metrics["per_site"])
    if rounded:
        told, mean, sites = (rounded[part] for part in ("pooled", "mean", "per_site"))
    rows: list[Any] = [("all sites together", sum(counts.values()) if counts else "-", *_cells(told, names))]
    rows += [("mean over sites", "", *_cells(mean, names))] if mean else []
    if guessed := result.values.get("without_images"):
        rows.append(("a guess without images", "", *_cells(guessed, names)))
    rows.append(None)
    rows += [(site, counts.get(site, "-"), *_cells(own, names)) for site, own in sites.items()]
    console = Console()
    print_table(("", "images", *names), rows, console=console, whole=1, title=f"{result['method']}, {images} images")
    if rounded:
        from polyclinic.runner.evaluate.rounded_scores import ROUNDED  # here: it imports torch

        console.print(f"note: {ROUNDED}", highlight=False, soft_wrap=True)
    if few := few_images(counts, list(metrics["per_site"])):
        console.print(f"note: {few}", highlight=False, soft_wrap=True)
    carried = human_bytes(result["communication"]["total_bytes"])
    selected = result["selected"]
    why = {"best": "the best on validation images", "last": "the last"}.get(selected["by"], selected["by"])
    released = f"model of round {selected['round']} ({why})"
    console.print(f"{released}; {carried} sent and received in all; folder: {result.folder}", soft_wrap=True)
    if found := result.values.get("replay"):
        console.print(replay_sentence(found), soft_wrap=True)
    print_warnings(console, result.values.get("warnings", []), shown)
    if privacy := result["privacy"]:
        console.print(
            f"epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:.3g} ({privacy['accountant'].upper()}) at "
            f"site '{privacy['site']}', the most of any; covers {', '.join(privacy['covers'])}; "
            f"does not cover {'; '.join(privacy['does_not_cover'])}",
            soft_wrap=True,
        )


def print_warnings(console: Console, warnings: Sequence[str], shown: Sequence[str]) -> None:
    """Each warning that nobody saw yet, and how many others there are."""
    for sentence in warnings:
        if sentence not in shown:
            console.print(f"warning: {sentence}", style="yellow", highlight=False, soft_wrap=True)
    if above := sum(sentence in shown for sentence in warnings):
        words = "1 warning stands" if above == 1 else f"{above} warnings stand"
        console.print(f"{words} above the table, and in result.json", style="yellow", highlight=False, soft_wrap=True)


def replay_sentence(found: Mapping[str, float]) -> str:
    """Quality of replayed images, codes that they used, and what a probe could tell."""
    words = []
    if "psnr" in found:
        words.append(f"replayed images came back at {found['psnr']:.1f} dB")
    if used := {n.removeprefix("code_usage_"): v for n, v in found.items() if n.startswith("code_usage_")}:
        words.append(f"codes in use: {', '.join(f'{share:.0%} ({level})' for level, share in used.items())}")
    if "real_or_replayed_auc" in found:
        words.append(f"a probe tells real from replayed with an AUC of {found['real_or_replayed_auc']:.3f}")
    if "which_site_accuracy" in found:
        chance = f"{found['which_site_chance']:.0%} by chance"
        words.append(f"and which site made one in {found['which_site_accuracy']:.0%} of cases ({chance})")
    return "; ".join(words)


def _cells(metrics: JsonMapping, names: list[str]) -> list[str]:
    """Figures, or the bounds of rounded ones."""

    found = []
    for name in names:
        if isinstance(metrics.get(name), Mapping):
            from polyclinic.runner.evaluate.rounded_scores import in_words  # here: it imports torch

            found.append(in_words(metrics, name))
        else:
            found.append(f"{metrics[name]:.3f}" if name in metrics else "-")
    return found


# --- what sites told before training -------------------------------------------------------------------

PAIRS = 3  #: of sites, that differ most, for which the KS is printed; a picture and --json have all
#: names of the histograms
WORDS = {"labels": "labels", "intensities": "intensities", "sides": "image sizes", "spacings": "pixel spacings"}


def show_inspection(found: JsonMapping, title: str, picture: Path | None) -> None:
    """Answers of sites before training, as tables, sentences and a picture; of volumes, the settings that follow."""
    if "plan" in found:
        print("\n".join(plan_lines(found)))
        return
    classes, console = found["classes"], Console()
    names = classes or [f"bin {number + 1}" for number in range(len(found["total"]["labels"]))]
    told = {**found["per_site"], "all": found["total"]}
    rows = [(site, *map(_cell, [*one["splits"], *one["patients"], *one["labels"]])) for site, one in told.items()]
    look: Any = {"title": f"{title}: what the sites tell", "caption": "-: not told (too few patients)"}
    columns = ("site", "train", "validation", "patients", *names)
    print_table(columns, rows, console=console, whole=1, title_justify="left", **look)
    _print_images(found, console)
    of_labels = {"labels": found["pairwise_ks"]} if len(classes) != 1 else {}  # masks without labels have one class
    for name, distances in {**of_labels, **found["ks"]}.items():
        for pair, distance in sorted(distances.items(), key=lambda one: -one[1])[:PAIRS]:
            console.print(f"KS of the {WORDS[name]} of {pair}: {distance:.3f}")
    for sentence in found["guidance"]:
        console.print(sentence, soft_wrap=True)
    if picture is not None:
        from polyclinic.runner.evaluate.inspect import draw_inspection

        save_figure(draw_inspection(found, title), picture)
        console.print(f"picture: {picture}")


def plan_lines(found: JsonMapping) -> list[str]:
    """The fingerprint of volumes, and lines of a study by nnU-Net's rules."""
    told = {name: found[name] for name in ("cases", "median_spacing", "median_extent", "voxels", "gigabytes")}
    lines = [f"# {name.replace('_', ' ')}: {json.dumps(value)}" for name, value in told.items()]
    lines += [f"# channel {n}, inside structures: {json.dumps(one)}" for n, one in enumerate(found["intensities"])]
    for table, settings in found["plan"].items():
        lines += ["", f"[{table}]"]
        for name, value in settings.items():
            inner = value.items() if isinstance(value, dict) else ()
            lines += [f"{name}.{key} = {json.dumps(one)}" for key, one in inner] or [f"{name} = {json.dumps(value)}"]
    return lines


def _print_images(found: JsonMapping, console: Console) -> None:
    """Sizes, spacings, and images without a value in a column."""
    units = {"sides": "px", "spacings": "mm"}
    heads = [f"{name} {unit}" for told, unit in units.items() for name in bin_names(found[told])]
    heads.append("mm unknown")
    rows = {**found["per_site"], "all": found["total"]}
    cells = {site: [*one["sides"], *one["spacings"]] for site, one in rows.items()}
    shown = [n for n in range(len(heads)) if any(own[n] for own in cells.values())]
    told = [(site, *(_cell(cells[site][n]) for n in shown), _cell(one["missing"][0])) for site, one in rows.items()]
    title = "images: longer side in pixels, distance of pixels in mm"
    columns = ("site", *(heads[n] for n in shown), "lacks a value")
    print_table(columns, told, console=console, whole=1, title=title, title_justify="left")


def bin_names(edges: Sequence[float]) -> list[str]:
    """Names of the bins between edges, with those below and above all."""
    between = [f"{low:g}-{high:g}" for low, high in itertools.pairwise(edges)]
    return [f"<{edges[0]:g}", *between, f">={edges[-1]:g}"]


def _cell(count: int) -> str:
    return "-" if count < 0 else f"{count:,}"


def save_figure(figure: "Figure", target: Path) -> None:
    """Save a picture; BadInput where it cannot be written."""
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        why = f"cannot write the picture ({error}); name a .png in a folder that exists"
        raise BadInput(f"--out {target}: {why}") from None


# --- audits -------------------------------------------------------------------------------------------

STYLES = {"leaks": "bold red", "withstood": "green", "not tested": "yellow"}
LINES = 3  #: of a sentence in a cell, at most; all of it is in audit.json
FEWEST_LETTERS = 28  #: of a line of a sentence, in a narrow terminal


def show_verdicts(report: Mapping[str, Any], run: Path) -> None:
    """A line for each kind of parcel and question; who the attacker is; where pictures and figures lie."""
    console = Console()
    console.print(verdict_table(report, console.width))
    console.print(threat_table(report))
    if "coordinator" in report:
        console.print(coordinator_table(report["coordinator"]))
    if two_sides := report.get("epsilon"):
        console.print(Text("; ".join([two_sides["words"], *filter(None, [two_sides.get("certainty")])])))
    if patients := report.get("patients"):
        console.print(Text(f"single patients: {patients['verdict']}. {patients['words']}"))
        for name in patients.get("lists", []):
            typer.echo(f"patients by risk, for the site's own people only: {run / name}")
    for kind, verdict in report["verdicts"].items():
        for words in attacks_of(kind, verdict):
            console.print(Text(words))
    for kind, verdict in report["verdicts"].items():
        for picture in verdict.get("pictures", []):
            typer.echo(f"{kind}: {run / picture}")
    typer.echo(f"all evidence: {run / 'audit.json'}")


def verdict_table(report: Mapping[str, Any], width: int = 80) -> Table:
    """A row for each kind and question; the kind stands in its first row."""
    title = f"{report['method']}: what the parcels give away (budget {report['budget']})"
    names = ("kind", "attacked", "question", "verdict")
    rows = [row for kind, of_kind in report["verdicts"].items() for row in (*_rows(kind, of_kind), None)]
    # letters of a line for the sentence, beside columns that are as wide as their longest entry (and two blanks)
    cells = [row[:-1] for row in rows if row]
    widest = [max(len(str(cell)) for cell in column) for column in zip(names, *cells, strict=True)]
    letters = max(FEWEST_LETTERS, width - sum(widest) - 2 * (len(names) + 1) - 2)
    shown = [row and (*row[:-1], shorten(row[-1], LINES * letters)) for row in rows]
    columns = (*names, "why")
    return table_of(columns, shown, words=columns, whole=len(names), title=title, box=box.SIMPLE_HEAD)


def _rows(kind: str, of_kind: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    attacked = f"{of_kind['attacked']} of {of_kind['left']}" if "attacked" in of_kind else "-"
    if not of_kind.get("questions"):
        yield kind, attacked, "-", Text(of_kind["verdict"], STYLES.get(of_kind["verdict"], "")), of_kind["words"]
        return
    for number, (name, one) in enumerate(of_kind["questions"].items()):
        first = (kind, attacked) if number == 0 else ("", "")
        yield *first, name, Text(one["verdict"], STYLES.get(one["verdict"], "")), one["why"]


def attacks_of(kind: str, of_kind: Mapping[str, Any]) -> Iterator[str]:
    """Attacks by question, with what they cost, and attacks that were not tried."""
    asked = {name: one for name, one in of_kind.get("questions", {}).items() if one["attacks"]}
    done = [f"{name}: {', '.join(one['attacks'])} ({one['seconds']:.0f} s)" for name, one in asked.items()]
    if done:
        yield f"{kind}, attacks: {'; '.join(done)}"
    if of_kind.get("released"):
        yield f"{kind}: the released model was attacked, too"
    if of_kind.get("not_tried"):
        yield f"{kind}, not tried: {'; '.join(of_kind['not_tried'])}"


def threat_table(report: Mapping[str, Any]) -> Table:
    """The attacker: what it holds and knows, and what it lacks."""
    look = {"title": "the attacker", "show_header": False, "box": box.SIMPLE}
    return table_of(("", ""), report["threat_table"], words=("",), whole=1, **look)


def coordinator_table(found: Mapping[str, Any]) -> Table:
    """Images that crafted weights got back from a site, without and with its incoming check."""
    columns = ("attack", "incoming check", "images back", "other images named", "PSNR, dB")
    rows = []
    for row in found["rows"]:
        back = "stopped" if row["stopped"] else f"{row['identified']} of {row['of']}"
        checked = "on" if row["checked"] else "off"
        rows.append((row["attack"], checked, back, row["by_chance"], _figure(row["psnr"], 1)))
    look = {"title": f"a coordinator that chooses the weights: {found['verdict']}", "caption": found["why"]}
    return table_of(columns, rows, words=columns, whole=1, box=box.SIMPLE_HEAD, **look)


def shorten(words: str, most: int) -> str:
    """The first words of a long sentence."""
    return words if len(words) <= most else words[: most - 4].rsplit(" ", 1)[0] + " ..."


def show_grid(report: Mapping[str, Any], run: Path) -> None:
    """Utility and leakage of each defence."""
    columns = ("defence", report["metric"], "PSNR", "guess", "recovered", "told", "verdict")
    rows = []
    for one in report["points"]:
        figures = [_figure(one[name], digits) for name, digits in (("utility", 3), ("psnr", 1), ("psnr_of_guess", 1))]
        counts = [f"{one[name]} of {one['images']}" for name in ("recovered", "told")]
        rows.append((one["defence"], *figures, *counts, one["verdict"]))
    title = "what defences cost and what they help against"
    print_table(columns, rows, words=("verdict",), title=title)
    drawn = f"drawn in {run / 'grid.png'}, " if (run / "grid.png").exists() else ""
    typer.echo(f"{drawn}figures in {run / 'grid.json'}")


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def show_findings(report: Mapping[str, Any], out: Path) -> None:
    """Findings in an update or in images of other programs: a row for each attack."""
    rows: list[Any] = []
    for row in report["findings"]:
        power = " ".join(f"Planted: {c['words']}: {'found' if c['found'] else 'missed'}." for c in row["power"])
        why = f"{row['words']} {row['doubt']} {power}".strip()
        rows += [(row["question"], row["attack"], row["verdict"], f"{row['seconds']:.0f}", why), None]
    title = f"{report['audited']}: {report['verdict']}"
    columns = ("question", "attack", "verdict", "seconds", "why")
    Console().print(table_of(columns, rows, words=columns, whole=4, title=title, box=box.SIMPLE_HEAD))
    for row in report["findings"]:
        if row["picture"]:
            typer.echo(f"{row['attack']}: {out / row['picture']}")
    typer.echo(f"all evidence: {out / 'audit.json'}")
