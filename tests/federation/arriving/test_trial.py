"""What weights do with some of a site's images: which images these are, and what is compared."""

import numpy as np
import pytest
import torch
from one_site import LAST, LIMITS, changed, make_check, make_site

from polyclinic.federation.arriving import units
from polyclinic.federation.arriving.history import History
from polyclinic.federation.arriving.trial import Trials, Tried
from polyclinic.federation.state import SiteState


def tried(losses, gradients):
    return Tried({}, torch.tensor(losses), torch.tensor(gradients))


def figures_of(result, before, limits=LIMITS):
    history = History(SiteState())
    if before is not None:
        history.take_most("loss", {"mean": before})
    return [tuple(figure) for figure in make_check(limits, first=None)._beside_history(result, history)]


def test_the_loss_is_compared_with_the_largest_so_far():
    sixteen = tried([2.0] * 16, [1e-3] * 15 + [5e-3])
    assert figures_of(sixteen, None) == []
    assert figures_of(sixteen, 4.0) == [("loss", "images", pytest.approx(0.5), 40.0)]
    assert figures_of(sixteen, 2.0) == [("loss", "images", pytest.approx(1.0), 40.0)]
    loss, dominance = figures_of(sixteen, 1.0)
    assert loss == ("loss", "images", pytest.approx(2.0), 40.0)
    assert dominance == ("dominance", "images", pytest.approx(0.25), 0.9)


def test_one_image_of_a_few_says_nothing_about_dominance():
    assert [figure[0] for figure in figures_of(tried([2.0] * 15, [1.0] * 15), 1.0)] == ["loss"]
    assert [figure[0] for figure in figures_of(tried([2.0] * 16, [1.0] * 16), 1.0)] == ["loss", "dominance"]


def test_losses_and_gradients_of_nothing_can_be_divided():
    loss, dominance = figures_of(tried([1e-3] * 16, [0.0] * 16), 1e-13)
    assert loss[2] == pytest.approx(1e-3 / 1e-12)
    assert dominance[2] == 0.0


@pytest.mark.parametrize(("images", "checks"), [(15, {"quiet"}), (16, {"quiet", "exposed"})])
def test_exposed_images_are_counted_where_there_are_enough(images, checks):
    level = torch.linspace(-1, 1, images)[:, None].repeat(1, 4)
    found = {"relu": units.responses_to(level, rectifier=True)}
    result = Tried(found, torch.ones(images), torch.ones(images))
    assert {figure[0] for figure in figures_of(result, None)} == checks


# --- the images that weights are tried on ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("tried_on", "held", "places"),
    [(4, 10, [0, 3, 6, 9]), (10, 4, [0, 1, 2, 3]), (2, 7, [0, 6]), (3, 6, [0, 2, 5]), (5, 1, [0])],
)
def test_images_are_spread_evenly_over_all(tried_on, held, places):
    site = make_site(images=held)
    site.data.train.images[:, 0, 0, 0] = np.arange(held)
    images, targets = Trials(tried_on)._some_images(site, site.trainer)
    assert (images[:, 0, 0, 0] * 255).round().int().tolist() == places
    assert targets.tolist() == [place % 2 for place in places]


def test_a_trial_leaves_the_sites_network_alone_and_has_no_dropout():
    site, trials = make_site(), Trials(8)
    held = site.trainer.weights()
    result = trials.try_weights(site, site.trainer, changed(times=2.0))
    assert all(torch.equal(one, held[name]) for name, one in site.trainer.weights().items())
    assert len(result.losses) == len(result.gradients) == 8
    assert result.loss == pytest.approx(float(result.losses.mean()))
    again = trials.try_weights(site, site.trainer, changed(times=2.0))
    assert torch.equal(result.losses, again.losses)
    twin = trials._twin(site.trainer)
    assert twin is trials._twin(site.trainer)
    assert twin is not site.trainer.model
    assert twin.training
    assert not any(parameter.requires_grad for parameter in twin.parameters())
    assert not any(module.training for module in twin.modules() if "Dropout" in type(module).__name__)


def test_the_gradient_of_an_image_is_that_of_its_loss_by_the_output():
    site = make_site()
    result = Trials(4).try_weights(
        site, site.trainer, {f"{LAST}.weight": torch.zeros(2, 84), f"{LAST}.bias": torch.zeros(2)}
    )
    assert result.losses.tolist() == pytest.approx([np.log(2)] * 4)
    assert result.gradients.tolist() == pytest.approx([0.5**0.5] * 4)
