"""The Python examples of the guide to studies run as they are written; its links lead somewhere."""

import ast
import inspect
import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from PIL import Image
from processes import ForkedWorker

import polyclinic
from polyclinic import testing
from polyclinic.cli import run_app
from polyclinic.cli.app import app
from polyclinic.cli.groups import UNNAMED, DefaultCommand
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.methods import METHODS
from polyclinic.registry import GROUPS, registry_of
from polyclinic.runner.run import engines

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_python_examples_of_studies_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL)
    names: dict = {}
    exec("\n".join(blocks), names)
    assert "metrics" in names["schema"]["required"]
    assert 0 <= names["result"].metrics["per_site"]["site-1"]["accuracy"] <= 1
    assert names["longer"].method.rounds == 2
    assert (tmp_path / "runs" / "two-sites" / "result.json").exists()


METHOD_PAGE = (ROOT / "docs" / "method_api.md").read_text(encoding="utf-8")
OWNERS = {"federation": polyclinic.Federation, "site": polyclinic.Site, "local_training": polyclinic.local_training}


@pytest.mark.parametrize("owner", OWNERS)
def test_the_calls_of_a_method_are_those_of_the_code(owner):
    """Each `owner.name(argument, other=None)` of the page has these parameters, in this order."""
    calls = re.findall(rf"`{owner}\.(\w+)\(([^)]*)\)`", METHOD_PAGE)
    assert len(calls) >= (1 if owner == "site" else 4)
    for name, arguments in calls:
        known = list(inspect.signature(getattr(OWNERS[owner], name)).parameters)
        named = [one.split("=")[0].strip(" *") for one in arguments.split(",") if one.strip()]
        assert [one for one in known if one in named] == named, name


def test_fednova_of_the_page_holds_the_contract_and_is_fedavg_where_steps_are_alike(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", METHOD_PAGE, re.DOTALL)
    (tmp_path / "fednova.py").write_text(code)
    names = runpy.run_path(str(tmp_path / "fednova.py"))
    plugins = [str(tmp_path / "fednova.py")]
    found = testing.check_method(names["FedNova"], tmp_path / "contract", workers=False, plugins=plugins)
    fedavg = polyclinic.run(testing.study_for(polyclinic.FedAvg), tmp_path / "fedavg")
    assert found["weights_sha256"] == fedavg["weights_sha256"]  # sites of one size take as many steps
    unlike = {"sites": {"partition": "quantity", "count": 3, "power": 1.5}}
    nova = polyclinic.run(testing.study_for(names["FedNova"], plugins=plugins, **unlike), tmp_path / "nova")
    plain = polyclinic.run(testing.study_for(polyclinic.FedAvg, **unlike), tmp_path / "plain")
    assert nova["weights_sha256"] != plain["weights_sha256"]


def test_the_python_example_of_statistics_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "statistics.md").read_text(), re.DOTALL)
    exec(code, {})
    assert capsys.readouterr().out.startswith("0.875 [")


