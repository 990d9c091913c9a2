"""The page of a dossier: one HTML file without scripts, every figure a link to its file of evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from html.parser import HTMLParser
from urllib.parse import quote, unquote

from polyclinic.report.dossier.figures import Figure
from polyclinic.report.dossier.parts import Bullets, Inline, Paragraph, Part, Section
from polyclinic.report.dossier.sections import PURPOSE

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --back: #fff; --link: #0a58a8;
  --note: #f3f6fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af; --line: #3d444d; --back: #14181d;
  --link: #79b8ff; --note: #1d232b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .2rem; }
.asked { color: var(--soft); margin: 0 0 .8rem; font-size: .9rem; }
.purpose { background: var(--note); border-left: 4px solid var(--link); padding: .8rem 1rem; }
a { color: var(--link); } a.figure { text-decoration-style: dotted; text-underline-offset: 2px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0 1rem; font-size: .92rem; }
th, td { border: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; min-width: 5rem; }
th { background: var(--note); }
td.digest, code { font-family: ui-monospace, monospace; font-size: .8rem; }
@media print { body { max-width: none; padding: 0; } a { color: inherit; } h2 { break-after: avoid; } }
"""
LONG = 40  # characters of a digest


def page_of(title: str, sections: Sequence[Section], files: Mapping[str, str]) -> str:
    """The HTML of a dossier; `files` are its files with their SHA-256."""
    contents = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    body = "\n".join(_section(section, files) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Dossier: {escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Dossier: {escape(title)}</h1>
<p class="purpose">{escape(PURPOSE)}</p>
<p>Every underlined figure leads to the file that it was read from. Point at it to see the place in the file and the
file's SHA-256. <code>polyclinic report verify</code> reads all of them again.</p>
<nav aria-label="Sections"><ul>{contents}<li><a href="#files">10. Files of evidence</a></li></ul></nav>
<main>
{body}
{_files(files)}
</main>
</body>
</html>
"""


def _section(section: Section, files: Mapping[str, str]) -> str:
    parts = "\n".join(_part(part, files) for part in section.parts)
    title, asked = escape(section.title), escape(section.asked)
    head = f'<h2>{title}</h2>\n<p class="asked">Asked for by: {asked}</p>'
    return f'<section id="{section.name}">{head}\n{parts}\n</section>'


def _part(part: Part, files: Mapping[str, str]) -> str:
    if isinstance(part, Paragraph):
        return f"<p>{_inline(part.words, files)}</p>"
    if isinstance(part, Bullets):
        return "<ul>" + "".join(f"<li>{_inline(words, files)}</li>" for words in part.items) + "</ul>"
    head = "".join(f'<th scope="col">{escape(_visible(name))}</th>' for name in part.head)
    rows = "".join("<tr>" + "".join(_cell(word, files) for word in row) + "</tr>" for row in part.rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(word: Inline, files: Mapping[str, str]) -> str:
    text = word.text if isinstance(word, Figure) else word
    long = ' class="digest"' if len(text) > LONG and " " not in text else ""
    return f"<td{long}>{_inline([word], files)}</td>"


def _inline(words: Sequence[Inline], files: Mapping[str, str]) -> str:
    return "".join(_figure(word, files) if isinstance(word, Figure) else escape(_visible(word)) for word in words)


def _figure(figure: Figure, files: Mapping[str, str]) -> str:
    link, place = escape(quote(figure.file)), escape(quote(figure.place))
    source = escape(_visible(f"{figure.file}, {figure.place}; SHA-256 {files[figure.file]}"))
    where = f'data-file="{link}" data-place="{place}" data-form="{figure.form}"'
    return f'<a class="figure" href="{link}" title="{source}" {where}>{escape(_visible(figure.text))}</a>'


def _visible(text: str) -> str:
    """Names without characters that hide or turn others around."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _files(files: Mapping[str, str]) -> str:
    rows = "".join(
        f'<tr><td><a href="{escape(quote(name))}">{escape(_visible(name))}</a></td>'
        f'<td class="digest">{digest}</td></tr>'
        for name, digest in sorted(files.items())
    )
    head = '<th scope="col">file</th><th scope="col">SHA-256</th>'
    table = f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f'<section id="files"><h2>10. Files of evidence</h2>\n{table}\n</section>'


class _Figures(HTMLParser):
    """Collects the figures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Figure] = []
        self._open: dict[str, str] | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag == "a" and "data-place" in known:
            self._open, self._text = known, ""

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._open is not None:
            form: str = self._open.get("data-form", "")
            file, place = (unquote(self._open.get(name, "")) for name in ("data-file", "data-place"))
            figure = Figure(file, place, form, self._text)  # type: ignore[arg-type]
            self.found.append(figure)
            self._open = None


def figures_on(page: str) -> Iterator[Figure]:
    """The figures that a page shows, with their places."""
    parser = _Figures()
    parser.feed(page)
    yield from parser.found


def visible(text: str) -> str:
    """A text as a page shows it."""
    return _visible(text)
