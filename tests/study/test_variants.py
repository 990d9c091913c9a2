"""Variants of a study, and settings that nothing uses."""

import warnings

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput, Notice
from polyclinic.registry import notice_once
from polyclinic.study import load_study
from polyclinic.study.reading import default_path, load_default
from polyclinic.study.study import parse_study
from polyclinic.study.unused import RULES, ignored


@pytest.fixture(autouse=True)
def _notices():
    notice_once.cache_clear()


@pytest.fixture
def written(tiny, tmp_path):
    """Writes a tiny study into a file."""

    def write(method, settings=None, **more):
        (tmp_path / "study.toml").write_text(tiny(method, settings, **more).to_toml())
        return tmp_path / "study.toml"

    return write


def test_replay_goes_with_the_method(written):
    file = written("cwt-replay", {"replay.ratio": 2.0})
    with pytest.warns(Notice, match=r"method\.name = 'cwt': the table \[replay\] of the study is left out"):
        study = load_study(file, ["method.name=cwt"])
    assert (study.method.name, study.replay) == ("cwt", None)
    # what is asked for in the same command stays, and the other method of the same kind keeps the table
    with pytest.warns(Notice, match="'cwt': it replays, as the study has a table"):
        assert load_study(file, ["method.name=cwt", "replay.ratio=3.0"]).replay.ratio == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_study(file, ["method.name=fedavg-replay"]).replay.ratio == 2
    notice_once.cache_clear()
    with pytest.warns(Notice, match="method.name = 'cwt': it replays, as the study has a table"):
        study = load_study(written("fedavg", {"replay.ratio": 2.0}), ["method.name=cwt"])
    assert study.replay.ratio == 2


def test_settings_tables_and_partitions_of_another_method(written):
    file = written("feder", {"tuning.alpha": 0.5}, buffer=7)
    with pytest.warns(Notice) as told:
        study = load_study(file, ["method.name=fedprox", "method.mu=0.3"])
    assert (study.method.name, study.method.rounds, study.method.mu, study.tuning) == ("fedprox", 3, 0.3, None)
    assert [str(one.message) for one in told] == [
        "method.name = 'fedprox': method.buffer, the table [tuning] of the study are left out, being for 'feder'"
    ]
    # a setting that is asked for in the same command is refused as ever
    with pytest.raises(BadInput, match=r"method\.buffer: no such setting"):
        load_study(file, ["method.name=fedprox", "method.buffer=8"])
    file = written("felicia", {"generator.name": "dcgan", "generator.critic_steps": 3, "generator.width": 5})
    with pytest.warns(Notice, match=r"generator\.name = 'stylegan2': generator\.critic_steps of the study is left out"):
        study = load_study(file, ["generator.name=stylegan2"])
    assert study.generator.width == 5  # both have it
    file = written("fedavg", {"sites": {"partition": "label-skew", "count": 3, "target_ks": 0.7}})
    with pytest.warns(Notice, match=r"sites\.partition = 'iid': sites\.target_ks of the study is left out"):
        assert load_study(file, ["sites.partition=iid"]).sites.count == 3


def test_settings_that_stand_at_their_default_are_left_out_without_a_word(tiny):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiny("fedprox").with_settings({"method.name": "cwt"}).method.name == "cwt"


