"""No code comes in as data: no pickle, no eval, no shell in the tree, but for the few bounded places named here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for top in ("src", "benchmarks", "lab", "examples", "deploy") for path in (ROOT / top).rglob("*.py")
)

#: file and call -> why it is bounded
ALLOWED = {
    # a plug-in: code that the user names, whose digest the run keeps
    ("src/polyclinic/plugins.py", "exec"),
    ("src/polyclinic/plugins.py", "compile"),
    # TorchScript: what this command has just written; a model of others that the user names (no Python runs in it)
    ("src/polyclinic/runner/export/formats.py", "torch.jit.load"),
    ("src/polyclinic/runner/evaluate/external_models.py", "torch.jit.load"),
    # the Inception and LPIPS weights of others: an unpickler that makes arrays and nothing else, after their hash
    ("src/polyclinic/metrics/networks/inception.py", "import pickle"),
    ("src/polyclinic/metrics/networks/weights.py", "import pickle"),
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "torch.jit.load"}


def name_of(node):
    """`a.b.c` of an expression; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def keyword(call, name):
    return next((word.value for word in call.keywords if word.arg == name), None)


def is_constant(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def problems_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            yield from (f"import {one}" for one in modules if one.split(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            yield from problems_of_call(node, name_of(node.func))


def problems_of_call(call, name):
    if name in FORBIDDEN_CALLS:
        yield name
    if name == "torch.load" and not is_constant(keyword(call, "weights_only"), True):
        yield "torch.load without weights_only"
    if name in ("np.load", "numpy.load") and not is_constant(keyword(call, "allow_pickle"), False):
        yield "np.load without allow_pickle=False"
    if name.startswith("subprocess.") and keyword(call, "shell") is not None:
        yield f"{name} with a shell"
    if name == "yaml.load":
        yield name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_code_comes_in_as_data(path):
    found = set(problems_in(ast.parse(path.read_text(encoding="utf-8"))))
    place = path.relative_to(ROOT).as_posix()
    assert {problem for problem in found if (place, problem) not in ALLOWED} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "import os\nos.system('ls')",
        "torch.load('a')",
        "torch.load('a', weights_only=False)",
        "np.load('a', mmap_mode='r')",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(code):
    assert list(problems_in(ast.parse(code)))


def test_what_is_allowed_is_still_there():
    for place, problem in ALLOWED:
        assert problem in set(problems_in(ast.parse((ROOT / place).read_text(encoding="utf-8")))), place
