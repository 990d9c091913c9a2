"""A served folder: its pages, and the places that it may show."""

import json
import os

import httpx
import pytest
from served import LINES, write_run

from polyclinic.files import lock
from polyclinic.report.serve.places import Outside, find, walk
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


def test_time_left_and_long_histories():
    lines = [{"round": number, "seconds": 100.0 if number < 5 else 2.0} for number in range(1, 11)]
    assert seconds_left(lines, 15, age=0.0) == 10.0
    assert seconds_left(lines, 15, age=1.0) == 9.0
    assert seconds_left(lines, 10, age=50.0) == 0.0
    assert seconds_left([], 10, age=0.0) is None
    assert seconds_left(lines, None, age=0.0) is None
    lines = [{**LINES[0], "round": number} for number in range(1, 5001)]
    found = curves(lines)
    assert len(found["rounds"]) <= MOST_POINTS
    assert found["rounds"][-1] == 5000
    assert len(found["scored"]) == len(found["pooled"]["accuracy"])


def test_comparisons_have_their_methods_and_runs(served):
    found = served.get("/api/compare", name=["runs/first", "runs/second", "runs/first"]).json()
    assert [run["name"] for run in found["runs"]] == ["runs/first", "runs/second"]
    assert served.get("/api/compare", name=["runs/first"] * 30).status_code == 200
    assert served.get("/api/compare", name=[f"r{number}" for number in range(30)]).status_code == 400
    assert served.get("/api/compare").status_code == 400
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


#: 30 ways to write a path that leaves the folder, or that is not the plainest way to write one inside
TRAVERSALS = [
    "../secret.csv", "runs/../../secret.csv", "runs/first/../../../secret.csv", "./../secret.csv", "..", ".", "",
    "/", "//", "/etc/passwd", "//etc/passwd", "runs//first/result.json", "runs/./first/result.json", "runs/first/",
    "..\\secret.csv", "runs\\..\\..\\secret.csv", "C:\\secret.csv", "C:/secret.csv", "c:secret.csv",
    "\\\\host\\share\\secret.csv", "%2e%2e/secret.csv", "..%2fsecret.csv", "%2e%2e%2fsecret.csv",
    "%252e%252e%252fsecret.csv", "..%c0%afsecret.csv", "..;/secret.csv", "....//secret.csv",
    "\uff0e\uff0e/secret.csv", "runs/first\x00/../../secret.csv", "runs/first/result.json\x00.png",
    "runs/first/result.json\n", "~/secret.csv", "file:///etc/passwd", "runs/first/" + "a" * 2000,
    "/".join(["runs"] * 200), "\ud800/secret.csv",
]  # fmt: skip


@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_way_of_writing_a_path_leads_out(folder, served, name):
    with pytest.raises(Outside) as told:
        find(folder, name)
    assert "secret" not in str(told.value)
    if "\ud800" in name:
        return
    answers = [served.get(f"/api/{path}", name=name) for path in ("run", "comparison", "compare")]
    answers += [served.post(f"/api/{path}", name=name) for path in ("resume", "report", "stop")]
    answers += [served.post("/api/start", study=name)]
    assert {answer.status_code for answer in answers} <= {400, 404}
    # even whoever had the key, which the server never gives
    encoded = "".join(f"%{byte:02x}" for byte in name.encode())
    raw = f"/files/{encoded}?key={served.access.key_for(name)}".encode()
    answers.append(served.client.get(httpx.URL("http://127.0.0.1:8642").copy_with(raw_path=raw)))
    assert answers[-1].status_code in (403, 404, 414)
    assert not any("diagnosis" in answer.text for answer in answers)
    assert served.jobs.facts() == []


def test_what_is_inside_is_found(folder):
    assert find(folder, "runs/first/result.json").is_file()
    assert find(folder, "runs").is_dir()


