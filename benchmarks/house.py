"""Figures of the source tree: files a folder, import cycles, long signatures, `Any`, names defined twice.

python benchmarks/house.py [--quick] [--json FILE] [--source DIR]

`--source` is the folder of another version's package, to compare with. Nothing is imported or run.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "polyclinic"
MOST_PARAMETERS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: it takes a second")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--source", type=Path, default=SOURCE, help="folder of a package")
    options = parser.parse_args()
    figures = measure(options.source)
    text = json.dumps(figures)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(text)


def measure(source: Path) -> dict[str, object]:
    """All figures of the package in a folder."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))}
    functions = [node for tree in trees.values() for node in _functions(tree)]
    folders = Counter(str(path.parent.relative_to(source)) for path in trees)
    twice = names_defined_twice(trees)
    return {
        "files": len(trees),
        "functions": len(functions),
        "largest folders": dict(folders.most_common(6)),
        "packages in import cycles": package_cycles(source, trees, every_import=True),
        "packages in import cycles, eager imports only": package_cycles(source, trees, every_import=False),
        "functions with more than six parameters": sum(_parameters(node) > MOST_PARAMETERS for node in functions),
        "functions above 40 lines": sum((node.end_lineno or 0) - node.lineno >= 40 for node in functions),
        "functions not fully annotated": sum(not _annotated(node) for node in functions),
        "Any": sum(isinstance(n, ast.Name) and n.id == "Any" for tree in trees.values() for n in ast.walk(tree)),
        "public names defined in two or more modules": len(twice),
        "which": twice,
    }


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def _annotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return node.returns is not None and all(a.annotation or a.arg in ("self", "cls") for a in named)


def names_defined_twice(trees: dict[Path, ast.Module]) -> list[str]:
    """Public classes and functions at the top of two or more modules; `operation`-like names inside classes do not
    count."""
    homes = defaultdict(set)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
    return sorted(name for name, paths in homes.items() if len(paths) > 1)


def package_cycles(source: Path, trees: dict[Path, ast.Module], *, every_import: bool) -> list[list[str]]:
    """Groups of packages that import each other. `every_import`: those inside functions and for types, too."""
    edges: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        room = path.relative_to(source).parts[0].removesuffix(".py")
        nodes = ast.walk(tree) if every_import else iter(tree.body)
        edges[room] |= {target for node in nodes for target in _targets(node) if target != room}
    reach = {room: _reachable(room, edges) for room in list(edges)}
    groups = {frozenset(other for other in reach[room] if room in reach.get(other, ())) for room in edges}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "polyclinic":
        module = str(node.module)
        yield from [module.split(".")[1]] if "." in module else [alias.name for alias in node.names]
    elif isinstance(node, ast.Import):
        yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("polyclinic."))


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in edges.get(waiting.pop(), ()):
            if target not in found and target in edges:
                found.add(target)
                waiting.append(target)
    return found


if __name__ == "__main__":
    main()
