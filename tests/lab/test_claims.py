"""Claims: their files, figures and pages."""

import json
import runpy
from pathlib import Path

import pytest

from polyclinic.errors import BadInput
from polyclinic_lab import claim
from polyclinic_lab.claim import CLAIMS, SCALES, Claim, ClaimsFile, find_claim, tuned_name
from polyclinic_lab.figure import _by_count, draw, shown_metrics
from polyclinic_lab.judge import STUDIES, plan, slug
from polyclinic_lab.measures import OF_ALL, OF_RUN
from polyclinic_lab.page import PAGES, _needed, _parts, pages
from polyclinic_lab.records import is_stale, minutes_of, records

SMALL = """
paper = "P"
[settings]
small = ["data.size=32", "method.rounds=2"]
[arms]
fedavg = ["method.name=fedavg"]
[group.eyes]
place = "Fig. 1"
paper_data = "theirs"
our_data = "ours"
study = "hands.toml"
measure = ["test mae"]
common = ["sites.count=2"]
quick = ["@small", "seed=1"]
minutes = { quick = { cpu = 1 }, full = {} }
[[claim]]
name = "first"
group = "eyes"
sentence = "a\\n"
arms = ["fedavg"]
rule = ["mae of fedavg is at most 3"]
exact = ["mae"]
[claim.numbers.mae]
fedavg = [3.0, 0.1]
[[claim]]
name = "second"
decides = "first"
sentence = "b"
rule = ["mae of cwt is at most 2"]
common = ["sites.count=3"]
quick = ["seed=2"]
[claim.arms]
cwt = ["method.name=cwt", "@small"]
[claim.arms_at.full]
cwt = ["method.rounds=9"]
"""


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Claim]:
    file = tmp_path / "claims.toml"
    file.write_text(SMALL)
    return ClaimsFile(file).claims({})


def test_a_table_becomes_a_claim(small: dict[str, Claim]) -> None:
    first = small["first"]
    assert (first.paper, first.sentence, first.place) == ("P", "a", "Fig. 1")
    changes = ("sites.count=2", "data.size=32", "method.rounds=2", "seed=1", "method.name=fedavg")
    assert first.changes("fedavg", "quick", phantom=False) == changes
    assert first.rule.sentences[0].exact
    assert [vars(one) for one in first.numbers] == [{"label": "fedavg", "metric": "mae", "mean": 3.0, "std": 0.1}]


def test_an_experiment_adds_to_the_studies_of_its_claim(small: dict[str, Claim]) -> None:
    second = small["second"]
    assert (second.place, second.numbers, second.study) == ("Fig. 1: why?", (), "hands.toml")
    common = ("sites.count=2", "sites.count=3")
    arm = ("method.name=cwt", "data.size=32", "method.rounds=2")
    at_quick = ("data.size=32", "method.rounds=2", "seed=1", "seed=2")
    assert second.changes("cwt", "quick", phantom=False) == (*common, *at_quick, *arm)
    assert second.changes("cwt", "full", phantom=False) == (*common, *arm, "method.rounds=9")


@pytest.mark.parametrize("name", CLAIMS)
def test_the_studies_of_a_claim_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))
    one = CLAIMS[name]
    for scale in SCALES:
        for phantom in [False, True] if one.phantom else [False]:
            assert list(plan(one, tmp_path, scale, 1, phantom=phantom)) == list(one.arms)
    assert len({slug(label) for label in one.arms}) == len(one.arms)


@pytest.mark.parametrize("name", CLAIMS)
def test_rule_numbers_and_measures_are_about_what_the_claim_has(name: str) -> None:
    claim = CLAIMS[name]
    sentences = [*claim.rule.sentences, *([claim.rule.provided] if claim.rule.provided else [])]
    asked = {label for one in sentences for label in (one.label, one.other) if label}
    assert not claim.arms or asked <= {*claim.arms, "all arms"}
    assert not claim.arms or {number.label for number in claim.numbers} <= set(claim.arms)
    assert {words.split()[0] for words in claim.measure} <= {*OF_RUN, *OF_ALL}


def test_every_study_is_used() -> None:
    assert {file.name for file in STUDIES.glob("*.toml")} == {claim.study for claim in CLAIMS.values() if claim.study}


