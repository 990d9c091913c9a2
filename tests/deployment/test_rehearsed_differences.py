"""Rehearsals: how a deployed run differs from a simulated one, and questions to deployed sites."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from processes import free_port
from rehearsals import rehearsed

from polyclinic.cli import run_app
from polyclinic.data.own_images import own_data
from polyclinic.deployment.approval import TRUSTED_WEIGHTS
from polyclinic.federation.ledger.ledger import verify
from polyclinic.files import write_tensors
from polyclinic.models import read_weights
from polyclinic.runner.predict.predict import load_predictor
from polyclinic.runner.run.run import run
from polyclinic.study import load_study

pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CLASSES = ("clear", "mild", "severe")
#: what the people of each site call the classes, and one that no study knows
NAMES = {"north": CLASSES, "east": CLASSES, "south": ("healthy", "mild", "bad", "unclear")}
SOUTH = 'label_map = { healthy = "clear", bad = "severe", unclear = "-" }\n'
STUDY = """seed = 0
[data]
source = "at-sites"
dataset = "scans"
size = 16
classes = ["clear", "mild", "severe"]
[sites]
partition = "column"
names = ["north", "east", "south"]
[model]
backbone = "lenet5"
[optimizer]
lr = 0.05
batch_size = 8
[method]
name = "fedavg"
rounds = 2
local_steps = 30
[federation]
label_sets = { east = ["clear", "mild"] }
[evaluation]
every = 0
select = "last"
[engine]
silence = 600.0
"""
ANALYTIC = {
    '[method]\nname = "fedavg"\nrounds = 2\nlocal_steps = 30\n': '[method]\nname = "analytic"\nnumbers = 6\n',
    'backbone = "lenet5"': 'backbone = "efficientnet-lite0-1024"\ninput_size = 32',
    "[optimizer]\nlr = 0.05\nbatch_size = 8\n": "",
}


def draw_images(site, file, count=240):
    """Grey images, brighter in a higher class, of women and men."""
    rng = np.random.default_rng([len(site), *site.encode()])
    names = NAMES[site]
    labels = np.arange(count) % len(names)
    images = np.clip(50 + 50 * labels[:, None, None] + 12 * rng.standard_normal((count, 16, 16)), 0, 255)
    sexes = rng.choice(["f", "m"], count)
    np.savez(file, images=images.astype(np.uint8), labels=np.array(names)[labels], sex=sexes)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    file = tmp_path_factory.mktemp("study") / "study.toml"
    file.write_text(STUDY)
    return file


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, study):
    out = tmp_path_factory.mktemp("differences") / "deployment"
    assert run_app(["deploy", "init", str(study), "--out", str(out), "--port", str(free_port())]) == 0
    for kit in (out / "sites").iterdir():
        draw_images(kit.name, kit / "scans.npz")
        table = '[datasets.scans]\nsource = "npz"\npath = "../scans.npz"\ncolumns = ["sex"]\n'
        (kit / "local" / "site.toml").write_text(table + (SOUTH if kit.name == "south" else ""))
        kinds = ["weights", "statistics", "metrics", "keys"]
        policy = f'kinds = {json.dumps(kinds)}\nmin_cohort = 5\nscores = "fine"\n[incoming]\non = false\n'
        (kit / "local" / "policy.toml").write_text(policy + "[approve]\nevery = true\n")
    with rehearsed(out) as running:
        yield running


@pytest.fixture(scope="module")
def trained(deployment, study, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    asked = ["deploy", "submit", str(study), "-d", str(deployment), "--name", "sets", "--within", "900"]
    assert run_app([*asked, "--out", str(out)]) == 0
    return out


def images_of(deployment, study, site, cache):
    """The site's test images, labels as the study numbers them, and the sex of each."""
    kit = deployment / "sites" / site
    data = own_data(kit / "local" / "site.toml", load_study(study).data, site, cache)
    known = np.asarray(data.test.labels) != 2 if site == "east" else np.ones(len(data.test), bool)
    columns = np.asarray(data.test.columns)[known, 0]
    return np.asarray(data.test.images)[known], np.asarray(data.test.labels)[known], columns


def test_sites_with_different_label_sets_and_names_train_one_model(deployment, study, trained, tmp_path):
    result, predictor = json.loads((trained / "result.json").read_text()), load_predictor(trained)
    for site in NAMES:
        images, labels, _ = images_of(deployment, study, site, tmp_path)
        assert set(labels.tolist()) == ({0, 1} if site == "east" else {0, 1, 2})
        right = (predictor.outputs(images).argmax(1).numpy() == labels).mean()
        assert result["metrics"]["per_site"][site]["accuracy"] == pytest.approx(right, abs=1e-6)