def test_the_plugins_of_extend_md_run_together(tmp_path):
    """Every block is a whole plug-in file: one study takes a source, a partition, ... from each of them."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    codes = [code for code in codes if "LAYERS =" not in code]  # tests/adversary/test_own_layers.py runs that one
    files = [tmp_path / f"plugin_{number}.py" for number in range(len(codes))]
    for file, code in zip(files, codes, strict=True):
        file.write_text(code)
    study = polyclinic.Study(
        plugins=[str(file) for file in files],
        data={"source": "squares", "size": 28, "samples": 60},
        sites={"partition": "in-turn", "count": 2},
        task={"name": "focal", "gamma": 1.0},
        model={"backbone": "two-layers"},
        method={"name": "fed-counts", "rounds": 1},
        generator={"name": "class-means"},
        audit={"keep_parcels": 1},
        policy={"kinds": [*KINDS.builtin, "class-counts"]},
        engine={"workers": 1, "device": "cpu"},
    )
    assert {table for code in codes for table in re.findall(r"^([A-Z]+) = {", code, re.MULTILINE)} == set(GROUPS)
    run = polyclinic.run(study, tmp_path / "run")
    report = polyclinic.audit(run.folder, kinds=["class-counts"])
    assert [one["findings"][0]["attack"] for one in report["parcels"]] == ["reads-counts"]
    assert report["verdicts"]["class-counts"]["verdict"] == "leaks"

    replay = study.with_settings({"method": {"name": "fedavg-replay", "rounds": 1}, "replay.codes": "prior"})
    assert polyclinic.run(replay, tmp_path / "replay")["communication"]["by_kind"]["generator"] > 0
    features = registry_of("encoders")["channel-means"]().features(torch.full((2, 1, 28, 28), 255, dtype=torch.uint8))
    assert features.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w.]+\.md)[)#]", index))


def test_the_navigation_of_the_site_names_pages_that_are_there():
    """Pages of the reference are made when the site is built, and some lie outside docs/."""
    named = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    written = [page for page in named if not page.startswith(("project/", "reference/"))]
    assert len(written) > 40
    assert [page for page in written if not (ROOT / "docs" / page).exists()] == []


SECTIONS = ("What it does", "What leaves a site", "When to choose it", "Settings")


@pytest.mark.parametrize("name", list(METHODS.builtin))
def test_every_method_has_a_page(name):
    """One page for one method, or for those that differ in a sentence."""
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")}
    parts = [f'`method.name = "{name}"`', f"<!-- what leaves: {name} -->", f"<!-- settings: {name} -->"]
    found = [page for page, text in pages.items() if all(text.count(part) == 1 for part in parts)]
    assert len(found) == 1, f"write docs/methods/{name}.md, as the pages beside it are"
    assert tuple(re.findall(r"^## (.+)$", pages[found[0]], re.MULTILINE)) == SECTIONS


def test_the_tutorials_plugin_runs(tmp_path, monkeypatch):
    """The method of the tutorial equals FedAvg with one site, as the tutorial says."""
    text = (ROOT / "docs" / "tutorials" / "add_method.md").read_text(encoding="utf-8")
    code, check = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (settings,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "median.py").write_text(code)
    (tmp_path / "test_median.py").write_text(check)
    (tmp_path / "study.toml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    one = ["sites.count=1", "data.samples=80", "method.rounds=1", "engine.device=cpu", "engine.workers=1"]
    ours = polyclinic.run(polyclinic.load_study(Path("study.toml"), one), "ours")
    fedavg = polyclinic.run(polyclinic.load_study(Path("study.toml"), [*one, "method.name=fedavg"]), "fedavg")
    assert ours["weights_sha256"] == fedavg["weights_sha256"]
    several = [*one, "sites.count=3"]
    assert polyclinic.run(polyclinic.load_study(Path("study.toml"), several), "three")["method"] == "fed-median"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(engines, "WorkerProcess", ForkedWorker)
    runpy.run_path("test_median.py")["test_fed_median"](tmp_path / "contract")


@pytest.mark.parametrize("page", ["tutorials/first_study.md", "tutorials/three_hospitals.md", "../README.md"])
def test_studies_on_pages_are_studies(page, tmp_path):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    study = next(block for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[method]" in block)
    (tmp_path / "study.toml").write_text(study)
    assert polyclinic.load_study(tmp_path / "study.toml").method.name == "fedavg"


TOP = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
COMMAND_PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = r"(?<![\w./-])((?:examples|lab|tests)/[\w./-]+\.(?:py|toml|sh|ipynb))\b"
COMMANDS = typer.main.get_command(app)


def lines_of(page: Path) -> list[str]:
    """What a reader may type: the lines of blocks of commands, and commands within sentences."""
    text = page.read_text(encoding="utf-8")
    blocks = [re.sub(r"\\\n\s*", " ", block) for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)]
    quoted = re.findall(r"`(polyclinic [^`]+)`", re.sub(r"\n>?\s*", " ", text))
    return [*(line.strip() for block in blocks for line in block.splitlines()), *quoted]


def words_of(line: str) -> list[str]:
    """The words after `polyclinic`; `[--option]` in a sentence is that option."""
    return [word.strip("[]") for word in shlex.split(line, comments=True)[1:]]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that is meant, and the words after its name."""
    command, rest = COMMANDS, list(words)
    while hasattr(command, "commands"):
        if rest and rest[0] in command.list_commands(None):  # also those of other packages
            command = command.get_command(None, rest.pop(0))
        elif isinstance(command, DefaultCommand) and rest:
            command = command.commands[UNNAMED]
        else:
            break
    return command, rest


