"""Studies with `[privacy]`, end to end: what the ledgers and the result say, budgets, resume, replay."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import ForkedWorker

from polyclinic.cli.tables import print_result
from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.federation.federation import Federation
from polyclinic.federation.leaving.ledger import verify
from polyclinic.federation.open_sites import secret_in
from polyclinic.federation.state import SitePosition, read_state
from polyclinic.privacy import record as records
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon, compute_epsilon
from polyclinic.privacy.site_account import Account
from polyclinic.runner import engines
from polyclinic.runner.assembly import Assembly
from polyclinic.runner.recorder import Display
from polyclinic.runner.run import run
from polyclinic.study import Study
from polyclinic.training import private_latents

NOISE = 1.1
PRIVATE = {"privacy.noise": NOISE, "privacy.clip": 0.5}
GENERATOR = {
    "generator.name": "vqvae2",
    "generator.codebook": "gradient",
    "generator.epochs": 1,
    "generator.prior_epochs": 1,
    "generator.batch_size": 8,
    "generator.prior_batch_size": 8,
    "generator.width": 8,
    "generator.prior_width": 8,
    "generator.prior_layers": 1,
    "generator.top_codes": 8,
    "generator.bottom_codes": 8,
}


def ledgers(folder: Path) -> dict[str, list[dict]]:
    return {path.stem: verify(path) for path in sorted((folder / "ledger").glob("*.jsonl"))}


def images_of(study: Study) -> dict[str, int]:
    return {site: counts["train"] for site, counts in prepare(study.data, study.sites).info["counts"].items()}


def expected_epsilon(images: int, rounds: int) -> float:
    """Of rounds of floor(n / 8) steps each, at delta = 1 / n."""
    return compute_epsilon(8 / images, NOISE, rounds * (images // 8), 1 / images)


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


def test_the_result_states_the_worst_site_and_what_is_not_covered(tiny, undisturbed):
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


def test_the_command_line_says_it_in_a_sentence(tiny, undisturbed, capsys):
    print_result(undisturbed(tiny("fedavg", PRIVATE)))
    said = capsys.readouterr().out
    assert re.search(
        r"epsilon [\d.]+ at delta [\d.]+ \(RDP\) at site 'site-\d', the most of any; covers everything", said
    )
    assert records.HELD_OUT in said


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


def test_without_the_table_there_is_no_privacy_to_report(tiny, undisturbed):
    result = undisturbed(tiny("fedavg"))
    assert result["privacy"] is None
    assert all(line["privacy"] is None for lines in ledgers(result.folder).values() for line in lines)


def test_the_same_study_gives_the_same_bits_and_another_seed_others(tiny, undisturbed, tmp_path):
    study = tiny("fedavg", PRIVATE)
    again = run(study, tmp_path / "again")
    other = run(study.with_settings({"seed": 1}), tmp_path / "other")
    assert again["weights_sha256"] == undisturbed(study)["weights_sha256"] != other["weights_sha256"]


@pytest.mark.parametrize("method", ["fedavg", "cwt", "standalone"])
def test_a_run_killed_after_a_round_ends_in_the_same_bits(tiny, undisturbed, tmp_path, monkeypatch, method):
    """Killed in the middle of round 3, after some parcels of it were written down."""
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
    resumed = run(study, tmp_path / "killed", resume=True)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["privacy"] == whole["privacy"]
    assert ledgers(resumed.folder) == ledgers(whole.folder)


def test_workers_make_no_difference(tiny, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "WorkerProcess", ForkedWorker)
    study = tiny("fedavg", PRIVATE)
    many = run(study.with_settings({"engine.workers": 2}), tmp_path / "workers")
    whole = undisturbed(study)
    assert many["weights_sha256"] == whole["weights_sha256"]
    assert many["privacy"] == whole["privacy"]


def test_a_site_stops_before_it_passes_its_target(tiny, tmp_path):
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


def test_a_target_that_cannot_be_met_stops_the_study_before_it_begins(tiny, tmp_path):
    with pytest.raises(BadInput, match=r"privacy\.target_epsilon"):
        run(tiny("fedavg", {**PRIVATE, "privacy.target_epsilon": 1e-3}), tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_sites_account_lies_in_its_state(tiny, undisturbed):
    study = tiny("fedavg", PRIVATE)
    result = undisturbed(study)
    manifest = json.loads((result.folder / "checkpoint" / "manifest.json").read_text())
    for site, images in images_of(study).items():
        state = read_state(result.folder, site, SitePosition(*manifest["sites"][site]))
        account = Account.restored(state.group("privacy"), 1 / images, "rdp")
        assert account.epsilon == pytest.approx(expected_epsilon(images, 3))


def test_prv_is_an_option_and_tighter(tiny, tmp_path, undisturbed):
    found = run(tiny("fedavg", {**PRIVATE, "privacy.accountant": "prv"}), tmp_path / "prv")
    rdp = undisturbed(tiny("fedavg", PRIVATE))
    assert found["privacy"]["accountant"] == "prv"
    assert found["privacy"]["epsilon"] < rdp["privacy"]["epsilon"]
    assert found["weights_sha256"] == rdp["weights_sha256"]


# --- methods ------------------------------------------------------------------------------------------------


def test_fedprox_without_its_penalty_is_fedavg_under_privacy_too(tiny, undisturbed, tmp_path):
    prox = run(tiny("fedprox", PRIVATE, mu=0.0), tmp_path / "prox")
    assert prox["weights_sha256"] == undisturbed(tiny("fedavg", PRIVATE))["weights_sha256"]


@pytest.mark.parametrize(("batch", "rate"), [("full", 1.0), ("mini", None)])
def test_fedsgd_spends_one_step_a_round(tiny, tmp_path, batch, rate):
    study = tiny("fedsgd", PRIVATE, batch=batch)
    result, images = run(study, tmp_path / batch), images_of(study)
    for site, one in result["privacy"]["per_site"].items():
        assert one["epsilon"] == pytest.approx(compute_epsilon(rate or 8 / images[site], NOISE, 3, 1 / images[site]))
    assert result["privacy"]["covers"] == [records.EVERYTHING]


def test_fedreplay_covers_the_encoder_but_not_the_latents(tiny, tmp_path):
    result = run(tiny("fedreplay", {**PRIVATE, "privacy.on": ["encoder"]}, rounds=1), tmp_path / "fedreplay")
    privacy = result["privacy"]
    assert privacy["covers"] == ["weights of the encoder"]
    assert records.UNCOVERED["latents"] in privacy["does_not_cover"]
    assert records.UNCOVERED["labels"] in privacy["does_not_cover"]
    assert len(privacy["per_site"]) == 1


PRIMARY = {**PRIVATE, "privacy.on": ["encoder", "primary"]}


def test_the_primary_model_of_fedreplay_spends_for_every_site_and_the_encoder_for_its_own(tiny, tmp_path):
    study = tiny("fedreplay", PRIMARY, rounds=2, encoder_passes=1, encoder_site="site-2")
    privacy, images = run(study, tmp_path / "primary")["privacy"], images_of(study)
    total = sum(images.values())
    primary = Mechanism(NOISE, 8 / total, 2 * (total // 8))
    encoder = Mechanism(NOISE, 8 / images["site-2"], images["site-2"] // 8)
    for site, one in privacy["per_site"].items():
        history = [encoder, primary] if site == "site-2" else [primary]
        assert one["epsilon"] == pytest.approx(composed_epsilon(history, 1 / images[site]), rel=1e-12)
        assert one["steps"] == sum(mechanism.steps for mechanism in history)
    assert set(privacy["per_site"]) == set(images)
    assert privacy["site"] == "site-2"
    assert privacy["covers"] == [records.RELEASES["encoder"], records.RELEASES["primary"]]
    assert {records.SEES_LATENTS, records.UNCOVERED["latents"], records.SEED} <= set(privacy["does_not_cover"])


def test_a_private_step_of_the_primary_model_is_the_clipped_mean_over_all_latents(tiny, tmp_path):
    """By hand, with every latent in the batch, next to no noise and a clipping norm that shortens most gradients."""
    settings = {"privacy.on": ["encoder", "primary"], "privacy.noise": 1e-6, "privacy.clip": 0.05}
    more = {"optimizer.batch_size": 1000, "optimizer.momentum": 0.0, "optimizer.lr": 0.5}
    study = tiny("fedreplay", {**settings, **more}, rounds=1, encoder_passes=1)
    result = run(study, tmp_path / "primary")
    assembly = Assembly(study, prepare(study.data, study.sites), result.folder)
    trainer, released = assembly.trainer(), result.weights()
    front, rest = trainer.split(trainer.load(assembly.initial_weights()))
    front.load_state_dict({name: released[name] for name in front.state_dict()})
    parts = [open_site(assembly.prepared.folder, site).train for site in assembly.prepared.names]
    total, count = {name: torch.zeros_like(weight) for name, weight in rest.named_parameters()}, 0
    for part in parts:
        for images, labels in trainer.in_order(part):
            for latent, label in zip(front(images).detach(), labels, strict=True):
                rest.zero_grad()
                torch.nn.functional.cross_entropy(rest(latent[None]), label[None]).backward()
                length = math.sqrt(sum(float(weight.grad.square().sum()) for weight in rest.parameters()))
                for name, weight in rest.named_parameters():
                    total[name] += weight.grad * min(1.0, 0.05 / length)
                count += 1
    for name, weight in rest.named_parameters():
        torch.testing.assert_close(released[name], weight.detach() - 0.5 * total[name] / count, rtol=1e-3, atol=1e-6)


def test_the_primary_model_stops_at_the_target_and_needs_something_left_after_the_encoder(tiny, tmp_path):
    images = images_of(tiny("fedreplay"))
    total, largest = sum(images.values()), max(images, key=lambda site: images[site])
    encoder = Mechanism(NOISE, 8 / images[largest], images[largest] // 8)
    some = composed_epsilon([encoder, Mechanism(NOISE, 8 / total, 5)], 1 / images[largest])
    settings = {**PRIMARY, "privacy.target_epsilon": some * 1.0001}
    privacy = run(tiny("fedreplay", settings, rounds=3, encoder_passes=1), tmp_path / "target")["privacy"]
    assert privacy["per_site"][largest]["epsilon"] <= some * 1.0001
    assert {one["steps"] for site, one in privacy["per_site"].items() if site != largest} == {5}
    alone = composed_epsilon([encoder], 1 / images[largest]) * 1.0001
    with pytest.raises(WorkFailed, match=r"nothing of site '.*' is left for the primary model after the encoder"):
        run(tiny("fedreplay", {**PRIMARY, "privacy.target_epsilon": alone}, encoder_passes=1), tmp_path / "spent")


def test_a_deployed_coordinator_draws_the_noise_of_the_primary_model_from_a_secret():
    def opened(simulation):
        engine, coverage = SimpleNamespace(simulation=simulation), SimpleNamespace(records={})
        return private_latents.open_accounts(SimpleNamespace(engine=engine, coverage=coverage), {"north": 5})

    assert opened(True) == {"images": {"north": 5}, "spent": {"north": []}, "secret": ""}
    secrets = {opened(False)["secret"] for _ in range(2)}
    assert [len(secret) for secret in secrets] == [64, 64]


def test_a_record_of_a_site_that_cannot_be_read_is_refused():
    coverage = SimpleNamespace(records={"north": {"mechanisms": [{"noise": "much"}]}})
    federation = SimpleNamespace(engine=SimpleNamespace(simulation=True), coverage=coverage)
    with pytest.raises(WorkFailed, match="site 'north' sent a privacy record whose mechanisms cannot be read"):
        private_latents.open_accounts(federation, {"north": 5})


class StoppedAfterRound2(Display):
    def round_done(self, line, rounds):
        if line["round"] == 2:
            raise KeyboardInterrupt


def test_a_resumed_run_of_a_private_primary_model_ends_in_the_same_weights_and_epsilon(tiny, tmp_path):
    study = tiny("fedreplay", PRIMARY, encoder_passes=1)
    whole = run(study, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path / "stopped", display=StoppedAfterRound2())
    resumed = run(study, tmp_path / "stopped", resume=True)
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["privacy"] == whole["privacy"]


def test_noise_for_each_image_is_the_square_root_of_the_batch_times_as_much_and_is_accounted_so(tiny, undisturbed):
    printed = undisturbed(tiny("fedavg", {**PRIVATE, "privacy.noise_form": "per-image"}, rounds=1))
    abadi = undisturbed(tiny("fedavg", {**PRIVATE, "privacy.noise": NOISE * math.sqrt(8)}, rounds=1))
    assert printed["weights_sha256"] == abadi["weights_sha256"]  # batches of 8
    assert printed["privacy"] == abadi["privacy"]
    assert printed["privacy"]["noise"] == pytest.approx(NOISE * math.sqrt(8))
    assert printed["privacy"]["epsilon"] < undisturbed(tiny("fedavg", PRIVATE, rounds=1))["privacy"]["epsilon"]


@pytest.mark.slow
def test_a_private_generator_with_codes_does_not_cover_the_codes(tiny, tmp_path):
    settings = {**PRIVATE, **GENERATOR, "privacy.on": ["generator"], "sites.count": 2}
    privacy = run(tiny("cwt-replay", settings, rounds=1), tmp_path / "codes")["privacy"]
    assert privacy["covers"] == ["weights of the generator"]
    for kind in ("codes", "labels", "weights"):
        assert records.UNCOVERED[kind] in privacy["does_not_cover"]


@pytest.mark.slow
def test_end_to_end_everything_released_is_covered_and_one_account_holds_it_all(tiny, tmp_path):
    """Generator, prior and classifier: 1 + 1 + 1 passes of n // 8 steps on the same images."""
    settings = {**PRIVATE, **GENERATOR, "replay.codes": "prior", "privacy.on": ["generator", "prior", "classifier"]}
    study = tiny("fedavg-replay", {**settings, "sites.count": 2}, rounds=1)
    result = run(study, tmp_path / "whole")
    assert result["privacy"]["covers"] == [records.EVERYTHING]
    for site, images in images_of(study).items():
        assert result["privacy"]["per_site"][site]["epsilon"] == pytest.approx(expected_epsilon(images, 3))
    kinds = {line["kind"] for lines in ledgers(result.folder).values() for line in lines}
    assert kinds == {"generator", "weights", "metrics"}
    shutil.rmtree(tmp_path / "whole")
    assert run(study, tmp_path / "whole")["weights_sha256"] == result["weights_sha256"]


