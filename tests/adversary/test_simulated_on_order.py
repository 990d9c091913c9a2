"""Attack: order a deployed site to work as a simulated one, whose policy, folders and plug-ins are the sender's."""

import json
import os

import pytest

from polyclinic.data.parts import prepare
from polyclinic.engines.nvflare.job import TOKEN, is_simulated
from polyclinic.errors import BadInput
from polyclinic.runner.run.assembly import Assembly

programs = pytest.importorskip("polyclinic.deployment.programs", reason="the extra [nvflare] is not installed")


@pytest.fixture
def order(tiny, tmp_path):
    """A simulated study with a policy of its own, as the simulator writes it."""
    study = tiny("fedavg", {"sites.count": 2, "policy.kinds": ["real-images", "weights", "labels"]})
    assembly = Assembly(study, prepare(study.data, study.sites), tmp_path / "run")
    return {"assembly": assembly.worker_spec, "names": {"north": "site-1"}, "run": os.getpid(), "token": "0123"}


@pytest.mark.parametrize("token", [None, "", "4567"])
def test_a_site_is_simulated_only_by_the_simulator_that_started_it(kit, order, token, monkeypatch):
    """Not even where all files of the kit are missing."""
    monkeypatch.delenv(TOKEN, raising=False) if token is None else monkeypatch.setenv(TOKEN, token)
    for folder in (kit.folder, kit.folder / "nothing here"):
        with pytest.raises(BadInput, match="takes part in deployed studies only"):
            programs.relay_for(order, "north", folder)
    with pytest.raises(BadInput, match="takes part in deployed studies only"):
        programs.relay_for({**order, "token": ""}, "north", kit.folder)


def test_the_simulators_own_processes_are_simulated(order, monkeypatch):
    monkeypatch.setenv(TOKEN, "0123")
    monkeypatch.setattr("polyclinic.runner.run.nvflare_simulation.end_with", lambda *_: None)
    assert is_simulated("0123")
    assert programs.relay_for(order, "north", None).site == "site-1"


def test_a_site_that_cannot_take_part_names_no_file_and_no_host(kit, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    error = FileNotFoundError(f"/data/thorax/patient_0815.dcm on {os.uname().nodename}")
    told = programs.refusal_at(kit.folder, error)
    assert told == "the site could not do this; its own people find the reason in failures.log of its kit"
    assert "patient_0815" in kit.log()


def test_a_message_that_breaks_the_relay_brings_no_traceback(kit, monkeypatch):
    """NVFlare sends the traceback of whatever a site's function raises."""
    monkeypatch.setattr("polyclinic.deployment.deployed_site.end_with", lambda *_: None)
    from attacked_site import study

    from polyclinic import __version__
    from polyclinic.federation.call import pack, unpack

    class Called:
        caller = "server"

    monkeypatch.setattr(programs, "collab", Called)
    program = programs.SiteProgram()
    order = {"version": __version__, "study": study().as_tables(), "run": "run"}
    program._relay = programs.relay_for(json.loads(json.dumps(order)), "north", kit.folder)
    header, _ = unpack(program.call("wait", pack({"call": "no such call"}, [])))
    assert header["failed"] == "the site could not do this; its own people find the reason in failures.log of its kit"
    assert "knows nothing of call" in kit.log()
