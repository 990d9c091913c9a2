"""The cells of the tutorial notebook run, in order, in an empty folder."""

from __future__ import annotations

import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "examples" / "tutorial.ipynb").read_text(encoding="utf-8"))


def value_of(code: str, names: dict) -> object:
    """Run a cell; what its last line is worth, as a notebook shows it."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_the_cells_of_the_tutorial_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    codes = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    shown = [value_of(code, names) for code in codes]
    assert "fedavg" in shown[2]._repr_html_()
    assert 0 <= shown[3]["auc"] <= 1
    assert len(shown[4]) == 3
    assert len(shown[5].axes) == 2
    assert set(shown[6]) == {"weights", "metrics"}
    assert set(shown[7]) == {"fedavg", "cwt"}
    assert [name for name, _ in shown[8]] == [f"eye-{number}.png" for number in range(4)]
    assert tuple(shown[9]) == (4, 2)


def test_the_notebook_is_kept_without_outputs_and_its_links_lead_somewhere():
    import re

    assert all(not cell.get("outputs") for cell in NOTEBOOK["cells"])
    text = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert all((ROOT / "examples" / link).exists() for link in links)
