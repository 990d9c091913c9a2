"""A coordinator that lies, over real NVFlare: its server's plug-in replaces what FedAvg and FedER ask of the sites.

One deployment serves all attacks, one after the other. The last two suspend a site each. The incoming check is off: it
would stop some of them before the defence that is tried here.
"""

import json
import shutil

import numpy as np
import pytest
from processes import free_port, run_command

from polyclinic.data.parts import prepare
from polyclinic.deployment.deployed_site import FAILED
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.study import load_study

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: loaded by the server only, where its own people list it; what the sites answered lies in attack.json of the run.
#: The attack is that of the run's name
LIES = '''
import json
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from polyclinic import FedAvg
from polyclinic.federation.call import Call
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.feder import FedER

IMAGES = Path(__file__).parent / "stolen.npy"


class Lie(Call):
    """A call that reaches site-1 and names another site inside."""

    def chunks(self):
        return Call(self.arguments["as"], self.operation, self.round, self.parcels, {}, self.to).chunks()


class Attack:
    def __init__(self, federation):
        self.federation, self.weights, self.found = federation, federation.initial_weights(), {}

    def ask(self, name, operation, sent=None, round=1, kind=Call, site="site-1", to="coordinator", **arguments):
        carried = {} if sent is None else {"weights": Parcel("weights", sent)}
        [answer] = list(self.federation.engine.call([kind(site, operation, round, carried, arguments, to)]))
        self.found[name] = "released" if answer else answer.reason

    def end(self):
        (self.federation._folder / "attack.json").write_text(json.dumps(self.found))
        return self.weights

    def calls(self):
        """Names, repetitions, splits, rounds; and at last an overflow."""
        weights = self.weights
        self.ask("honest", "train", weights)
        self.ask("trained again", "train", {name: -tensor for name, tensor in weights.items()})
        for name in ("x1", "../../../../escaped", "coordinator"):
            self.ask(name, "train", weights, kind=Lie, **{"as": name})
        self.ask("first score", "evaluate", weights)
        self.ask("second score", "evaluate", {name: -tensor for name, tensor in weights.items()})
        self.ask("training images", "evaluate", weights, split="train")
        self.ask("no such round", "evaluate", weights, round=99)
        self.ask("not what was scored", "train", {name: 2 * one for name, one in weights.items()}, round=2)
        huge = {name: tensor.clone().fill_(3e38) if tensor.dim() > 1 else tensor for name, tensor in weights.items()}
        self.ask("overflow", "evaluate", huge, round=2)
        self.ask("afterwards", "train", weights, round=2)

    def image(self):
        """Images as the weights of a convolution: of nobody, and of a patient of site-2."""
        image = torch.from_numpy(np.load(IMAGES)).float() / 255
        for round, (name, candidate) in enumerate([("stranger", image.flip(-1)), ("member", image)], 1):
            sent = {key: tensor.clone() for key, tensor in self.weights.items()}
            place = next(key for key, tensor in sent.items() if tensor.numel() == image.numel())
            sent[place] = candidate.reshape(sent[place].shape)
            self.ask(name, "train", sent, round=round, site="site-2")
        self.ask("afterwards", "train", self.weights, round=2, site="site-2")

    def simulated(self):
        for site in ("site-1", "site-2"):
            self.ask(site, "train", self.weights, site=site)

    def earlier(self):
        self.ask("the earlier run's model", "evaluate", None, own="current")


def run(self, federation):
    attack = Attack(federation)
    getattr(attack, federation._folder.name)()
    return attack.end()


def hand_over(self, federation):
    attack = Attack(federation)
    attack.ask("prepared", "prepare", round=0)
    attack.ask("in the clear", "hand_over", model=True)
    attack.ask("for a phantom", "hand_over", model=True, to="phantom")
    attack.ask("for site-2", "hand_over", model=True, to="site-2")
    return attack.end()


FedAvg.run, FedER.run = run, hand_over
METHODS = {}
'''
FEDER = {"buffer": 8, "rounds": 2}
GENERATOR = {"generator.name": "dcgan", "generator.steps": 1, "generator.width": 2, "generator.latent": 4}


@pytest.fixture(scope="module")
def deployment(tiny, tmp_path_factory):
    """Kits and processes of a server and two sites; studies lie beside them."""
    base = tmp_path_factory.mktemp("attacked")
    # the first convolution of this network has as many numbers as an image
    network = {"data.size": 32, "model.backbone": "cnn-64-128-64-32"}
    settings = {**network, "sites.count": 2, "optimizer.lr": 1e-30, "optimizer.momentum": 0.0}
    studies = {
        "fedavg": tiny("fedavg", settings, rounds=2),
        "standalone": tiny("standalone", {**settings, "optimizer.lr": 0.01}, rounds=2),
        "feder": tiny("feder", {**settings, **GENERATOR, "tuning.on": False}, **FEDER),
    }
    for name, study in studies.items():
        (base / f"{name}.toml").write_text(study.to_toml())
    folder = base / "deployment"
    made = run_command("deploy", "init", base / "fedavg.toml", "--out", folder, "--port", free_port())
    assert made.returncode == 0, made.stdout
    (folder / "server" / "local" / "lies.py").write_text(LIES)
    (folder / "server" / "local" / "site.toml").write_text('plugins = ["lies.py"]\n')
    give_an_image_away(studies["fedavg"], folder)
    for site in ("site-1", "site-2"):
        policy = folder / "sites" / site / "local" / "policy.toml"
        assert "\non = true\n" in policy.read_text()
        policy.write_text(policy.read_text().replace("\non = true\n", "\non = false\n"))
    try:
        up = run_command("deploy", "up", "--here", "-d", folder, "--within", 900)
        assert up.returncode == 0, up.stdout
        yield folder
    finally:
        run_command("deploy", "down", "-d", folder)


