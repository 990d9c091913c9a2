"""How the sites differ, in a report of images that have masks and no labels."""

from types import SimpleNamespace

import numpy as np

from polyclinic.data.parts import ImageSet, SiteData
from polyclinic.report.blocks import Chart, Table, Text
from polyclinic.report.evidence import SiteImages
from polyclinic.report.sites import sites_section


def site(name, inside):
    masks = np.zeros((4, 8, 8), np.uint8)
    masks[:, :inside] = 1
    images = ImageSet(np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64), masks)
    return SiteData(name, images, images, images)


def test_masks_without_labels_have_masked_pixels_and_no_distance_of_labels():
    found = {"a": site("a", 2), "b": site("b", 0)}
    heterogeneity = {"mean_ks": 0.0, "pairwise_ks": [[0, 0], [0, 0]], "labels": {"edges": None, "per_site": {}}}
    counts = {name: {"train": 4, "validation": 4, "test": 4} for name in found}
    result = {"heterogeneity": heterogeneity, "data": {"counts": counts, "classes": ["image"]}}
    run = SimpleNamespace(result=result, classes=["image"], sites=list(found), images=SiteImages(sites=found))
    blocks = sites_section(run).blocks
    words = " ".join(block.words for block in blocks if isinstance(block, Text))
    assert "Images have masks and no labels" in words
    assert "hardly differ" not in words
    assert not [block for block in blocks if isinstance(block, Chart)]
    assert [["a", "25.0%"], ["b", "0.0%"]] in [block.rows for block in blocks if isinstance(block, Table)]
