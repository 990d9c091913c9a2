"""Tables in Markdown from files that `attack_tables.py --json` wrote: `attack_tables_markdown.py FILE...`.

A table for each data set and network: a row for each distance, ours with the paper's figure in brackets. `--theirs`
takes the scores as the authors' code computes them (see attack_tables.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FORMS = {"plain": ", a kernel per layer", "whole": ", one kernel", "scaled": ", scaled", "": ""}
NAMES = {
    "Eucl": "Euclidean",
    "AG": "adaptive Gaussian, n Var",
    "AG2": "adaptive Gaussian, 2 n Var",
    "Var": "Var (SAPAG)",
}
HEAD = "| distance | TG: MSE | SSIM | failed | Unif: MSE | SSIM | failed | failed at lr 1: TG | Unif |"

Row = dict[str, Any]


def tables(rows: list[Row], theirs: bool) -> str:
    """All tables, one after the other; of ResNet-18 the last number of steps counts."""
    parts = []
    for data, network in dict.fromkeys((row["data"], row["network"]) for row in rows):
        some = [row for row in rows if (row["data"], row["network"]) == (data, network)]
        parts.append("\n".join([f"{data}, {network}:", "", HEAD, "|---|" + "---|" * 8, *lines(some, theirs), ""]))
    return "\n".join(parts)


def lines(rows: list[Row], theirs: bool) -> list[str]:
    found = {(row["distance"], row["form"], row["start"], row["lr"]): row for row in rows}
    slow = min(row["lr"] for row in rows)
    made = []
    for distance, form in dict.fromkeys((row["distance"], row["form"]) for row in rows):
        name = NAMES.get(distance, f"lambda² = {distance}") + FORMS[form]
        cells = [cell for start in ("TG", "Unif") for cell in figures(found.get((distance, form, start, slow)), theirs)]
        fast = [figures(found.get((distance, form, start, 1.0)), theirs)[2] for start in ("TG", "Unif")]
        made.append(f"| {name} | " + " | ".join([*cells, *fast]) + " |")
    return made


def figures(row: Row | None, theirs: bool) -> list[str]:
    """MSE, SSIM and how many failed, each with the paper's in brackets."""
    if row is None:
        return [""] * 3
    ours, paper = row["their_scoring"] if theirs else row, row["paper"] or {}
    shown = []
    for name, style in (("mse", ".2g"), ("ssim", ".2f"), ("non_converging", "d")):
        value, other = ours[name], paper.get(name)
        text = "–" if value is None else format(value, style)
        shown.append(text if other is None else f"{text} ({format(other, style)})")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--theirs", action="store_true", help="scores as the authors' code computes them")
    options = parser.parse_args()
    rows = [row for path in options.files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    print(tables(rows, options.theirs))


if __name__ == "__main__":
    main()