def test_an_unknown_claim_gets_a_hint() -> None:
    with pytest.raises(BadInput, match="did you mean 'qu-table1-forgetting'"):
        find_claim("qu-table1-forgeting")


def test_the_rule_of_an_experiment_came_first_and_its_claim_says_what_was_found() -> None:
    experiments = [claim for claim in CLAIMS.values() if claim.decides]
    assert not any(claim.post_hoc for claim in experiments if claim.arms)  # arithmetic may have been known
    assert {claim.name for claim in CLAIMS.values() if claim.finding} >= {claim.decides for claim in experiments}


@pytest.mark.parametrize(("name", "scale"), records())
def test_a_record_judged_again_says_the_same(name: str, scale: str) -> None:
    found = records()[name, scale]
    verdict = CLAIMS[name].rule.judge({(row["label"], row["metric"]): row["values"] for row in found["ours"]})
    assert (found["rule"], found["verdict"], found["why"]) == (CLAIMS[name].rule.words, verdict.word, verdict.why)


def test_the_pages_are_what_the_records_say() -> None:
    for name, text in pages().items():
        assert (PAGES / name).read_text(encoding="utf-8") == text, "run python -m polyclinic_lab.page"
    assert len(pages()["claims.md"].split()) <= 3000, "a reviewer reads it in five minutes"


def test_a_record_of_another_study_is_stale() -> None:
    claim = CLAIMS["ours-one-site"]
    changes = {label: list(claim.changes(label, "quick", phantom=False)) for label in claim.arms}
    found = {"claim": claim.name, "scale": "quick", "phantom": False, "changes": changes}
    assert not is_stale(found)
    assert is_stale(found | {"changes": {**changes, "fedavg": ["method.rounds=99"]}})


def test_an_undecided_conjunction_says_how_many_parts_hold() -> None:
    """By hand: one difference has one sign in all seeds, the other has both."""
    values = {"cwt": [0.5, 0.51], "cwt-replay": [0.7, 0.71], "fedavg": [0.7, 0.8], "fedreplay": [0.8, 0.7]}
    rows = [{"label": label, "metric": "accuracy", "values": seeds} for label, seeds in values.items()]
    claim = CLAIMS["qu-figure5-retina-high"]
    assert _parts(claim, {"verdict": "undecided", "ours": rows}) == "; 1 of 2 parts"
    assert _parts(claim, {"verdict": "yes", "ours": rows}) == ""


def test_what_is_open_says_how_many_seeds_and_minutes_would_decide() -> None:
    """By hand: six more seeds, of which three took twelve minutes."""
    found = {"verdict": "undecided", "study": "a.toml", "minutes": {"runs": 10, "audits": 2, "this call": 1}}
    why = "yes: a. undecided: b; about 5 seeds would decide. undecided: c; about 9 seeds would decide"
    assert _needed({**found, "why": why}, 3) == "; 9 would, 24 min"
    assert _needed({**found, "why": f"{why}. d; more than 999 seeds are needed"}, 3) == "; over 999 would"
    assert _needed({**found, "why": why, "verdict": "no"}, 3) == ""
    assert _needed({**found, "why": f"{why}. d: 3 and 0 seeds make no pairs"}, 3) == ""


def test_minutes_are_measured_where_there_is_a_record() -> None:
    claim = CLAIMS["qu-table1-forgetting"]
    kept = {(claim.name, "quick"): {"minutes": {"runs": 2.0, "audits": 0.5, "this call": 9.0}}}
    assert minutes_of(claim, "quick", kept) == "2.5"
    assert minutes_of(claim, "full", kept) == f"~{claim.minutes['full']['gpu']:g}"


def test_every_choice_of_settings_is_an_arm_of_some_claim() -> None:
    arms = {
        tuned_name(one, label, scale) for one in CLAIMS.values() if one.tune for label in one.arms for scale in SCALES
    }
    assert claim.CHOSEN.keys() <= arms


