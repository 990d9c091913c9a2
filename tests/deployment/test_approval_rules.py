"""Rules of approval, and approvals that are put back."""

import json
import shutil

import pytest
from kit_of_north import make_kit

from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.approval_rules import ApprovalRules, changed_settings, rules_of, widened
from polyclinic.deployment.coordination import ends_of_ledgers
from polyclinic.deployment.deployed_site import ApprovedRelay, notice_put_back
from polyclinic.errors import BadInput
from polyclinic.federation.call import pack
from polyclinic.federation.layers.suspension import Suspensions
from polyclinic.federation.ledger.keys import KitKeys
from polyclinic.federation.ledger.ledger import AnchorFile, Ledger
from polyclinic.federation.policy import Policy
from polyclinic.run_folder import note_files


def tables(**changes):
    study = {"seed": 0, "method": {"name": "fedavg", "rounds": 20}, "engine": {"threads": 1}}
    return {**study, **changes}


PRIVATE = {"privacy": {"noise_multiplier": 1.0, "target_epsilon": 4.0, "cover": "all"}}
PARTLY = {"privacy": {"noise_multiplier": 1.0, "target_epsilon": 4.0, "cover": "named"}}
METHOD = {"name": "fedavg", "rounds": 20, "local_steps": 10}
MODEL = {"backbone": "lenet5", "backbones": {"north": "resnet18"}}
REPLAY = {"replay": {"ratio": 1.0}}


@pytest.mark.parametrize(
    ("rules", "study", "approved"),
    [
        ({}, tables(), None),
        ({"every": True}, tables(), "the rule approve.every"),
        ({"methods": ("fedavg",)}, tables(), "the rule approve.methods"),
        ({"methods": ("cwt",)}, tables(), None),
        ({"methods": ("fedavg",), "max_rounds": 20}, tables(), "the rule approve.methods"),
        ({"methods": ("fedavg",), "max_rounds": 19}, tables(), None),
        ({"methods": ("fedavg",), "max_epsilon": 4.0}, tables(**PRIVATE), "the rule approve.methods"),
        ({"methods": ("fedavg",), "max_epsilon": 3.9}, tables(**PRIVATE), None),
        ({"methods": ("fedavg",), "max_epsilon": 4.0}, tables(), None),
        ({"methods": ("fedavg",), "max_epsilon": 4.0}, tables(**PARTLY), None),
        ({"methods": ("fedavg",)}, tables(**REPLAY), None),
        ({"methods": ("fedavg+replay",)}, tables(**REPLAY), "the rule approve.methods"),
        ({"methods": ("fedavg+replay",)}, tables(), None),
        ({"methods": ("fedavg",), "max_epsilon": 4.0}, tables(privacy={"noise_multiplier": 1.0}), None),
        *(
            ({"methods": ("fedavg",), name: most}, tables(method=METHOD, data={"size": 28}, model=MODEL), approved)
            for name, most, approved in (
                ("max_local_steps", 10, "the rule approve.methods"),
                ("max_local_steps", 9, None),
                ("max_size", 28, "the rule approve.methods"),
                ("max_size", 27, None),
                ("networks", ("lenet5", "resnet18"), "the rule approve.methods"),
                ("networks", ("lenet5",), None),
                ("max_a_day", 0, None),
            )
        ),
        ({"methods": ("fedavg",), "max_local_steps": 10}, tables(), None),  # epochs of who knows how many steps
        ({"same_as_last": True, "max_a_day": 0}, tables(), None),
        ({"every": True, "max_a_day": 0}, tables(), "the rule approve.every"),
        ({"max_rounds": 100}, tables(), None),  # limits alone approve nothing
        ({"same_as_last": True}, tables(), "the rule approve.same_as_last"),
        ({"same_as_last": True}, tables(seed=7), "the rule approve.same_as_last"),
        ({"same_as_last": True}, tables(engine={"threads": 2}), "the rule approve.same_as_last"),
        ({"same_as_last": True}, tables(method={"name": "fedavg", "rounds": 21}), None),
    ],
)
def test_a_rule_approves_what_it_names_and_nothing_else(rules, study, approved):
    assert ApprovalRules(**rules).reason_to_approve(study, last=tables()) == approved
    assert rules.get("same_as_last") is None or ApprovalRules(**rules).reason_to_approve(study, last=None) is None


def test_mistakes_in_the_rules_name_the_file(tmp_path):
    (tmp_path / "policy.toml").write_text("[approve]\nmethod = ['fedavg']\n")
    with pytest.raises(BadInput, match=r"policy\.toml: approve\.method: no such setting"):
        rules_of(tmp_path / "policy.toml")
    (tmp_path / "policy.toml").write_text("min_cohort = 3\n")
    assert rules_of(tmp_path / "policy.toml") == ApprovalRules()


def test_changes_of_a_study_in_words():
    now = tables(seed=1, method={"name": "fedavg", "rounds": 50, "weighting": "uniform"}, **PRIVATE)
    assert changed_settings(tables(model={"norm": "group"}), now) == [
        "method.rounds was 20 and is now 50",
        "method.weighting is new: uniform",
        "model.norm was group and is now not set",
        "privacy.cover is new: all",
        "privacy.noise_multiplier is new: 1.0",
        "privacy.target_epsilon is new: 4.0",
        "seed was 0 and is now 1",
    ]