def test_a_method_that_would_unlearn_classes_is_refused(deployment, study, capsys):
    asked = ["deploy", "submit", str(study), "-d", str(deployment), "--set", 'method.name="scaffold"']
    assert run_app(asked) == 2
    assert "makes the common model unlearn it; choose fedavg" in " ".join(capsys.readouterr().err.split())


def test_two_models_are_compared_by_sub_groups(deployment, study, trained, tmp_path):
    model, other = trained / "model.safetensors", tmp_path / "other.safetensors"
    tensors = dict(read_weights(model).tensors)
    write_tensors(other, {name: -tensor if name == "fc3.weight" else tensor for name, tensor in tensors.items()})
    for kit in (deployment / "sites").iterdir():
        (kit / TRUSTED_WEIGHTS).mkdir(exist_ok=True)
        for file in (model, other):
            shutil.copy(file, kit / TRUSTED_WEIGHTS)
    asked = ["deploy", "evaluate", str(model), "--study", str(study), "-d", str(deployment), "--within", "900"]
    asked += ["--by", "sex", "--against", str(other), "--out", str(tmp_path / "run")]
    assert run_app(asked) == 0
    told = json.loads((tmp_path / "run" / "result.json").read_text())["safe_statistics"]
    predictor = load_predictor(trained)
    assert told["notes"] == ["site 'east' has no test image of severe, or too few"]
    for site, figures in told["per_site"].items():
        images, labels, sexes = images_of(deployment, study, site, tmp_path)
        right = predictor.outputs(images).argmax(1).numpy() == labels
        for sex in ("f", "m"):
            mine = sexes == sex
            if f"sex = {sex}: accuracy" in figures:  # nothing of fewer than ten patients, nor of those who follow
                assert figures[f"sex = {sex}: accuracy"][0] == pytest.approx(right[mine].mean(), abs=1 / mine.sum())
        assert figures["accuracy"][0] == pytest.approx(right.mean(), abs=1 / len(right))
        assert figures["change of auc"][0] > 0.3  # the other one ranks images the other way round
        assert set(figures) & {"sex = f: accuracy", "sex = m: accuracy"}
    assert told["p_of_change"]["change of auc"] < 0.05
    for ledger in deployment.glob("sites/*/runs/evaluate/ledger/*.jsonl"):
        assert {line["kind"] for line in verify(ledger)} <= {"statistics", "metrics"}


def test_what_each_site_adds_follows_from_open_sums(deployment, study, tmp_path, capsys):
    text = study.read_text()
    for before, after in ANALYTIC.items():
        assert before in text
        text = text.replace(before, after)
    file = tmp_path / "analytic.toml"
    file.write_text(text)
    asked = ["deploy", "worth", str(file), "-d", str(deployment), "--within", "900"]
    assert run_app([*asked, "--set", 'federation.sum="secure"']) == 2
    assert "federation.sum: the worth of a site" in capsys.readouterr().err
    assert run_app([*asked, "--out", str(tmp_path / "run")]) == 0
    assert "what each site adds" in capsys.readouterr().out
    told = json.loads((tmp_path / "run" / "result.json").read_text())["worth"]
    assert set(told["sites"]) == set(NAMES)
    added = sum(one["shapley"] for one in told["sites"].values())
    assert added == pytest.approx(told["all"] - told["none"])
    assert told["all"] > told["none"]
    for ledger in deployment.glob("sites/*/runs/worth/ledger/*.jsonl"):
        asked_for = [line["operation"] for line in verify(ledger) if line["kind"] == "statistics"]
        assert asked_for == ["give_sums", "give_held_out_sums"]


pytest.importorskip("nvflare", reason="the extra [nvflare] is not installed")


EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluate.toml"
SHORT = {"method.rounds": 2, "evaluation.every": 0, "evaluation.select": "last", "engine.silence": 600.0}