def test_drawn_images_instead_of_real_ones_need_no_notice(tmp_path):
    (tmp_path / "study.toml").write_text(
        '[data]\nsource = "npz"\npath = "a.npz"\nsamples = 40\n[sites]\npartition = "iid"\ncount = 2\n'
        '[method]\nname = "fedavg"\n'
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_study(tmp_path / "study.toml", ["data.source=chest-phantom"]).data.samples == 40


def test_generators_change_with_the_method(written):
    file = written("fedavg")
    text = file.read_text()
    file.write_text(text[: text.index("[generator]")] + text[text.index("[evaluation]") :])
    study = load_study(file, ["method.name=cwt-replay", "generator.epochs=8"])
    assert (study.generator.name, study.generator.epochs) == ("vqvae2", 8)
    study = load_study(file, ["method.name=feder", "generator.steps=8"])
    assert (study.generator.name, study.generator.steps) == ("dcgan", 8)
    assert load_study(written("fedavg"), ["method.name=felicia"]).generator.name == "dcgan"
    chosen = written("fedavg", {"generator.name": "vqvae2", "generator.epochs": 7})
    with pytest.raises(BadInput, match=r"generator\.name: felicia trains GANs"):
        load_study(chosen, ["method.name=felicia"])
    with pytest.warns(Notice, match=r"generator\.name = 'gan': generator\.epochs of the study is left out"):
        assert load_study(chosen, ["method.name=felicia", "generator.name=gan"]).generator.name == "gan"


def test_all_tables_at_fault_are_named_at_once(written):
    file = written("fedavg")
    with pytest.raises(BadInput) as told:
        load_study(file, ["data.sze=3", "sites.parttion=iid", "method.round=2", "enigne.workers=2"])
    lines = str(told.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["enigne", "data.sze", "sites.parttion", "method.round"]


REPLAY = ["method.name=cwt-replay"]
#: for each rule: what makes its settings needless, and a value of each setting
EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "optimizer.momentum": (["optimizer.name=adam"], ["0.5"]),
    "evaluation.statistics": (["evaluation.final=validation"], ["true"]),
    "optimizer.decay": (["optimizer.schedule=cosine"], ["0.5"]),
    "optimizer.decay_every": (["optimizer.schedule=cosine"], ["5"]),
    "generator.epochs": ([], ["3"]),
    "generator.decay": ([*REPLAY, "generator.decay_every=0"], ["0.7"]),
    "generator.smoothing": (["method.name=feder", "generator.loss=hinge"], ["0.2"]),
    "generator.prior_lr": ([*REPLAY, "generator.prior_epochs=0"], ["0.1"]),
    "replay.probe": ([*REPLAY, "replay.ratio=0"], ["false"]),
    "replay.samples": (REPLAY, ["9"]),
    "replay.looks": (REPLAY, ["3"]),
    "tuning.alpha": (["method.name=feder", "tuning.on=false"], ["2"]),
    "tuning.growth": (["method.name=feder", "tuning.alpha=0"], ["3"]),
    "defence.keep": (["defence.name=prune"], ["0.2"]),
    "defence.fraction": (["defence.name=quantise"], ["0.2"]),
    "defence.bits": (["defence.name=prune"], ["4"]),
    "evaluation.metric": (["evaluation.select=last"], ["auc"]),
    "engine.gpus": ([], ["1"]),
    "engine.silence": ([], ["5"]),
    "engine.durable": (["engine.checkpoint_every=0"], ["false"]),
    "engine.quorum": (["engine.on_failure=stop"], ["0.9"]),
    "method.liars": ([], ["0.1"]),
    "federation.bits": (["federation.sum=float"], ["20"]),
    "poisoning.share": (["poisoning.sites=['north']", "poisoning.attack=scale"], ["0.5"]),
    "poisoning.patch": (["poisoning.sites=['north']", "poisoning.attack=scale"], ["3"]),
    "poisoning.factor": (["poisoning.sites=['north']", "poisoning.attack=label-flip"], ["3"]),
    "method.apart": ([], ["0.5"]),
    "method.beta2": (["method.name=fedopt", "method.server_optimizer=adagrad"], ["0.5"]),
    "method.tau": (["method.name=fedopt", "method.server_optimizer=sgd"], ["0.5"]),
    "method.sent": (["method.name=felicia"], ["16"]),
    "method.warm_up": (["method.name=felicia", "method.weight=0"], ["5"]),
    "method.encoder_site": (["method.name=fedreplay", "method.front=public"], ["random"]),
    "data.test": (["data.fold=1/5"], ["0.3"]),
    "data.validation": (["data.tuning_fold=1/5"], ["0.3"]),
    "sites.power": (["sites.partition=quantity", "sites.shares=[1,1,1,2]"], ["2"]),
}
"""Two rules share `optimizer.decay`."""
FRONT = ["model.weights=public", "model.backbone=efficientnet-lite0"]


@pytest.mark.parametrize("setting", EXAMPLES)
def test_a_setting_without_effect_is_said(setting, capsys):
    sets, (value,) = EXAMPLES[setting]
    sets = [*sets, *(FRONT if "method.front=public" in sets else []), f"{setting}={value}"]
    flags = [word for one in sets for word in ("--set", one)]
    assert run_app(["study", "check", str(default_path()), *flags]) == 0
    said = capsys.readouterr().err
    assert setting in said, said
    assert "not used, as" in said


def test_every_rule_has_an_example():
    for rule in RULES:
        if rule.settings:
            assert any(f"{rule.table}.{setting}" in EXAMPLES for setting in rule.settings), rule


def test_what_is_written_out_or_built_in_says_nothing(tiny):
    assert [*ignored(parse_study(tiny("fedavg").as_tables()))] == []
    with pytest.raises(BadInput, match=r"model\.arguments"):
        tiny("fedavg", {"model.arguments": {"spatial_dims": 2}})


@pytest.mark.parametrize(("setting", "value"), [("images", "80"), ("path", "/nowhere"), ("label", "age")])
def test_settings_of_files_are_not_for_drawn_images(setting, value, capsys):
    assert run_app(["study", "check", str(default_path()), "--set", f"data.{setting}={value}"]) == 0
    said = capsys.readouterr().err
    assert said == f"data.{setting}: not used, as data.source = 'fundus-phantom' has images of another kind\n"


@pytest.mark.parametrize(
    ("method", "brief"), [("fedavg", []), ("cwt-replay", ["generator.epochs = 8"]), ("felicia", ["method.steps = 40"])]
)
def test_the_study_of_the_package_trains_generators_briefly_and_says_so(method, brief, capsys, recwarn):
    study = load_default([f"method.name={method}"])
    said = "\n".join(str(one.message) for one in recwarn)
    assert ("trains generators briefly" in said) == bool(brief)
    assert all(words in said for words in brief)
    assert list(ignored(study)) == []


def test_what_somebody_sets_is_not_made_brief():
    assert load_default(["method.name=cwt-replay", "generator.epochs=30"]).generator.epochs == 30
    tuned = load_default(["method.name=feder", "tuning.most_steps=7"])
    assert tuned.tuning.measured == 40
    assert tuned.generator.steps is None