@pytest.mark.slow
def test_without_the_classifier_its_weights_are_not_covered(tiny, tmp_path):
    settings = {**PRIVATE, **GENERATOR, "replay.codes": "prior", "privacy.on": ["generator", "prior"]}
    privacy = run(tiny("fedavg-replay", {**settings, "sites.count": 2}, rounds=1), tmp_path / "part")["privacy"]
    assert records.SAMPLED in privacy["covers"]
    assert records.UNCOVERED["weights"] in privacy["does_not_cover"]


# --- secrets ------------------------------------------------------------------------------------------------


def test_a_deployed_sites_secret_is_drawn_once_and_kept(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = secret_in(tmp_path / "a")
    assert first == secret_in(tmp_path / "a") != secret_in(tmp_path / "b")
    assert len(first) == 64
    assert (tmp_path / "a" / "noise.key").stat().st_mode & 0o077 == 0


def test_the_secret_changes_the_noise_and_the_record_says_so(tiny, tmp_path):
    from polyclinic.federation.call import Call
    from polyclinic.federation.host import SiteHost
    from polyclinic.federation.leaving.parcel import Parcel
    from polyclinic.federation.leaving.policy import Policy
    from polyclinic.runner.assembly import Assembly

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
    from polyclinic.federation.call import Call
    from polyclinic.federation.host import SiteHost
    from polyclinic.federation.leaving.parcel import Parcel
    from polyclinic.federation.leaving.policy import Policy
    from polyclinic.runner.assembly import Assembly

    parts = prepare(study.data, study.sites)
    assembly = Assembly(study, parts, folder)
    host = SiteHost(replace(assembly.host_spec(), policy=Policy(deployed=True)))
    host.restore(restored or {})
    first = len(restored or {}) + 1  # a site that was put back to where it stood after its first round
    calls = [
        Call(parts.names[0], "train", round, {"weights": Parcel("weights", weights)})
        for round, weights in enumerate(asked, first)
    ]
    released = []
    for call in calls:
        released.append(host.handle(call).parcels[0])
        position = host.checkpoint()
    return released, position


def test_a_site_that_is_put_back_repeats_itself_only_when_it_is_asked_the_same(tiny, tmp_path):
    """Noise that is used twice, under weights that hardly differ, would be taken off by subtraction."""
    from polyclinic.runner.assembly import Assembly

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
    from polyclinic.runner.assembly import Assembly

    study = tiny("fedavg", PRIVATE, local_steps=1)
    weights = Assembly(study, prepare(study.data, study.sites), tmp_path / "any").initial_weights()
    trained = set()
    for change in ({}, {"privacy.noise": 2.0}, {"data.samples": study.data.samples + 8}):
        (released,), _ = deployed_asked(study.with_settings(change), tmp_path / "run", [weights])
        trained.add(released.privacy["trained"])
    assert len(trained) == 3
    (released,), _ = deployed_asked(study.with_settings({"engine.threads": 2}), tmp_path / "run", [weights])
    assert released.privacy["trained"] in trained  # where it runs says nothing about results
