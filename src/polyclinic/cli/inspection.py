"""What sites told before training, as a table, sentences and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonMapping

if TYPE_CHECKING:
    from rich.table import Table

PAIRS = 3  #: of sites, that differ most, for which the KS is printed; a picture and --json have all
#: what the histograms are of
WORDS = {"labels": "labels", "intensities": "intensities", "sides": "image sizes", "spacings": "pixel spacings"}


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
    console.print(_of_images(found))
    of_labels = {"labels": found["pairwise_ks"]} if len(classes) != 1 else {}  # masks without labels have one class
    for name, distances in {**of_labels, **found["ks"]}.items():
        for pair, distance in sorted(distances.items(), key=lambda one: -one[1])[:PAIRS]:
            console.print(f"KS of the {WORDS[name]} of {pair}: {distance:.3f}")
    for sentence in found["guidance"]:
        console.print(sentence, soft_wrap=True)
    if picture is not None:
        _draw(found, title, picture)
        console.print(f"picture: {picture}")


def _of_images(found: JsonMapping) -> Table:
    """Sizes, spacings, and images without a value in a column."""
    from rich.table import Table

    table = Table(title="images: longer side in pixels, distance of pixels in mm", title_justify="left")
    sides, spacings = bin_names(found["sides"]), [*bin_names(found["spacings"]), "unknown"]
    heads = [
        *(f"{name} px" for name in sides),
        *(f"{name} mm" if name != "unknown" else "mm unknown" for name in spacings),
    ]
    rows = {**found["per_site"], "all": found["total"]}
    shown = [n for n in range(len(heads)) if any([*one["sides"], *one["spacings"]][n] for one in rows.values())]
    for column in ("site", *(heads[n] for n in shown), "lacks a value"):
        table.add_column(column, justify="left" if column == "site" else "right")
    for site, one in rows.items():
        cells = [*one["sides"], *one["spacings"]]
        table.add_row(site, *(_cell(cells[n]) for n in shown), _cell(one["missing"][0]))
    return table


def bin_names(edges: Sequence[float]) -> list[str]:
    """What to call the bins between edges, with those below and above all."""
    between = [f"{low:g}-{high:g}" for low, high in itertools.pairwise(edges)]
    return [f"<{edges[0]:g}", *between, f">={edges[-1]:g}"]


def _cell(count: int) -> str:
    return "-" if count < 0 else f"{count:,}"


def _draw(found: JsonMapping, title: str, target: Path) -> None:
    from polyclinic.runner.inspect_federated import draw_inspection

    try:
        draw_inspection(found, title).savefig(target, dpi=150)
    except (OSError, ValueError) as error:
        raise BadInput(f"{target}: cannot write the picture ({error}); name a .png in a folder that exists") from None