def is_placeholder(word: str) -> bool:
    """Whether a word stands for others: `COMMAND`, `init|start`, `--help`."""
    return word.startswith("-") or "|" in word or word.isupper() or word == "..."


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.stem)
def test_commands_and_options_are_there(page):
    typed = [line for line in lines_of(page) if line.startswith("polyclinic ")]
    for line in typed:
        command, rest = command_of(words_of(line))
        unknown = hasattr(command, "commands") and rest and not is_placeholder(rest[0])
        assert not unknown, f"{page.name}: there is no such command: {line}"
        known = {"--help", *(option for one in command.params for option in (*one.opts, *one.secondary_opts))}
        for word in rest:
            option = word.partition("=")[0]
            fits = not option.startswith("--") or option in {"--", *known}
            assert fits, f"{page.name}: there is no option {option}: {line}"


def test_files_of_the_repository_that_pages_name_are_there():
    named = {(page, file) for page in COMMAND_PAGES for file in re.findall(NAMED, page.read_text(encoding="utf-8"))}
    assert len(named) > 50
    gone = [(page, file) for page, file in named if not (ROOT / file).exists() and "NAME" not in file]
    assert sorted(f"{page.name}: {file}" for page, file in gone) == []


TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECTION = TEXT.partition("\n## A study\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def draw_images(folder: Path) -> None:
    """`scans` with a folder per class, and `new_scans`, as PNG files."""
    data = ChestPhantom(samples=200, size=64).load()
    for number, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
        place = folder / ("new_scans" if number >= 196 else f"scans/{data.classes[label]}")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image[0])).save(place / f"{number}.png")


@pytest.mark.slow  # a ResNet-18 is trained six times, and attacked
@pytest.mark.timeout(1800)
def test_what_readme_says_works_in_this_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw_images(tmp_path)
    (study,), (commands,), (code,) = blocks("toml"), blocks("bash"), blocks("python")
    for long, short in (("rounds = 20\n", "rounds = 1\n"), ("size = 64\n", "size = 32\n")):  # else as it is written
        assert long in study
        study = study.replace(long, short)
    Path("study.toml").write_text(study)
    typed = [shlex.split(line, comments=True)[1:] for line in commands.splitlines()]
    assert [words[0] for words in typed] == ["run", "ledger", "audit", "compare", "report", "predict"]
    for words in typed:
        capsys.readouterr()
        assert run_app(words) == 0, (words, capsys.readouterr().err)
    assert len([line for line in capsys.readouterr().out.splitlines() if "new_scans" in line]) == 4
    verdicts = json.loads(Path("runs/first/audit.json").read_text())["verdicts"]
    assert verdicts["weights"]["verdict"] in ("leaks", "withstood", "not tested")
    assert list(Path("runs/first").rglob("*.png"))  # "with pictures"
    assert "<html" in Path("runs/first/report.html").read_text(encoding="utf-8")
    compared = json.loads(Path("runs/compared/comparison.json").read_text())["methods"]
    assert set(compared) == {"standalone", "fedavg", "cwt", "centralized"}
    exec(code, {})
    assert Path("runs/from-python/result.json").exists()
    first, again = (json.loads(Path(f"runs/{name}/result.json").read_text()) for name in ("first", "from-python"))
    assert first["weights_sha256"] == again["weights_sha256"]  # "the same model, bit for bit"
    assert run_app(shlex.split(re.search(r"`polyclinic (run --resume [^`]+)`", SECTION)[1])) == 0


def test_the_commands_of_make_are_targets_of_the_makefile():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    typed = re.findall(r"\bmake ([a-z-]+)", TEXT)
    assert {"demo", "test", "docs"} <= set(typed)
    assert [name for name in typed if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


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
    assert all(not cell.get("outputs") for cell in NOTEBOOK["cells"])
    text = "".join("".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert all((ROOT / "examples" / link).exists() for link in links)
