"""A study that looks like another, that hides a setting from the officer, or that comes again and again."""

import pytest
from kit_of_north import came, make_kit

from polyclinic.deployment.approval import Approvals, NotApproved
from polyclinic.deployment.approval_rules import NameTaken, refuse_odd_text
from polyclinic.deployment.site_status import describe
from polyclinic.errors import BadInput


@pytest.fixture
def kit(tmp_path):
    return make_kit(tmp_path)


@pytest.mark.parametrize("run", ["fırst", "first\u200b", "ｆirst", "f\u0456rst"])
def test_a_run_is_not_called_nearly_as_another(kit, run):
    with pytest.raises(BadInput):
        came(kit, run)
    assert Approvals(kit, "north").requests() == []


@pytest.mark.parametrize("text", ["cl\u0435ar", "cle\u202ear", "clear\x1b[2J", "cle\u0301ar", "c\u043bear"])
def test_what_an_officer_reads_has_no_letters_that_look_like_others(kit, text):
    with pytest.raises(NameTaken, match="look like others"):
        came(kit, data={"source": "at-sites", "dataset": "scans", "size": 16, "classes": [text, "ill"]})
    with pytest.raises(NameTaken):
        refuse_odd_text({"a": {text: 1}})


def test_words_of_one_script_are_taken(kit):
    for text in ("gesund", "Ödem", "β-thalassemia", "здоров", "健康", "正常な", "kg/m²", "a_b 3"):
        refuse_odd_text({"x": [text]}, ("north",))
    with pytest.raises(NameTaken, match="letters of ASCII only"):
        refuse_odd_text({}, ("Süd",))


def test_every_unusual_setting_is_shown_to_the_officer(kit):
    came(kit, optimizer={"batch_size": 10, "lr": 0.7}, evaluation={"statistics": True}, method={"name": "fedavg"})
    told = describe(Approvals(kit, "north"), "first").sentences
    shown = told[told.index("Settings that differ from the defaults:") + 1 :]
    for line in ("- optimizer.lr = 0.7", "- optimizer.batch_size = 10", "- evaluation.statistics = True",
                 "- data.size = 16", "- model.backbone = lenet5"):  # fmt: skip
        assert line in shown
    assert not any("rounds" in line for line in shown)


def test_rules_approve_so_many_studies_in_a_day_and_no_more(kit):
    policy = kit / "local" / "policy.toml"
    policy.write_text(policy.read_text() + "[approve]\nmethods = ['fedavg']\nmax_a_day = 2\n")
    approvals = Approvals(kit, "north")
    for number in range(3):
        came(kit, f"run{number}")
    for run in ("run0", "run1"):
        approvals.require(run)
    with pytest.raises(NotApproved):
        approvals.require("run2")
    approvals.decide("run2", "approve")  # a person may
    approvals.require("run2")
