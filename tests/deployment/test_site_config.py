"""What a site says about itself: where its images are, and what may leave. Mistakes are one sentence with the file."""

import hashlib
import json
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image
from pinned_keys import pin_keys
from test_registry import install

import polyclinic
from polyclinic import plugins
from polyclinic.cli import run_app
from polyclinic.data.own_images import own_data
from polyclinic.data.source import AtSites
from polyclinic.deployment import deployed_site, kits
from polyclinic.deployment.admin import Submission
from polyclinic.deployment.approval import Approvals
from polyclinic.deployment.deployed_site import FAILED, deployed_host, discreet, relay_of
from polyclinic.errors import BadInput
from polyclinic.federation.call import Call, GateRefused, GateRefusedData, Suspended
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.registry import is_restricted
from polyclinic.runner.evaluate import calibration
from polyclinic.runner.predict.predict import load_predictor
from polyclinic.study import Study

SITES = ["north", "south"]


def sent(**changes):
    """A study as a coordinator sends it."""
    tables = {
        "data": {"source": "at-sites", "dataset": "lesions", "size": 16, "classes": ["benign", "odd", "malignant"]},
        "sites": {"partition": "column", "names": SITES},
        "model": {"backbone": "lenet5"},
        "optimizer": {"batch_size": 4},
        "method": {"name": "fedavg", "rounds": 1},
        "engine": {"device": "cpu"},
    }
    for path, value in changes.items():
        table, _, name = path.partition("__")
        tables[table][name] = value
    return Study(**tables)


@pytest.fixture
def kit(tmp_path):
    """The kit of a site with its own folder of images: 20 benign and 20 malignant ones, in the site's own order."""
    rng = np.random.default_rng(0)
    for name in ("malignant", "benign"):
        folder = tmp_path / "scans" / name
        folder.mkdir(parents=True)
        for k in range(20):
            Image.fromarray(rng.integers(0, 255, (20, 20), dtype=np.uint8)).save(folder / f"{k}.png")
    local = tmp_path / "kit" / "local"
    local.mkdir(parents=True)
    (tmp_path / "server").mkdir()
    pin_keys({"north": local}, tmp_path / "server")
    (local / "site.toml").write_text('[datasets.lesions]\nsource = "folder"\npath = "../../scans"\n')
    (local / "policy.toml").write_text('kinds = ["weights", "metrics", "statistics"]\nmin_cohort = 10\n')
    return tmp_path / "kit"


def host_of(kit, study, site="north", run="first"):
    """The site's process for a study that a person there has approved."""
    approvals = Approvals(kit, site)
    approvals.request(run, study, polyclinic.__version__)
    approvals.decide(run, "approve")
    told = {"study": study.as_tables(), "run": run, "site": site, "kit": str(kit)}
    return deployed_host(json.loads(json.dumps(told)))


def train(host, **arguments):
    weights = host.spec.first_weights("north")
    return host.handle(Call("north", "train", 1, {"weights": Parcel("weights", weights)}, arguments))


def test_a_site_opens_its_own_images_and_numbers_classes_as_the_study_does(kit, tmp_path):
    data = own_data(kit / "local" / "site.toml", sent().data, "north", tmp_path / "cache")
    counts = {split: len(getattr(data, split)) for split in ("train", "validation", "test")}
    assert sum(counts.values()) == 40
    assert set(data.train.labels.tolist()) == {0, 2}  # benign and malignant; this site has nothing odd


def test_a_deployed_site_works_and_keeps_its_ledger_to_itself(kit):
    reply = train(host_of(kit, sent()))
    assert reply.parcel("weights").metadata["samples"] > 20
    assert (kit / "runs" / "first" / "ledger" / "north.jsonl").exists()
    assert (kit / "runs" / "first" / "sites" / "north" / "noise.key").exists()


def test_studies_do_not_fill_the_disk_with_prepared_images(kit, monkeypatch):
    monkeypatch.setattr(deployed_site, "MOST_CACHED", 2)
    for number, size in enumerate((16, 20, 24, 28)):
        host_of(kit, sent(data__size=size), run=f"run{number}")
    left = [path for path in (kit / "cache" / "parts").iterdir() if path.is_dir()]
    assert len(left) == 2
    train(host_of(kit, sent(data__size=16), run="run0"))  # and what went is made again


