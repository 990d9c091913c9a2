"""A run at the server that its owner stops, and resumes: real sites in processes of their own, no NVFlare between."""

import hashlib
import json
import threading

import pytest
from processes import ForkedWorker
from run_folders import history, history_without_bytes, left, result

from polyclinic import __version__
from polyclinic.deployment import deployed_site
from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.coordination import OUTCOME, Coordination, Reach
from polyclinic.deployment.kits import rehearse
from polyclinic.engines.nvflare.engine import JOB_ENDED
from polyclinic.engines.nvflare.relay import refusal
from polyclinic.engines.worker_process import Outcome
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.federation.ledger.verify import check_run
from polyclinic.runner.run.recorder import Display
from polyclinic.study import load_study

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")


@pytest.fixture
def coordinate(tiny, tmp_path, monkeypatch):
    """Makes the coordination of a run, with sites that have just been started."""
    monkeypatch.setattr(deployed_site, "end_with", lambda *_: None)
    monkeypatch.setattr(deployed_site, "WorkerProcess", ForkedWorker)
    folder, relays = tmp_path / "deployment", []
    rehearse(tiny("fedavg", {"sites.count": 2}), folder, server="localhost", port=8002, display=Display())
    assert [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077] == []  # no others read kits
    first = load_study(folder / "study.toml")

    def make(resume, job, **changes):
        study = first.with_settings({name.replace("__", "."): value for name, value in changes.items()})
        while relays:  # NVFlare ends a job at its sites before the next one begins
            relays.pop().close()
        # the server's files are not at the sites
        there = study.with_settings({"model.weights": "nowhere.safetensors"}) if "model__weights" in changes else study
        spec = {"study": there.as_tables(), "run": "run", "resume": resume, "version": __version__}
        mine = {site: deployed_site.relay_of(spec, site, folder / "sites" / site) for site in ("site-1", "site-2")}
        relays.extend(mine.values())
        sends = {site: lambda what, payload, timeout, r=relay: r.handle(what, payload) for site, relay in mine.items()}
        server = folder / "server"
        keys, reach = KitKeys(server / "local"), Reach(sends, lambda site: True)
        return Coordination(study, server / "runs" / "run", resume, reach, job, keys)

    yield make
    for relay in relays:
        relay.close()


class ApprovesMeanwhile(threading.Event):
    """While the coordinator waits for approval, its sites' people look at the study, one site after the other."""

    def __init__(self, kits, status):
        super().__init__()
        self.kits, self.status, self.seen = list(kits), status, []

    def wait(self, timeout=None):
        self.seen.append(self.status()["approvals"])
        site = self.kits.pop(0)
        Approvals(site, site.name).decide("run", "approve")
        return False


def ask_people(folder, *names):
    """From now on a person must approve at these sites."""
    for name in names:
        policy = folder / "sites" / name / "local" / "policy.toml"
        policy.write_text(policy.read_text().replace("every = true", "every = false"))


def test_the_coordinator_waits_until_the_people_of_all_sites_have_approved(coordinate, tmp_path):
    folder = tmp_path / "deployment"
    ask_people(folder, "site-1", "site-2")
    run = coordinate(False, tmp_path / "job")
    run._stopping = people = ApprovesMeanwhile([folder / "sites" / "site-2", folder / "sites" / "site-1"], run.status)
    outcome = run.run()
    assert outcome.error is None, outcome.reason
    assert people.seen == [{"site-1": "waiting", "site-2": "waiting"}, {"site-1": "waiting"}]
    assert all(line["failed"] == {} for line in history(tmp_path / "job" / "run"))


@pytest.mark.parametrize(("decision", "words"), [(None, "waits for approval"), ("refuse", "was refused")])
def test_a_run_stops_if_too_few_sites_let_it_and_goes_on_when_they_do(coordinate, tmp_path, decision, words):
    folder = tmp_path / "deployment"
    ask_people(folder, "site-1", "site-2")
    run = coordinate(False, tmp_path / "job-1")
    run.study = run.study.with_settings({"engine.approval_wait": 0.0})
    if decision:
        for site in ("site-1", "site-2"):
            Approvals(folder / "sites" / site, site).decide("run", decision)
    outcome = run.run()
    assert outcome.error == "WorkFailed"
    assert f"site-1: the study {words}" in outcome.reason
    for site in ("site-1", "site-2"):
        Approvals(folder / "sites" / site, site).decide("run", "approve")
    assert coordinate(True, tmp_path / "job-2").run().error is None


