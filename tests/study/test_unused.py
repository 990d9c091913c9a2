"""A setting that has no effect is a notice or an error: every setting of every table is read always, or has a rule."""

from __future__ import annotations

import pytest

from polyclinic.cli import run_app
from polyclinic.errors import BadInput
from polyclinic.study.reading import default_path, load_default
from polyclinic.study.study import PLAIN, VARIANTS, parse_study
from polyclinic.study.unused import RULES, ignored

REPLAY = ["method.name=cwt-replay"]
#: by table: settings that are read always, or whose needless use is refused (with the test that shows it)
ALWAYS = {
    "model": "backbone backbones arguments weights weights_sha256 freeze input_size norm cut batch_norm",
    "optimizer": "name lr weight_decay batch_size batch_sizes schedule warmup keep_state augment balanced_batches",
    "replay": "ratio space",
    "tuning": "preset on",
    "privacy": "on cover noise noise_form clip unit delta target_epsilon clipping accountant score_noise",
    "defence": "name",
    "audit": "keep_parcels threat_model gradient_inversion secure_sum defences own_images",
    "evaluation": "every select final handovers",
    "engine": """name workers threads device precision graphs stacked reproducible deadline on_failure checkpoint_every
        wire""",
    "policy": "kinds incoming shares",
    "federation": "sum liars threshold label_sets",
    "poisoning": "sites attack",
    "logging": "to",
    "generator": "name batch_size",
    "data": "source size validation fold test_per_class test_total_per_class acquisition seed",
    "sites": "partition names count",
    "task": "name label_smoothing criterion surface_distances",
    "method": "name rounds fraction patience local_steps local_epochs weighting aggregation server_lr beta1",
}
#: settings that one variant adds for itself, and reads whenever it is chosen
OWN = {
    "data": """samples grades reader_error scanner_b slices balanced path origin shape channels patient window
        label_range unit keep merge columns rename per_class image label site split mask subgroup images labels group
        masks ids eyes graham sex step institutions finding against view subset dataset classes
        max_pixels allow_outside class_folders""",
    "sites": "target_ks alpha min_size shares rename mixing per_class subgroup share others",
    "method": """images reuse_generators steps batch mu beta server_optimizer option temperature alpha strength
        personal_after head_epochs tuning_steps noise numbers whitening phantoms bias average share weighted_loss front
        flips latents buffer real_share mode turn_takes weight first_weights schedule wire shared_noise share_images
        learner_steps weigh_every margin release penalty rule components iterations passes worth""",
}
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
    "sites.power": (["sites.partition=quantity", "sites.shares=[1,1,1,2]"], ["2"]),
}
"""Two rules share `optimizer.decay`."""
FRONT = ["model.weights=public", "model.backbone=efficientnet-lite0"]


def all_settings() -> dict[str, set[str]]:
    """Every setting that some study can have, by table."""
    found = {table: set(kind.model_fields) for table, kind in PLAIN.items()}
    for table, (registry, _) in VARIANTS.items():
        kinds = [registry[name] for name in registry.builtin]  # type: ignore[attr-defined]
        found[table] = {setting for kind in kinds for setting in kind.model_fields}
    return found


def with_rule(table: str) -> set[str]:
    return {setting for rule in RULES if rule.table == table for setting in rule.settings}


@pytest.mark.slow  # it asks whoever adds a setting to decide; it shall not stand in the way of the change itself
@pytest.mark.parametrize("table", [*PLAIN, *VARIANTS])
def test_every_setting_is_always_read_or_has_a_rule(table):
    known = {*ALWAYS.get(table, "").split(), *OWN.get(table, "").split(), *with_rule(table)}
    if any(rule.table == table and not rule.settings for rule in RULES):
        return  # one rule for all settings of the table
    assert all_settings()[table] == known, "a new setting: say in RULES when it is not read, or add it to ALWAYS here"


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


def test_a_study_with_every_setting_written_out_says_nothing(tiny):
    assert [*ignored(parse_study(tiny("fedavg").as_tables()))] == []


@pytest.mark.parametrize(("setting", "value"), [("images", "80"), ("path", "/nowhere"), ("label", "age")])
def test_settings_of_files_are_not_for_drawn_images(setting, value, capsys):
    assert run_app(["study", "check", str(default_path()), "--set", f"data.{setting}={value}"]) == 0
    said = capsys.readouterr().err
    assert said == f"data.{setting}: not used, as data.source = 'fundus-phantom' has images of another kind\n"


def test_networks_that_are_built_in_refuse_arguments(tiny):
    with pytest.raises(BadInput, match=r"model\.arguments"):
        tiny("fedavg", {"model.arguments": {"spatial_dims": 2}})


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
