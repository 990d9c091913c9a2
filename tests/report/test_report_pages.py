"""Reports of real runs as pages: what they say, that nothing of a study runs, that no text becomes HTML."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageFile
from report_page import Page, change, charts

from polyclinic.errors import BadInput
from polyclinic.report.blocks import Picture, Table, Text
from polyclinic.report.write import WEB, build_report, html_of, paper_of, parts_of, write_report
from polyclinic.runner.evaluate.case_scores import read_cases

OLD = Path(__file__).parents[1] / "data" / "run_format_1" / "finished"


EVIL = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def regression(tiny, undisturbed):
    return undisturbed(tiny("fedavg", {"data.source": "hand-phantom", "task": {"name": "regression"}}, rounds=1)).folder


@pytest.fixture(scope="module")
def segmentation(tiny, undisturbed):
    settings = {"data.source": "brain-phantom", "model.backbone": "unet"}
    task = {"task": {"name": "segmentation", "surface_distances": True}}
    return undisturbed(tiny("fedavg", {**settings, **task}, rounds=1)).folder


@pytest.fixture(scope="module")
def personal(tiny, undisturbed):
    return undisturbed(tiny("standalone", rounds=1)).folder


def test_a_file_that_changed_since_the_run_ended_is_refused(classification, tmp_path):
    folder = Path(shutil.copytree(classification, tmp_path / "run"))
    cases = folder / "cases" / "test.npz"
    cases.write_bytes(cases.read_bytes() + b" ")
    with pytest.raises(BadInput, match=r"test\.npz: is damaged"):
        build_report(folder)


def words_of(report) -> str:
    texts = [block.words for s in report.sections for block in s.blocks if isinstance(block, Text)]
    return " ".join([*report.summary, *texts])


def test_a_classification_has_all_its_charts_and_says_the_figures_of_the_result(classification):
    report = build_report(classification)
    assert charts(report).keys() >= {"labels", "ks", "curve", "roc", "pr", "confusion", "calibration", "left"}
    result = json.loads((classification / "result.json").read_text())
    words = " ".join(report.summary)
    assert f"accuracy {result['metrics']['test']['accuracy']:.3f} (95 % interval" in words
    assert f"On {len(read_cases(classification))} test images of all sites together" in words
    assert "site-1, site-2 and site-3" in words
    assert "What left was not attacked" in words
    assert "no differential privacy" in words
    confusion = charts(report)["confusion"].table
    cases = read_cases(classification)
    assert sum(sum(row[1:]) for row in confusion.rows) == len(cases)
    right = sum(row[i + 1] for i, row in enumerate(confusion.rows))
    assert right / len(cases) == pytest.approx(result["metrics"]["test"]["accuracy"])


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ((0.9999, 1.0, 1.0), "All sites have accuracy 1.000."),
        ((0.5, 1.0, 0.75), "Sites differ: accuracy lies between 0.500 (site-1, "),
    ],
)
def test_sites_differ_only_where_a_reader_sees_it(copied, scores, said):
    def score(values):
        for own, accuracy in zip(values["metrics"]["per_site"].values(), scores, strict=True):
            own["accuracy"] = accuracy

    change(copied, score)
    assert any(sentence.startswith(said) for sentence in build_report(copied).summary)


def test_a_regression_has_bland_altman_by_hand(regression):
    report = build_report(regression)
    found = charts(report)
    assert {"scatter", "bland-altman"} <= found.keys()
    cases = read_cases(regression)
    apart = cases.predictions - cases.labels
    (table,) = [
        b for s in report.sections for b in s.blocks if isinstance(b, Table) and b.title.startswith("Agreement")
    ]
    bias, lower, upper = (row[1] for row in table.rows)
    assert bias == pytest.approx(apart.mean())
    assert (upper - lower) / 2 == pytest.approx(1.959964 * apart.std(ddof=1), rel=1e-5)
    assert "months" in " ".join(report.summary)


def test_a_segmentation_shows_dice_distances_and_cases_with_outlines(segmentation):
    report = build_report(segmentation)
    dice = charts(report)["dice"].table
    cases = read_cases(segmentation)
    overlap, predicted, true = cases.areas[0]
    assert dice.rows[0][1] == pytest.approx(2 * overlap / max(1, predicted + true))
    pictures = [b for s in report.sections for b in s.blocks if isinstance(b, Picture)]
    assert {"samples", "examples"} <= {picture.key for picture in pictures}
    assert all(picture.png.startswith(b"\x89PNG") for picture in pictures)
    without = build_report(segmentation, images=False)
    assert not any(isinstance(b, Picture) for s in without.sections for b in s.blocks)


def test_models_of_each_site_have_a_convergence_matrix(personal):
    report = build_report(personal)
    across = json.loads((personal / "result.json").read_text())["metrics"]["across_sites"]
    table = charts(report)["convergence"].table
    assert table.rows[0][1] == pytest.approx(across["site-1"]["site-1"]["accuracy"])
    assert "A model of its own for each site" in " ".join(report.summary)


def test_worths_and_intervals_of_odd_forms_are_shown(copied):
    result = json.loads((copied / "result.json").read_text())
    (copied / "result.json").write_text(json.dumps({**result, "worth": [{"round": 1, "site-1": {"recall": 0.5}}]}))
    assert build_report(copied)
    whole = {"value": 1.0, "low": 1.0, "high": 1.0}
    change(copied, lambda values: values["metrics"]["intervals"]["pooled"].update(accuracy=whole))
    words = " ".join(build_report(copied).summary)
    assert "accuracy 1.000 (too few images for an interval)" in words
    assert "1.000 to 1.000" not in words


def test_a_run_of_an_older_version_and_one_without_cases_get_sentences(tmp_path, copied):
    old = Path(shutil.copytree(OLD, tmp_path / "old"))
    assert "kept no predictions of single images" in words_of(build_report(old))
    shutil.rmtree(copied / "cases")
    change(copied, lambda values: [values["metrics"].pop(name) for name in ("intervals", "calibration")])
    study = (copied / "study.toml").read_text().partition("\n")[2]  # without its digest
    (copied / "study.toml").write_text(re.sub(r'source = "[^"]*"', 'source = "at-sites"', study))
    words = words_of(build_report(copied))
    assert "scores of single images stay at the sites" in words
    assert "The images are at their sites" in words


def test_what_deployed_sites_computed_themselves_is_shown(copied):
    """Intervals, tests, sub-groups and calibration that left a site, where no score of an image did."""
    told = {
        "per_site": {
            "north": {"accuracy": [0.8, 0.7, 0.9, 0.003], "change of accuracy": [0.2, 0.0, 0.4, 0.01]},
            "south": {"accuracy": [0.6, 0.5, 0.7, 0.003], "sex = f: accuracy": [0.7, 0.5, 0.9, 0.01]},
        },
        "mean": {"accuracy": [0.7, 0.62, 0.78, 0.0016], "change of accuracy": [0.2, 0.0, 0.4, 0.01]},
        "p_of_change": {"change of accuracy": 0.046},
        "calibration": {"north": {"bins": [0, 0, 20, 30, 0], "right": [0, 0, 10, 27, 0]}},
        "notes": ["site 'south' has no test image of severe, or too few"],
    }
    worth = {"value": "minus the error", "how": "exact", "all": -0.1, "none": -0.5}
    worth["sites"] = {"north": {"leave_one_out": 0.1, "shapley": 0.3}, "south": {"leave_one_out": 0, "shapley": 0.1}}
    path = copied / "result.json"
    result = json.loads(path.read_text())
    result["metrics"].pop("intervals")
    path.write_text(json.dumps({**result, "safe_statistics": told, "worth": worth}))
    shutil.rmtree(copied / "cases", ignore_errors=True)
    report = build_report(copied)
    sections = {one.key: one for one in report.sections}
    tables = [block for key in ("told", "worth") for block in sections[key].blocks if isinstance(block, Table)]
    rows = [row for table in tables for row in table.rows]
    assert ["accuracy", "north", 0.8, 0.7, 0.9] in rows
    assert ["change of accuracy", "mean over sites", 0.2, 0.0, 0.4, 0.046] in rows
    assert ["sex = f: accuracy", "south", 0.7, 0.5, 0.9] in rows
    assert ["60% to 80%", 30, 0.9] in rows
    assert ["north", 0.1, 0.3, None, None] in rows
    assert "has no test image of severe" in words_of(report)
    assert "By what the sites computed themselves, accuracy is 0.7" in words_of(report)
    assert "told-accuracy" in charts(report)
    assert "What each site adds" in html_of(report)


def test_a_model_that_says_no_numbers_gets_a_sentence(copied):
    cases = dict(np.load(copied / "cases" / "test.npz"))
    cases["predictions"] = np.full_like(cases["predictions"], np.nan)
    np.savez(copied / "cases" / "test.npz", **cases)
    assert "what is no number" in words_of(build_report(copied))


def test_audit_privacy_and_broken_ledgers_are_told(copied):
    finding = {
        "attack": "inversion", "verdict": "leaks", "words": "3 of 8",
        "evidence": {"images": 8, "recovered": 3, "psnr": 20.0},
        "threat_model": "", "assumed": None, "picture": "../outside.png",
    }  # fmt: skip
    parcel = {"site": "site-1", "round": 1, "operation": "train", "kind": "weights", "findings": [finding]}
    verdicts = {"weights": {"left": 3, "verdict": "leaks", "words": "leaks", "not_tried": ["a"]}}
    audit = {"budget": "quick", "threat_model": "t", "complete": True, "verdicts": verdicts, "parcels": [parcel]}
    (copied / "audit.json").write_text(json.dumps(audit))
    privacy = {"epsilon": 3.2, "delta": 1e-5, "site": "site-2", "covers": ["weights"], "does_not_cover": ["scores"],
               "per_site": {"site-2": {"epsilon": 3.2, "delta": 1e-5}}}  # fmt: skip
    change(copied, lambda values: values.update(privacy=privacy))
    ledger = next((copied / "ledger").iterdir())
    ledger.write_text(ledger.read_text().replace('"round": 1', '"round": 2', 1))
    report = build_report(copied)
    words = words_of(report)
    assert "3 of 8 attacked images recovered" in words
    assert "epsilon 3.2 at delta 1e-05" in words
    assert "It does not cover scores" in words
    assert f"The ledger of {ledger.stem} does not hold" in words


def test_where_a_ledger_does_not_hold_nobody_says_that_no_image_left(copied):
    files = sorted((copied / "ledger").iterdir())
    for number, file in enumerate(files, 1):
        file.write_text(file.read_text().replace('"round": 1', '"round": 2', 1))
        report = build_report(copied, images=False)
        summary = " ".join(report.summary)
        assert summary.count("does not hold:") == number
        assert "Whether a real image left is not known: a ledger does not hold." in summary
        assert "No real image left" not in summary
        assert "not in this folder" not in words_of(report)
    shutil.rmtree(copied / "ledger")
    assert "No real image left" not in " ".join(build_report(copied, images=False).summary)


def test_the_page_is_whole_has_a_table_behind_every_chart_and_asks_nobody(classification, tmp_path):
    made = build_report(classification, title="Lungs,\n <b>2026</b>")
    [written] = write_report(made, classification, tmp_path / "page.html")
    text = written.read_text(encoding="utf-8")
    assert "<h1>Lungs, &lt;b&gt;2026&lt;/b&gt;</h1>" in text
    report = build_report(classification)
    assert report.title == "fundus-phantom: classification with fedavg"
    page, drawn = Page(text), report.charts()
    assert page.count("svg") == len(drawn) == page.count("details")
    assert page.count("script") == 0
    assert len(page.ids()) == len(set(page.ids()))
    for _, given in page.tags:
        for name in ("src", "href", "action"):
            assert re.match(r"#|data:", given.get(name) or "#"), given
    assert "default-src 'none'" in text
    assert text.count('download="') >= len(drawn)
    for stand_in in WEB.variables().values():
        assert stand_in not in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):  # no formula and no power of ten is written raw
        assert "mathdefault" not in svg
        assert "$" not in re.sub(r"<[^>]*>", "", svg)
    assert len(text) < 4_000_000


def test_hostile_names_stay_texts(copied):
    def rename(values):
        values["data"]["classes"] = [EVIL, '"><img src=x onerror=alert(1)>$x$']
        values["method"] = EVIL
        values["data"]["source"] = "</title><script>"

    change(copied, rename)
    cases = dict(np.load(copied / "cases" / "test.npz"))
    cases["sites"] = np.array([EVIL, "$\\frac$", "c"])
    cases["columns"] = np.full_like(cases["columns"], EVIL, dtype="<U40")
    cases["column_names"] = np.array([EVIL])
    np.savez(copied / "cases" / "test.npz", **cases)
    text = html_of(build_report(copied))
    page = Page(text)
    assert page.count("script") == 0
    assert not any("onerror" in given for _, given in page.tags)
    assert page.count("title") == 1
    assert "&lt;script&gt;" in text


def test_warnings_of_the_run_stand_below_the_summary_as_texts(copied):
    change(copied, lambda values: values.pop("warnings", None))
    assert "Warnings of the run" not in html_of(build_report(copied))
    few = "a site takes 4 steps in a round; give `optimizer.batch_size`"
    change(copied, lambda values: values.update(warnings=[few, EVIL]))
    text = html_of(build_report(copied))
    summary = text[text.index('<section id="summary"') :].split("</section>")[0]
    assert "<h3>Warnings of the run</h3>" in summary
    assert "<li>a site takes 4 steps in a round; give <code>optimizer.batch_size</code></li>" in summary
    assert "&lt;script&gt;" in summary
    assert Page(text).count("script") == 0
    change(copied, lambda values: values.update(warnings="no list"))
    assert build_report(copied).warnings == []


def test_a_report_runs_no_code_of_the_study(copied, tmp_path):
    plugin = copied / "plugin.py"
    plugin.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    study = (copied / "study.toml").read_text()
    backbone = re.sub(r'backbone = "[^"]*"', 'backbone = "plugin:build"', study)
    (copied / "study.toml").write_text(f'plugins = ["{plugin}"]\n{backbone}')
    report = build_report(copied)
    assert not (tmp_path / "ran").exists()
    assert "a report runs no code of a study" in words_of(report)


def test_the_pdf_has_all_that_fits_on_paper(regression, tmp_path):
    report = build_report(regression)
    assert html_of(report) == html_of(build_report(regression)), "the same every time"
    page = Page(paper_of(report))
    assert page.count("svg") == len(report.charts())
    assert page.count("details") == 0
    try:
        _, written = write_report(report, regression, tmp_path / "page.html", pdf=True)
    except BadInput as error:
        pytest.skip(str(error))  # WeasyPrint or Pango is not installed
    content = written.read_bytes()
    assert content.startswith(b"%PDF")
    assert len(content) > 50_000
    assert not ImageFile.LOAD_TRUNCATED_IMAGES, "damaged images are still refused"


def test_a_table_that_is_too_wide_for_paper_is_written_in_parts_with_its_first_column():
    narrow = Table(("site", "AUC"), [["Turku", 0.91]], "Scores")
    assert [(part.columns, part.rows) for part in parts_of(narrow)] == [(["site", "AUC"], [["Turku", 0.91]])]
    head = ["site", *(f"balanced_accuracy_{number}" for number in range(12))]
    parts = parts_of(Table(head, [[str(number) for number in range(13)]], "Scores"))
    assert len(parts) > 1
    assert [part.columns[0] for part in parts] == ["site"] * len(parts)
    assert [name for part in parts for name in part.columns[1:]] == head[1:]
    assert [cell for part in parts for cell in part.rows[0][1:]] == [str(number) for number in range(1, 13)]
    assert [part.title for part in parts] == ["Scores"] + [""] * (len(parts) - 1)
