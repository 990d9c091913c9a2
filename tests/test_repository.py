"""The repository stands alone: nothing in it names a folder outside it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WHERE = ("src", "tests", "docs", "examples", "benchmarks", "lab", "*.md", "*.toml", "Makefile")
SUFFIXES = {".py", ".md", ".toml", ".json", ".jsonl", ".txt", ""}
#: folders of one machine, and relative paths in settings that leave the repository
OUTSIDE = re.compile(
    r"""(?<![\w.~])/(?:work|root|home/\w+|Users/\w+|mnt/\w+)/|\.\./shared|^path = "\.\./""", re.MULTILINE
)


def texts() -> list[Path]:
    found = [path for pattern in WHERE for path in ROOT.glob(pattern)]
    files = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path])]
    return [file for file in files if file.is_file() and file.suffix in SUFFIXES and "__pycache__" not in file.parts]


def test_the_search_finds_folders_outside_the_repository_and_there_are_none():
    files = [file for file in texts() if file != Path(__file__)]
    assert len(files) > 300
    named = {
        str(file.relative_to(ROOT)): match[0]
        for file in files
        if (match := OUTSIDE.search(file.read_text(encoding="utf-8")))
    }
    assert named == {}
    assert OUTSIDE.search('[data]\npath = "../images.npz"')
    assert OUTSIDE.search("see ../shared/data")
    assert OUTSIDE.search("kept in /home/anna/images")
    assert not OUTSIDE.search("see [data](../docs/data.md), https://example.org/home/x and ~/images")


PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
#: rows of the tables of defences: what is tried, what holds, tests
DEFENCES = [
    line
    for table in re.findall(r"\| attack \| what holds \| test \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    for line in table.splitlines()
]
NAMED = sorted(set(re.findall(r"`(tests/[\w/.:]+)`", PAGE)))


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_is_named_exists(named):
    file, _, function = named.partition("::")
    assert (f"\ndef {function}(" if function else "\ndef test_") in (ROOT / file).read_text(encoding="utf-8")


def test_each_defence_names_a_test():
    assert len(DEFENCES) > 30
    assert [line for line in DEFENCES if "`tests/" not in line.split("|")[3]] == []


def test_every_file_of_attacks_is_named():
    """What tests/adversary tries is a defence that this page owes its reader."""
    files = {path.name for path in (ROOT / "tests" / "adversary").glob("test_*.py")}
    assert sorted(files - {Path(name.partition("::")[0]).name for name in NAMED}) == []


SOURCES = sorted(
    path for top in ("src", "benchmarks", "lab", "examples", "deploy") for path in (ROOT / top).rglob("*.py")
)
#: file and call -> why it is bounded
ALLOWED = {
    # a plug-in: code that the user names, whose digest the run keeps
    ("src/polyclinic/plugins.py", "exec"),
    ("src/polyclinic/plugins.py", "compile"),
    # a mutant: a file of this repository with one change, in a test process of the campaign
    ("lab/campaigns/mutants.py", "exec"),
    ("lab/campaigns/mutants.py", "compile"),
    # TorchScript: what this command has just written; a model of others that the user names (no Python runs in it)
    ("src/polyclinic/runner/export/export.py", "torch.jit.load"),
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


@pytest.mark.parametrize("code", [
    "import pickle",
    "from pickle import loads",
    "eval('1')",
    "import os\nos.system('ls')",
    "torch.load('a')",
    "torch.load('a', weights_only=False)",
    "np.load('a', mmap_mode='r')",
    "subprocess.run('ls', shell=True)",
])  # fmt: skip
def test_code_that_comes_in_as_data_is_found(code):
    assert list(problems_in(ast.parse(code)))


def test_what_is_allowed_is_still_there():
    for place, problem in ALLOWED:
        assert problem in set(problems_in(ast.parse((ROOT / place).read_text(encoding="utf-8")))), place
