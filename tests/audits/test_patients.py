"""Single patients: exact by hand, no alarm by chance, one who is remembered is found, and nobody is named outside."""

import dataclasses
import json
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from polyclinic.attacks.patients import gaps, order_tail, risks, rounded, smallest_risk
from polyclinic.audits import patients
from polyclinic.audits.audit import audit, build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.references import Pool, References, halves
from polyclinic.audits.verdicts import verdicts
from polyclinic.data.parts import ImageSet, SiteData, prepare
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import run
from polyclinic.study import tables as settings

SMALL = {"audit.keep_parcels": 0, "sites.count": 2, "data.samples": 72, "data.test": 0.4}
NAMES = [str(number) for number in range(100)]
HEAD = {
    "model.backbone": "efficientnet-lite0-1280", "model.input_size": 32, "data.samples": 40, "sites.count": 1,
    "data.test": 0.5, "audit.keep_parcels": 0, "audit.patient_limit": 0.98,
}  # fmt: skip


@pytest.fixture
def references(monkeypatch):
    def count(number: int) -> None:
        few = dataclasses.replace(settings.EFFORTS["quick"], patient_references=number)
        monkeypatch.setitem(settings.EFFORTS, "quick", few)

    return count


def asked(folder, progress=None, sites=()):
    return patients.audit_patients(build_tools(open_run(folder)[0], "quick", "pixels", "cpu"), folder, sites, progress)


