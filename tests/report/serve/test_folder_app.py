"""What the page of a folder is told: runs, comparisons, curves, time left, and files that are damaged or hostile."""

import json

import pytest
from served import LINES, write_run

from polyclinic.files import lock
from polyclinic.report.serve.run_files import MOST_POINTS, curves, seconds_left


def test_the_overview_names_everything(served):
    found = served.get("/api/overview").json()
    assert found["folder"] == "project"
    assert [run["name"] for run in found["runs"]] == ["runs/both/fedavg-seed0", "runs/first", "runs/second"]
    assert found["comparisons"] == [{"name": "runs/both", "methods": ["fedavg"], "finished": True}]
    assert found["studies"] == ["study.toml"]
    first, second = found["runs"][1:]
    assert (first["state"], first["rounds_done"], first["rounds"]) == ("finished", 3, 3)
    assert (first["metrics"], first["images"], first["epsilon"]) == ({"accuracy": 0.8, "auc": None}, "test", 2.5)
    assert (second["state"], second["method"], second["rounds_done"], second["rounds"]) == ("stopped", "cwt", 3, 5)
    assert (second["metrics"], second["images"], second["bytes"]) == ({"accuracy": 0.8}, "validation", 3000)


def test_a_run_at_work_says_who_works_and_how_long_it_will_take(served, folder):
    run = folder / "runs" / "second"
    live = {"round": 4, "rounds": 5, "sites": ["site-1", "site-2"], "operation": "train", "since": 1}
    live["at_work"] = ["site-2"]
    (run / "progress.json").write_text(json.dumps({**live, "metric": "accuracy", "warnings": ["one site is slow"]}))
    with lock(run / ".lock"):
        found = served.get("/api/run", name="runs/second").json()
    assert found["state"] == "running"
    assert found["at_work"] == {"round": 4, "operation": "train", "since": 1, "sites": ["site-2"]}
    assert found["warnings"] == ["one site is slow"]
    assert 0 < found["seconds_left"] <= 4.0
    assert found["curves"]["scored"] == [1, 2, 3]
    assert found["curves"]["pooled"]["accuracy"] == [0.6, 0.7, 0.8]
    assert found["curves"]["per_site"]["site-1"]["accuracy"] == [0.1, 0.2, 0.3]
    assert found["failed"] == [{"round": 2, "site": "site-2", "reason": "train: gone"}]
    stopped = served.get("/api/run", name="runs/second").json()
    assert (stopped["state"], stopped["at_work"], stopped["seconds_left"]) == ("stopped", {}, None)


def test_what_left_follows_a_ledger_that_grows(served, folder):
    ledger = folder / "runs" / "first" / "ledger" / "site-1.jsonl"
    rows = served.get("/api/run", name="runs/first").json()["left"]
    assert rows == [
        {"site": "site-1", "kind": "metrics", "parcels": 1, "bytes": 7},
        {"site": "site-1", "kind": "weights", "parcels": 2, "bytes": 900},
    ]
    with ledger.open("a") as file:
        file.write('{"kind": "weights", "bytes": 100}\n{"kind": "weig')
    assert served.get("/api/run", name="runs/first").json()["left"][1]["bytes"] == 1000
    ledger.write_text('{"kind": "weights", "bytes": 1}\n')
    assert served.get("/api/run", name="runs/first").json()["left"][0]["bytes"] == 1


def test_time_left_is_that_of_the_last_rounds():
    lines = [{"round": number, "seconds": 100.0 if number < 5 else 2.0} for number in range(1, 11)]
    assert seconds_left(lines, 15, age=0.0) == 10.0
    assert seconds_left(lines, 15, age=1.0) == 9.0
    assert seconds_left(lines, 10, age=50.0) == 0.0
    assert seconds_left([], 10, age=0.0) is None
    assert seconds_left(lines, None, age=0.0) is None


def test_a_long_history_is_thinned_out_and_keeps_its_end():
    lines = [{**LINES[0], "round": number} for number in range(1, 5001)]
    found = curves(lines)
    assert len(found["rounds"]) <= MOST_POINTS
    assert found["rounds"][-1] == 5000
    assert len(found["scored"]) == len(found["pooled"]["accuracy"])


def test_chosen_runs_side_by_side(served):
    found = served.get("/api/compare", name=["runs/first", "runs/second", "runs/first"]).json()
    assert [run["name"] for run in found["runs"]] == ["runs/first", "runs/second"]
    assert served.get("/api/compare", name=["runs/first"] * 30).status_code == 200
    assert served.get("/api/compare", name=[f"r{number}" for number in range(30)]).status_code == 400
    assert served.get("/api/compare").status_code == 400


def test_a_comparison_has_its_methods_and_runs(served):
    found = served.get("/api/comparison", name="runs/both").json()
    assert found["methods"]["fedavg"]["test_accuracy"]["mean"] == 0.8
    assert [run["name"] for run in found["runs"]] == ["runs/both/fedavg-seed0"]
    assert [file["file"] for file in found["files"]] == ["comparison.json"]
    assert served.get("/api/comparison", name="runs/first").status_code == 404
    assert served.get("/api/comparison", name="study.toml").status_code == 404


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"metrics": 7, "privacy": [], "communication": "x", "rounds": {}, "data": {"counts": 3}}',
        b'{"metrics": {"test": {"accuracy": "<script>"}, "per_site": []}, "privacy": {"covers": 7}}',
        b'{"metrics": ' + b"[" * 100_000 + b"}",
        b'{"rounds": NaN, "metrics": {"test": {"accuracy": Infinity}}}',
    ],
)
def test_damaged_and_hostile_files_end_no_page(served, folder, content):
    run = folder / "runs" / "first"
    for name in ("result.json", "progress.json", "history.jsonl", "ledger/site-1.jsonl", "study.toml"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).write_bytes(content)
        with lock(run / ".lock"):
            assert served.get("/api/overview").status_code == 200
            assert served.get("/api/run", name="runs/first").status_code == 200
            assert served.get("/api/compare", name="runs/first").status_code == 200
        (run / name).unlink() if kept is None else (run / name).write_bytes(kept)
    (folder / "runs" / "both" / "comparison.json").write_bytes(content)
    assert served.get("/api/overview").status_code == 200
    assert served.get("/api/comparison", name="runs/both").status_code == 200


def test_hostile_names_are_only_ever_data(served, folder):
    write_run(folder / "<img src=x onerror=alert(1)>", method="<script>alert(1)</script>")
    answer = served.get("/api/overview")
    assert answer.headers["content-type"] == "application/json"
    assert "<script>alert(1)</script>" in [run["method"] for run in answer.json()["runs"]]


def test_the_scripts_never_make_html_of_a_text():
    from polyclinic.report.serve.app import STATIC

    for file in STATIC.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
            assert word not in text, f"{file.name}: {word}"
