"""Attack: begin a study with crafted weights in a file, so that later ones are compared with them."""

import hashlib

import pytest
from attacked_site import SITE, ask, study

from polyclinic import __version__
from polyclinic.deployment.admin import with_digest_of_weights
from polyclinic.deployment.approval import TRUSTED_WEIGHTS, Approvals, NotApproved
from polyclinic.deployment.approval_rules import policy_of
from polyclinic.deployment.study_in_words import Asked
from polyclinic.errors import BadInput
from polyclinic.federation.call import DataDependentRefusal
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.files import write_tensors
from polyclinic.models import read_weights
from polyclinic.study import parse_study


@pytest.fixture
def file(kit):
    """A file of weights of the study's network, and its SHA-256."""
    host = kit.host("before")
    first = host.spec.first_weights(SITE)
    place = kit.folder.parent / "weights.safetensors"
    write_tensors(place, {name: tensor.flip(0).contiguous() for name, tensor in first.items()})
    return place, hashlib.sha256(place.read_bytes()).hexdigest()


def tables(file, sha256):
    return {"backbone": "lenet5", "weights": str(file), **({"weights_sha256": sha256} if sha256 else {})}


def trust(kit, file):
    folder = kit.folder / TRUSTED_WEIGHTS
    folder.mkdir()
    (folder / "hospital.safetensors").write_bytes(file.read_bytes())


@pytest.mark.parametrize("told", [True, False])
def test_no_rule_approves_weights_from_a_file_that_the_site_does_not_have(kit, file, told):
    place, sha256 = file
    with pytest.raises(NotApproved):
        kit.host("run", model=tables(place, sha256 if told else None))
    if told:
        Approvals(kit.folder, SITE).decide("run", "approve")  # a person may
        assert kit.host("run", model=tables(place, sha256)).spec.first_weights(SITE) is None


def test_weights_that_the_site_has_are_compared_with_those_that_come_first(kit, file):
    place, sha256 = file
    trust(kit, place)
    kit.policy(incoming="on = true")
    host = kit.host("run", model=tables(place, sha256), method={"name": "fedsgd", "rounds": 2})
    weights = host.spec.first_weights(SITE)
    assert ask(host, "gradient", 1, weights=weights).parcels
    host = kit.host("crafted", model=tables(place, sha256), method={"name": "fedsgd", "rounds": 2})
    with pytest.raises(DataDependentRefusal, match="moved of"):
        ask(host, "gradient", 1, weights={name: tensor.flip(0) for name, tensor in weights.items()})


def test_the_person_who_approves_reads_which_file_it_is(kit, file):
    place, sha256 = file
    with pytest.raises(NotApproved):
        kit.host("run", model=tables(place, sha256))
    asked = Approvals(kit.folder, SITE).named("run")
    shown = Asked(parse_study(asked.study), SITE, kit.folder, policy_of(kit.folder / "local" / "policy.toml"))
    assert f"'weights.safetensors' with the SHA-256 {sha256}, which your site does not have" in shown.first_weights()[0]
    trust(kit, place)
    assert "your site has it as hospital.safetensors and compares" in shown.first_weights()[0]


def test_a_study_that_is_sent_names_the_file_by_its_digest(kit, file):
    place, sha256 = file
    assert with_digest_of_weights(study(model=tables(place, None))).model.weights_sha256 == sha256


def test_no_rule_approves_a_second_model_that_the_site_does_not_have(kit, file):
    """A model of the coordinator's choice, to be compared with a known one, may be crafted like any other."""
    place, _ = file
    digest = Parcel("weights", dict(read_weights(place).tensors)).digest
    asked = study(method={"name": "evaluate", "against": str(place), "against_digest": digest})
    approvals = Approvals(kit.folder, SITE)
    approvals.request("compare", asked, __version__)

    def told():
        return " ".join(Asked(asked, SITE, kit.folder, policy_of(approvals.policy_file)).sentences(None))

    with pytest.raises(BadInput, match="name its file"):
        study(method={"name": "evaluate", "against_digest": digest})
    with pytest.raises(NotApproved):
        approvals.require("compare")
    assert "'weights.safetensors', which your site does not have" in told()
    trust(kit, place)
    approvals.require("compare")
    assert "your site has it as hospital.safetensors" in told()