def flags(settings):
    return [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    out = tmp_path_factory.mktemp("questions") / "deployment"
    assert run_app(["deploy", "init", str(EXAMPLE), "--out", str(out), "--port", str(free_port())]) == 0
    with rehearsed(out) as running:
        yield running


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """The same study in one process, with the whole numbers of the secure sum."""
    study = load_study(EXAMPLE).with_settings({**SHORT, "federation.sum": "integer"})
    return run(study, tmp_path_factory.mktemp("simulated") / "run")


@pytest.fixture(scope="module")
def submitted(rehearsal, tmp_path_factory):
    out = tmp_path_factory.mktemp("submitted") / "run"
    asked = ["deploy", "submit", str(EXAMPLE), "-d", str(rehearsal), "--name", "secret", "--within", "900"]
    assert run_app([*asked, *flags({**SHORT, "federation.sum": "secure"}), "--out", str(out)]) == 0
    return out


def test_statistics_of_a_secure_run_lie_near_those_of_a_simulation(rehearsal, simulated, submitted):
    told = json.loads((submitted / "result.json").read_text())
    assert told["weights_sha256"] == simulated.values["weights_sha256"]
    fine, coarse = simulated.metrics["intervals"]["per_site"], told["safe_statistics"]["per_site"]
    assert set(coarse) == set(fine) == {"north", "east", "south"}
    gaps = {}
    for site, metrics in coarse.items():
        for name in ("accuracy", "auc", "brier"):
            value, low, high, _ = metrics[name]
            exact = fine[site][name]
            gaps.setdefault(name, []).append(abs(value - exact["value"]))
            gaps.setdefault(f"ends of {name}", []).append(max(abs(low - exact["low"]), abs(high - exact["high"])))
        assert "auc by DeLong" in metrics
        assert "change of auc by DeLong" in metrics
    print({name: [round(one, 4) for one in some] for name, some in gaps.items()})
    assert max(max(gaps[name]) for name in ("accuracy", "brier")) <= 0.05  # a step of one of some 27 patients
    assert max(gaps["auc"]) <= 0.25  # half a step of one of the few patients of the smallest class
    for ledger in rehearsal.glob("sites/*/runs/secret/ledger/*.jsonl"):
        kinds = [line["kind"] for line in verify(ledger)]
        assert {"masked", "shares", "statistics"} <= set(kinds)
        assert not {"weights", "metrics"} & set(kinds)


def test_figures_of_a_secure_run_are_those_of_a_simulation_within_their_stated_error(simulated, submitted):
    told, exact = json.loads((submitted / "result.json").read_text())["metrics"], simulated.metrics["test"]
    assert told["per_site"] == told["mean"] == {}
    stated = told["rounding"]["pooled"]
    assert stated.keys() == told["test"].keys() == exact.keys()
    for name, ends in stated.items():
        assert ends["low"] - 1e-6 <= exact[name] <= ends["high"] + 1e-6, name
        assert ends["low"] <= told["test"][name] <= ends["high"], name
        assert name == "auc" or ends["low"] == ends["high"]


def test_sites_tell_counts_and_no_secret_of_a_sum_lies_in_their_folder(rehearsal, submitted, tmp_path, capsys):
    for state in rehearsal.glob("sites/*/runs/secret/sites/*/state-*.safetensors"):
        assert b'"mask_key"' not in state.read_bytes()
        assert b'"own_seed"' not in state.read_bytes()
    picture = tmp_path / "sites.png"
    asked = ["deploy", "inspect", str(EXAMPLE), "-d", str(rehearsal), "--within", "900", "--picture", str(picture)]
    assert run_app([*asked, *flags({"engine.silence": 600.0})]) == 0
    said = capsys.readouterr().out
    assert "distance of" in said
    assert "KS of the labels" in said
    assert picture.stat().st_size > 5000


def test_only_totals_come_out_of_a_secure_sum(rehearsal, capsys):
    settings = {"engine.silence": 600.0, "federation.sum": "secure"}
    asked = ["deploy", "inspect", str(EXAMPLE), "-d", str(rehearsal), "--name", "totals", "--within", "900"]
    assert run_app([*asked, *flags(settings)]) == 0
    said = capsys.readouterr().out
    assert "How the sites differ is not known from totals" in " ".join(said.split())
    for ledger in rehearsal.glob("sites/*/runs/totals/ledger/*.jsonl"):
        kinds = {line["kind"] for line in verify(ledger)}
        assert "masked" in kinds
        assert "statistics" not in kinds


def test_sites_score_a_model(rehearsal, simulated, tmp_path, capsys):
    model = simulated.folder / "model.safetensors"
    for kit in (rehearsal / "sites").iterdir():
        (kit / TRUSTED_WEIGHTS).mkdir(exist_ok=True)
        shutil.copy(model, kit / TRUSTED_WEIGHTS)
    asked = ["deploy", "evaluate", str(model), "--study", str(EXAMPLE), "-d", str(rehearsal), "--within", "900"]
    assert run_app([*asked, *flags({"engine.silence": 600.0}), "--out", str(tmp_path / "run")]) == 0
    assert "warning" not in capsys.readouterr().err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["metrics"]["test"]["accuracy"] == pytest.approx(simulated.metrics["test"]["accuracy"], abs=1e-6)
    assert set(found["safe_statistics"]["per_site"]) == {"north", "east", "south"}
