"""What MkDocs calls when it builds the site: adds the pages that are made from the code, and mends links.

Pages link to files of the repository as they lie there, so that they can be read without the site. Links that leave
`docs/` lead to copies in the site: SECURITY.md, examples, ...; of other files only the name is shown.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import yaml
from method_parts import filled
from mkdocs.structure.files import File
from reference_api import api_page
from reference_commands import commands_page
from reference_formats import formats_page, schemas
from reference_settings import PAGES, names_page, study_page, variants_page

ROOT = Path(__file__).parents[2]
#: pages outside docs/ and what they are called in the site
OUTSIDE = {
    "README.md": "project/readme.md",
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "THIRD_PARTY_NOTICES.md": "project/third_party_notices.md",
}
#: links to folders and what shows their content
INSTEAD = {"src/polyclinic/schemas": "reference/formats.md"}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Puts pages that the navigation does not name at the end of "How to"."""
    navigation = yaml.safe_dump(config.nav)
    pages = sorted(page.relative_to(config.docs_dir).as_posix() for page in Path(config.docs_dir).rglob("*.md"))
    how_to = next(section["How to"] for section in config.nav if "How to" in section)
    how_to += [page for page in pages if f" {page}\n" not in navigation]
    return config


def on_files(files: Any, config: Any) -> Any:
    for path, content in {**pages_from_code(), **files_to_copy()}.items():
        files.append(File.generated(config, path, content=content))
    for path, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return with_site_links(with_deep_lists(filled(markdown)), page.file.src_uri)


ITEM = re.compile(r"(\d+\.|[-*]) +")


def with_deep_lists(markdown: str) -> str:
    """A page whose lists hold what is indented below them: MkDocs wants four spaces there, and would end the list."""
    lines, width, in_code = [], 0, False
    for line in markdown.split("\n"):
        indented = width and line.startswith(" " * width)
        if not in_code and line and not indented:
            item = ITEM.match(line)
            width = len(item[0]) if item else 0
        if line.lstrip().startswith("```"):
            in_code = not in_code
        lines.append("    " + line[width:] if indented else line)
    return "\n".join(lines)


def pages_from_code() -> dict[str, str]:
    """Pages of the reference by their path in the site."""
    made = {f"reference/{file}.md": variants_page(name) for name, (file, _, _) in PAGES.items()}
    return made | {
        "reference/study.md": study_page(),
        "reference/names.md": names_page(),
        "reference/commands.md": commands_page(),
        "reference/api.md": api_page(),
        "reference/formats.md": formats_page(),
    }


def files_to_copy() -> dict[str, str]:
    """Schemas and examples, to be downloaded."""
    examples = {
        f"examples/{file.name}": file.read_text(encoding="utf-8") for file in (ROOT / "examples").glob("*.toml")
    }
    return examples | {f"reference/schemas/{name}.schema.json": text for name, text in schemas().items()}


def with_site_links(markdown: str, path: str) -> str:
    """A page whose links lead to pages of the site. `path` is the page's own path in the site."""
    origin = next((outside for outside, name in OUTSIDE.items() if name == path), f"docs/{path}")

    def mend(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if target.startswith("#") or ":" in target:
            return link[0]
        file, _, place = target.partition("#")
        found = in_site(posixpath.normpath(posixpath.join(posixpath.dirname(origin), file)))
        if found is None:
            return text if "`" in text or "/" in text else f"{text} (`{file.lstrip('./')}`)"
        mended = posixpath.relpath(found, posixpath.dirname(path) or ".")
        return f"{image}[{text}]({mended}{'#' if place else ''}{place})"

    return LINK.sub(mend, markdown)


def in_site(path: str) -> str | None:
    """Where a file of the repository is in the site; None if it is not there."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith(".toml"):
        return path
    return OUTSIDE.get(path) or INSTEAD.get(path.rstrip("/"))
