"""Robust combinations, and methods whose replies are summed."""

import itertools
import json

import pytest
import torch

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.call import Reply
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.methods.shared import aggregation
from polyclinic.runner.run.run import run


def replies(*rows, samples=()):
    """Sites whose weights are these rows, and a counter of whole numbers."""
    tensors = [{"w": torch.tensor(row), "n": torch.tensor(number)} for number, row in enumerate(rows)]
    said = [{"samples": count} for count in samples or [1] * len(rows)]
    return [Reply(f"site-{n}", (Parcel("weights", *one),)) for n, one in enumerate(zip(tensors, said, strict=True))]


BEFORE = {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(0)}
#: updates (1, 0), (0, 1), (1, 1) and one that lies, (100, -100)
ROWS = ([2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [101.0, -99.0])


def aggregate(rule, sites=None, share=0.25):
    return aggregation.robust_mean(rule, BEFORE, replies(*ROWS) if sites is None else sites, "samples", share, 0.0)


def test_means_clusters_and_liars_by_hand():
    # columns of updates: 1, 0, 1, 100 and 0, 1, 1, -100
    assert aggregate("median")["w"].tolist() == [1 + 1.0, 1 + 0.5]
    assert aggregate("trimmed-mean")["w"].tolist() == [1 + 1.0, 1 + 0.5]
    assert aggregate("trimmed-mean", share=0.0)["w"].tolist() == [1 + 102 / 4, 1 - 98 / 4]
    # lengths 1, 1, sqrt 2 and 100 sqrt 2: the median is (1 + sqrt 2) / 2
    limit = (1 + 2**0.5) / 2
    unit = limit / 2**0.5
    expected = [1 + (1 * 1 + 0 + 1 * unit + 2 * unit) / 5, 1 + (0 + 1 + unit - 2 * unit) / 5]
    assert aggregate("norm-bound", replies(*ROWS, samples=[1, 1, 1, 2]))["w"].tolist() == pytest.approx(expected)
    assert aggregate("multi-krum")["w"].tolist() == pytest.approx([1 + 2 / 3, 1 + 2 / 3])
    rows = torch.tensor([[0.0], [1.0], [2.0], [50.0], [60.0]])
    # each with its 5 - 2 - 2 = 1 nearest neighbour: 1, 1, 1, 100, 100
    assert aggregation.multi_krum(rows, 2).tolist() == [0, 1, 2]
    assert aggregate("trimmed-mean", replies([3.0, 0.0], [1.0, 0.0]), share=0.49)["w"].tolist() == [2.0, 0.0]
    found = aggregation.robust_mean("median", {}, replies(*ROWS[:3]), "samples", 0.25, 0.0)
    assert found["w"].tolist() == [2.0, 2.0]
    assert found["n"].item() == 1
    with pytest.raises(WorkFailed, match="no site has sent weights"):
        aggregate("median", [])
    # (1, 0), (0, 1), (1, 1) against (-1, -1): the largest cosine across the split is -0.71
    sites = replies([2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [0.0, 0.0])
    assert aggregate("clusters", sites)["w"].tolist() == pytest.approx([1 + 2 / 3, 1 + 2 / 3])
    sites = replies([2.0, 1.0], [1.0, 2.0], [2.0, 2.0])  # (1, 0) and (0, 1): a cosine of 0 is not below 0
    assert aggregate("clusters", sites)["w"].tolist() == pytest.approx([1 + 2 / 3, 1 + 2 / 3])
    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    assert aggregation.larger_cluster(rows, apart=0.0).tolist() == [0, 1, 2]
    assert aggregation.larger_cluster(rows, apart=0.2).tolist() == [0, 1]
    assert aggregation.larger_cluster(rows[:1], apart=1.0).tolist() == [0]
    # Against all splits of six random updates.
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).double()
    unit = rows / rows.norm(dim=1, keepdim=True)
    alike = unit @ unit.T

    def across(part):
        rest = [site for site in range(6) if site not in part]
        return float(alike[list(part)][:, rest].max())

    best = min((part for size in (1, 2, 3) for part in itertools.combinations(range(6), size)), key=across)
    kept = aggregation.larger_cluster(rows, apart=1.0).tolist()
    assert across(kept) == pytest.approx(across(best))


@pytest.mark.parametrize("rule", ["norm-bound", "median", "trimmed-mean", "multi-krum"])
def test_equal_updates_give_that_update_and_counters_are_averaged(rule):
    found = aggregate(rule, replies([3.0, 0.0], [3.0, 0.0], [3.0, 0.0]))
    assert found["w"].tolist() == pytest.approx([3.0, 0.0])
    assert (found["n"].item(), found["n"].dtype) == (1, torch.int64)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedavgm", "fedopt", "scaffold", "feddyn"])
def test_methods_built_on_fedavg_take_it(tiny, tmp_path, method):
    settings = {"data.samples": 36}
    plain = run(tiny(method, settings, rounds=1), tmp_path / "mean")
    other = run(tiny(method, settings, rounds=1, aggregation="median"), tmp_path / "median")
    assert plain["weights_sha256"] != other["weights_sha256"]
    one = {"data.samples": 36, "sites.count": 1}
    alone = [
        run(tiny(method, one, rounds=1, aggregation=rule), tmp_path / f"alone-{rule}")
        for rule in ("mean", "trimmed-mean")
    ]
    for name, tensor in alone[0].weights().items():
        assert torch.allclose(tensor.float(), alone[1].weights()[name].float(), atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("liars", [0, 1, 2, 3])
@pytest.mark.parametrize("sites", [1, 2, 3, 4, 5, 7, 9])
def test_multi_krum_against_the_definition(sites, liars, seed):
    """Blanchard et al. 2017: K - liars - 2 nearest neighbours, and the K - liars lowest scores."""
    liars = min(liars, (sites - 1) // 2)
    rows = torch.randn(sites, 3, generator=torch.Generator().manual_seed(10 * sites + seed)).double()

    def score(site):
        distances = sorted(float((rows[site] - rows[other]).square().sum()) for other in range(sites) if other != site)
        return sum(distances[: max(1, sites - liars - 2)])

    kept = sorted(sorted(range(sites), key=score)[: sites - liars])
    assert aggregation.multi_krum(rows, liars).tolist() == kept


@pytest.mark.parametrize("rows", [[[10.0, 0.0], [0.1, 0.1]], [[0.1, 0.1], [10.0, 0.0]]])
def test_clusters_look_at_directions_whatever_the_lengths(rows):
    """The cosine of these two is 0.71."""
    assert aggregation.larger_cluster(torch.tensor(rows), apart=0.7).tolist() == [0, 1]
    assert aggregation.larger_cluster(torch.tensor(rows), apart=0.72).tolist() == [0]


#: a round of each way to answer: weights, weights with control variates, gradients and statistics, whole sums
SUMMED = [
    {"name": "fedavg", "local_steps": 2},
    {"name": "scaffold", "local_steps": 2},
    {"name": "feddyn", "local_steps": 2},
    {"name": "fedsgd", "batch": "mini"},
    {"name": "analytic", "numbers": 8},
]


def test_secure_sums_name_their_sum_share_noise_and_refuse_large_numbers(tiny_run):
    folder = tiny_run({"rounds": 1, **SUMMED[0]}, federation={"sum": "secure"}).folder
    sums = set()
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        lines = verify(file)
        assert "weights" not in {line["kind"] for line in lines}
        masked, *scores = [line for line in lines if line["kind"] == "masked"]
        assert (masked["operation"], masked["to"], masked["sum"]["sites"]) == ("train", "coordinator", 3)
        assert {line["operation"] for line in scores} == {"add_final_scores"}
        sums.add(masked["sum"]["id"])
    assert len(sums) == 1
    by_kind = json.loads((folder / "result.json").read_text())["communication"]["by_kind"]
    assert {"masked", "shares", "keys"} <= set(by_kind)
    with pytest.raises(WorkFailed, match=r"lower federation\.bits"):
        tiny_run(
            {"rounds": 1, "name": "fedavg", "local_steps": 1},
            federation={"sum": "integer", "bits": 40},
            optimizer={"lr": 1e4},
        )
    # The record of each parcel says for how many honest sites the sum is covered.
    method = {"name": "private-head", "rounds": 1, "noise": "shared", "numbers": 8, "phantoms": 10}
    folder = tiny_run(method, federation={"sum": "secure"}).folder
    for file in sorted((folder / "ledger").glob("*.jsonl")):
        masked, scores = [line for line in verify(file) if line["kind"] == "masked"]
        assert (masked["operation"], scores["operation"]) == ("give_share_of_sum", "add_final_scores")
        assert any("fewer than 3 honest sites" in limit for limit in masked["privacy"]["does_not_cover"])


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
