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
from polyclinic.federation.layers.defence_and_poisoning import Defence
from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.models import build, split
from polyclinic.randomness import torch_rng

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def carry_out(code: str, names: dict, usual: str = "", hurried: str = "") -> None:
    """Run an example, in fewer steps than it has."""
    assert usual in code
    exec(compile(code.replace(usual, hurried) if usual else code, "example", "exec"), names)


@pytest.mark.slow
def test_the_examples_of_gradient_inversion_run(capsys, tmp_path, monkeypatch):
    example, trajectory = blocks("docs/attacks.md")[:2]
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    names = {"images": images, "labels": torch.tensor([3, 4])}
    monkeypatch.chdir(tmp_path)
    carry_out(example, names, "lr=0.1", "lr=0.1, iterations=2")
    carry_out(trajectory, names)
    printed = capsys.readouterr().out
    assert printed.startswith("gradient-inversion: the attacker has the gradients that a site sent")
    assert "of 2 images converged: MSE" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "images.png"]


def test_the_examples_of_a_coordinator_that_chooses_weights_and_of_the_folders_readme_run(capsys):
    sent, _, read = blocks("docs/attacks.md")[2].partition("found =")
    rng = torch.Generator().manual_seed(1)
    public, truth, others = (torch.rand(count, 1, 16, 16, generator=rng) for count in (40, 4, 4))
    model = models.build("cnn-64-128-64-32", channels=1, outputs=2, size=16)
    names = {"model": model, "public": public, "truth": truth, "others": others, "attacks": attacks}
    carry_out(sent, names)
    crafted = names["crafted"]
    torch.nn.functional.cross_entropy(crafted(truth), torch.tensor([0, 1, 0, 1])).backward()
    names["gradients"] = {name: weight.grad for name, weight in crafted.named_parameters()}
    carry_out(f"found ={read}", names)
    assert "of 4 images identified at" in capsys.readouterr().out
    (example,) = blocks("src/polyclinic/attacks/README.md")
    carry_out(example, {}, '"iterations": 50', '"iterations": 2')
    assert "[3]" in capsys.readouterr().out  # the label


def test_every_capability_is_in_the_guide_and_tables_of_the_audits_page_are_a_studys():
    text = (ROOT / "docs/attacks.md").read_text(encoding="utf-8")
    assert [one for one in Capability if f"`{one}`" not in text] == []
    keeping, defending = (tomllib.loads(one) for one in blocks("docs/audit.md", "toml"))
    keeping["audit"]["threat_model"].remove("...")
    assert Audit(**keeping["audit"]).keep_parcels == 1
    assert Defence(**defending["defence"]).keep == 0.1


def test_every_example_about_latents_and_synthetic_images_runs(capsys):
    members, held_out, synthetic = noise_images(72, 1, 28, torch_rng("docs", "images")).split(24)
    model = build("small-cnn", channels=1, outputs=2, size=28).eval()
    front, _ = split(model, "conv1")

    def generate(z: Tensor, labels: Tensor) -> Tensor:
        return (synthetic[:8].flatten(1).T @ z.softmax(1).T).T.reshape(-1, 1, 28, 28) + 0 * labels[:, None, None, None]

    names = {"members": members, "held_out": held_out, "synthetic": synthetic, "truth": members[:2], "model": model}
    names |= {"first": members[:2], "second": held_out[:2], "own_images": held_out, "image_shape": (1, 28, 28)}
    names |= {"latents": front(members[:2]).detach(), "own_latents": front(held_out).detach(), "generate": generate}
    names |= {"member_labels": torch.zeros(24), "held_out_labels": torch.zeros(24)}
    examples = blocks("docs/attacks.md")[3:]
    assert len(examples) >= 6
    for example in examples:
        carry_out(example.replace("steps=20", "steps=2"), names)
    printed = capsys.readouterr().out
    for words in (
        "latent-inversion: the attacker has the latents", "structure and weights of the encoder are unknown",
        "EffLite0", "FD-EffLite0 floor", "none of 24 made images is a copy",
    ):  # fmt: skip
        assert words in printed
