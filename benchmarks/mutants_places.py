"""Places of the source that a mutant changes: negated comparisons, other numbers and operators, dropped guards."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"

SWAPPED: dict[type, type] = {
    **{ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And},
}


@dataclass(frozen=True)
class Place:
    """One change of one file. `function` is "" where the place runs at import; then `lines` are those that use it."""

    room: str
    file: str
    index: int
    line: int
    function: str
    how: str
    before: str
    after: str
    lines: tuple[int, ...] = field(repr=False)

    @property
    def module(self) -> str:
        return ".".join(Path(self.file).with_suffix("").parts).removesuffix(".__init__")

    def told(self) -> dict[str, Any]:
        """What a campaign writes of it."""
        kept = ("room", "function", "how", "before", "after")
        return {"where": f"src/{self.file}:{self.line}", **{key: asdict(self)[key] for key in kept}}

    def code(self) -> CodeType:
        """The file with this change, compiled; lines keep their numbers."""
        path = SOURCE / self.file
        tree = ast.parse(path.read_text(encoding="utf-8"))
        _mutate(list(_mutations(tree))[self.index].node)
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)


@dataclass(frozen=True)
class _Found:
    node: ast.AST
    how: str
    function: str
    statement: ast.stmt


def places_of(room: str) -> list[Place]:
    """All places of a room."""
    found = []
    for path in sorted((SOURCE / "polyclinic" / room).rglob("*.py")):
        found += list(_places_of_file(room, path))
    return found


def draw(room: str, seed: int, count: int) -> list[Place]:
    """Places of a room, each as likely as any other."""
    everything = places_of(room)
    return random.Random(f"{seed} {room}").sample(everything, min(count, len(everything)))


def found_again(rows: Sequence[dict[str, Any]]) -> list[Place]:
    """The places of an earlier campaign, by what was told of them: lines may have moved since."""
    known: dict[str, list[Place]] = {}
    again = []
    for row in rows:
        places = known.setdefault(row["room"], places_of(row["room"]))
        file, _, line = row["where"].removeprefix("src/").rpartition(":")
        same = [one for one in places if one.file == file and all(getattr(one, k) == row[k] for k in _SAME)]
        again += sorted(same, key=lambda one: abs(one.line - int(line)))[:1]
    return again


_SAME = ("function", "how", "before", "after")


def _places_of_file(room: str, path: Path) -> Iterator[Place]:
    text = path.read_text(encoding="utf-8")
    for index, found in enumerate(_mutations(ast.parse(text))):
        line, before = getattr(found.node, "lineno", found.statement.lineno), _short(found.node)
        lines = _lines_of(found, text)
        _mutate(found.node)  # the tree is not used again: the next place comes from the same walk
        after = _short(found.node)
        _restore(found.node)
        file = str(path.relative_to(SOURCE))
        yield Place(room, file, index, line, found.function, found.how, before, after, lines)


def _short(node: ast.AST) -> str:
    return ast.unparse(node).splitlines()[0]


def _mutations(tree: ast.Module) -> Iterator[_Found]:
    for node, function, statement in _with_functions(tree, "", "", None):
        how = _how(node)
        if how and statement is not None:
            yield _Found(node, how, function, statement)


def _how(node: ast.AST) -> str:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        return "negated comparison"
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPPED:
        return "other operator"
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return "other number"
    if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise | ast.Return):
        return "dropped guard"
    return ""


def _with_functions(
    node: ast.AST, prefix: str, function: str, statement: ast.stmt | None
) -> Iterator[tuple[ast.AST, str, ast.stmt | None]]:
    """All nodes below, each with its function and statement; not those that only a type checker sees."""
    for name, value in ast.iter_fields(node):
        inside, path = function, prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name == "body":
            inside, path = prefix + node.name, f"{prefix}{node.name}.<locals>."
        elif isinstance(node, ast.ClassDef) and name == "body":
            path = f"{prefix}{node.name}."
        elif name in ("annotation", "returns") or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                own = child if isinstance(child, ast.stmt) else statement
                yield child, inside, own
                yield from _with_functions(child, path, inside, own)


def _mutate(node: ast.AST) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = SWAPPED[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPPED[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.kept = node.value  # type: ignore[attr-defined]
        node.value = node.value + 1 if isinstance(node.value, int) else node.value * 2 + 0.5  # type: ignore[operator]
    elif isinstance(node, ast.If):
        node.kept = node.test  # type: ignore[attr-defined]
        node.test = ast.copy_location(ast.Constant(False), node.test)


def _restore(node: ast.AST) -> None:
    if isinstance(node, ast.Constant):
        node.value = node.kept  # type: ignore[attr-defined]
    elif isinstance(node, ast.If):
        node.test = node.kept  # type: ignore[attr-defined]
    else:
        _mutate(node)  # a second exchange gives the first operator


def _lines_of(found: _Found, text: str) -> tuple[int, ...]:
    """The lines by which a test reaches the place: those of its statement, or those that use what it defines."""
    statement = found.statement
    if found.function:
        return tuple(_header(statement))
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):  # a default value or a decorator
        return tuple(range(statement.body[0].lineno, (statement.end_lineno or 0) + 1))
    names = _defined(statement)
    if not names:
        return ()
    tree = ast.parse(text)
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    return tuple(sorted({node.lineno for node in used if (getattr(node, "id", None) or node.attr) in names}))  # type: ignore[union-attr]


def _header(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return range(statement.lineno, max(last, statement.lineno) + 1)


def _defined(statement: ast.stmt) -> set[str]:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}
