"""What untrained generators make: the number of their weights, and means of the images, are what was recorded.

Networks of another depth, width, gain or activation make other images. Weights and noise are drawn by seed, so the
figures hold on every processor up to rounding.

    python tests/generators/test_recorded_networks.py    records them again
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from polyclinic.generators import GENERATORS
from polyclinic.randomness import torch_rng
from polyclinic.tasks import Target

RECORDED = Path(__file__).with_name("recorded_networks.json")
CLASSES, AGES = Target(classes=("a", "b", "c")), Target(unit="months", label_range=(0.0, 200.0))
VQVAE2 = {"name": "vqvae2", "width": 8, "blocks": 1, "top_codes": 8, "bottom_codes": 8, "prior_width": 8}
SMALL = {"width": 4, "latent": 8}
CASES = {
    "vqvae2": (VQVAE2, CLASSES),
    "vqvae2, ages": ({**VQVAE2, "blocks": 2, "prior_layers": 2}, AGES),
    "dcgan": ({"name": "dcgan", **SMALL}, CLASSES),
    "dcgan, ages": ({"name": "dcgan", **SMALL}, AGES),
    "dcgan, plane": ({"name": "dcgan", **SMALL, "condition": "plane"}, CLASSES),
    "dcgan, apart": ({"name": "dcgan", **SMALL, "condition": "apart"}, CLASSES),
    "gan": ({"name": "gan", **SMALL}, CLASSES),
    "wgan-gp": ({"name": "wgan-gp", **SMALL}, CLASSES),
    "stylegan2": ({"name": "stylegan2", "width": 2, "latent": 4}, CLASSES),
    "stylegan2, ages": ({"name": "stylegan2", "width": 2, "latent": 4, "label_layers": 2}, AGES),
}


def figures(case, size):
    """Weights, and the means of the four quarters of images made of three labels."""
    table, target = CASES[case]
    model = GENERATORS[table["name"]](**table).build(channels=3, size=size, target=target, seed=1)
    labels = torch.arange(3) if target.classes else torch.tensor([0.0, 90.0, 200.0])
    made = model.sample(labels, torch_rng("recorded", "networks")).float().mean(1)
    quarters = made.reshape(3, 2, size // 2, 2, size // 2).mean((2, 4))
    count = sum(tensor.numel() for tensor in model.state().values())
    return [count, *quarters.flatten().tolist()]


@pytest.mark.parametrize("size", [28, 40])
@pytest.mark.parametrize("case", CASES)
def test_untrained_networks_make_what_was_recorded(case, size):
    count, *means = json.loads(RECORDED.read_text(encoding="utf-8"))[f"{case}, {size} px"]
    found, *made = figures(case, size)
    assert found == count
    assert made == pytest.approx(means, abs=0.1)


if __name__ == "__main__":
    found = {f"{case}, {size} px": figures(case, size) for case in CASES for size in (28, 40)}
    rows = [f'"{case}": {json.dumps([row[0], *(round(x, 2) for x in row[1:])])}' for case, row in found.items()]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
