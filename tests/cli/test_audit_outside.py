"""`polyclinic audit`, of runs and of what others made."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from polyclinic.attacks.near_copies import shift
from polyclinic.audits import audit
from polyclinic.audits import external_files as outside_update
from polyclinic.audits.external_files import ImageFolder, share_classes
from polyclinic.cli import run_app
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.errors import BadInput
from polyclinic.models import build
from polyclinic.randomness import torch_rng
from polyclinic.study import tables as audit_settings
from polyclinic.study.tables import EFFORTS, Effort


@pytest.fixture(scope="module")
def chests() -> Tensor:
    return torch.from_numpy(ChestPhantom(samples=90, size=28, seed=2).load().images)


def write(folder: Path, images: Tensor, name: str = "") -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(folder / name / f"{number:03d}.png")
    return folder


@dataclass(frozen=True)
class Ended:
    exit_code: int
    stdout: str
    output: str


@pytest.fixture
def run(capsys):
    def end(*args: object) -> Ended:
        capsys.readouterr()
        code = run_app(["audit", *map(str, args)])
        said = capsys.readouterr()
        return Ended(code, said.out, f"{said.out}\n{said.err}")

    return end


@pytest.fixture
def update(tmp_path, chests, monkeypatch) -> dict[str, Path]:
    """One step of plain descent on one image, saved before and after."""
    monkeypatch.setitem(audit_settings.EFFORTS, "quick", replace(EFFORTS["quick"], update_steps=60, candidates=20))
    torch.manual_seed(0)
    network = build("lenet5", channels=1, outputs=2, size=28)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    image = chests[:1].float() / 255
    loss = nn.functional.cross_entropy(network(image), torch.tensor([1]))
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    after = {n: before[n] - 0.1 * g for (n, _), g in zip(network.named_parameters(), gradients, strict=True)}
    after = {**before, **after}
    save_file(before, tmp_path / "before.safetensors")
    save_file(after, tmp_path / "after.safetensors")
    torch.save(after, tmp_path / "after.pt")
    for name, state in (("before", before), ("after", after)):
        np.savez(tmp_path / f"{name}.npz", *[tensor.numpy() for tensor in state.values()])  # as Flower does
    write(tmp_path / "images", chests[:1])
    write(tmp_path / "held_out", chests[30:60])
    return {path.name: path for path in tmp_path.iterdir()}


def arguments(files: dict[str, Path], tmp_path: Path, **changes: object) -> list[object]:
    options = {
        "--before": files["before.safetensors"], "--after": files["after.safetensors"], "--model": "lenet5",
        "--images": files["images"], "--held-out": files["held_out"], "--out": tmp_path / "out",
        "--settings": "lr=0.1,steps=1,batch=1",
    }  # fmt: skip
    options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return ["update", *[part for pair in options.items() for part in pair]]


@pytest.mark.parametrize(
    ("before", "after"),
    [("before.safetensors", "after.pt"), pytest.param("before.npz", "after.npz", marks=pytest.mark.slow)],
)
def test_an_update_of_one_image_is_audited_whatever_saved_it(run, update, tmp_path, before, after):
    found = run(*arguments(update, tmp_path, before=update[before], after=update[after]), "--json")
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report == json.loads((tmp_path / "out" / "audit.json").read_text())
    (finding,) = [one for one in report["findings"] if one["attack"] == "gradient-inversion"]
    assert report["verdict"] in ("leaks", "not tested")
    assert finding["verdict"] != "withstood"  # one image behind an update is a leak, whether 60 steps show it or not
    assert (tmp_path / "out" / finding["picture"]).stat().st_size > 1000


def test_a_difference_of_weights_is_the_same_update(run, update, tmp_path, chests):
    """As MONAI's clients send it; the search and its figures are those of the whole weights."""
    states = [load_file(update[f"{name}.safetensors"]) for name in ("before", "after")]
    torch.save({name: states[1][name] - tensor for name, tensor in states[0].items()}, tmp_path / "change.pt")
    sent = arguments(update, tmp_path, change=tmp_path / "change.pt")
    place = sent.index("--after")
    assert "one of the two" in run(*sent).output
    del sent[place : place + 2]
    found = run(*sent, "--json")
    assert found.exit_code == 0, found.output
    (finding,) = [one for one in json.loads(found.stdout)["findings"] if one["attack"] == "gradient-inversion"]
    assert any("of --held-out" in words for words in finding["assumed"])
    assert finding["evidence"]["psnr"] > 15


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings": "steps=1"}, "--settings: lr: Field required"),
        ({"settings": "lr"}, "'lr' is no name=value"),
        ({"settings": "lr=1,rounds=3"}, "--settings: rounds:"),
        ({"model": "resnet18"}, "--before: "),
        ({"model": "lenet6"}, "lenet5"),
        ({"budget": "huge"}, "--budget: no such choice"),
        ({"before": "nowhere.npz"}, "--before: there is no file"),
        ({"images": "nowhere"}, "--images: 'nowhere' is no folder"),
        ({"after": "BEFORE"}, "--after: changes nothing in the weights of --before"),
    ],
)
def test_bad_input_of_an_update_is_named(run, update, tmp_path, changes, words):
    if changes.get("after") == "BEFORE":
        changes = {"after": update["before.safetensors"]}
    found = run(*arguments(update, tmp_path, **changes))
    assert found.exit_code == 2, found.output
    assert words in found.output.replace("\n", " ")
    assert not (tmp_path / "out" / "audit.json").exists()


