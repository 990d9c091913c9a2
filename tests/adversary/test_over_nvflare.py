"""A coordinator that lies, over real NVFlare: its server's plug-in replaces what FedAvg asks of the sites."""

import json
import socket
import subprocess
import sys

import pytest

from polyclinic.deployment.deployed_site import FAILED
from polyclinic.federation.leaving.suspension import Suspensions

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: loaded by the server only, where its own people list it; what the sites answered lies in attack.json of the run
LIES = '''
import json
from typing import Literal
from polyclinic import FedAvg
from polyclinic.federation.call import Call
from polyclinic.federation.leaving.parcel import Parcel


class Lie(Call):
    """A call that reaches site-1 and names another site inside."""

    def chunks(self):
        return Call(self.arguments["as"], self.operation, self.round, self.parcels, {}, self.to).chunks()


def run(self, federation):
    weights, found = federation.initial_weights(), {}

    def ask(name, operation, sent=weights, round=1, kind=Call, **arguments):
        call = kind("site-1", operation, round, {"weights": Parcel("weights", sent)}, arguments)
        [answer] = list(federation.engine.call([call]))
        found[name] = "released" if answer else answer.reason

    ask("honest", "train")
    for name in ("x1", "../../../../escaped", "coordinator"):
        ask(name, "train", kind=Lie, **{"as": name})
    ask("first score", "evaluate")
    ask("second score", "evaluate", {name: -tensor for name, tensor in weights.items()})
    ask("training images", "evaluate", split="train")
    ask("no such round", "evaluate", round=99)
    huge = {name: tensor.clone().fill_(3e38) if tensor.dim() > 1 else tensor for name, tensor in weights.items()}
    ask("overflow", "train", huge, round=2)
    ask("afterwards", "train", round=2)
    (federation._folder / "attack.json").write_text(json.dumps(found))
    return weights


class Lies(FedAvg):
    name: Literal["lies"] = "lies"


FedAvg.run = run
METHODS = {"lies": Lies}
'''


def polyclinic(*arguments):
    return subprocess.run([sys.executable, "-m", "polyclinic", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture
def deployment(tiny, tmp_path):
    (tmp_path / "study.toml").write_text(tiny("fedavg", {"sites.count": 2}, rounds=2).to_toml())
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    folder = tmp_path / "deployment"
    made = polyclinic("deploy", "init", tmp_path / "study.toml", "--out", folder, "--port", port)
    assert made.returncode == 0, made.stderr
    (folder / "server" / "local" / "lies.py").write_text(LIES)
    (folder / "server" / "local" / "site.toml").write_text('plugins = ["lies.py"]\n')
    try:
        polyclinic("deploy", "up", "--here", "-d", folder, "--within", 900)
        yield folder
    finally:
        polyclinic("deploy", "down", "-d", folder)


def test_a_coordinator_that_lies_gets_what_the_policy_allows_and_one_bit(deployment, tmp_path):
    submit = ["deploy", "submit", tmp_path / "study.toml", "-d", deployment, "--name", "run", "--within", 900]
    told = polyclinic(*submit)
    assert (deployment / "server" / "runs" / "run" / "attack.json").exists(), told.stdout + told.stderr
    found = json.loads((deployment / "server" / "runs" / "run" / "attack.json").read_text())
    assert found["honest"] == found["first score"] == "released"
    for name in ("x1", "../../../../escaped", "coordinator"):
        assert found[name] == "this host serves site 'site-1' only"
    assert "has released its scores of round 1 already" in found["second score"]
    assert "scores of training images never leave a deployed site" in found["training images"]
    assert "the study has rounds 0 to 2" in found["no such round"]
    assert not list(tmp_path.rglob("escaped*"))
    assert Suspensions(deployment / "sites" / "site-1").all()
    assert found["overflow"] == found["afterwards"] == FAILED
