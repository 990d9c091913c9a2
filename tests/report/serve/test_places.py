"""No path leads outside the folder: traversal in many forms, symbolic links, hidden and odd names."""

import os

import httpx
import pytest
from served import write_run

from polyclinic.report.serve.places import Outside, find, walk

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


def test_hidden_files_and_other_kinds_are_not_sent(served, folder):
    run = folder / "runs" / "first"
    for name in (".lock", ".hidden.csv", "key.pem", "images.npy", "notes.py", "page.svg", "page.htm"):
        (run / name).write_text("x")
        assert served.file(f"runs/first/{name}").status_code == 404
    names = {one["file"] for one in served.get("/api/run", name="runs/first").json()["files"]}
    assert not names & {".lock", ".hidden.csv", "key.pem", "images.npy", "notes.py", "page.svg", "page.htm"}
    assert served.file("runs/first").status_code == 404


def test_a_key_opens_one_file_only(served):
    key = served.access.key_for("runs/first/result.json")
    assert served.client.get("/files/runs/first/result.json", params={"key": key}).status_code == 200
    for name in ("runs/first/study.toml", "runs/first/RESULT.json", "runs/second/study.toml"):
        assert served.client.get(f"/files/{name}", params={"key": key}).status_code == 403
    for bad in ("", "0" * 64, key[:-1], key.upper(), "é"):
        assert served.client.get("/files/runs/first/result.json", params={"key": bad}).status_code == 403


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
