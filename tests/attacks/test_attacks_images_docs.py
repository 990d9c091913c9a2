"""The examples of docs/attacks.md about latents and images run, one after the other, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from polyclinic.generators.vqvae2.autoencoder import noise_images
from polyclinic.models import build, split
from polyclinic.randomness import torch_rng

DOCS = Path(__file__).parents[2] / "docs" / "attacks.md"
SECTION = DOCS.read_text(encoding="utf-8").partition("\n## Latents and synthetic images\n")[2]
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
        exec(compile(example.replace("steps=20", "steps=2"), str(DOCS), "exec"), names)
    printed = capsys.readouterr().out
    assert "latent-inversion: the attacker has the latents" in printed
    assert "structure and weights of the encoder are unknown" in printed
    assert "EffLite0" in printed
    assert "FD-EffLite0 floor" in printed
    assert "none of 24 made images is a copy" in printed