def test_the_order_of_two_and_two_models_by_hand():
    assert order_tail(2).tolist() == pytest.approx([1, 5 / 6, 4 / 6, 2 / 6, 1 / 6])
    scores = np.array([[3.0, 1.0], [4.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    found = risks(scores, np.array([[True, True], [True, True], [False, False], [False, False]]))
    assert found.area.tolist() == [1, 0.5]
    assert found.chance.tolist() == pytest.approx([1 / 6, 1])  # scores that are all alike say nothing
    assert found.corrected.tolist() == pytest.approx([2 / 6, 1])


@given(st.integers(0, 2**32 - 1))
def test_chance_alone_names_nobody_more_often_than_said(seed):
    rng = np.random.default_rng(seed)
    inside = halves(16, list("abcdefghijkl"), "chance", seed)
    assert (inside.sum(0) == 8).all()
    found = risks(rng.integers(0, 9, (16, 12)).astype(float), inside)  # many ties
    assert found.chance.min() >= 1 / 12870
    assert not found.found.any()


def test_the_smallest_risk_is_found_as_often_as_said():
    assert smallest_risk(8, 10) is None  # 70 orders are too few for one in a thousand
    least = smallest_risk(64, 100)
    assert 0.85 < least < 0.9
    rng, hits = np.random.default_rng(0), 0
    for _ in range(200):  # the distribution of that area with the largest variance: a share of models lies far ahead
        inside = halves(64, NAMES, "power", int(rng.integers(2**31)))
        scores = rng.standard_normal((64, 100))
        own = inside[:, 0] & (rng.random(64) < 2 * least - 1)
        scores[own, 0] += 100
        hits += bool(risks(scores, inside).found[0])
    assert hits >= 150


def test_who_is_remembered_is_found_and_named_at_the_site_alone(tiny, tmp_path, references):
    folder = tmp_path / "run"
    run(tiny("analytic", HEAD, numbers=64, penalty=1e-6), folder)
    references(32)
    done = []

    def stop(what, count, total):
        done.append(count)
        if len(done) == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asked(folder, stop)
    found = asked(folder, lambda what, count, total: done.append(count))
    assert done == [0, 1, 2, 3, 4, 5, *range(5, 32)]  # what was done is not done again
    assert found["verdict"] == "leaks"
    for place in found["lists"]:
        assert stat.S_IMODE((folder / place).stat().st_mode) == 0o600
        rows = json.loads((folder / place).read_text())["patients"]
        assert any(one["above_limit"] for one in rows)
    assert found["above_limit"] != "no patient"
    assert "'patient'" not in str(found)


def test_what_tells_nobody_apart_has_withstood_unless_another_model_was_released(tiny, tmp_path, references):
    folder = tmp_path / "run"
    run(tiny("analytic", HEAD, numbers=4, penalty=1000.0), folder)
    references(32)
    found = asked(folder)
    assert found["verdict"] == "withstood"
    assert found["smallest_risk"] <= 0.98
    assert "every image counts as one" in found["words"]
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, folder / "model.safetensors")
    found = asked(folder)
    assert found["verdict"] == "not tested"
    assert "is not what the study gives" in found["words"]


def test_a_model_that_remembers_one_patient_cannot_hide_it(tiny, tmp_path):
    """Behind a mean over images, a copy under another name, a record at another site, or losses of 0."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (9, 1, 28, 28), np.uint8)
    images[8] = images[0]  # b has an image of a
    part = ImageSet(images, np.zeros(9, np.int64), cases=np.array([7, 7, 7, 5, 5, 5, 3, 3, 2]))
    pool = Pool.of(SiteData("x", part, part.take(np.arange(0)), part.take(np.arange(0))))
    assert pool.patients.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 0]
    assert list(pool.names) == ["7", "5", "3"]
    assert (halves(8, ["7", "5"], 1)[:, 0] == halves(8, ["4", "7"], 1)[:, 1]).all()  # at two sites alike
    inside = halves(64, pool.names, "hidden")
    scores = rng.standard_normal((64, 9))
    scores[:, :6] *= 30
    scores[inside[:, 2], 7] += 5  # one of two images is remembered, the other one is far louder
    scores[:, 6] *= 30
    assert not risks(pool.mean(scores), inside).found.any()
    assert risks(pool.strongest(scores), inside).found.tolist() == [False, False, True]
    study = tiny("fedavg", SMALL)
    assembly = Assembly(study, prepare(study.data, study.sites), tmp_path)
    pools = {site: Pool.of(assembly.open_images()(site)) for site in assembly.prepared.names}
    references = References(assembly, pools, {site: halves(4, one.names) for site, one in pools.items()})
    loud = {name: 30 * one for name, one in assembly.initial_weights().items()}  # every loss is 0 or far from it
    assert len(np.unique(references.scores("site-1", loud))) == len(pools["site-1"].part)


def test_one_site_that_withstood_says_nothing_of_another(tiny, tmp_path, references):
    folder = tmp_path / "run"
    run(tiny("analytic", {**HEAD, "data.samples": 60, "sites.count": 2}, numbers=4, penalty=1e9), folder)
    references(32)
    found = asked(folder, sites=["site-1"])
    assert found["verdict"] == "not tested"
    assert "patients of site-2 were not tested" in found["words"]
    assert asked(folder)["verdict"] == "withstood"


def test_stacked_reference_runs_are_those_one_by_one(tiny, tmp_path):
    models = []
    for how in ("never", "always"):
        study = tiny("fedavg", {**SMALL, "engine.stacked": how}, rounds=2)
        assembly = Assembly(study, prepare(study.data, study.sites), tmp_path)
        pools = {site: Pool.of(assembly.open_images()(site)) for site in assembly.prepared.names}
        inside = {site: halves(4, pool.names) for site, pool in pools.items()}
        references = References(assembly, pools, inside)
        assert references.stacked == (how == "always")
        models.append(list(references.models(range(3))))
    for one, other in zip(*models, strict=True):
        assert all(one[""][name].allclose(other[""][name], atol=1e-6) for name in one[""])


def test_the_average_alone_never_makes_membership_withstood(tiny, undisturbed, tmp_path, hurry, hurried):
    finding = {
        "attack": "rmia", "question": "membership", "verdict": "withstood", "words": "", "doubt": "", "seconds": 1.0,
        "power": [{"leak": "memory", "found": True, "words": "a memory"}], "evidence": {}, "picture": "",
    }  # fmt: skip
    parcel = {"kind": "weights", "site": "a", "operation": "train", "digests": ["x"], "findings": [finding]}
    lines = {"a": [{"kind": "weights", "operation": "train"}]}
    for of_patients, word in ((None, "not tested"), ("withstood", "not tested"), ("leaks", "leaks")):
        report = None if of_patients is None else {"verdict": of_patients, "words": "3 patients"}
        found = verdicts([{**parcel, "not_tried": []}], lines, report)["weights"]
        assert found["verdict"] == found["questions"]["membership"]["verdict"] == word


def test_what_has_no_reference_is_not_tested_with_the_reason(tiny, undisturbed, tmp_path, references):
    study = tiny("fedavg", {**SMALL, "data.samples": 24}, rounds=1)
    found = asked(undisturbed(study).folder)
    assert found["verdict"] == "not tested"
    assert "fewer than 8 patients" in found["words"]


def test_gaps_and_numbers_that_leave():
    area = np.array([0.5, 0.6, 0.5, 0.6, 0.5, 0.9, 1.0, 0.9, 1.0, 0.9])
    (gap,) = gaps(area, {"class ill": area > 0.8, "class few": area > 0.95})
    assert gap.gap == pytest.approx(0.4)
    assert gap.low > 0.3
    assert [rounded(count) for count in (0, 1, 4, 5, 12, 13)] == [
        "no patient", *["fewer than 5 patients"] * 2, "about 5 patients", "about 10 patients", "about 15 patients",
    ]  # fmt: skip


def test_the_command_tests_patients_after_parcels(tiny, undisturbed, tmp_path, hurry, hurried):
    import shutil

    study = tiny("fedavg", SMALL, rounds=1)
    shutil.copytree(undisturbed(study).folder, tmp_path / "run")
    hurry(patient_references=4)
    seen = []

    def look(what, *numbers):
        if "reference" in what:
            seen.append(json.loads((tmp_path / "run" / "audit.json").read_text())["complete"])

    report = audit(tmp_path / "run", patients=True, kinds=["weights"], progress=look)
    assert report["complete"]
    assert not any(seen)  # an audit that is stopped there is not whole
    assert seen
    assert report["patients"]["verdict"] == "not tested"
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["patients"] == report["patients"]
