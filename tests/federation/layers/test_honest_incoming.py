"""The incoming check in honest runs of every method: no alarm, and the same result to the last bit."""

import pytest

from polyclinic import run
from polyclinic.federation.layers.incoming_figures import History
from polyclinic.files import read_tensors
from polyclinic.methods import METHODS

GAN = {"name": "dcgan", "width": 4, "latent": 8, "steps": 2}
SETTINGS = {
    **{name: ({"generator": GAN, "tuning": {"on": False}}, {"buffer": 8}) for name in ("feder", "feder-a", "feder-b")},
    "felicia": ({"generator": GAN}, {"steps": 2, "learner_steps": 3, "schedule": "local", "exchange_every": 1}),
    "cwt-replay": ({"generator": GAN, "replay": {"probe": False, "codes": "prior", "samples": 8}}, {}),
    "fedavg-replay": ({"generator": GAN, "replay": {"probe": False, "codes": "prior", "samples": 8}}, {}),
}
#: these say nothing of arriving weights that a quicker method does not
LONG = ("fedavg-replay", "feder", "feder-b", "finetune", "fedrep", "ditto", "moon")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
        for name in METHODS.builtin
        if not METHODS[name].traits.needs_encoder
    ],
)
def test_an_honest_run_passes_and_ends_in_the_same_weights(tiny, undisturbed, tmp_path, method):
    tables, settings = SETTINGS.get(method, ({}, {}))
    tables = {**tables, "sites.count": 2, "data.samples": 48}
    if method == "fedbn":
        tables["model.backbone"] = "small-cnn"
    plain = undisturbed(tiny(method, tables, rounds=2, **settings))
    checked = tiny(method, {**tables, "policy.incoming": {"on": True}}, rounds=2, **settings)
    assert run(checked, tmp_path / "run")["weights_sha256"] == plain["weights_sha256"]


@pytest.mark.parametrize(("from_file", "kept"), [(False, {"last", "own", "passed"}), (True, {"last", "own", "loss"})])
def test_the_history_lies_in_the_sites_state_and_begins_with_weights_from_a_file(tiny, tmp_path, from_file, kept):
    plain = run(tiny("fedavg", {"sites.count": 2}, rounds=1), tmp_path / "plain")
    assert not list(plain.folder.glob("sites/*/state-*.safetensors"))
    first = {"model.backbone": "lenet5", "model.weights": str(plain.folder / "model.safetensors")} if from_file else {}
    result = run(
        tiny("fedavg", {"policy.incoming": {"on": True}, "sites.count": 2, **first}, rounds=2), tmp_path / "run"
    )
    for state in result.folder.glob("sites/*/state-*.safetensors"):
        assert {name.split("/")[1] for name in read_tensors(state) if name.startswith(History.GROUP)} >= kept


def test_a_simulated_site_refuses_what_is_above_a_limit(tiny, tmp_path):
    """A limit that no round can hold: every site fails in the first round after the first weights."""
    study = tiny(
        "fedavg",
        {"policy.incoming": {"on": True, "moved": 1e-9, "times_own": 0.0}, "engine.on_failure": "stop"},
        rounds=2,
    )
    with pytest.raises(Exception, match="moved of"):
        run(study, tmp_path / "run")
