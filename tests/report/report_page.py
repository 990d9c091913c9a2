"""A page as a parser sees it."""

import json
from html.parser import HTMLParser
from pathlib import Path

from polyclinic.report.blocks import Chart


class Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def ids(self) -> list[str]:
        return [str(given["id"]) for _, given in self.tags if "id" in given]


def change(folder: Path, edit) -> None:
    values = json.loads((folder / "result.json").read_text())
    edit(values)
    (folder / "result.json").write_text(json.dumps(values))


def charts(report) -> dict[str, Chart]:
    return {chart.key: chart for chart in report.charts()}
