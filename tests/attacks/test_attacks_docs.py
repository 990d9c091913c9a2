"""The examples of docs/attacks.md run as a reader would type them; tables of the audit's page are a study's."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyclinic import attacks, models
from polyclinic.attacks.attack import Capability
from polyclinic.audits import Audit
from polyclinic.federation.layers.defence import Defence
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.models import build, split
from polyclinic.randomness import torch_rng

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_the_examples_of_gradient_inversion_run(capsys, tmp_path, monkeypatch):
    example, trajectory, coordinator = re.findall(
        r"```python\n(.*?)```", (DOCS / "attacks.md").read_text(encoding="utf-8"), re.DOTALL
    )[:3]
    hurried = example.replace("lr=0.1", "lr=0.1, iterations=2")
    assert hurried != example
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    names = {"images": images, "labels": torch.tensor([3, 4])}
    monkeypatch.chdir(tmp_path)
    exec(compile(hurried, "attacks.md", "exec"), names)
    exec(compile(trajectory, "attacks.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("gradient-inversion: the attacker has the gradients that a site sent")
    assert "of 2 images converged: MSE" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "images.png"]
    assert "Imprint()" in coordinator  # runs below


def test_the_example_of_a_coordinator_that_chooses_weights_runs(capsys):
    example = re.findall(r"```python\n(.*?)```", (DOCS / "attacks.md").read_text(encoding="utf-8"), re.DOTALL)[2]
    rng = torch.Generator().manual_seed(1)
    public, truth, others = (torch.rand(count, 1, 16, 16, generator=rng) for count in (40, 4, 4))
    model = models.build("cnn-64-128-64-32", channels=1, outputs=2, size=16)

    def answer(crafted):
        torch.nn.functional.cross_entropy(crafted(truth), torch.tensor([0, 1, 0, 1])).backward()
        return {name: weight.grad for name, weight in crafted.named_parameters()}

    sent, _, read = example.partition("found =")
    names = {"model": model, "public": public, "truth": truth, "others": others, "attacks": attacks}
    exec(compile(sent, "attacks.md", "exec"), names)
    names["gradients"] = answer(names["crafted"])
    exec(compile(f"found ={read}", "attacks.md", "exec"), names)
    assert "of 4 images identified at" in capsys.readouterr().out


def test_the_example_of_the_folders_readme_runs(capsys):
    text = (DOCS.parent / "src" / "polyclinic" / "attacks" / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    hurried = example.replace('"iterations": 50', '"iterations": 2')
    assert hurried != example
    exec(compile(hurried, "README.md", "exec"), {})
    assert "[3]" in capsys.readouterr().out  # the label


def test_every_capability_is_in_the_guide():
    text = (DOCS / "attacks.md").read_text(encoding="utf-8")
    assert [one for one in Capability if f"`{one}`" not in text] == []


def test_tables_of_the_audits_page_are_a_studys():
    keeping, defending = re.findall(r"```toml\n(.*?)```", (DOCS / "audit.md").read_text(encoding="utf-8"), re.DOTALL)
    table = tomllib.loads(keeping)["audit"]
    table["threat_model"].remove("...")
    assert Audit(**table).keep_parcels == 1
    assert Defence(**tomllib.loads(defending)["defence"]).keep == 0.1


PAGE = Path(__file__).parents[2] / "docs" / "attacks.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("\n## Latents and synthetic images\n")[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)


def test_every_example_runs(capsys):
    members, held_out, synthetic = noise_images(72, 1, 28, torch_rng("docs", "images")).split(24)
    model = build("small-cnn", channels=1, outputs=2, size=28).eval()
    front, _ = split(model, "conv1")

    def generate(z: Tensor, labels: Tensor) -> Tensor:
        return (synthetic[:8].flatten(1).T @ z.softmax(1).T).T.reshape(-1, 1, 28, 28) + 0 * labels[:, None, None, None]

    names = {
        "members": members,
        "held_out": held_out,
        "synthetic": synthetic,
        "first": members[:2],
        "second": held_out[:2],
        "truth": members[:2],
        "model": model,
        "latents": front(members[:2]).detach(),
        "own_images": held_out,
        "own_latents": front(held_out).detach(),
        "image_shape": (1, 28, 28),
        "generate": generate,
        "member_labels": torch.zeros(24),
        "held_out_labels": torch.zeros(24),
    }
    assert len(EXAMPLES) >= 6
    for example in EXAMPLES:
        exec(compile(example.replace("steps=20", "steps=2"), str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "latent-inversion: the attacker has the latents" in printed
    assert "structure and weights of the encoder are unknown" in printed
    assert "EffLite0" in printed
    assert "FD-EffLite0 floor" in printed
    assert "none of 24 made images is a copy" in printed
