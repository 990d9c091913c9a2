"""Noise, clip and expected number of images wherever a site adds noise, by hand: every draw of the noise is 0.5."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from private_runs import Scale

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.federation.layers.replies import Coverage
from polyclinic.federation.site import Site, SiteState
from polyclinic.privacy import dp_sgd
from polyclinic.privacy.settings import Privacy
from polyclinic.training import private, private_latents, private_steps
from polyclinic.training.generator_loop import Schedule

#: of lengths 5, 0.5 and 0.5; the clipping norm is 2, so that their sum is (1.2, 1.6) + (0.3, 0.4) + (0, 0.5)
ROWS = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.5]])
CLIPPED = [1.5, 2.5]


@pytest.fixture(autouse=True)
def _halves(monkeypatch):
    for module in (private, dp_sgd):
        monkeypatch.setattr(module, "noise_from", lambda *address: lambda like: torch.full_like(like, 0.5))


def make_site(tmp_path, **privacy):
    """Three images, each of a patient of its own."""
    part = ImageSet(np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2), np.zeros(3), cases=np.arange(3))
    trainer = SimpleNamespace(
        privacy=Privacy(noise_multiplier=4.0, max_grad_norm=2.0, score_noise=3.0, delta=1e-5, **privacy),
        task=SimpleNamespace(
            losses=lambda output, targets, target: output,
            noised=lambda sums, noise, target: {name: one + noise(one) for name, one in sums.items()},
        ),
        target=None,
        model=Scale(),
        forward=lambda images: trainer.model(images),
        batch=lambda part, index, seeds: (ROWS[index], torch.zeros(len(index))),
        optimizer=SimpleNamespace(batch_size=3),
        device=torch.device("cpu"),
        graphs=False,
        kept={},
    )
    study = SimpleNamespace(seed=1)
    return Site("north", study, SiteData("north", part, part, part), trainer, SiteState(), tmp_path, round=1)


def test_scores(tmp_path):
    """3 x 0.5 is added to each."""
    parcel = private.release_scores(make_site(tmp_path), "test", {"loss": torch.tensor([1.0, 2.0])})
    assert parcel.tensors["loss"].tolist() == [2.5, 3.5]


@pytest.mark.parametrize(
    ("batch_size", "form", "noise", "expected"),
    [(None, "per-batch", 4.0, 3.0), (3, "per-batch", 4.0, 3.0), (None, "per-image", 4 * 3**0.5, 3.0)],
)
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_sum(tmp_path, share, batch_size, form, noise, expected):
    """(1, 2) and a share of noise times clip times 0.5."""
    site = make_site(tmp_path, noise_form=form)
    found, count = private_steps.release_sum(site, lambda *_: torch.tensor([1.0, 2.0]), batch_size, share=share)
    added = share * noise * 2.0 * 0.5
    assert found.tolist() == pytest.approx([1.0 + added, 2.0 + added])
    assert count == expected
    assert private.account_of(site).history == [(noise, 1.0, 1)]


def test_a_sum_of_samples_is_of_the_expected_number(tmp_path):
    site = make_site(tmp_path)
    assert private_steps.release_sum(site, lambda index, _: torch.zeros(2), 2)[1] == pytest.approx(2.0)
    assert private.account_of(site).history == [(4.0, 2 / 3, 1)]


@pytest.mark.parametrize("unit", ["image", "patient"])
@pytest.mark.parametrize(("form", "noise"), [("per-batch", 4.0), ("per-image", 4 * 3**0.5)])
def test_a_gradient(tmp_path, form, noise, unit):
    """The clipped sum and noise x 2 x 0.5, over 3 images."""
    site = make_site(tmp_path, noise_form=form, unit=unit)
    found = private_steps.gradients(site, 1.0)["layer.weight"].flatten()
    assert found.tolist() == pytest.approx([(one + noise * 2 * 0.5) / 3 for one in CLIPPED])


@pytest.mark.parametrize("unit", ["image", "patient"])
def test_a_step_with_rows_that_join_it(tmp_path, unit):
    """Three images and six joined rows (0, 1), each of nobody, are 9 on average: noise 4 x sqrt(9) x 2 x 0.5 = 12."""
    site = make_site(tmp_path, noise_form="per-image", unit=unit)

    def join(batches):
        for (rows,) in batches:
            yield (torch.cat([rows, torch.tensor([[0.0, 1.0]] * 6)]),)

    model = site.trainer.model
    objective = private_steps.PrivateObjective(model, model, lambda index, _: (ROWS[index],), 3, join, joined=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert private_steps.take_private_steps(site, objective, 2, optimizer) == 2
    step = [(CLIPPED[0] + 12) / 9, (CLIPPED[1] + 6 + 12) / 9]
    assert model.layer.weight.flatten().tolist() == pytest.approx([-2 * one for one in step])
    assert private.account_of(site).history == [(12.0, 1.0, 2)]


@pytest.mark.parametrize(("batch_size", "steps"), [(3, 2), (2, 2), (1, 6), (4, 2)])
def test_a_generator_takes_floor_n_by_b_steps_an_epoch(tmp_path, batch_size, steps):
    site = make_site(tmp_path, on=("generator",))
    learn = private_steps.learners(site, "generator", "prior")["generator"]
    model = Scale()
    learn(model, model, lambda index, _: (ROWS[index],), Schedule(2, batch_size, 0.1), 0)
    assert private.account_of(site).steps == steps


@pytest.mark.parametrize(("form", "noise"), [("per-batch", 4.0), ("per-image", 4 * 3**0.5)])
def test_the_primary_model_on_latents(tmp_path, form, noise):
    """Batches of 3 of 3 latents: one step, (clipped sum + noise x 2 x 0.5) / 3."""
    trainer = make_site(tmp_path).trainer
    trainer.privacy = Privacy(on=("encoder", "primary"), noise_multiplier=4.0, max_grad_norm=2.0, noise_form=form)
    engine, primary = SimpleNamespace(simulation=True), Scale()
    federation = SimpleNamespace(trainer=trainer, seed=0, round=1, engine=engine, coverage=Coverage())
    kept = private_latents.open_accounts(federation, {"north": 3})
    optimizer = torch.optim.SGD(primary.parameters(), lr=1.0)
    kept = private_latents.train(federation, kept, primary, (ROWS, torch.zeros(3)), optimizer)
    assert primary.layer.weight.flatten().tolist() == pytest.approx([-(one + noise) / 3 for one in CLIPPED])
    assert kept["spent"] == {"north": [[noise, 1.0, 1]]}
    trainer.optimizer.batch_size = 1
    spent = private_latents.train(federation, kept, primary, (ROWS, torch.zeros(3)), optimizer)["spent"]
    assert spent == {"north": [[noise, 1.0, 1], [4.0, 1 / 3, 3]]}
