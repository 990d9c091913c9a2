"""Small rules of privacy, each by hand: mutants of them lived until these tests were written."""

import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

from polyclinic.privacy.curve import draw
from polyclinic.privacy.epsilon import ORDERS
from polyclinic.privacy.ghost_clipping import laid_out_as
from polyclinic.privacy.settings import Privacy


def test_a_study_that_names_no_noise_has_that_of_the_curves_of_the_paper():
    """Qu et al. 2022, Fig. 7."""
    assert (Privacy().noise, Privacy().clip) == (0.7, 1.0)


def test_a_picture_of_curves_begins_at_zero(monkeypatch, tmp_path):
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(pyplot, "close", lambda _: None)
    draw(tmp_path / "curve.png", (500,), epochs=2)
    axis = pyplot.gcf().axes[0]
    monkeypatch.undo()
    pyplot.close("all")
    assert axis.get_xlim() == (0.0, 2.0)
    assert axis.get_ylim()[0] == 0.0


def test_a_gradient_lies_in_memory_as_its_parameter():
    parameter, gradient = torch.zeros(2, 3, 4, 4), torch.rand(2, 3, 4, 4)
    assert laid_out_as(parameter, gradient) is gradient
    other = gradient.contiguous(memory_format=torch.channels_last)
    found = laid_out_as(parameter, other)
    assert found.stride() == parameter.stride() != other.stride()
    assert torch.equal(found, gradient)


def test_orders_grow_from_close_to_one_to_a_thousand():
    assert list(ORDERS) == sorted(set(ORDERS))
    assert ORDERS[:4] == pytest.approx((1.01, 1.02, 1.05, 1.1))
    assert set(range(11, 64)) <= set(ORDERS)
    assert 10.9 in [pytest.approx(one) for one in ORDERS]
    assert ORDERS[-4:] == (128, 256, 512, 1024)
