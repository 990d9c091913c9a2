"""Patients who leave: nothing of them is in the new run, to the last bit, and the certificate can be checked."""

import csv
import json
import shutil
import stat

import numpy as np
import pytest
import torch
import typer.testing
from PIL import Image

from polyclinic.audits.open_run import open_run
from polyclinic.audits.patients import names_at_sites
from polyclinic.audits.references import Pool
from polyclinic.audits.withdrawal import CERTIFICATE, Withdrawal, check_certificate, runs_that_knew
from polyclinic.cli.app import app
from polyclinic.data.opt_out import names_in
from polyclinic.data.own_images import own_data
from polyclinic.data.source import AtSites
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.methods.analytic import solve
from polyclinic.methods.shared.one_round import Moments, moments
from polyclinic.run_folder import read_result
from polyclinic.runner.run.run import run

SPLITS = ("train", "train", "train", "test", "validation")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A table of 40 pictures of 20 patients at two sites, and one without those of p3 and p5."""
    folder, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    rows = []
    for number in range(40):
        Image.fromarray(rng.integers(0, 255, (28, 28), np.uint8)).save(folder / f"{number}.png")
        patient = number // 2
        rows.append([f"{number}.png", "ab"[number % 2], f"p{patient}", "xy"[patient % 2], SPLITS[patient % 5]])
    for name, kept in (("all", rows), ("without", [row for row in rows if row[2] not in ("p3", "p5")])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["path", "label", "patient", "site", "split"], *kept])
    (folder / "leaving.txt").write_text("# who left\np3\np5  # asked in March\n")
    return folder


@pytest.fixture
def study_of(tiny, pictures):
    def make(table, method="fedavg", **settings):
        changes = {
            "data": {"source": "csv", "path": str(pictures / f"{table}.csv"), "size": 28},
            "sites": {"partition": "column"}, "optimizer.batch_size": 4,
        }  # fmt: skip
        return tiny(method, changes | settings.pop("changes", {}), **{"rounds": 2, **settings})

    return make


@pytest.mark.parametrize(("method", "changes"), [
    ("fedavg", {}),
    ("analytic", {"model.backbone": "efficientnet-lite0-1280", "model.input_size": 32}),
])  # fmt: skip
def test_the_new_run_is_one_that_never_saw_them(study_of, pictures, tmp_path, method, changes):
    settings = {"numbers": 4} if method == "analytic" else {}
    run(study_of("all", method, changes=changes, **settings), tmp_path / "run")
    never = run(study_of("without", method, changes=changes, **settings), tmp_path / "never").values
    leaving = Withdrawal(tmp_path / "run", pictures / "leaving.txt")
    assert leaving.places == {"y": {"train": 2, "validation": 0, "test": 2}}
    assert ("sums of one round" if method == "analytic" else "2 rounds") in " ".join(leaving.cost())
    found = leaving.carry_out(tmp_path / "new")
    after = read_result(tmp_path / "new")
    assert after["weights_sha256"] == found["after"]["weights_sha256"] == never["weights_sha256"]
    assert after["metrics"] == never["metrics"]
    assert after["weights_sha256"] != found["before"]["weights_sha256"]


def test_a_certificate_names_nobody_and_every_change_of_it_or_of_a_run_is_found(study_of, pictures, tmp_path):
    run(study_of("all"), tmp_path / "run")
    shown = typer.testing.CliRunner().invoke(
        app, ["withdraw", str(tmp_path / "run"), "--patients", str(pictures / "leaving.txt")]
    )
    assert shown.exit_code == 0, shown.output
    before, after = tmp_path / "run", tmp_path / "run-without"
    text = (after / CERTIFICATE).read_text()
    assert "p3" not in text + shown.output
    kept = tmp_path / "run-without.opt-out.txt"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "p5" in kept.read_text()
    assert len(check_certificate(before, after, pictures / "leaving.txt")) == 3
    knew = json.loads(text)["knew"]
    assert {one["site"] for one in knew["parcels"]} == {"y"}
    assert knew["first_round"] == 1
    content = json.loads(text)
    for place, value in (("patients", 1), ("sites", []), ("exact", "nearly")):
        (after / CERTIFICATE).write_text(json.dumps({**content, place: value}))
        with pytest.raises(WorkFailed, match="was changed"):
            check_certificate(before, after)
    (after / CERTIFICATE).write_text(text)
    model = (after / "model.safetensors").read_bytes()
    (after / "model.safetensors").write_bytes((before / "model.safetensors").read_bytes())
    with pytest.raises(WorkFailed, match="model_sha256 is not what"):
        check_certificate(before, after)
    (after / "model.safetensors").write_bytes(model)
    (tmp_path / "nobody.txt").write_text("# nobody\n")
    with pytest.raises(BadInput, match="names nobody"):
        check_certificate(before, after, tmp_path / "nobody.txt")
    assert list(runs_that_knew(before, "p3")) == ["run"]
    assert not runs_that_knew(after, "p3")
    with pytest.raises(BadInput, match="all of them had left"):
        Withdrawal(after, pictures / "leaving.txt")
    kept.write_text(kept.read_text().replace("p5\n", ""))
    with pytest.raises(WorkFailed, match="not the one that was certified"):
        check_certificate(before, after, pictures / "leaving.txt")


def test_who_knew_a_patient_and_lists_call_patients_as_the_site_does(study_of, tmp_path):
    run(study_of("all"), tmp_path / "run")
    assembly = open_run(tmp_path / "run")[0]
    pools = {site: Pool.of(assembly.open_images()(site)) for site in ("x", "y")}
    trained = {name for place, name in enumerate(f"p{number}" for number in range(20)) if place % 5 < 3}
    called = names_at_sites(assembly, tmp_path / "run", pools)
    assert {name for names in called.values() for name in names} == trained
    asked = typer.testing.CliRunner()
    said = asked.invoke(app, ["ledger", "who", "p1", str(tmp_path / "run")]).output
    assert said.startswith("run, y: images: 2 train; ")
    assert "round 2, train: weights" in said
    assert asked.invoke(app, ["ledger", "who", "nobody", str(tmp_path / "run")]).exit_code != 0


def test_a_list_that_fits_nobody_is_refused_without_repeating_a_name(study_of, pictures, tmp_path):
    run(study_of("all"), tmp_path / "run")
    for text, words in (("p3\nsecret\n", "1 of 2 are none"), ("# nobody\n", "names nobody")):
        (tmp_path / "list.txt").write_text(text)
        with pytest.raises(BadInput, match=words) as refused:
            Withdrawal(tmp_path / "run", tmp_path / "list.txt")
        assert "secret" not in str(refused.value)
    before = sorted(tmp_path.rglob("*"))
    for out, words in ((pictures, "holds other files"), (tmp_path / "run" / "new", "lies within the run")):
        with pytest.raises(BadInput, match=words):  # and no list is left behind
            Withdrawal(tmp_path / "run", pictures / "leaving.txt").carry_out(out)
    assert sorted(tmp_path.rglob("*")) == before
    assert not list(pictures.parent.glob("*.opt-out.txt"))


def test_a_list_of_windows_and_a_name_with_a_hash(tmp_path):
    (tmp_path / "list.txt").write_bytes("\ufeffp1\r\n p#2 # asked in March\r\n\r\n# nobody\r\n".encode())
    assert names_in(tmp_path / "list.txt") == ["p#2", "p1"]


def test_a_deployed_site_honours_its_list_at_every_start(pictures, tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    (local / "site.toml").write_text(f'[datasets.images]\nsource = "csv"\npath = "{pictures / "all.csv"}"\n')
    wanted = AtSites(size=28, channels=1, classes=("a", "b"))
    whole = own_data(local / "site.toml", wanted, "x", tmp_path / "cache")
    shutil.copy(pictures / "leaving.txt", local / "opt-out.txt")
    left = own_data(local / "site.toml", wanted, "x", tmp_path / "cache")
    assert (
        len(whole.train)
        - len(left.train)
        + len(whole.test)
        - len(left.test)
        + len(whole.validation)
        - len(left.validation)
        == 4
    )
    (local / "opt-out.txt").write_text("somebody of another dataset\n")
    assert len(own_data(local / "site.toml", wanted, "x", tmp_path / "cache").train) == len(whole.train)


def test_sums_without_a_patient_are_those_that_never_had_the_patient():
    """A thousand random withdrawals from closed-form heads: equal to the last bit."""
    rng = np.random.default_rng(0)
    features, targets = rng.standard_normal((60, 5)).astype(np.float32), torch.from_numpy(rng.standard_normal((60, 2)))
    every = moments(features, targets)
    for _ in range(1000):
        gone = rng.random(60) < rng.uniform(0.02, 0.5)
        out, rest = (moments(features[rows], targets[rows]) for rows in (gone, ~gone))
        left = Moments(every.products - out.products, every.cross - out.cross, every.squares - out.squares)
        assert all(torch.equal(one, other) for one, other in zip(vars(left).values(), vars(rest).values(), strict=True))
        assert torch.equal(solve(left, 0.1)[1], solve(rest, 0.1)[1])