@pytest.mark.parametrize("method", ["fedavg", "standalone"])
def test_the_finished_model_is_the_sites_to_use(kit, method, monkeypatch):
    """The common one, or its own; images are then prepared as the site's were, which the coordinator does not know, and
    probabilities calibrated on its own validation images, of which nothing leaves."""
    monkeypatch.setattr(calibration, "LEAST_CASES", 2)
    path = kit / "local" / "site.toml"
    path.write_text(path.read_text() + 'shape = "pad"\n')
    host = host_of(kit, sent(method__name=method))
    common = {"weights": Parcel("weights", host.spec.first_weights("north"))} if method == "fedavg" else {}
    host.handle(Call("north", "train", 1, common))
    kept = host.resident()[0].state.group("local")
    own = "none" if method == "fedavg" else "current"
    assert host.handle(Call("north", "keep_model", 1, common, {"own": own})).parcels == ()

    predictor = load_predictor(kit / "runs" / "first")
    data = own_data(kit / "local" / "site.toml", sent().data, "north", kit / "cache")
    assert predictor.calibration is not None
    assert predictor.calibration.cases == len(data.validation)
    assert (predictor.card.shape, predictor.card.classes) == ("pad", ("benign", "odd", "malignant"))
    expected = common["weights"].tensors if common else kept
    assert all(torch.equal(tensor, expected[name]) for name, tensor in predictor.model.networks[0].state_dict().items())


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ('kinds = ["metrics"]', "the site's policy does not let this kind out"),
        ("min_cohort = 1000", "fewer patients are behind it than the 1000 that the site's policy wants"),
        ("max_bytes = 1000", "more bytes would have left this site than the 1000 that its policy allows"),
        ("max_epsilon = 1.0", "differential privacy does not cover this"),
    ],
)
def test_the_sites_policy_holds_whatever_the_coordinator_asks(kit, policy, reason):
    """The study's own table [policy] lets everything out; the site's file is what counts."""
    (kit / "local" / "policy.toml").write_text(policy)
    with pytest.raises(GateRefused, match=reason):
        train(host_of(kit, sent()))


def test_a_byte_budget_holds_over_runs(kit):
    size = len(train(host_of(kit, sent())).parcels[0].encoded)
    (kit / "local" / "policy.toml").write_text(f"max_bytes = {size + 100}\n")
    with pytest.raises(GateRefused, match="bytes would have left"):
        train(host_of(kit, sent(), run="second"))


def test_pooling_images_is_refused_at_a_real_site(kit):
    study = sent(method__name="centralized")
    (kit / "local" / "policy.toml").write_text('kinds = ["real-images", "labels", "weights", "metrics"]\n')
    host = host_of(kit, study)
    with pytest.raises(GateRefused, match="simulation only"):
        host.handle(Call("north", "give_all", 0, {}, {}))


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("site.toml", "[datasets.lesion]\nsource = 'folder'", "no table [datasets.lesions] (did you mean 'lesion'?)"),
        ("site.toml", "[datasets.lesions]\nsource = 'foldr'", "datasets.lesions.source: no such choice: 'foldr'"),
        ("site.toml", "[datasets.lesions]\nsource = 'folder'\npath = 'gone'", "data.path: there is nothing at"),
        ("site.toml", "[datasets.lesions\n", "site.toml: cannot be read"),
        ("site.toml", None, "site.toml: no such file"),
        (
            "policy.toml",
            'kinds = ["wheights"]',
            "policy.toml: kinds.0: no such choice: 'wheights' (did you mean",
        ),
        ("policy.toml", "deployed = false", "'deployed' is not a setting"),
        ("policy.toml", "min_cohorts = 3", "policy.toml: min_cohorts: no such setting (did you mean 'min_cohort'?)"),
    ],
)
def test_mistakes_in_a_sites_files_are_named(kit, file, text, words):
    path = kit / "local" / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(BadInput) as error:
        host_of(kit, sent())
    assert words in str(error.value)


def test_a_site_tells_the_coordinator_what_its_gate_refused_and_nothing_about_its_files(kit):
    tell = discreet(str(kit))
    assert tell(GateRefused("the policy says no")) == "the policy says no"
    secret = [FileNotFoundError("/data/thorax/patient_0815.dcm"), GateRefusedData("NaN"), Suspended("until released")]
    assert {tell(error) for error in secret} == {FAILED}
    assert "patient_0815" in (kit / "failures.log").read_text()
    assert (kit / "failures.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("data", "where", "words"),
    [
        ({"source": "fundus-phantom", "samples": 40, "size": 28}, {}, "must be 'at-sites'"),
        (None, {"site": "west"}, "is not for 'west'"),
        (None, {"run": "../../elsewhere"}, "cannot be the name"),
    ],
)
def test_studies_that_are_not_for_this_site_are_refused(kit, data, where, words):
    study = Study(**{**sent().as_tables(), "data": data}) if data else sent()
    with pytest.raises(BadInput, match=words):
        host_of(kit, study, **where)


