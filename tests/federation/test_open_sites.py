"""What a host opens for a site: simulated, or deployed with a secret, an anchor and a budget of its own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_study import kit_of, plain_study

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.host import OpenSites
from polyclinic.federation.ledger.kinds import ParcelRejected
from polyclinic.federation.policy import Policy
from polyclinic.federation.site import HostSpec, Site, SitePosition, SiteState, version_of


def sites_in(folder, privacy=None, **changes):
    part = ImageSet(np.zeros((5, 1, 8, 8), dtype=np.uint8), np.zeros(5, dtype=np.int64))
    spec = {
        "study": plain_study(SimpleNamespace(rounds=3, name="none"), durable=changes.pop("durable", False)),
        "trainer": SimpleNamespace(privacy=privacy),
        "folder": folder / "runs" / "study",
        "open_data": lambda name: SiteData(name, part, part, part),
        "policy": Policy(),
        "expected": {},
    }
    found = HostSpec(**{**spec, **changes})
    return OpenSites(found, deployed=found.policy.deployed)


def deployed(**settings):
    return Policy(deployed=True, **settings)


def test_a_deployed_site_has_a_secret_and_what_its_policy_says_and_a_simulated_one_none(tmp_path):
    policy = deployed(min_cohort=7, few_images="refuse")
    site = sites_in(tmp_path, policy=policy).get("a")
    assert (site.own_draws, site.min_cohort) == (True, 7)
    assert len(bytes.fromhex(site.secret)) == 32
    assert site.secret == (tmp_path / "runs" / "study" / "sites" / "a" / "noise.key").read_text()
    assert sites_in(tmp_path, policy=policy).get("a").secret == site.secret  # a resumed run draws the same again
    other = sites_in(tmp_path / "other", policy=deployed(draws="study")).get("a")
    assert not other.own_draws
    assert other.secret != site.secret
    site = sites_in(tmp_path / "simulated", policy=Policy(few_images="allow")).get("a")
    assert (site.secret, site.own_draws, site.min_cohort) == ("", False, 0)
    assert not (site.folder / "noise.key").exists()
    plain = Site("a", plain_study(), None, None, SiteState(), tmp_path)
    assert (plain.min_cohort, plain.policy.few_images, plain.round) == (0, "allow", 0)


@pytest.mark.parametrize(
    ("target", "policy", "found"), [(None, deployed(), None), (3.0, deployed(), 3.0), (3.0, Policy(), None)]
)
def test_the_epsilon_that_was_approved_with_the_study_holds_at_a_deployed_site(tmp_path, target, policy, found):
    sites = sites_in(tmp_path, SimpleNamespace(target_epsilon=target), policy=policy)
    sites.get("a")
    held = sites.gates["a"].target
    assert (held.epsilon if held else None) == found


def test_a_site_that_goes_on_from_before_its_ledger_is_put_back(tmp_path):
    sites = sites_in(tmp_path)
    sites.get("a")
    assert sites.put_back == set()
    for number in (1, 2):
        sites.ledgers["a"].append(round=number, operation="x", kind="metrics", bytes=1, digest="d", to="coordinator")
    for lines, put_back in ((2, set()), (1, {"a"})):
        again = sites_in(tmp_path)
        again.restore({"a": SitePosition(0, lines)})
        again.get("a")
        assert again.put_back == put_back


def test_a_host_of_one_site_serves_no_other(tmp_path):
    sites = sites_in(tmp_path, kit=kit_of(tmp_path))
    sites.refuse_other_names(["a"])
    sites_in(tmp_path).refuse_other_names(["a", "b"])
    for names in (["b"], ["a", "b"]):
        with pytest.raises(ParcelRejected, match="this host serves site 'a' only"):
            sites.refuse_other_names(names)


def states(folder):
    return sorted(version_of(path) for path in (folder / "runs" / "study" / "sites" / "a").glob("state-*"))


@pytest.mark.parametrize(
    ("only", "durable", "left"),
    [
        (None, 0, [1, 2, 3]),
        (None, 2, [2, 3]),
        (None, 9, []),
        ("a", 0, [1, 2, 3]),
        ("a", 2, [2, 3]),
        ("a", 3, [3]),
        ("a", 4, [1, 2, 3]),  # a deployed site does not stand so far: a coordinator that lies
    ],
)
def test_states_that_a_checkpoint_does_not_need_are_deleted(tmp_path, only, durable, left):
    sites = sites_in(tmp_path, kit=kit_of(tmp_path) if only else None)
    site = sites.get("a")
    for number in (1, 2, 3):
        site.state["x"] = torch.tensor(number)
        assert sites.save("a") == SitePosition(number, 0)
    sites.drop_old_versions({"a": SitePosition(durable, 0)})
    assert states(tmp_path) == left


@pytest.mark.parametrize("position", [(-1, 0), (0, -1), (1.0, 0), (0, True), ("1", 0), (0, None)])
def test_a_position_is_two_whole_numbers(position):
    SitePosition(0, 0).check()
    SitePosition(7, 9).check()
    with pytest.raises(ParcelRejected, match="two whole numbers"):
        SitePosition(*position).check()


def test_the_trainer_of_weights_is_that_whose_network_they_fit():
    def trainer(*shapes):
        tensors = {f"w{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
        return SimpleNamespace(model=SimpleNamespace(state_dict=lambda: tensors))

    own, other, third = trainer((2,), (3,)), trainer((2,), (4,)), trainer((2,))
    site = Site("a", plain_study(), None, own, SiteState(), None, trainers=(own, other, third))
    for one in (own, other, third):
        assert site.trainer_for(one.model.state_dict()) is one
    assert site.trainer_for({"w0": torch.zeros(9), "w1": torch.zeros(3)}) is own
    assert site.trainer_for({}) is own
