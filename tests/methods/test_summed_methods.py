"""Methods whose sites' answers are added up in whole numbers: open and secret sums end in the same bits."""

import json

import pytest

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.ledger import verify

#: a round of each way to answer: weights, weights with control variates, gradients and statistics, whole sums
SUMMED = [
    {"name": "fedavg", "local_steps": 2},
    {"name": "scaffold", "local_steps": 2},
    {"name": "feddyn", "local_steps": 2},
    {"name": "fedsgd", "batch": "mini"},
    {"name": "analytic", "numbers": 8},
]


def test_the_ledger_says_in_which_sum_a_parcel_left(tiny_run):
    folder = tiny_run({"rounds": 1, **SUMMED[0]}, federation={"sum": "secure"}).folder
    sums = set()
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        lines = verify(file)
        assert "weights" not in {line["kind"] for line in lines}
        [masked] = [line for line in lines if line["kind"] == "masked"]
        assert (masked["operation"], masked["to"], masked["sum"]["sites"]) == ("train", "coordinator", 3)
        sums.add(masked["sum"]["id"])
    assert len(sums) == 1
    by_kind = json.loads((folder / "result.json").read_text())["communication"]["by_kind"]
    assert {"masked", "shares", "keys"} <= set(by_kind)


@pytest.mark.parametrize(("method", "tables", "sentence"), [
    ({"name": "cwt"}, {}, "method.name: the coordinator of 'cwt' needs each site's answer by itself"),
    ({"name": "fedpft"}, {}, "method.name: the coordinator of 'fedpft' needs each site's answer by itself"),
    ({"name": "fedavg", "aggregation": "median"}, {}, "method.aggregation: 'median' compares the sites' weights"),
    ({"name": "scaffold", "weighting": "samples"}, {}, "method.weighting: scaffold counts sites alike"),
    ({"name": "fedavg"}, {"sites": {"partition": "iid", "count": 2}}, "would show what a single one sent"),
    ({"name": "fedavg", "fraction": 0.4}, {}, "would show what a single one sent"),
    ({"name": "fedavg"}, {"federation": {"sum": "secure", "liars": 3}}, "may not all lie"),
    ({"name": "fedavg"}, {"federation": {"sum": "integer", "threshold": 0.9}}, "threshold: is of secure"),
], ids=lambda one: one.get("name", "")[:12] if isinstance(one, dict) else "")  # fmt: skip
def test_what_cannot_be_summed_in_secret_is_refused_with_the_cure(study_of, method, tables, sentence):
    with pytest.raises(BadInput) as refusal:
        study_of(method, **{"federation": {"sum": "secure"}, **tables})
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert any(word in str(refusal.value) for word in ("set ", "choose ", "take ", "leave "))


def test_numbers_that_do_not_fit_are_refused_with_the_cure(tiny_run):
    with pytest.raises(WorkFailed, match=r"lower federation\.bits"):
        tiny_run(
            {"rounds": 1, "name": "fedavg", "local_steps": 1},
            federation={"sum": "integer", "bits": 40},
            optimizer={"lr": 1e4},
        )


def test_sites_share_noise_in_a_secure_sum(tiny_run):
    """The record of each parcel says for how many honest sites the sum is covered."""
    method = {"name": "private-head", "rounds": 1, "noise": "shared", "numbers": 8, "phantoms": 10}
    folder = tiny_run(method, federation={"sum": "secure"}).folder
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        [masked] = [line for line in verify(file) if line["kind"] == "masked"]
        assert masked["operation"] == "give_share_of_sum"
        assert any("fewer than 3 honest sites" in limit for limit in masked["privacy"]["does_not_cover"])