@pytest.mark.parametrize("name", ["Köln 1 (neu)", "<b>x<b>", "a'b\"c", "100%", "a;b&c", "한국", "-rf", "a=b"])
def test_odd_names_inside_are_found_and_served(served, name):
    file = served.folder / "runs" / "first" / f"{name}.csv"
    file.write_text("x\n")
    run = served.get("/api/run", name="runs/first").json()
    [entry] = [one for one in run["files"] if one["file"] == f"{name}.csv"]
    answer = served.client.get(entry["url"])
    assert (answer.status_code, answer.text) == (200, "x\n")
    assert answer.headers["content-disposition"].startswith("attachment")


def test_symbolic_links_do_not_exist(served, folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "study.toml").write_text('[method]\nname = "fedavg"\n')
    (other / "result.json").write_text("{}")
    os.symlink(other, folder / "runs" / "linked")
    os.symlink(tmp_path / "secret.csv", folder / "runs" / "first" / "linked.csv")
    os.symlink(other / "study.toml", folder / "linked.toml")
    os.symlink("first", folder / "runs" / "inside")
    os.symlink(tmp_path, folder / "runs" / "first" / "up")
    for name in ("runs/linked", "runs/first/linked.csv", "linked.toml", "runs/inside", "runs/first/up/secret.csv"):
        with pytest.raises(Outside):
            find(folder, name)
        assert served.file(name).status_code == 404
    shown = served.get("/api/overview").json()
    assert "linked" not in str(shown)
    assert "linked" not in str(served.get("/api/run", name="runs/first").json())
    assert served.post("/api/start", study="linked.toml").status_code == 404


def test_the_evidence_of_a_dossier_is_no_run(served, folder):
    write_run(folder / "dossier" / "evidence")
    assert "dossier/evidence" in str(served.get("/api/overview").json())
    for name in ("manifest.json", "figures.json"):
        (folder / "dossier" / name).write_text("{}")
    assert "dossier/evidence" not in str(served.get("/api/overview").json())


def test_links_inside_a_run_are_not_read(served, folder, tmp_path):
    """A ledger, a history or a result that is a link to somewhere else reads as nothing."""
    (tmp_path / "elsewhere.jsonl").write_text('{"round": 99, "kind": "patients", "bytes": 1}\n')
    run = folder / "runs" / "second"
    for name in ("history.jsonl", "ledger/site-1.jsonl"):
        (run / name).unlink()
        os.symlink(tmp_path / "elsewhere.jsonl", run / name)
    found = served.get("/api/run", name="runs/second").json()
    assert found["rounds_done"] == 0
    assert found["left"] == []


def test_a_key_opens_one_file_only_and_hidden_files_are_not_sent(served, folder):
    key = served.access.key_for("runs/first/result.json")
    assert served.client.get("/files/runs/first/result.json", params={"key": key}).status_code == 200
    for name in ("runs/first/study.toml", "runs/first/RESULT.json", "runs/second/study.toml"):
        assert served.client.get(f"/files/{name}", params={"key": key}).status_code == 403
    for bad in ("", "0" * 64, key[:-1], key.upper(), "é"):
        assert served.client.get("/files/runs/first/result.json", params={"key": bad}).status_code == 403
    run = folder / "runs" / "first"
    for name in (".lock", ".hidden.csv", "key.pem", "images.npy", "notes.py", "page.svg", "page.htm"):
        (run / name).write_text("x")
        assert served.file(f"runs/first/{name}").status_code == 404
    names = {one["file"] for one in served.get("/api/run", name="runs/first").json()["files"]}
    assert not names & {".lock", ".hidden.csv", "key.pem", "images.npy", "notes.py", "page.svg", "page.htm"}
    assert served.file("runs/first").status_code == 404


def test_a_report_is_in_a_sandbox(served, folder):
    (folder / "runs" / "first" / "report.html").write_text("<script>1</script>")
    answer = served.file("runs/first/report.html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox allow-downloads; default-src 'none'")
    assert "script" not in policy
    assert "allow-same-origin" not in policy
    assert "connect-src" not in policy
    assert answer.headers["content-disposition"].startswith("inline")
    assert served.file("runs/first/report.html", save=1).headers["content-disposition"].startswith("attachment")


def test_deep_folders_end_the_walk(tmp_path):
    deep = tmp_path.joinpath(*["d"] * 30)
    deep.mkdir(parents=True)
    assert len(list(walk(tmp_path))) < 10