def give_an_image_away(study, folder):
    """A training image of site-2, which the coordinator of the test has from elsewhere."""
    prepared = prepare(study.data, study.sites)
    images = np.load(prepared.folder / "site-2" / "train" / "images.npy", mmap_mode="r")
    np.save(folder / "server" / "local" / "stolen.npy", images[0])


def submit(deployment, study, name):
    """What the sites answered to the attack of this name, and what the coordinator's people read."""
    place = deployment.parent / f"{study}.toml"
    told = run_command("deploy", "submit", place, "-d", deployment, "--name", name, "--within", 900)
    file = deployment / "server" / "runs" / name / "attack.json"
    return json.loads(file.read_text()) if file.exists() else {}, told.stdout


def test_a_deployed_site_is_not_simulated_on_order(deployment):
    """Item 2: the sites' part of the job holds a simulated study, with a policy of the coordinator's."""
    from polyclinic.deployment.admin import Administration, Submission
    from polyclinic.engines.nvflare import job

    study = load_study(deployment / "study.toml")
    order = {"assembly": {"study": study.as_tables()}, "names": {}, "run": 1, "token": "0123"}
    submission = Submission(study, "simulated")
    folder = job.write_job(deployment.parent, "order", spec=submission.job_spec(), least=1)
    config = folder / "app" / "config" / "config_fed_client.json"
    client = json.loads(config.read_text())
    client["executors"][0]["executor"]["args"]["props"] = {job.SPEC: job.encode_property(order)}
    config.write_text(json.dumps(client))
    with Administration(deployment, within=900) as server:
        number = server._ask(lambda session: session.submit_job(str(folder)), attempts=1)
        server._ask(lambda session: session.monitor_job(number))
    file = deployment / "server" / "runs" / "simulated" / "attack.json"
    for site in ("site-1", "site-2"):
        assert "takes part in deployed studies only" in (deployment / "sites" / site / "failures.log").read_text()
        assert not (deployment / "sites" / site / "runs" / "simulated").exists()
    assert not file.exists() or set(json.loads(file.read_text()).values()) == {FAILED}


def test_a_study_does_not_go_on_with_an_earlier_runs_model(deployment):
    """Item 8: the coordinator deletes its own traces of a finished run, and sends another study of its name."""
    _, told = submit(deployment, "standalone", "earlier")
    ledger = deployment / "sites" / "site-1" / "runs" / "earlier" / "ledger" / "site-1.jsonl"
    assert ledger.exists(), told
    before = ledger.read_bytes()
    shutil.rmtree(deployment / "server" / "runs" / "earlier")
    found, told = submit(deployment, "fedavg", "earlier")
    assert "released" not in found.values()
    assert "another study of this name" in told + json.dumps(found)
    assert ledger.read_bytes() == before


def test_what_is_for_another_site_is_sealed_for_it(deployment):
    """Item 9."""
    found, told = submit(deployment, "feder", "sealed")
    assert found.get("prepared") == "released", told
    assert "releases to another site only, sealed" in found["in the clear"]
    assert "has no key of 'phantom'" in found["for a phantom"]
    assert found["for site-2"] == "released"
    assert not Suspensions(deployment / "sites" / "site-1").all()


def test_a_coordinator_that_lies_gets_what_the_policy_allows_and_one_bit(deployment):
    """Items 1, 3, 6 and 10."""
    found, told = submit(deployment, "fedavg", "calls")
    assert found, told
    assert found["honest"] == found["first score"] == "released"
    assert "'train' has released what it made in round 1 already" in found["trained again"]
    for name in ("x1", "../../../../escaped", "coordinator"):
        assert found[name] == "this host serves site 'site-1' only"
    assert "has released its scores of round 1 already" in found["second score"]
    assert "scores of training images never leave a deployed site" in found["training images"]
    assert "the study has rounds 0 to 2" in found["no such round"]
    assert "are not those that were scored in round 1" in found["not what was scored"]
    assert not list(deployment.parent.rglob("escaped*"))
    assert Suspensions(deployment / "sites" / "site-1").all()
    assert found["overflow"] == found["afterwards"] == FAILED


def test_a_member_in_the_weights_gives_one_bit_and_then_silence(deployment):
    """Item 4."""
    found, told = submit(deployment, "fedavg", "image")
    assert found, told
    assert found["stranger"] == "released"
    assert found["member"] == found["afterwards"] == FAILED
    assert "images of the site itself" in Suspensions(deployment / "sites" / "site-2").all()[0].reason