NARROW = {"kinds": ("weights", "metrics"), "max_bytes": 1000, "max_epsilon": 2.0, "max_scores": 10, "min_cohort": 10}
NARROW |= {"max_delta": 1e-6, "accountants": ("rdp",), "unit": "patient", "scores": "coarse"}


@pytest.mark.parametrize(
    ("name", "wide", "tight"),
    [
        ("kinds", ("weights", "latents"), ("weights",)),
        ("max_bytes", None, 999),
        ("max_epsilon", 2.1, 1.0),
        ("max_scores", 11, 0),
        ("max_delta", 1e-5, 1e-7),
        ("min_cohort", 9, 11),
        ("accountants", ("rdp", "prv"), ("rdp",)),
        ("unit", "image", "patient"),
        ("scores", "fine", "coarse"),
    ],
)
def test_each_setting_of_a_policy_knows_which_way_is_wider(name, wide, tight):
    before = Policy(**NARROW).model_dump(mode="json")
    assert [name in sentence for sentence in widened(before, Policy(**{**NARROW, name: wide}))] == [True]
    assert widened(before, Policy(**{**NARROW, name: tight})) == []


def test_limits_and_settings_that_nobody_thought_of():
    before = Policy().model_dump(mode="json")
    assert widened(before, Policy(max_bytes=10, max_epsilon=8.0, max_scores=3)) == []
    assert widened(before, Policy(max_delta=0.5)) == ["policy.toml: max_delta was without a limit and is now 0.5"]
    before = {**Policy(**NARROW).model_dump(mode="json"), "deployed": "perhaps"}
    assert len(widened(before, Policy(**NARROW))) == 1
    before = Policy(incoming={}).model_dump(mode="json")
    before["incoming"]["graded"] = 9  # a limit that an older version had
    assert widened(before, Policy(incoming={}))


@pytest.mark.parametrize(
    ("old", "new", "wider"),
    [
        (None, {}, False),  # approved before there was such a check
        (None, {"on": False}, True),
        ({}, {"on": False}, True),
        ({}, {"moved": 5.0}, True),
        ({}, {"moved": 0.1}, False),
        ({"on": False}, {"moved": 5.0}, False),
    ],
)
def test_an_incoming_check_that_stops_less_is_wider(old, new, wider):
    before = Policy(incoming=old or {}).model_dump(mode="json")
    if old is None:
        del before["incoming"]
    assert bool(widened(before, Policy(incoming=new))) == wider


@pytest.fixture
def kit(tmp_path):
    return make_kit(tmp_path)


def released(kit, run, times, key=None):
    """Parcels leave for a run; the head of its ledger."""
    path, anchor = kit / "runs" / run / "ledger" / "north.jsonl", AnchorFile(kit / "anchors" / "runs" / f"{run}.json")
    ledger = Ledger(path, key or KitKeys(kit / "local").signing_key(), anchor)
    for number in range(times):
        about = {"round": number, "operation": "train", "kind": "weights", "bytes": 9, "to": "coordinator"}
        ledger.append(f"{number}" * 64, **about)
    ledger.commit()
    return ledger.head


def known_to_coordinator(tmp_path, run, head):
    folder = tmp_path / "server" / "runs" / run
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({"ledgers": {"north": head._asdict()}}))
    note_files(folder)
    return ends_of_ledgers(tmp_path / "server" / "runs")["north"]


def ask(kit, seen, run="now"):
    relay = ApprovedRelay("north", None, str, lambda: None, lambda told: notice_put_back(kit, "north", run, told))
    relay.handle("ping", pack({"seen": seen}, []))
    return [one.reason for one in Suspensions(kit).all()]


def test_a_ledger_that_is_whole_suspends_nobody(kit, tmp_path):
    seen = known_to_coordinator(tmp_path, "first", released(kit, "first", 3))
    released(kit, "second", 2)
    assert ask(kit, seen) == []


@pytest.mark.parametrize("backup_has", [0, 1])
def test_a_backup_that_is_put_back_is_noticed_once(kit, tmp_path, backup_has):
    if backup_has:
        released(kit, "first", backup_has)
    shutil.copytree(kit, tmp_path / "backup")
    seen = known_to_coordinator(tmp_path, "first", released(kit, "first", 3))
    shutil.rmtree(kit)
    shutil.copytree(tmp_path / "backup", kit)
    [why] = ask(kit, seen)
    assert f"north.jsonl, line {backup_has + 1}: is missing" in why
    assert f"the coordinator says {3 + backup_has} lines" in why
    assert "your budgets do not count what left since that backup" in why
    Suspensions(kit).release("now")  # a person has looked
    assert ask(kit, seen) == []


def test_a_coordinator_invents_no_end_of_a_ledger(kit, tmp_path):
    """Whoever could would suspend a site by it: an end counts if the site itself has signed its line."""
    released(kit, "first", 1)
    thief = KitKeys(tmp_path / "server").signing_key()
    forged = released(tmp_path / "elsewhere", "first", 5, thief)
    assert ask(kit, {"first": list(forged)}) == []
    for damaged in ({"first": "x"}, {"../first": list(forged)}):
        with pytest.raises((ValueError, BadInput), match=r"head of a ledger|cannot be the name"):
            ask(kit, damaged)
    assert Approvals(kit, "north").requests() == []