def test_a_site_may_have_images_of_one_class_only(chests):
    one = ImageFolder(chests[:2], torch.tensor([0, 0]), ("ill",))
    both = ImageFolder(chests[:3], torch.tensor([0, 1, 1]), ("healthy", "ill"))
    first, second = share_classes(one, both, 2)
    assert (first.labels.tolist(), second.labels.tolist()) == ([1, 1], [0, 1, 1])
    other = ImageFolder(chests[:2], torch.tensor([0, 0]), ("Ill",))
    with pytest.raises(BadInput, match=r"name 3 classes \(Ill, healthy, ill\), and the network has 2 outputs"):
        share_classes(other, both, 2)


def test_a_pickled_object_is_refused(run, update, tmp_path):
    evil = tmp_path / "evil.npz"
    np.savez(evil, weights=np.array([{"a": 1}], dtype=object))
    found = run(*arguments(update, tmp_path, before=evil))
    assert found.exit_code == 2
    assert "is no archive of plain arrays" in found.output


def test_an_archive_that_unpacks_to_gigabytes_is_refused(run, update, tmp_path, monkeypatch):
    monkeypatch.setattr(outside_update, "MOST_BYTES", 2**20)
    np.savez_compressed(tmp_path / "zeros.npz", weights=np.zeros(2**18, np.float32))
    assert (tmp_path / "zeros.npz").stat().st_size < 2**12
    found = run(*arguments(update, tmp_path, before=tmp_path / "zeros.npz"))
    assert found.exit_code == 2
    assert "it unpacks to more than" in found.output


def test_a_shifted_copy_among_synthetic_images_leaks_and_honest_ones_do_not(run, tmp_path, chests):
    training, held_out = write(tmp_path / "training", chests[:30]), write(tmp_path / "held_out", chests[30:60])
    made = chests[60:80].clone()
    honest = write(tmp_path / "honest", made)
    sets = ("--training", training, "--held-out", held_out, "--json", "--out")
    report = json.loads(run("images", honest, *sets, tmp_path / "first").stdout)
    assert report["questions"]["copies"] != "leaks"
    (near,) = [one for one in report["findings"] if one["attack"] == "near-copies"]
    assert "planted here, a single copy is found if" in near["words"]
    made[3] = (shift(chests[5:6].float() / 255, 0.07, chests, torch_rng()) * 255).byte()[0]
    spoiled = write(tmp_path / "spoiled", made)
    report = json.loads(run("images", spoiled, *sets, tmp_path / "second").stdout)
    assert report["verdict"] == "leaks"
    assert "number 3, which is training image 5" in report["findings"][0]["words"]
    assert (tmp_path / "second" / "near-copies.png").stat().st_size > 1000