def test_a_run_is_stopped_while_it_waits(coordinate, tmp_path):
    ask_people(tmp_path / "deployment", "site-1")
    run = coordinate(False, tmp_path / "job")
    run.stop()
    assert run.run().error == "Stopped"


def test_a_run_is_stopped_after_the_round_it_is_in_and_resumed(coordinate, tiny, undisturbed, tmp_path):
    stopped = coordinate(False, tmp_path / "job-1")
    stopped.stop()
    told = json.loads((tmp_path / "job-1" / "run" / OUTCOME).read_text())
    assert (told["error"], told["values"]) == ("Stopped", None)  # from now on: a job that is killed was not lost
    outcome = stopped.run()
    assert (outcome.error, outcome.reason) == ("Stopped", "the run was stopped by its owner (deploy stop)")
    assert json.loads((tmp_path / "job-1" / "run" / OUTCOME).read_text())["error"] == "Stopped"
    assert [line["round"] for line in history(tmp_path / "job-1" / "run")] == [1]

    outcome = coordinate(True, tmp_path / "job-2").run()
    assert outcome.error is None
    expected = undisturbed(tiny("fedavg", {"sites.count": 2})).folder
    assert result(tmp_path / "job-2" / "run")["weights_sha256"] == result(expected)["weights_sha256"]
    assert history_without_bytes(tmp_path / "job-2" / "run") == history_without_bytes(expected)

    # the ledgers, which are at the sites, fit what the coordinator received and counter-signed in both jobs
    server = tmp_path / "deployment" / "server" / "runs" / "run"
    heads = json.loads((server / "result.json").read_text())["ledgers"]
    for site in ("site-1", "site-2"):
        there = tmp_path / "deployment" / "sites" / site / "runs" / "run"
        assert left(there, site) == left(expected, site)
        assert heads[site]["lines"] == len(left(expected, site))
        [checked] = check_run(there, against=server).values()
        assert (checked.seen, checked.countersigned, checked.not_received) == (len(checked.lines),) * 2 + ([],)
        kept = json.loads((there.parent.parent / "anchors" / "runs" / "run.json").read_text())
        assert kept["head"] == [heads[site][name] for name in ("lines", "digest", "signature")]
        assert kept["countersigned"][0] > 2
    for run in (tmp_path / "deployment" / "server" / "runs" / "run", expected):
        assert run.stat().st_mode & 0o777 == 0o700


def test_the_servers_file_of_first_weights_reaches_sites_that_cannot_read_it(coordinate, tiny, undisturbed, tmp_path):
    first = undisturbed(tiny("fedavg", rounds=1)).folder / "model.safetensors"
    file = tmp_path / "first.safetensors"
    file.write_bytes(first.read_bytes())
    expected = undisturbed(tiny("fedavg", {"sites.count": 2, "model.weights": str(file)}, rounds=1))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    weights = {"model__weights": str(file), "model__weights_sha256": sha256}
    run = coordinate(False, tmp_path / "job", **weights, method__rounds=1)
    kits = [tmp_path / "deployment" / "sites" / site for site in ("site-1", "site-2")]
    run._stopping = people = ApprovesMeanwhile(kits, run.status)
    outcome = run.run()
    assert outcome.error is None, outcome.reason
    # no rule approves a file that a site does not have, not even in a rehearsal: its people did
    assert people.seen == [{"site-1": "waiting", "site-2": "waiting"}, {"site-2": "waiting"}]
    assert result(tmp_path / "job" / "run")["weights_sha256"] == expected["weights_sha256"]
    assert json.loads((tmp_path / "job" / "run" / "weights.json").read_text())["file"] == "first.safetensors"


def test_a_run_that_its_owner_stops_at_once_is_stopped_whatever_its_sites_say(coordinate, tmp_path):
    """NVFlare ends the job at the sites first: the run must not be taken for one that was lost."""
    run = coordinate(False, tmp_path / "job")
    run.reach = Reach(dict.fromkeys(run.reach.sends, lambda *_: refusal(JOB_ENDED)), run.reach.present)
    run.stop()
    assert run.run().error == Outcome.read(tmp_path / "job" / "run" / OUTCOME).error == "Stopped"