def test_versions_plugins_and_images_that_are_elsewhere(tmp_path):
    order = {"version": "0.0.1", "study": sent().as_tables(), "run": "a", "resume": False}
    with pytest.raises(BadInput, match=f"this site has polyclinic {polyclinic.__version__} and the coordinator 0.0.1"):
        relay_of(order, "north", None)
    study, _ = study_with_a_plugin(tmp_path)
    assert Submission(study, "first").job_spec()["study"]["plugins"] == ["mine.py"]
    with pytest.raises(BadInput, match="polyclinic deploy"):
        AtSites().load()


PLUGIN = """
from typing import Literal
from polyclinic import FedAvg

class Mine(FedAvg):
    name: Literal["mine"] = "mine"

METHODS = {"mine": Mine}
"""


def list_plugins(kit, *names):
    file = kit / "local" / "site.toml"
    file.write_text(f"plugins = {list(names)}\n" + file.read_text())


def study_with_a_plugin(tmp_path):
    """A study whose own plug-in leaves a mark where it is loaded, as a coordinator would send it."""
    mark, file = tmp_path / "loaded", tmp_path / "mine.py"
    file.write_text(f"open({str(mark)!r}, 'a').write('x')\n{PLUGIN}")
    tables = sent().as_tables() | {"plugins": [str(file)], "method": {"name": "mine", "rounds": 1}}
    study = Study(**tables)
    assert mark.read_text() == "x"
    plugins.forget()
    return study, mark


def test_a_study_brings_no_code_to_a_site(kit, tmp_path):
    study, mark = study_with_a_plugin(tmp_path)
    words = (
        r"^method\.name: no such choice: 'mine'.* at this site; the study names the plug-in mine\.py, and a study "
        r"brings no code: install what it needs here and list it as plugins in local/site\.toml$"
    )
    with pytest.raises(BadInput, match=words):
        host_of(kit, study)
    assert mark.read_text() == "x"


def test_a_site_takes_part_with_the_plugin_that_its_people_listed(kit, tmp_path):
    study, mark = study_with_a_plugin(tmp_path)
    (kit / "local" / "ours.py").write_text(PLUGIN)
    list_plugins(kit, "ours.py")
    host = host_of(kit, study)
    assert host.spec.method.name == "mine"
    assert mark.read_text() == "x"
    assert "plugins" not in (host.spec.folder / "study.toml").read_text()  # no command at the site may load them later
    sha256 = hashlib.sha256((kit / "local" / "ours.py").read_bytes()).hexdigest()
    kept = json.loads((host.spec.folder / "plugins.json").read_text())
    assert kept == {"plugins": {}, "installed": {}, "listed": {"ours.py": sha256}}


def test_an_installed_package_counts_at_a_site_only_if_it_is_listed(kit, tmp_path, monkeypatch):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "ours_installed.py").write_text(PLUGIN.partition("METHODS")[0])
    install(packages, "ours_installed", {"polyclinic.methods": "mine = ours_installed:Mine"})
    monkeypatch.syspath_prepend(packages)
    study = Study(**sent().as_tables() | {"method": {"name": "mine", "rounds": 1}})
    with pytest.raises(BadInput, match=r"'mine'.* at this site; a study brings no code"):
        host_of(kit, study)
    plugins.forget()
    list_plugins(kit, "ours_installed")
    host = host_of(kit, study)
    assert host.spec.method.name == "mine"
    [(name, sha256)] = json.loads((host.spec.folder / "plugins.json").read_text())["installed"].items()
    assert (name, len(sha256)) == ("ours_installed 0.1", 64)


def test_an_importable_network_must_be_listed_at_a_site(kit):
    """Even MONAI's: arguments of some networks load files or download weights."""
    network = {"backbone": "monai.networks.nets:Classifier", "arguments": {"channels": [4], "strides": [2]}}
    study = Study(**sent().as_tables() | {"model": network})
    words = r"Classifier' is code that this site has not listed; .* add 'monai\.networks\.nets' to plugins in local"
    with pytest.raises(BadInput, match=words):
        host_of(kit, study)
    plugins.forget()
    list_plugins(kit, "monai.networks.nets")
    assert host_of(kit, study).spec.trainer.model.name == network["backbone"]


def test_mistakes_in_a_sites_list_name_its_file(kit):
    list_plugins(kit, "nowhere.py")
    with pytest.raises(BadInput, match=r"site\.toml: plugins: .*nowhere\.py cannot be read"):
        host_of(kit, sent())


