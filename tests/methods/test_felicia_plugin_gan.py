"""FELICIA joins a GAN of a plug-in that shares no code with ours: it learns, obeys the central term, and resumes."""

from pathlib import Path

import pytest
import torch
from run_folders import assert_same_run

from polyclinic.federation.federation import Federation
from polyclinic.federation.site import SitePosition, read_state
from polyclinic.methods.shared.training_gans import NETWORKS
from polyclinic.runner.run.run import run

PLUGIN = str(Path(__file__).with_name("plugin_gan.py"))


@pytest.fixture
def study(tiny):
    def make(**method):
        tables = {"plugins": [PLUGIN], "data.source": "skin-phantom", "data.samples": 60, "sites.count": 2}
        tables |= {"generator.name": "linear-gan", "generator.batch_size": 8}
        quick = {"steps": 3, "rounds": 2, "learner_steps": 1, "images": 8}
        return tiny("felicia", tables, **{**quick, **method})

    return make


def generator_of(folder):
    found = read_state(folder, "site-1", SitePosition(2, 0)).group(NETWORKS)
    return found["generator.weight"]


@pytest.mark.parametrize("schedule", ["synchronous", "local"])
def test_the_central_term_reaches_its_generator(study, tmp_path, schedule):
    for weight in (0.0, 50.0):
        done = run(study(schedule=schedule, exchange_every=1, weight=weight), tmp_path / str(weight))
        assert done["failures"] == []
    assert not torch.equal(generator_of(tmp_path / "0.0"), generator_of(tmp_path / "50.0"))


def test_a_resumed_run_is_the_same_run(study, tmp_path, monkeypatch):
    run(study(), tmp_path / "whole")
    saved = Federation.save

    def stop_after_the_first_round(self):
        saved(self)
        if self.round == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Federation, "save", stop_after_the_first_round)
    with pytest.raises(KeyboardInterrupt):
        run(study(), tmp_path / "run")
    monkeypatch.undo()
    run(study(), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert torch.equal(generator_of(tmp_path / "run"), generator_of(tmp_path / "whole"))