def test_too_few_images_are_named(run, tmp_path, chests):
    few, other = write(tmp_path / "few", chests[:3]), write(tmp_path / "other", chests[3:6])
    found = run("images", few, "--training", few, "--held-out", other, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert "give 20 or more of each" in found.output.replace("\n", " ")
    same = run("images", few, "--training", few, "--held-out", few, "--out", tmp_path / "out")
    assert same.exit_code == 2
    assert "all its images are among those trained on" in same.output.replace("\n", " ")


STUDY = """
data = { source = "fundus-phantom", size = 28, samples = 80 }
sites = { partition = "iid", count = 2 }
model = { backbone = "lenet5" }
optimizer = { batch_size = 8 }
method = { name = "fedavg", rounds = 1 }
engine = { workers = 1 }
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    few = Effort(
        sites=1, releases=1, images=2, update_steps=2, latent_steps=2, projected=4, projection_steps=1, candidates=20
    )
    monkeypatch.setitem(audit_settings.EFFORTS, "quick", few)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    return tmp_path


def test_an_audit_prints_verdicts_and_where_pictures_lie(here, capsys):
    assert run_app(["run", "study.toml", "--set", "audit.keep_parcels=0", "--out", "out", "--quiet"]) == 0
    assert run_app(["audit", "out"]) == 0
    captured = capsys.readouterr()
    assert "gradient-inversion" in captured.out
    assert "attacker" in captured.out
    assert "weights, not tried: 1 of 2 parcels that left" in captured.out
    assert "1 of 2" in captured.out
    pictures = [line.split(": ")[1] for line in captured.out.splitlines() if line.endswith(".png")]
    assert len(pictures) == 6
    assert all((here / picture).is_file() for picture in pictures)
    assert "audit: 2 of 2 done" in captured.err  # weights, and the scores of the first evaluation

    assert run_app(["audit", "out", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads((here / "out" / "audit.json").read_text())
    assert captured.err == ""

    assert run_app(["audit", "out", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_run_that_kept_nothing_and_flags_that_a_grid_does_not_have_are_refused(here, capsys):
    assert run_app(["run", "study.toml", "--out", "out", "--quiet"]) == 0
    assert run_app(["audit", "out"]) == 2
    assert "kept no parcels" in capsys.readouterr().err
    for flag in (["--kinds", "weights"], ["--sites", "site-1"], ["--features", "lpips-alex"], ["--study", "a.toml"]):
        assert run_app(["audit", "out", "--grid", *flag]) == 2
        assert capsys.readouterr().err.startswith("--grid: ")
    assert not (here / "out" / "grid").exists()


def test_an_interrupted_audit_says_what_there_is(here, capsys, monkeypatch):
    assert run_app(["run", "study.toml", "--set", "audit.keep_parcels=0", "--out", "out", "--quiet"]) == 0
    attack_one, done = audit.audit_parcel, []

    def stop_at_the_second(*given):
        if done:
            raise KeyboardInterrupt
        done.append(attack_one(*given))
        return done[0]

    monkeypatch.setattr(audit, "audit_parcel", stop_at_the_second)
    both = ["audit", "out", "--sites", "site-1,site-2", "--quiet"]
    assert run_app(both) == 1
    assert capsys.readouterr().err == "interrupted; what was found so far is in out/audit.json\n"
    report = json.loads((here / "out" / "audit.json").read_text())
    assert (report["complete"], len(report["parcels"])) == (False, 1)
    os.utime(here / "out" / "audit.json", (0, 0))  # from now on an earlier audit's
    assert run_app(both) == 1
    assert capsys.readouterr().err == "interrupted; nothing was found yet\n"
    assert json.loads((here / "out" / "audit.json").read_text()) == report


@pytest.mark.slow
def test_a_grid_prints_what_defences_cost(here, capsys):
    sets = ["--set", "audit.keep_parcels=0", "--set", 'audit.defences=["quantise"]']
    assert run_app(["run", "study.toml", *sets, "--out", "out", "--quiet"]) == 0
    assert run_app(["audit", "out", "--grid"]) == 0
    printed = capsys.readouterr().out
    assert "8 bits" in printed
    assert (here / "out" / "grid.png").is_file()
    assert "out/grid.png" in printed
    assert run_app(["audit", "out", "--grid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((here / "out" / "grid.json").read_text())
