"""How phantoms are drawn: the mean of each quarter of some images is what was recorded.

Studies and figures of the documentation use these images. The last bits of an image differ between processors, and a
mean of 196 pixels moves by far less than the tolerance then. An edit that draws anything otherwise moves it by more.

    python tests/data/test_phantoms_drawn.py    records them again
"""

import json
from pathlib import Path

import numpy as np
import pytest

from polyclinic.data.datasets import SOURCES

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