def test_a_new_kind_leaves_a_site_only_where_its_policy_names_it(kit):
    code = "from polyclinic import Kind\nclass Means(Kind):\n    'Means.'\nKINDS = {'means': Means}\n"
    (kit / "local" / "ours.py").write_text(code)
    list_plugins(kit, "ours.py")
    (kit / "local" / "policy.toml").write_text("min_cohort = 10\n")
    assert "means" not in host_of(kit, sent()).spec.policy.kinds
    (kit / "local" / "policy.toml").write_text('kinds = ["weights", "means"]\n')
    assert "means" in host_of(kit, sent()).spec.policy.kinds


@pytest.mark.parametrize("age", ["new", "older"])
def test_commands_in_the_servers_kit_load_no_plugin_of_a_study(tmp_path, capsys, age):
    """The server's kit has a site.toml of its own; one from before there was any is a kit as well."""
    server = tmp_path / "server"
    (server / "local").mkdir(parents=True)
    (server / "startup").mkdir()
    (server / "local" / "resources.json.default").write_text('{"servers": [{}]}')
    kits._write_server(server)
    listed = tomllib.loads((server / "local" / "site.toml").read_text())
    assert listed == {}
    assert "# plugins = " in (server / "local" / "site.toml").read_text()
    if age == "older":
        (server / "local" / "site.toml").unlink()
    mark, run = tmp_path / "mark", server / "runs" / "first"
    run.mkdir(parents=True)
    (tmp_path / "theirs.py").write_text(f"open({str(mark)!r}, 'a').write('x')\nMETHODS = {{}}\n")
    (run / "study.toml").write_text(f'plugins = ["{tmp_path / "theirs.py"}"]\n' + sent(method__name="cwt").to_toml())
    for command in (["audit", str(run)], ["forgetting", str(run)], ["run", "--resume", "--out", str(run)]):
        assert run_app(command) == 2
    assert run_app(["study", "check", str(run / "study.toml")]) == 0
    assert not mark.exists()
    assert not is_restricted()  # a kit's restriction ends with the command
    capsys.readouterr()
    assert run_app(["audit", str(run)]) == 2
    assert "has no ledger of a site; each site audits its own part" in capsys.readouterr().err


def test_a_site_may_call_classes_otherwise(kit):
    """Its people say what their names are in the study, and leave a class out."""
    before = host_of(kit, sent()).sites.get("north").data
    file = kit / "local" / "site.toml"
    plain = file.read_text()
    classes = ["harmless", "dangerous"]
    file.write_text(plain + 'label_map = { benign = "harmless", malignant = "dangerous" }\n')
    mapped = host_of(kit, sent(data__classes=classes), run="mapped").sites.get("north").data
    assert len(mapped.train) == len(before.train)
    assert sorted(set(mapped.train.labels.tolist())) == [0, 1]
    file.write_text(plain + 'label_map = { benign = "harmless", malignant = "-" }\n')
    left = host_of(kit, sent(data__classes=classes), run="left").sites.get("north").data
    assert set(left.train.labels.tolist()) == {0}
    assert 0 < len(left.train) < len(mapped.train)
    for text, words in (
        ('label_map = { bening = "harmless" }', "the site has no class 'bening' (did you mean 'benign'?)"),
        ("label_map = 3", "write the site's class and the study's"),
        ('label_map = { benign = "nothing" }', "say what it is in the study"),
    ):
        file.write_text(f"{plain}{text}\n")
        with pytest.raises(BadInput) as error:
            host_of(kit, sent(data__classes=classes), run="wrong")
        assert words in str(error.value)


def test_a_site_tells_statistics_where_the_study_asks_for_them(kit):
    """Once, of the model of the end; in a study that does not ask, the operation is not there."""
    (kit / "local" / "policy.toml").write_text('kinds = ["weights", "metrics", "statistics"]\nmin_cohort = 4\n')
    study = sent(data__classes=["benign", "malignant"])
    asked = study.with_settings({"evaluation.statistics": True})
    host = host_of(kit, asked, run="asked")
    weights = Parcel("weights", host.spec.first_weights("north"))
    reply = host.handle(Call("north", "give_statistics", 1, {"weights": weights}))
    assert set(reply.statistics) >= {"bins", "right", "classes told"}
    plain = host_of(kit, study, run="plain")
    with pytest.raises(LookupError, match="has no operation 'give_statistics'"):
        plain.handle(Call("north", "give_statistics", 1, {"weights": weights}))
