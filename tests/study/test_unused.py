"""A setting that has no effect is a notice or an error: every setting of every table is read always, or has a rule."""

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.study.reading import default_path, load_default
from polyclinic.study.study import parse_study
from polyclinic.study.unused import RULES, ignored

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
    "federation.bits": ([], ["20"]),
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
