"""Files about studies that are damaged at a site: such a study does not run, is named, and keeps none from stopping."""

import pytest
from attacked_site import SITE, Kit, study
from kit_of_north import came, make_kit
from served import Served

from polyclinic import __version__
from polyclinic.cli import run_app
from polyclinic.deployment.approval import Approvals, NotApproved
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.report.serve.server import Access
from polyclinic.report.serve.site_app import site_app

DAMAGE = [b"", b"{", b"[]", b'{"run": 3}', b"\xff\xfe", b"\0" * 300, b"null", b"[" * 100_000]


@pytest.fixture
def kit(tmp_path):
    """Three studies, of which two are approved."""
    kit = make_kit(tmp_path)
    for run in ("first", "second", "third"):
        came(kit, run)
    for run in ("first", "second"):
        Approvals(kit, "north").decide(run, "approve")
    return kit


def page(kit):
    access = Access(8642)
    return Served(kit, access, None, site_app(kit, access))


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize("name", ["request.json", "decisions.jsonl"])
def test_a_damaged_file_stops_its_study_alone_and_is_named(kit, name, content, capsys):
    (kit / "approvals" / "first" / name).write_bytes(content)
    approvals = Approvals(kit, "north")
    with pytest.raises(NotApproved):
        approvals.require("first")
    assert approvals.state("second") == "approved"
    assert run_app(["site", "pending", "--kit", str(kit)]) == 0
    assert "third: waits since" in (told := capsys.readouterr().out)
    answer = page(kit).get("/api/site")
    assert answer.status_code == 200
    if name == "request.json":
        assert approvals.state("first") == "revoked"
        assert "first: its request.json is damaged; the study counts as stopped" in told
        assert any("first: its request.json is damaged" in one for one in answer.json()["problems"])


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize(
    "file",
    ["approvals/first/request.json", "approvals/first/decisions.jsonl", "approvals/first/ledger/north.jsonl",
     "anchors/approvals/first.json", "local/signing.key", "local/site_keys.toml", "local/policy.toml",
     "suspended/first.json"],
)  # fmt: skip
def test_all_studies_are_stopped_whatever_is_damaged(kit, file, content):
    """And stay stopped when the file is brought back."""
    (kit / file).parent.mkdir(exist_ok=True)
    before = (kit / file).read_bytes() if (kit / file).exists() else None
    (kit / file).write_bytes(content)
    answer = page(kit).post("/api/site/stop-all", why="now")
    assert answer.status_code == 200
    assert answer.json()["stopped"][:2] == ["first", "second"]  # and those of which nothing can be read
    (kit / file).unlink(missing_ok=True)
    if before is not None:
        (kit / file).write_bytes(before)
    for run in ("first", "second"):
        assert Approvals(kit, "north").state(run) == "revoked"
        with pytest.raises(NotApproved):
            Approvals(kit, "north").require(run)


def test_a_study_that_was_stopped_over_damage_can_be_approved_again(kit):
    (kit / "approvals" / "first" / "decisions.jsonl").write_bytes(b"{")
    approvals = Approvals(kit, "north")
    approvals.decide("first", "revoke")
    assert approvals.state("first") == "revoked"
    approvals.decide("first", "approve")
    assert approvals.state("first") == "approved"


@pytest.mark.parametrize("content", DAMAGE)
def test_a_damaged_suspension_still_suspends(tmp_path, content):
    kit = Kit(tmp_path / "kit")
    Approvals(kit.folder, SITE).request("run", study(), __version__)
    (kit.folder / "suspended").mkdir()
    (kit.folder / "suspended" / "run.json").write_bytes(content)
    [found] = Suspensions(kit.folder).all()
    assert found.study == "run"
    assert "is damaged" in found.reason
    assert run_app(["site", "pending", "--kit", str(make_kit(tmp_path / "other"))]) == 0
    Suspensions(kit.folder).release("run")
    assert Suspensions(kit.folder).all() == []


def test_no_rule_approves_a_copy_of_a_refused_study_whose_request_is_damaged(kit):
    policy = kit / "local" / "policy.toml"
    policy.write_text(policy.read_text() + "[approve]\nevery = true\n")
    approvals = Approvals(kit, "north")
    approvals.decide("third", "refuse")
    (kit / "approvals" / "third" / "request.json").write_bytes(b"{")
    came(kit, "fourth")
    with pytest.raises(NotApproved):
        approvals.require("fourth")
