"""Studies with `[privacy]`, end to end: what the ledgers and the result say, budgets, resume, replay."""

import math
import re
from dataclasses import replace

import pytest
import torch
from private_runs import NOISE, PRIVATE, expected_epsilon, images_of, ledgers

from polyclinic.data.parts import prepare
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call
from polyclinic.federation.federation import Federation
from polyclinic.federation.host import SiteHost, secret_in
from polyclinic.federation.ledger.ledger import verify
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.federation.policy import Policy
from polyclinic.privacy import account as records
from polyclinic.run_folder import with_own_digest
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.run import run
from polyclinic.study import load_study


def test_the_ledger_has_the_accountants_epsilon_after_every_round(tiny, undisturbed):
    study = tiny("fedavg", PRIVATE)
    result = undisturbed(study)
    images = images_of(study)
    for site, lines in ledgers(result.folder).items():
        trained = [line for line in lines if line["operation"] == "train"]
        assert [line["round"] for line in trained] == [1, 2, 3]
        for line in trained:
            privacy = line["privacy"]
            assert privacy["epsilon"] == pytest.approx(expected_epsilon(images[site], line["round"]), rel=1e-12)
            assert privacy["steps"] == line["round"] * (images[site] // 8)
            assert (privacy["noise"], privacy["accountant"]) == (NOISE, "rdp")
            assert privacy["sampling_rate"] == 8 / images[site]
            assert privacy["covers"] == ["weights of the classifier"]
            assert records.SEED in privacy["does_not_cover"]


def test_the_result_states_the_worst_site_what_is_not_covered_or_nothing(tiny, undisturbed):
    study = tiny("fedavg", {**PRIVATE, "sites.partition": "quantity", "sites.shares": [0.5, 0.3, 0.2]})
    privacy, images = undisturbed(study)["privacy"], images_of(study)
    worst = max(images, key=lambda site: expected_epsilon(images[site], 3))
    assert len(set(images.values())) > 1
    assert privacy["site"] == worst
    assert privacy["epsilon"] == pytest.approx(expected_epsilon(images[worst], 3))
    assert privacy["delta"] == 1 / images[worst]
    assert privacy["covers"] == [records.EVERYTHING]
    assert records.HELD_OUT in privacy["does_not_cover"]
    assert records.ONE_IMAGE in privacy["does_not_cover"]
    assert set(privacy["per_site"]) == set(images)
    result = undisturbed(tiny("fedavg"))
    assert result["privacy"] is None
    assert all(line["privacy"] is None for lines in ledgers(result.folder).values() for line in lines)


def test_no_loss_of_training_images_leaves_a_private_site(tiny, tmp_path, monkeypatch):
    seen = []
    original = Federation._checked

    def look(self, call, answer):
        seen.extend(dict(parcel.metadata) for parcel in answer.parcels if call.operation == "train")
        return original(self, call, answer)

    monkeypatch.setattr(Federation, "_checked", look)
    run(tiny("fedavg", PRIVATE, rounds=1), tmp_path / "private")
    assert seen
    assert all(set(metadata) == {"samples", "steps"} for metadata in seen)


@pytest.mark.parametrize("method", ["fedavg", "cwt", "standalone"])
def test_a_run_killed_after_a_round_ends_in_the_same_bits(tiny, undisturbed, tmp_path, monkeypatch, method):
    """Killed in the middle of round 3, after some parcels of it were written down; one of them by an older version."""
    study = tiny(method, {**PRIVATE, "optimizer.keep_state": True})
    whole = undisturbed(study)

    class Killed(BaseException):
        pass

    original = Federation._checked

    def dies(self, call, answer):
        if self.round == 3 and call.site == self.sites[1]:
            raise Killed
        return original(self, call, answer)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "_checked", dies)
        with pytest.raises(Killed):
            run(study, tmp_path / "killed")
    if method == "cwt":
        begun = tmp_path / "killed/study.toml"
        older = re.sub("^noise_multiplier", "noise", begun.read_text(), flags=re.MULTILINE)
        older = re.sub("^max_grad_norm", "clip", older, flags=re.MULTILINE)
        begun.write_text(with_own_digest(older.partition("\n")[2]))
        with pytest.raises(BadInput, match=r"study\.toml: privacy\.noise: is now called 'noise_multiplier'"):
            load_study(begun)
    resumed = run(study, tmp_path / "killed", resume=True)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["privacy"] == whole["privacy"]
    assert ledgers(resumed.folder) == ledgers(whole.folder)


