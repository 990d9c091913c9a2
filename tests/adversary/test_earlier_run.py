"""Attack: run another study under the name of an earlier run, to release what that run kept at the site."""

import pytest
from attacked_site import ask, first_weights

from polyclinic.errors import BadInput


def test_a_run_goes_on_with_its_own_study_only(kit):
    """`standalone` keeps its model; `fedavg` with a learning rate of nothing would hand that model out as it is."""
    alone = kit.host(method__name="standalone")
    ask(alone, "train")
    alone.checkpoint()
    with pytest.raises(BadInput, match="differs from the study that run 'run' was begun with"):
        kit.host(method__name="fedavg", optimizer__lr=1e-30)


def test_the_same_study_may_go_on_with_another_engine(kit):
    first = kit.host()
    ask(first, "train", weights=first_weights(first))
    assert kit.host(engine__quorum=0.9, engine__silence=5.0)
