"""`polyclinic ledger`: check every site's ledger, and say what left."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.cli.groups import UNNAMED, DefaultCommand, UnnamedCommand

if TYPE_CHECKING:
    from polyclinic.federation.ledger.verify import Checked
    from polyclinic.json_types import JsonObject

HELP = """Check the ledgers of a run, and explain what left each site.

`polyclinic ledger RUN` sums up; with --lines it prints every line. Write ./verify for a folder named verify.
"""
MORE = "`polyclinic ledger RUN --help` lists the options without a command's name."
app = typer.Typer(name="ledger", cls=DefaultCommand, help=HELP, epilog=MORE)

RUN = typer.Argument(..., help="A run folder (at a site, KIT/runs/NAME), or one ledger file.")
KEYS = typer.Option(None, help="The file site_keys.toml with the sites' public keys, where RUN is not in a kit.")
AGAINST = typer.Option(None, help="The coordinator's run folder: what it received is compared with the ledgers.")


@app.command(UNNAMED, hidden=True, cls=UnnamedCommand)
def summary(
    run: Path = RUN,
    lines: bool = typer.Option(False, "--lines", help="Print every line instead of a summary."),
    keys: Path | None = KEYS,
) -> None:
    """Check the ledgers of a run, and sum up what left each site."""
    from polyclinic.federation.ledger.verify import check_run

    ledgers = check_run(run, keys)
    (show_lines if lines else show_summary)(ledgers)


@app.command()
def verify(run: Path = RUN, keys: Path | None = KEYS, against: Path | None = AGAINST) -> None:
    """Find any line that was changed, removed, added, moved or forged, and any ledger that was cut short or deleted.

    Exit code 1, with the file and the line, where a ledger does not hold.
    """
    from polyclinic.federation.ledger.verify import check_run

    for site, checked in check_run(run, keys, against).items():
        typer.echo(sentence_about(site, checked))


@app.command()
def show(
    run: Path = RUN,
    for_officer: bool = typer.Option(False, "--for-officer", help="Plain sentences for a data protection officer."),
    keys: Path | None = KEYS,
) -> None:
    """Print every line of the ledgers, or what they mean in plain sentences."""
    from polyclinic.federation.ledger.verify import check_run

    ledgers = check_run(run, keys)
    if not for_officer:
        show_lines(ledgers)
        return
    for site, checked in ledgers.items():
        typer.echo("\n".join([sentence_about(site, checked), *sentences(checked.lines), ""]))
    typer.echo("\n".join(refusals(run)))


@app.command()
def who(
    patient: str = typer.Argument(..., help="A patient, as the site's own data calls him or her."),
    run: Path = typer.Argument(..., help="A run folder, or a site's kit, of which all runs are looked at."),
) -> None:
    """List the runs, rounds and parcels that knew a patient. For the site's own people."""
    from polyclinic.audits.withdrawal import runs_that_knew

    found = runs_that_knew(run, patient)
    for name, sites in found.items():
        for site, (counts, lines) in sites.items():
            images = ", ".join(f"{count} {split}" for split, count in counts.items() if count)
            typer.echo(f"{name}, {site}: images: {images}; {len(lines)} parcels left")
            for line in lines:
                typer.echo(f"  round {line['round']}, {line['operation']}: {line['kind']} {line['digest'][:12]}")
    if not found:
        typer.echo("no run knew this patient")


def sentence_about(site: str, checked: "Checked") -> str:
    """A sentence about a ledger that holds."""
    count, signed = len(checked.lines), checked.signatures_checked
    words = [f"{site}: {count} lines, each follows the one before it"]
    if checked.unsigned:
        many = "all" if checked.unsigned == count else f"the first {checked.unsigned}"
        words.append(f"{many} are unsigned (written by an older version): nobody can tell whether they were rewritten")
    if checked.unsigned < count:
        words.append("signatures are right" if signed else "signatures were not checked; name --keys")
    known = f"records outside the ledger confirm {checked.seen} lines"
    words.append(known if checked.seen else "nothing outside the ledger says how many lines it must have")
    if checked.countersigned:
        words.append(f"{checked.countersigned} are counter-signed by the coordinator")
    if checked.not_received:
        lines = ", ".join(map(str, checked.not_received))
        words.append(f"what left in line {lines} did not reach the coordinator")
    return "; ".join(words) + "."


def show_lines(ledgers: "Mapping[str, Checked]") -> None:
    every = [{"site": site, **line} for site, checked in ledgers.items() for line in checked.lines]
    wide = {name: max((len(str(line[name])) for line in every), default=0) for name in ("site", "operation", "kind")}
    for line in every:
        columns = "  ".join(f"{line[name]:<{wide[name]}}" for name in ("operation", "kind"))
        about = f"round {line['round']:>3}  {columns}  {line['bytes']:>10} B  to {line['to']}  {line['digest'][:16]}"
        if of_sum := line.get("sum"):
            about += f"  in sum {of_sum['id']} of {of_sum['sites']} sites"
        typer.echo(f"{line['site']:<{wide['site']}}  {about}")