def test_a_site_stops_before_it_passes_its_target_and_a_study_that_cannot_meet_it(tiny, tmp_path):
    images = images_of(tiny("fedavg"))
    once = max(expected_epsilon(count, 1) for count in images.values())
    twice = max(expected_epsilon(count, 2) for count in images.values())
    study = tiny("fedavg", {**PRIVATE, "privacy.target_epsilon": (once + twice) / 2})
    result = run(study, tmp_path / "target")
    for site, lines in ledgers(result.folder).items():
        trained = [line for line in lines if line["operation"] == "train"]
        steps = [line["privacy"]["steps"] for line in trained]
        assert steps[0] == images[site] // 8
        assert steps[-1] < 2 * (images[site] // 8)
        assert steps[-1] == steps[-2]  # nothing is left for the last round
        assert all(line["privacy"]["epsilon"] <= study.privacy.target_epsilon for line in trained)
    assert result["privacy"]["epsilon"] <= study.privacy.target_epsilon
    with pytest.raises(BadInput, match=r"privacy\.target_epsilon"):
        run(tiny("fedavg", {**PRIVATE, "privacy.target_epsilon": 1e-3}), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_prv_is_an_option_and_tighter(tiny, tmp_path, undisturbed):
    found = run(tiny("fedavg", {**PRIVATE, "privacy.accountant": "prv"}), tmp_path / "prv")
    rdp = undisturbed(tiny("fedavg", PRIVATE))
    assert found["privacy"]["accountant"] == "prv"
    assert found["privacy"]["epsilon"] < rdp["privacy"]["epsilon"]
    assert found["weights_sha256"] == rdp["weights_sha256"]


def test_a_deployed_sites_secret_is_drawn_once_and_kept(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = secret_in(tmp_path / "a")
    assert first == secret_in(tmp_path / "a") != secret_in(tmp_path / "b")
    assert len(first) == 64
    assert (tmp_path / "a" / "noise.key").stat().st_mode & 0o077 == 0


def test_the_secret_changes_the_noise_and_the_record_says_so(tiny, tmp_path):
    study = tiny("fedavg", PRIVATE)
    parts = prepare(study.data, study.sites)
    sent = {}
    for name, deployed in (("simulated", False), ("deployed", True)):
        assembly = Assembly(study, parts, tmp_path / name)
        host = SiteHost(replace(assembly.host_spec(), policy=Policy(deployed=deployed)))
        weights = Parcel("weights", assembly.initial_weights())
        sent[name] = host.handle(Call(parts.names[0], "train", 1, {"weights": weights})).parcels[0]
    assert not torch.equal(sent["simulated"].tensors["fc3.bias"], sent["deployed"].tensors["fc3.bias"])
    assert records.SEED in sent["simulated"].privacy["does_not_cover"]
    assert records.SEED not in sent["deployed"].privacy["does_not_cover"]
    assert math.isclose(sent["simulated"].privacy["epsilon"], sent["deployed"].privacy["epsilon"])


def deployed_asked(study, folder, asked, restored=None):
    """What a deployed site releases when it is asked to train with each of these weights, one round after the other."""
    parts = prepare(study.data, study.sites)
    assembly = Assembly(study, parts, folder)
    host = SiteHost(replace(assembly.host_spec(), policy=Policy(deployed=True)))
    host.restore(restored or {})
    first = len(restored or {}) + 1  # a site that was put back to where it stood after its first round
    sent = [{"weights": Parcel("weights", weights)} for weights in asked]
    calls = [Call(parts.names[0], "train", round, one) for round, one in enumerate(sent, first)]
    released = []
    for call in calls:
        released.append(host.handle(call).parcels[0])
        position = host.checkpoint()
    return released, position


def test_a_site_that_is_put_back_repeats_itself_only_when_it_is_asked_the_same(tiny, tmp_path):
    """Noise that is used twice, under weights that hardly differ, would be taken off by subtraction."""
    study = tiny("fedavg", PRIVATE, local_steps=1)
    weights = Assembly(study, prepare(study.data, study.sites), tmp_path / "any").initial_weights()
    nudged = {name: tensor + 1e-6 for name, tensor in weights.items()}
    (first,), position = deployed_asked(study, tmp_path / "run", [weights])
    other, same = (deployed_asked(study, tmp_path / "run", [sent])[0][0] for sent in (nudged, weights))
    assert same.digest == first.digest
    apart = (other.tensors["fc1.weight"] - first.tensors["fc1.weight"]).std()
    noise = (first.tensors["fc1.weight"] - weights["fc1.weight"]).std()
    assert apart > 0.5 * noise  # two draws lie farther apart than one from zero; with one draw this is 1e-6

    (going_on,), _ = deployed_asked(study, tmp_path / "run", [weights], restored=position)
    (otherwise,), _ = deployed_asked(study, tmp_path / "run", [nudged], restored=position)
    assert going_on.privacy["after"] == otherwise.privacy["after"] == first.privacy["trained"] != 0
    assert going_on.privacy["trained"] != otherwise.privacy["trained"]


def test_other_settings_and_other_images_mean_other_noise(tiny, tmp_path):

    study = tiny("fedavg", PRIVATE, local_steps=1)
    weights = Assembly(study, prepare(study.data, study.sites), tmp_path / "any").initial_weights()
    trained = set()
    for change in ({}, {"privacy.noise_multiplier": 2.0}, {"data.samples": study.data.samples + 8}):
        (released,), _ = deployed_asked(study.with_settings(change), tmp_path / "run", [weights])
        trained.add(released.privacy["trained"])
    assert len(trained) == 3
    (released,), _ = deployed_asked(study.with_settings({"engine.threads": 2}), tmp_path / "run", [weights])
    assert released.privacy["trained"] in trained  # where it runs says nothing about results


NO_SCORES = {"evaluation.every": 0, "evaluation.final": "none", "evaluation.select": "last"}
ALL = {"privacy.cover": "all", "privacy.on": ["classifier"], "privacy.noise_multiplier": 1.0}
REPLAY = {"generator.name": "vqvae2", "generator.codebook": "gradient", "replay.codes": "final-encoder"}
REPLAY |= {**ALL, **NO_SCORES}


@pytest.mark.parametrize(("method", "settings", "cure"), [
    ("fedavg", {**ALL}, "set evaluation.every = 0 and evaluation.final = 'none'"),
    ("fedavg", {**ALL, "evaluation.every": 0}, "evaluation.final = 'none'"),
    ("fedavg", {**ALL, "evaluation.final": "none"}, "set evaluation.every = 0"),
    ("fedavg-replay", {**REPLAY, "privacy.on": ["generator"]}, "name classifier in privacy.on"),
    ("fedavg-replay", {**REPLAY, "privacy.on": ["generator", "classifier"]}, "set replay.codes = 'prior'"),
    ("fedreplay", {**ALL, **NO_SCORES, "privacy.on": ["encoder", "primary"]}, "releases labels, latents"),
    ("felicia", {**ALL, **NO_SCORES, "generator.name": "gan", "privacy.on": ["generator"]}, "releases metrics of"),
])  # fmt: skip
def test_what_would_leave_uncovered_is_named_with_the_cure(tiny, method, settings, cure):
    with pytest.raises(BadInput) as refused:
        tiny(method, settings)
    assert cure in str(refused.value)
    assert str(refused.value).startswith("privacy.cover: ")


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_a_study_in_which_all_is_covered_releases_no_score(tiny, tmp_path, method):
    study = tiny(method, {**ALL, **NO_SCORES, "sites.count": 2}, rounds=2)
    result = run(study, tmp_path / "run")
    lines = [line for file in (tmp_path / "run" / "ledger").iterdir() for line in verify(file)]
    assert lines
    assert {line["kind"] for line in lines} <= {"weights", "gradients", "statistics"}
    assert result.values["privacy"]["covers"] == ["everything released"]
    assert result.values["metrics"]["test"] == {}
