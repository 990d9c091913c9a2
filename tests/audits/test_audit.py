"""Audits of small runs: each kind of parcel with what fits it, held against the ledger, honest about what was done."""

import dataclasses
import json
import shutil

import pytest
from small_audits import DRAWN, MASKS, SMALL

from polyclinic.audits import ATTACKS
from polyclinic.audits.audit import audit
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.ledger.archive import ATTACKABLE_KINDS, SUM_KINDS
from polyclinic.study import tables as audit_settings

MEMBERSHIP = {"loss-threshold", "rmia", "lira", "site-inference", "site-of-update"}
REFERENCES = {"rmia-generators", "lira-generators"}
REPLAYED = {
    "codes": {"decoding", "copies", "nearest-synthetic"}, "weights": {"gradient-inversion", *MEMBERSHIP},
    "generator": {"copies", "near-copies", "nearest-synthetic", "projection", *REFERENCES},
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("hurried")
GENERATOR = {
    "generator.name": "vqvae2", "generator.epochs": 1, "generator.prior_epochs": 1, "generator.width": 8,
    "generator.top_codes": 8, "generator.bottom_codes": 8, "generator.prior_width": 8, "generator.prior_layers": 1,
    "replay.probe": False,
}  # fmt: skip


@pytest.mark.parametrize(("method", "changes", "attacks"), [
    ("fedavg", {}, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
    pytest.param("fedprox", {}, {"weights": {"gradient-inversion", *MEMBERSHIP}}, marks=pytest.mark.slow),
    ("fedbn", {"model.backbone": "small-cnn"}, {"weights": {"gradient-inversion"}}),
    ("fedsgd", {}, {"gradients": {"gradient-inversion"}}),
    pytest.param("fedavg", MASKS, {"weights": {"gradient-inversion", *MEMBERSHIP}}, marks=pytest.mark.slow),
    ("cwt", {"optimizer.name": "adam"}, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
    ("fedavg-share", {}, {"weights": {"gradient-inversion", *MEMBERSHIP}}),
    (
        "splitnn",
        {"model.backbone": "small-cnn"},
        {"activations": {"latent-inversion", "learned-decoder"}, "weights": {"gradient-inversion"}},
    ),
    ("fedreplay", {}, {"latents": {"latent-inversion", "learned-decoder"}, "weights": {"gradient-inversion"}}),
    pytest.param("cwt-replay", GENERATOR, REPLAYED, marks=pytest.mark.slow),
    pytest.param("fedavg-replay", {**GENERATOR, "replay.codes": "as-trained"}, REPLAYED, marks=pytest.mark.slow),
])  # fmt: skip
def test_every_kind_is_attacked_with_what_fits_it(audited, method, changes, attacks):
    report, folder = audited(method, changes)
    done: dict[str, set[str]] = {}
    for parcel in [one for one in report["parcels"] if one["operation"] != "released model"]:
        done.setdefault(parcel["kind"], set()).update(finding["attack"] for finding in parcel["findings"])
        for finding in parcel["findings"]:
            assert finding["threat_model"]
            if method in DRAWN:
                assert (folder / finding["picture"]).stat().st_size > 1000
                assert finding["picture"].startswith(f"sites/{parcel['site']}/audit/")
    assert done.pop("metrics", set()) <= {"score-histograms"}  # test_audit_of_sums.py has more images
    assert done == attacks
    for kind in attacks:
        assert report["verdicts"][kind]["words"]


def test_a_secure_sum_alone_is_attacked_and_real_images_need_no_attack(audited):
    report, _ = audited("fedavg", {"federation.sum": "secure", "sites.count": 3})
    assert {(parcel["kind"], parcel["site"]) for parcel in report["parcels"]} == {("masked", "sum of 3 sites")}
    assert "weights" not in report["verdicts"]
    assert report["verdicts"]["masked"]["attacked"] >= 1
    assert report["verdicts"]["shares"]["verdict"] == "not tested"
    report, _ = audited("fedavg-share")
    assert report["verdicts"]["real-images"] == {
        "left": 2, "verdict": "leaks", "words": "real images left the site as they are (2 times)", "not_tried": [],
    }  # fmt: skip


@pytest.mark.parametrize(("generator", "changes"), [
    ("dcgan", {"generator.steps": 2, "generator.width": 2, "generator.latent": 4}),
    ("stylegan2", {"generator.steps": 1, "generator.width": 4, "generator.latent": 8}),
])  # fmt: skip
@pytest.mark.slow
def test_generators_of_every_kind_are_projected_into(audited, generator, changes):
    table = {"generator.name": generator, "generator.batch_size": 8, **changes}
    replay = {"replay.codes": "prior", "replay.probe": False, "replay.samples": 8}
    report, _ = audited("fedavg-replay", {**table, **replay})
    (parcel,) = [one for one in report["parcels"] if one["kind"] == "generator"]
    before = ["copies", "nearest-synthetic", "projection", "near-copies"]
    assert [one["attack"] for one in parcel["findings"]] == [*before, "rmia-generators", "lira-generators"]
    said = parcel["findings"][2]["threat_model"]
    assert ("the labels of those that it asks about" in said) == (generator == "dcgan")  # StyleGAN2's styles have none


def test_sealed_parcels_are_audited_at_their_sender(audited):
    table = {"generator.name": "dcgan", "generator.steps": 2, "generator.width": 2, "generator.latent": 4}
    report, folder = audited("feder", {**table, "generator.batch_size": 8, "tuning.on": False}, buffer=24, rounds=2)
    parcels = [one for one in report["parcels"] if one["kind"] != "metrics"]
    done = {one["kind"]: {found["attack"] for found in one["findings"]} for one in parcels}
    made = {"copies", "near-copies", "nearest-synthetic", *REFERENCES}
    assert done == {"weights": MEMBERSHIP, "synthetic-images": made}
    assert {one["round"] for one in parcels} == {2}  # the last ones: the longer it learns, the more it tells
    lines = [json.loads(line) for line in (folder / "ledger" / "site-1.jsonl").read_text().splitlines()]
    assert any(line["to"] == "site-2" for line in lines if line["operation"] == "hand_over")


def test_latents_of_a_shallow_cut_leak_and_labels_are_named(tiny, undisturbed, tmp_path, monkeypatch):
    more = dataclasses.replace(audit_settings.EFFORTS["quick"], latent_steps=250)
    monkeypatch.setitem(audit_settings.EFFORTS, "quick", more)
    done = undisturbed(tiny("fedreplay", {**SMALL, "audit.own_images": "none"}, rounds=1))  # no decoder
    shutil.copytree(done.folder, tmp_path / "run")
    report = audit(tmp_path / "run", kinds=["latents"])
    assert report["verdicts"]["latents"]["verdict"] == "leaks"
    assert report["verdicts"]["labels"]["verdict"] == "leaks"
    assert report["verdicts"]["weights"]["verdict"] == "not tested"
    assert report["verdicts"]["metrics"]["verdict"] == "not tested"


def test_every_telling_kind_has_an_attack():
    assert {kind for attack in ATTACKS.values() for kind in attack.kinds} == {*ATTACKABLE_KINDS, *SUM_KINDS}


def test_a_broken_chain_is_refused(audited):
    _, folder = audited("fedavg")
    ledger = folder / "ledger" / "site-2.jsonl"
    ledger.write_text(ledger.read_text().replace('"bytes": ', '"bytes": 1'))
    with pytest.raises(WorkFailed, match="chain is broken"):
        audit(folder)


def test_a_folder_that_is_no_run_or_kept_nothing_gets_one_sentence(tiny, undisturbed, tmp_path):
    done = undisturbed(tiny("fedavg", {"sites.count": 2}, rounds=1))
    with pytest.raises(BadInput, match=r"kept no parcels to attack; .* --set audit.keep_parcels=1$"):
        audit(done.folder)
    with pytest.raises(BadInput, match="is not a run folder"):
        audit(tmp_path)