def test_what_was_tuned_changes_an_arm_in_every_claim_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table, shortcut = CLAIMS["feder-table4-methods"], CLAIMS["feder-shortcut"]
    name = tuned_name(table, "fedavg", "full")
    monkeypatch.setitem(claim.CHOSEN, name, ["optimizer.lr=0.5"])
    for one in (table, shortcut):
        assert one.changes("fedavg", "full", phantom=False)[-1] == "optimizer.lr=0.5"
    assert "optimizer.lr=0.5" not in table.changes("fedavg", "quick", phantom=False)
    assert "optimizer.lr=0.5" not in table.changes("feder", "full", phantom=False)
    assert "optimizer.lr=0.5" not in table.changes("fedavg", "full", phantom=True)


pytest.importorskip("matplotlib")


def row(label: str, metric: str, mean: float) -> dict:
    return {"label": label, "metric": metric, "mean": mean, "std": 0.1}


def found(*rows: dict, paper: tuple[dict, ...] = ()) -> dict:
    return {"ours": list(rows), "paper_numbers": list(paper), "axis": "", "rule": "auc of a is at least 1"} | {
        "paper": "P",
        "place": "T",
        "verdict": "yes",
    }


def test_bars_and_curves_are_drawn(tmp_path: Path) -> None:
    curves = found(*(row("few", f"epsilon after {n} epochs", n / 10) for n in (1, 2, 3)))
    bars = found(row("a", "mae", 1.0), row("b", "mae", 2.0), paper=(row("a", "mae", 1.5),))
    both = found(*(row("1", f"score after {n} steps", n / 10) for n in (100, 200)), row("1", "auc", 0.7))
    assert shown_metrics(both) == ["auc"]
    for name, content in (("curves", curves), ("bars", bars), ("both", both)):
        draw(content, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_of_the_rule_and_of_the_paper_come_first() -> None:
    rows = [row("a", metric, 1.0) for metric in ("MB", "seconds", "loss", "auc", "mae")]
    assert shown_metrics(found(*rows, paper=(row("a", "mae", 1.0),))) == ["auc", "mae", "MB", "seconds"]


def test_arms_that_differ_in_the_number_of_sites_are_curves(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row(f"{name}, {count} sites", "auc", count / 10) for name in ("feder", "fedavg") for count in (6, 2)]
    axes = Figure().subplots()
    _by_count(axes, found(*rows), "auc", [])
    handles, names = axes.get_legend_handles_labels()
    assert names == ["feder", "fedavg"]
    assert list(handles[0].lines[0].get_xdata()) == [2, 6]
    draw(found(*rows), tmp_path / "sites.png")
    assert (tmp_path / "sites.png").read_bytes().startswith(b"\x89PNG")


LAB = Path(__file__).parents[2] / "lab"


@pytest.fixture(scope="module")
def program():
    return runpy.run_path(str(LAB / "benchmarks" / "performance_page.py"))


@pytest.mark.parametrize("page", ["performance", "campaigns"])
def test_a_page_is_what_the_figures_say(page, program):
    text = (LAB / "pages" / f"{page}.md").read_text(encoding="utf-8")
    assert text == program[page](), "run python lab/benchmarks/performance_page.py"


def test_every_section_has_a_file_that_says_where_it_comes_from(program):
    for name in (*program["SECTIONS"], *program["CAMPAIGNS"]):
        content = json.loads((LAB / "figures" / f"{name}.json").read_text(encoding="utf-8"))
        script = content["again"].split()[1]
        assert (LAB.parent / script).is_file()
        assert all(one["machine"] not in ("", "unknown") and one["date"] for one in content["measured"])


def test_the_picture_shows_what_stands_in_the_sections(program, tmp_path):
    """By hand from the kept files: two ratios to a bare loop, and one of an attack."""
    kept = {name: program["read"](name)["figures"] for name in program["SECTIONS"]}
    rows = program["glance"](kept)
    times = {row.what: row.times for row in rows}
    small = kept["gpu_round"]["cases"][0]
    assert times[f"a round: {small['case']}"] == 1 / small["ratio"]
    assert times["a round: small CNN"] == 1 / kept["overhead"]["cases"][0]["cpu_ratio"]["median"]
    assert times["gradient inversion: ResNet-18 + AdamW"] == kept["attacks"]["rows"][1]["ratio"]
    program["draw"](rows, tmp_path / "glance.png")
    assert (tmp_path / "glance.png").read_bytes().startswith(b"\x89PNG")
