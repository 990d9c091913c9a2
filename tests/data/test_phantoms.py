"""Phantoms: seeded, the same anatomy at every size, and labelled with what is drawn."""

import json
from pathlib import Path

import numpy as np
import pytest

from polyclinic.data.datasets import SOURCES
from polyclinic.data.datasets.phantoms.brain import BrainPhantom
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.datasets.phantoms.fundus import FundusPhantom
from polyclinic.data.datasets.phantoms.hand import HandPhantom
from polyclinic.data.datasets.phantoms.skin import LESIONS, SkinPhantom

PHANTOMS = {
    "fundus-phantom": FundusPhantom,
    "hand-phantom": HandPhantom,
    "chest-phantom": ChestPhantom,
    "brain-phantom": BrainPhantom,
    "skin-phantom": SkinPhantom,
}


def shrink(images, size):
    """Mean over blocks: [N, C, H, W] to [N, C, size, size]."""
    n, channels, side, _ = images.shape
    block = side // size
    return images.reshape(n, channels, size, block, size, block).mean(axis=(3, 5))


@pytest.mark.parametrize("name", PHANTOMS)
class TestEveryPhantom:
    def test_they_are_drawn_once_for_every_way_to_spread_them(self, name):
        kind = PHANTOMS[name]
        one = kind(samples=10, size=28).load_shared()
        assert kind(samples=10, size=28, fold="1/2", acquisition=0.5, test=0.3).load_shared() is one
        with pytest.raises(ValueError, match="read-only"):
            one.images[0] = 0
        other = kind(samples=10, size=28, seed=1).load_shared()
        assert not np.array_equal(other.images, one.images)
        assert np.array_equal(one.images, kind(samples=10, size=28).load().images)

    def test_more_samples_continue_the_same_series(self, name):
        few, many = (PHANTOMS[name](samples=n, size=28).load() for n in (12, 20))
        np.testing.assert_array_equal(few.images, many.images[:12])
        np.testing.assert_array_equal(few.labels, many.labels[:12])

    def test_the_same_anatomy_at_every_size(self, name):
        small, large = (PHANTOMS[name](samples=10, size=size).load() for size in (32, 256))
        np.testing.assert_array_equal(small.labels, large.labels)
        ours, theirs = small.images.astype(float), shrink(large.images, 32)
        alike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(ours, theirs, strict=True)]
        unlike = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(ours, theirs[::-1], strict=True)]
        assert min(alike) > 0.9
        assert min(alike) > max(unlike)


def test_labels_of_hands_chests_brains_and_skin():
    hands = HandPhantom(samples=400, size=28).load()
    assert (hands.labels.dtype, hands.unit, hands.label_range, hands.classes) == (np.float32, "months", (0, 228), ())
    chests = ChestPhantom(samples=300, size=28).load()
    assert (set(chests.site), chests.classes) == ({"scanner-a", "scanner-b"}, ("normal", "tuberculosis"))
    assert set(ChestPhantom(samples=20, size=28, scanner_b=0).load().site) == {"scanner-a"}
    brains = BrainPhantom(samples=120, size=28, slices=4).load()
    assert len(set(brains.patient)) == 30
    assert len(set(zip(brains.patient.tolist(), brains.site.tolist(), strict=True))) == 30
    np.testing.assert_array_equal(brains.masks.any(axis=(1, 2)), brains.labels == 1)
    skin = SkinPhantom(samples=400, size=28).load()
    assert skin.classes == ("benign", "malignant")
    for lesion, (its_class, _) in LESIONS.items():
        of_it = skin.subgroup == lesion
        assert set(skin.labels[of_it]) == {its_class}
        assert 70 < of_it.sum() < 130


RECORDED = Path(__file__).with_name("recorded_phantoms.json")
CASES = {
    "fundus-phantom": {},
    "fundus-phantom, five grades": {"grades": 5},
    "hand-phantom": {},
    "chest-phantom": {},
    "brain-phantom": {"slices": 2},
    "skin-phantom": {},
    "skin-phantom, as frequent": {"balanced": False},
}


def drawn(case):
    """The mean of each quarter of each image, its label, and the area of its mask."""
    name = case.partition(",")[0]
    data = SOURCES[name](source=name, samples=40, size=28, seed=3, **CASES[case]).load()
    quarters = data.images.astype(float).mean(axis=1).reshape(-1, 2, 14, 2, 14).mean(axis=(2, 4)).reshape(-1, 4)
    areas = np.zeros(len(quarters)) if data.masks is None else (data.masks == 1).mean(axis=(1, 2)) * 100
    return np.column_stack([quarters, data.labels, areas])


@pytest.mark.parametrize("case", CASES)
def test_they_are_drawn_as_recorded(case):
    known = json.loads(RECORDED.read_text(encoding="utf-8"))[case]
    np.testing.assert_allclose(drawn(case), known, rtol=0, atol=0.03)


if __name__ == "__main__":
    rows = {name: [json.dumps([round(float(x), 2) for x in row]) for row in drawn(name)] for name in CASES}
    tables = [f"{json.dumps(name)}: [\n" + ",\n".join(row) + "\n]" for name, row in rows.items()]
    RECORDED.write_text("{" + ",\n".join(tables) + "}\n", encoding="utf-8")
