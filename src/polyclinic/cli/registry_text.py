"""Names and sentences of what is built in, read from the source text: importing it all, and torch, takes seconds."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path


def built_in(package: str) -> dict[str, str] | None:
    """The sentence of each entry of the registry that a package defines; None where the text does not tell."""
    tree = _parsed(package)
    table = next((_entries(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_registry(node)), None)
    if not table:
        return None
    modules = _imports(tree)
    found = {}
    for name, kind in table.items():
        sentence = _sentence(modules.get(kind, package), kind)
        if sentence is None:
            return None
        found[name] = sentence
    return found


def _parsed(module: str) -> ast.Module:
    spec = _spec_without_import(module)
    return ast.parse(spec.read_text(encoding="utf-8"))


def _spec_without_import(module: str) -> Path:
    """The file of a module of ours; `find_spec` of a submodule would import its package."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    assert spec is not None, "our own package"
    assert spec.origin is not None, "it has a file"
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_registry(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "Registry"


def _entries(call: ast.Call) -> dict[str, str]:
    """`{"fedavg": FedAvg}` as names; nothing where it is written in another way."""
    table = call.args[1] if len(call.args) > 1 else None
    if not isinstance(table, ast.Dict):
        return {}
    found = {}
    for key, value in zip(table.keys, table.values, strict=True):
        if not isinstance(key, ast.Constant) or not isinstance(value, ast.Name):
            return {}
        found[str(key.value)] = value.id
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    """The module that each imported name comes from."""
    statements = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module) for node in statements for alias in node.names}


def _sentence(module: str, kind: str) -> str | None:
    """What `summary_of` says of a class: its own `summary`, else the first line of its docstring, else its parent's."""
    if not module.startswith("polyclinic"):
        return None
    tree = _parsed(module)
    own = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind), None)
    if own is None:  # a package hands on what a module of it defines
        imported = _imports(tree).get(kind)
        return _sentence(imported, kind) if imported else None
    for node in own.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "summary":
            text = ast.literal_eval(node.value) if node.value else ""
            return str(text).removesuffix(".")
    if text := ast.get_docstring(own, clean=False):
        return text.strip().split("\n")[0].removesuffix(".")
    return _of_parent(module, tree, own)


def _of_parent(module: str, tree: ast.Module, own: ast.ClassDef) -> str | None:
    parents = [base.id for base in own.bases if isinstance(base, ast.Name)]
    for parent in parents:
        if (found := _sentence(_imports(tree).get(parent, module), parent)) is not None:
            return found
    return None
