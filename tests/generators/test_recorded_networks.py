"""What untrained networks say: the number of their weights, means of images, and scores are what was recorded.

Networks of another depth, width, gain or activation make other images. Weights and noise are drawn by seed, so the
figures hold on every processor up to rounding.

    python tests/generators/test_recorded_networks.py    records them again
"""

import json
import math
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
    "dcgan, groups": ({"name": "dcgan", **SMALL, "norm": "group", "discriminator_norm": "group"}, CLASSES),
    "dcgan, no labels": ({"name": "dcgan", **SMALL, "condition": "none", "spread": False}, CLASSES),
    "gan": ({"name": "gan", **SMALL}, CLASSES),
    "gan, plane": ({"name": "gan", **SMALL, "condition": "plane", "discriminator_norm": "none"}, CLASSES),
    "privgan": ({"name": "privgan", "width": 2, "latent": 8}, CLASSES),
    "privgan, plane": ({"name": "privgan", "width": 2, "latent": 8, "condition": "plane"}, CLASSES),
    "privgan, projection": ({"name": "privgan", "width": 2, "latent": 8, "condition": "projection"}, AGES),
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
    return [count, *quarters.flatten().tolist()], scores(model, size, labels)


@torch.no_grad()
def scores(model, size, labels):
    """What a discriminator says of four images: the largest score, and all in thousandths of it."""
    if "discriminator" not in model.networks:
        return []
    images = 2 * torch.rand(4, 3, size, size, generator=torch_rng("recorded", "scores")) - 1
    side = {"stylegan2": 2 ** math.ceil(math.log2(size))}.get(model.settings.name, size)
    images = torch.nn.functional.pad(images, (0, side - size, 0, side - size), mode="replicate")
    found = model.networks["discriminator"].eval()(images, torch.cat([labels, labels[:1]])).flatten()
    return [float(found.abs().max()), *(found / found.abs().max() * 1000).tolist()]


@pytest.mark.parametrize("size", [28, 40])
@pytest.mark.parametrize("case", CASES)
def test_untrained_networks_make_what_was_recorded(case, size):
    (count, *means), known = json.loads(RECORDED.read_text(encoding="utf-8"))[f"{case}, {size} px"]
    (found, *made), said = figures(case, size)
    assert found == count
    assert made == pytest.approx(means, abs=0.1)
    assert said[:1] == pytest.approx(known[:1], rel=5e-3)
    assert said[1:] == pytest.approx(known[1:], abs=5)


def _short(number):
    return number if isinstance(number, int) else float(f"{number:.6g}")


if __name__ == "__main__":
    found = {f"{case}, {size} px": figures(case, size) for case in CASES for size in (28, 40)}
    rows = [
        f"{json.dumps(case)}: {json.dumps([[_short(x) for x in row] for row in rows])}" for case, rows in found.items()
    ]
    RECORDED.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
