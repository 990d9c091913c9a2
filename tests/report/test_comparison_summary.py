"""The summary of a comparison from figures made by hand, and the words of a chart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from matplotlib.figure import Figure

from polyclinic.palette import LIGHT
from polyclinic.report.blocks import Chart, Table
from polyclinic.report.comparison import _summary as comparison_summary
from polyclinic.report.evidence import ComparisonEvidence, Ledgers
from polyclinic.report.run_report import _most
from polyclinic.report.theme import NAME, legend, svg_of


def summary_of_one(method: str, audits: list) -> str:
    spread = {"test_accuracy": {"mean": 0.5, "n": 1}, "total_bytes": {"mean": 2000.0}}
    content = {"metric": "accuracy", "methods": {method: spread}, "rows": [{}]}
    runs = [SimpleNamespace(audit=audit, ledgers=Ledgers({}, {}), unit="") for audit in audits]
    found = ComparisonEvidence(Path("one"), content, {method: runs})
    return " ".join(comparison_summary(found))


def test_leaks_that_rebuild_no_image_are_told_and_one_method_is_not_compared():
    leak = {"verdicts": {"weights": {"verdict": "leaks"}, "scores": {"verdict": "withstood"}}, "parcels": []}
    words = summary_of_one("fedavg", [leak, None])
    assert (
        "No attack that rebuilds images was run; the reports of the runs have the verdicts: leaks in weights." in words
    )
    assert "fedavg has a mean accuracy of 0.500." in words
    assert "fedavg carried 2.0 kB a run." in words
    assert "all have the same" not in words
    assert "verdicts: nothing was shown to leak." in summary_of_one(
        "fedavg", [{"verdicts": {"weights": {"verdict": "withstood"}}}]
    )
    assert "No run was attacked" in summary_of_one("fedavg", [None])


def test_a_backslash_in_a_title_is_a_letter():
    chart = Chart("by", r"Accuracy by \1 \g<9> \U", lambda figure, theme: None, Table(("a",), []))
    assert r'aria-label="Accuracy by \1 \g&lt;9&gt; \U. The table' in svg_of(chart)


def test_who_sent_most_is_named_only_where_sizes_differ():
    assert "south" not in _most({"north": 2000, "south": 2000})
    assert _most({"north": 2000, "south": 5000}).startswith("south")


def test_names_of_a_legend_take_several_lines():
    axes = Figure().subplots()
    name = "University Hospital of Southern Finland against all others"
    axes.plot([0, 1], [0, 1], label=f"{name}\nAUC 0.910")
    legend(axes, LIGHT)
    [text] = axes.get_legend().get_texts()
    lines = text.get_text().split("\n")
    assert " ".join(lines[:-1]) == name
    assert (max(map(len, lines)) <= NAME, lines[-1]) == (True, "AUC 0.910")
