"""Scores in a secure sum: the coordinator learns those of all sites together, and of no site by itself."""

import json
from dataclasses import replace

import pytest
import torch

from polyclinic.data.parts import prepare
from polyclinic.federation.host import SiteHost
from polyclinic.federation.ledger.archive import releases
from polyclinic.federation.operation import carry_out
from polyclinic.runner.evaluate.rounded_scores import in_words, intervals_of_cells
from polyclinic.runner.run.assembly import Assembly
from polyclinic.tasks import Target
from polyclinic.tasks.classification import Classification

SECURE = {"federation.sum": "secure", "evaluation.every": 1, "sites.count": 3}


def history(result):
    return [json.loads(line)["validation"] for line in (result.folder / "history.jsonl").read_text().splitlines()]


def kinds_by_operation(result, site="site-1"):
    lines = map(json.loads, (result.folder / "ledger" / f"{site}.jsonl").read_text().splitlines())
    return {(line["operation"], line["kind"]) for line in lines}


def test_only_the_figures_of_all_sites_together_are_seen(undisturbed, tiny):
    secure = undisturbed(tiny("fedavg", SECURE, rounds=3))
    open_ = undisturbed(tiny("fedavg", {**SECURE, "federation.sum": "integer"}, rounds=3))
    assert secure["weights_sha256"] == open_["weights_sha256"]
    for added, seen in zip(history(secure), history(open_), strict=True):
        assert added["per_site"] == added["mean"] == {}
        assert len(seen["per_site"]) == 3
        for name, value in added["pooled"].items():
            assert name == "auc" or value == pytest.approx(seen["pooled"][name], abs=1e-6), name
    assert not [kind for _, kind in kinds_by_operation(secure) if kind == "metrics"]
    assert {("add_scores", "masked"), ("add_final_scores", "masked")} < kinds_by_operation(secure)
    # the simulator looks at each site, as it does at each image
    assert secure.metrics["test"] == open_.metrics["test"]
    assert secure.metrics["per_site"] == open_.metrics["per_site"]


@pytest.mark.parametrize(("method", "changes"), [
    ("fedavg", {"evaluation.final": "validation"}),
    ("fedbn", {"model.backbone": "small-cnn"}),
    ("fedsgd", {"method.fraction": 0.7, "sites.count": 5}),
])  # fmt: skip
def test_other_studies_have_the_scores_of_an_open_sum(undisturbed, tiny, method, changes):
    results = [undisturbed(tiny(method, {**SECURE, **changes, "federation.sum": how})) for how in ("secure", "integer")]
    assert results[0].metrics == results[1].metrics


def test_of_two_sites_scores_leave_in_coarse_steps(undisturbed, tiny):
    """A sum of two shows each the other. The simulator's own figures stay what they are."""
    changes = {"sites.count": 2, "data.samples": 240, "audit.keep_parcels": 1, "evaluation.every": 1}
    fine = undisturbed(tiny("fedavg", changes))
    coarse = undisturbed(tiny("fedavg", {**changes, "policy.scores": "coarse"}))
    assert coarse.metrics == fine.metrics
    assert coarse["weights_sha256"] == fine["weights_sha256"]
    told = [
        one.parcels[0].tensors
        for site in ("site-1", "site-2")
        for one in releases(coarse.folder / "sites" / site / "kept")
        if one.operation == "evaluate"
    ]
    assert told
    for sums in told:
        counts = sums["confusion"][sums["confusion"] > 0]
        assert len(counts) == 0 or int(counts.min()) >= 10


def test_a_site_without_enough_images_adds_zeros(tiny, tmp_path):
    study = tiny("fedavg", SECURE)
    parts = prepare(study.data, study.sites)
    spec = Assembly(study, parts, tmp_path).host_spec()
    spec = replace(spec, policy=spec.policy.model_copy(update={"min_cohort": 4}))

    def few(name, images):
        data = spec.open_data(name)
        return replace(data, validation=data.validation.take(range(images)))

    left = {}
    for images in (0, 3, 4):
        host = SiteHost(replace(spec, open_data=lambda name, images=images: few(name, images)))
        site = host.sites.get("site-1")
        [parcel] = carry_out([study.method.add_scores(site, dict(site.trainer.state()))])
        left[images] = {
            name: (str(one.dtype), one.shape, float(one.abs().sum())) for name, one in parcel.tensors.items()
        }
    assert left[0] == left[3] == {name: (dtype, shape, 0.0) for name, (dtype, shape, _) in left[4].items()}
    assert left[4]["count"][-1] == 4
    assert left[4]["histograms"][1] == (2, 2, 16)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_exact_auc_lies_between_the_bounds_of_cells(scale):
    task, target = Classification(), Target(("a", "b", "c"))
    labels = torch.arange(120) % 3
    logits = scale * (torch.randn(120, 3, generator=torch.Generator().manual_seed(0)) + 0.5 * torch.eye(3)[labels])
    fine = task.sums(task.observe(logits, labels, target), labels, None, target)
    added = task.add(*(task.summable(fine, 1e9) for _ in range(2)))  # two sites with the same images
    opened = task.opened(added)
    task.check_sums(opened, target)
    bounds, exact = intervals_of_cells(task, opened)["pooled"], task.finish(fine)
    assert bounds["auc"]["low"] <= exact["auc"] <= bounds["auc"]["high"]
    assert bounds["auc"]["high"] - bounds["auc"]["low"] < (0.2 if scale == 1.0 else 0.5)
    assert bounds["accuracy"] == {"low": exact["accuracy"], "high": exact["accuracy"]}
    assert in_words(bounds, "accuracy") == f"{exact['accuracy']:.3f}"
    assert " to " in in_words(bounds, "auc")
    assert intervals_of_cells(task, {"count": torch.tensor(1)}) == {}