def show_summary(ledgers: "Mapping[str, Checked]") -> None:
    from rich.console import Console

    from polyclinic.cli.tables import human_bytes, table_of

    rows = []
    for site, checked in ledgers.items():
        for kind in sorted({line["kind"] for line in checked.lines}):
            sizes = [line["bytes"] for line in checked.lines if line["kind"] == kind]
            rows.append((site, kind, len(sizes), human_bytes(sum(sizes))))
    title, console = "what left each site (all chains hold)", Console()
    console.print(table_of(("site", "kind", "parcels", "bytes"), rows, words=("kind",), title=title))
    if unsigned := [site for site, checked in ledgers.items() if checked.unsigned]:
        console.print(f"unsigned lines, written by an older version: {', '.join(unsigned)}", soft_wrap=True)


# --- plain sentences for a data protection officer: what left, to whom, and what protects it -----------


def sentences(lines: "Sequence[JsonObject]") -> list[str]:
    """Sentences of a ledger: what left, how often, to whom; what differential privacy covers and what not."""
    from polyclinic.files import human_bytes

    sent = [line for line in lines if line["bytes"]]
    if not sent:
        return ["Nothing left this site.", *_acts(lines)]
    total = human_bytes(sum(line["bytes"] for line in sent))
    return [f"What left ({total} in all):", *_what_left(sent), *_protection(sent), *_acts(lines)]


def refusals(run: Path) -> list[str]:
    """Refusals of the gate: at a site, by its own log of all runs; in a simulation, by the result of the run."""
    from polyclinic.data.own_images import find_kit
    from polyclinic.run_folder import read_result

    kit = find_kit(run if run.is_dir() else run.resolve().parent.parent)
    if kit:
        log = kit / "failures.log"
        texts = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        refused, where = [text for text in texts if "kept back" in text], f"by {log}, which is about all runs"
    elif (run / "result.json").exists():
        failures = read_result(run).get("failures", [])
        refused = [f"round {one['round']}: {one['reason']}" for one in failures if "kept back" in one["reason"]]
        where = "by result.json"
    else:
        return ["What was refused is not in this folder: see failures.log of the site's kit."]
    if not refused:
        return [f"The gate kept no parcel back ({where})."]
    return [f"The gate kept parcels back {len(refused)} times ({where}):", *(f"- {text}" for text in refused)]


def _what_left(lines: "Sequence[JsonObject]") -> Iterator[str]:
    from polyclinic.data.allowed_paths import COORDINATOR
    from polyclinic.federation.ledger.kinds import KINDS_IN_WORDS
    from polyclinic.files import human_bytes

    groups: dict[tuple[str, str, str], list[JsonObject]] = {}
    for line in lines:
        groups.setdefault((line["kind"], line["operation"], line["to"]), []).append(line)
    for (kind, operation, to), group in groups.items():
        receiver = "the coordinator" if to == COORDINATOR else f"site '{to}', sealed: the coordinator cannot read it"
        size = human_bytes(sum(line["bytes"] for line in group))
        rounds = sorted({line["round"] for line in group})
        often = "once" if len(group) == 1 else f"{len(group)} times"
        span = f"in round {rounds[0]}" if len(rounds) == 1 else f"in rounds {rounds[0]} to {rounds[-1]}"
        when = f"{often}, {'before the first round' if rounds == [0] else span}"
        yield f"- {KINDS_IN_WORDS.get(kind, kind)}: {when}, {size}, to {receiver} (step '{operation}')."


def _protection(lines: "Sequence[JsonObject]") -> Iterator[str]:
    from polyclinic.federation.ledger.budget import Spent
    from polyclinic.federation.ledger.kinds import KINDS_IN_WORDS, OF_NO_IMAGE

    records = [line["privacy"] for line in lines if line["privacy"]]
    bare = dict.fromkeys(line["kind"] for line in lines if line["privacy"] is None and line["kind"] not in OF_NO_IMAGE)
    if not records:
        yield "Differential privacy covers nothing of this: no epsilon limits what it tells about a patient."
        return
    spent = Spent()
    for line in lines:
        epsilon = (line["privacy"] or {}).get("epsilon")
        spent.add(line["kind"], line["bytes"], line["privacy"], float("inf") if epsilon is None else epsilon)
    last = records[-1]
    total = f"epsilon {spent.epsilon:.4g} in all at delta {last['delta']:g} (accountant {last['accountant']})"
    yield f"Differential privacy: {total}. It covers {'; '.join(last['covers']) or 'nothing'}."
    if last["does_not_cover"]:
        yield f"It does not cover {'; '.join(last['does_not_cover'])}."
    if bare:
        yield f"No epsilon holds for: {', '.join(KINDS_IN_WORDS.get(kind, kind) for kind in bare)}."


def _acts(lines: "Sequence[JsonObject]") -> Iterator[str]:
    """Lines that are about no parcel: keys that were changed, studies that were approved."""
    for line in lines:
        if not line["bytes"]:
            yield f"Line {line['index'] + 1}: {line['operation']} ({line['kind']} {line['digest'][:16]})."
