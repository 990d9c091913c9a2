"""What backbones of the package say of their norm layers is what a network of theirs has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from polyclinic.models import BACKBONES, NORMS, find, norm_names
from polyclinic.models.encoders import ENCODERS
from polyclinic.privacy.dp_sgd import BATCH_NORM, obstacles
from polyclinic.study.checks import gives_square_map, has_batch_norm, network_obstacle, shape_at

OWN = [*BACKBONES.builtin, next(iter(ENCODERS.builtin))]


@pytest.mark.parametrize("name", OWN)
def test_a_backbone_has_the_norm_layers_that_it_says(name):
    pytest.importorskip("monai")  # for `unet`
    kind = find(name, size=32)
    for norm in NORMS:
        network = kind.without_weights(32, norm)
        said = bool(kind.norm_layers) and norm == "batch"
        assert bool(norm_names(network)) == said, norm
        assert obstacles(network) == ([BATCH_NORM] if said else []), norm


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if one in ("resnet101", "resnet152") else ()) for one in OWN]
)
def test_a_cut_gives_a_square_map_where_the_package_says_so(name):
    pytest.importorskip("monai")
    model = SimpleNamespace(backbone=name, arguments={}, norm="batch", input_size=None)
    study = SimpleNamespace(data=SimpleNamespace(size=64), model=model)
    for cut in [*find(name, size=64).stages][:-1]:
        shape = shape_at(study, cut)
        assert gives_square_map(study, cut) == (len(shape) == 3 and shape[1] == shape[2]), (cut, shape)


def test_a_backbone_that_is_derived_from_ours_is_looked_at(tiny, monkeypatch):
    """Its class inherits what ours says, and its layers may be others."""
    from torch import nn

    class Mine(BACKBONES["small-cnn"]):  # type: ignore[misc]
        def __init__(self, *given):
            super().__init__(*given)
            self.norm1 = self.norm2 = self.norm3 = nn.Identity()

    study = tiny("fedavg", {"model.backbone": "small-cnn"})
    assert has_batch_norm(study)
    assert network_obstacle(study) == BATCH_NORM
    monkeypatch.setitem(BACKBONES.builtin, "small-cnn-mine", Mine)
    own = study.with_settings({"model.backbone": "small-cnn-mine"})
    assert not has_batch_norm(own)
    assert network_obstacle(own) is None
