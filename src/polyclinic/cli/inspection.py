"""What sites told before training, as a table, sentences and a picture."""

from __future__ import annotations

from pathlib import Path

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonMapping


def show_inspection(found: JsonMapping, title: str, picture: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{title}: what the sites tell", title_justify="left", caption="-: not told (too few patients)")
    classes = found["classes"]
    names = classes or [f"bin {number + 1}" for number in range(len(found["total"]["labels"]))]
    for column in ("site", "train", "validation", "patients", *names):
        table.add_column(column, justify="left" if column == "site" else "right")
    for site, one in {**found["per_site"], "all": found["total"]}.items():
        table.add_row(site, *map(_cell, [*one["splits"], *one["patients"], *one["labels"]]))
    console = Console()
    console.print(table)
    for pair, distance in found["pairwise_ks"].items():
        console.print(f"KS of the labels of {pair}: {distance:.3f}")
    for sentence in found["guidance"]:
        console.print(sentence, soft_wrap=True)
    if picture is not None:
        _draw(found, title, picture)
        console.print(f"picture: {picture}")


def _cell(count: int) -> str:
    return "-" if count < 0 else f"{count:,}"


def _draw(found: JsonMapping, title: str, target: Path) -> None:
    from polyclinic.runner.inspect_federated import draw_inspection

    try:
        draw_inspection(found, title).savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise BadInput(f"{target}: cannot write the picture ({error}); name a .png in a folder that exists") from None
