"""Methods under differential privacy: what they spend, and what is covered."""

import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from private_runs import NOISE, PRIVATE, expected_epsilon, images_of, ledgers

from polyclinic.data.parts import open_site, prepare
from polyclinic.errors import WorkFailed
from polyclinic.privacy import account as records
from polyclinic.privacy.epsilon import Mechanism, composed_epsilon, compute_epsilon
from polyclinic.runner.run.assembly import Assembly
from polyclinic.runner.run.recorder import Display
from polyclinic.runner.run.run import run
from polyclinic.training import private_latents

GENERATOR = {
    "generator.name": "vqvae2", "generator.codebook": "gradient", "generator.epochs": 1, "generator.prior_epochs": 1,
    "generator.batch_size": 8, "generator.prior_batch_size": 8, "generator.width": 8, "generator.prior_width": 8,
    "generator.prior_layers": 1, "generator.top_codes": 8, "generator.bottom_codes": 8,
}  # fmt: skip


def test_fedprox_without_its_penalty_is_fedavg_under_privacy_too(tiny, undisturbed, tmp_path):
    prox = run(tiny("fedprox", PRIVATE, mu=0.0), tmp_path / "prox")
    assert prox["weights_sha256"] == undisturbed(tiny("fedavg", PRIVATE))["weights_sha256"]


def test_scaffold_goes_on_where_epsilon_is_spent_and_no_step_is_left(tiny, tmp_path):
    """Its mean gradient of no steps would be NaN."""
    target = max(expected_epsilon(count, 1) for count in images_of(tiny("fedavg")).values())
    result = run(tiny("scaffold", {**PRIVATE, "privacy.target_epsilon": target}), tmp_path / "scaffold")
    steps = [line["privacy"]["steps"] for lines in ledgers(result.folder).values() for line in lines if line["privacy"]]
    assert result["failures"] == []
    assert len(set(steps)) < len(steps)  # rounds in which nothing was left


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
    settings = {"privacy.on": ["encoder", "primary"], "privacy.noise_multiplier": 1e-6, "privacy.max_grad_norm": 0.05}
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


def test_a_deployed_coordinator_draws_from_a_secret_and_refuses_a_damaged_record():
    def opened(simulation):
        engine, coverage = SimpleNamespace(simulation=simulation), SimpleNamespace(records={})
        return private_latents.open_accounts(SimpleNamespace(engine=engine, coverage=coverage), {"north": 5})

    assert opened(True) == {"images": {"north": 5}, "spent": {"north": []}, "secret": ""}
    secrets = {opened(False)["secret"] for _ in range(2)}
    assert [len(secret) for secret in secrets] == [64, 64]
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
    abadi = undisturbed(tiny("fedavg", {**PRIVATE, "privacy.noise_multiplier": NOISE * math.sqrt(8)}, rounds=1))
    assert printed["weights_sha256"] == abadi["weights_sha256"]  # batches of 8
    assert printed["privacy"] == abadi["privacy"]
    assert printed["privacy"]["noise"] == pytest.approx(NOISE * math.sqrt(8))
    assert printed["privacy"]["epsilon"] < undisturbed(tiny("fedavg", PRIVATE, rounds=1))["privacy"]["epsilon"]


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
