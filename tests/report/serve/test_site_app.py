"""The page of a site decides and says what `polyclinic site` does."""

import pytest
from kit_of_north import came, left, make_kit
from served import Served

from polyclinic.deployment.approval import Approvals
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.files import lock
from polyclinic.report.serve.server import Access
from polyclinic.report.serve.site_app import site_app


@pytest.fixture
def kit(tmp_path):
    return make_kit(tmp_path)


@pytest.fixture
def site(kit):
    access = Access(8642)
    return Served(kit, access, None, site_app(kit, access))


def studies(site):
    return {one["run"]: one for one in site.get("/api/site").json()["studies"]}


def test_a_study_waits_is_read_approved_and_stopped(site, kit):
    came(kit)
    assert studies(site)["first"]["state"] == "waiting"
    told = site.get("/api/site/study", run="first").json()
    assert any("(step 'train'): weights of a model, to the coordinator." in line for line in told["sentences"])
    assert [line.split(": ")[0] for line in told["short"]] == [
        "What leaves", "What attacks have got out of such parcels", "What bounds it"
    ]  # fmt: skip
    assert "no differential privacy" in told["short"][2]
    assert site.post("/api/site/decide", run="first", decision="approve").status_code == 400  # nobody's name
    answer = site.post("/api/site/decide", run="first", decision="approve", why="our board agreed", who="Ada Weiß")
    assert answer.json()["standing"].startswith("It was approved by Ada Weiß (")
    assert Approvals(kit, "north").state("first") == "approved"
    assert studies(site)["first"]["decisions"][0]["why"] == "our board agreed"
    assert studies(site)["first"]["finished"] is False
    (kit / "runs" / "first").mkdir(parents=True)
    (kit / "runs" / "first" / "model.safetensors").write_text("")
    assert "It is finished" in studies(site)["first"]["standing"]
    assert site.post("/api/site/decide", run="first", decision="refuse").status_code == 400
    assert site.post("/api/site/decide", run="first", decision="revoke").status_code == 200
    assert Approvals(kit, "north").state("first") == "revoked"


def test_all_studies_are_stopped_at_once(site, kit):
    for run in ("first", "second", "third"):
        came(kit, run)
    for run in ("first", "second"):
        site.post("/api/site/decide", run=run, decision="approve", who="Ada")
    answer = site.post("/api/site/stop-all", why="the ward asked").json()
    assert answer == {"stopped": ["first", "second"], "problems": []}
    assert list(studies(site)) == ["third", "second", "first"]  # the newest first
    assert [one["state"] for one in studies(site).values()] == ["waiting", "revoked", "revoked"]


def test_a_broken_ledger_of_decisions_keeps_nobody_from_stopping_the_others(site, kit):
    for run in ("first", "second"):
        came(kit, run)
        site.post("/api/site/decide", run=run, decision="approve", who="Ada")
    ledger = Approvals(kit, "north").ledger_file("first")
    ledger.write_text(ledger.read_text().replace("approve", "refuse!"))
    answer = site.post("/api/site/stop-all").json()
    assert answer["stopped"] == ["first", "second"]
    assert "first: is stopped, and its ledger cannot say so" in answer["problems"][0]
    assert "does not hold" in studies(site)["first"]["decisions"][0]["why"]
    assert studies(site)["first"]["state"] == "revoked"


def test_what_left_by_kind_and_what_is_left_of_the_budgets(site, kit):
    came(kit)
    left(kit)
    found = site.get("/api/site").json()
    assert found["site"] == "north"
    assert found["running"] is False
    assert found["studies"][0]["left"] == [
        {"kind": "metrics", "parcels": 2, "bytes": 60},
        {"kind": "weights", "parcels": 2, "bytes": 4000},
    ]
    size, epsilon, scores = found["budgets"]
    assert (size["used"], size["most"], size["setting"]) == (4060, 1_000_000, "max_bytes")
    assert (epsilon["used"], epsilon["most"]) == (0, None)
    assert (scores["used"], scores["most"]) == (2, 1000)
    with lock(kit / "runs" / ".first.lock"):
        assert studies(site)["first"]["at_work"] is True


def test_the_ledger_is_searched(site, kit):
    left(kit, "first")
    left(kit, "second", rounds=1)
    every = site.get("/api/site/ledger").json()
    assert (every["found"], every["of"]) == (6, 6)
    assert site.get("/api/site/ledger", kind="weights").json()["bytes"] == 6000
    assert site.get("/api/site/ledger", run="second").json()["found"] == 2
    assert site.get("/api/site/ledger", text="EVALUATE").json()["found"] == 3
    assert site.get("/api/site/ledger", text="2w2w", kind="weights", run="first").json()["lines"][0]["round"] == 2
    assert site.get("/api/site/ledger", text="nowhere").json()["found"] == 0


def test_a_ledger_that_does_not_hold_is_named_and_the_rest_is_shown(site, kit):
    file = left(kit, "first")
    left(kit, "second")
    file.write_text(file.read_text().replace("2000", "1", 1))
    found = site.get("/api/site").json()
    assert [run["run"] for run in found["others"]] == ["second"]
    assert "the ledger of run 'first' does not hold" in found["problems"][0]


def test_a_suspension_is_shown_and_ends_with_a_decision(site, kit):
    came(kit)
    Suspensions(kit).suspend("first", "a gradient holds NaN")
    assert site.get("/api/site").json()["suspended"][0]["reason"] == "a gradient holds NaN"
    site.post("/api/site/decide", run="first", decision="approve", who="Ada")
    assert site.get("/api/site").json()["suspended"] == []


REFUSED = [
    *({"run": run, "decision": "approve", "who": "Ada"} for run in (
        "", "..", "../first", "a/b", "missing", "first\x00", "é" * 500, "<b>",
    )),
    {"run": "first", "decision": "delete"},
    {"run": "first", "decision": "approve", "by": "the director"},
    {"run": "first", "decision": "approve", "who": "Ada", "why": "x" * 2000},
    *({"run": "first", "decision": "approve", "who": who} for who in (" ", "the rule approve.every", "Ada\nby a rule")),
]  # fmt: skip


@pytest.mark.parametrize("made", REFUSED, ids=str)
def test_a_decision_that_is_refused(site, kit, made):
    came(kit)
    assert site.post("/api/site/decide", **made).status_code == 400
    assert made["run"] == "first" or site.get("/api/site/study", run=made["run"]).status_code == 400
    assert Approvals(kit, "north").state("first") == "waiting"
    assert Approvals(kit, "north").decisions("first") == []


def test_nobody_decides_without_the_token(site, kit):
    came(kit)
    body = {"run": "first", "decision": "approve", "who": "Ada"}
    assert site.client.post("/api/site/decide", json=body).status_code == 401
    other = {**site.token, "origin": "http://evil.example"}
    assert site.client.post("/api/site/decide", json=body, headers=other).status_code == 403
    assert Approvals(kit, "north").state("first") == "waiting"


def test_a_mistake_in_the_policy_is_said(site, kit):
    (kit / "local" / "policy.toml").write_text("kinds = 7\n")
    answer = site.get("/api/site")
    assert answer.status_code == 400
    assert "policy.toml" in answer.json()["error"]
