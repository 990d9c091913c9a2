"""The part of an archive that a claim needs gives the same parts of all sites as the whole archive."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from polyclinic_lab import archives
from polyclinic_lab.claim import CLAIMS

ROWS = 120


@pytest.fixture
def eyes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive such as the retinopathy claims read, of 40 px; the claim wants twenty a class at 32."""
    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (ROWS, 40, 40, 3), dtype=np.uint8),
        "labels": np.arange(ROWS) % 5,
        "patient": np.arange(ROWS),
        "label_names": np.array(list("01234")),
    }
    np.savez(tmp_path / "dr_multisite_128_jpeg.npz", **arrays)
    monkeypatch.setenv("POLYCLINIC_DATA", str(tmp_path))
    claim = dataclasses.replace(
        CLAIMS["qu-figure5-retina-low"], scales={"quick": ("data.size=32", "data.per_class=20")}
    )
    monkeypatch.setattr(archives, "find_claim", lambda name: claim)
    return tmp_path


@pytest.mark.parametrize("fit", [False, True])
def test_an_archive_keeps_its_rows_and_only_the_images_that_are_read(eyes: Path, tmp_path: Path, fit: bool) -> None:
    (study,) = archives.studies_of(["qu-figure5-retina-low"], "quick")
    small = tmp_path / "small"
    small.mkdir()
    archives.write(study.data.location, [study], small / study.data.location.name, fit=fit)
    with np.load(small / study.data.location.name) as kept:
        assert len(kept["labels"]) == ROWS
        assert kept["images"].shape == ((ROWS, 32, 32, 3) if fit else (ROWS, 40, 40, 3))
        assert kept["images"].any((1, 2, 3)).sum() == 40
    assert archives.facts(study) == archives.facts(study, small)


def test_packed_pictures_that_nobody_reads_are_empty(tmp_path: Path) -> None:
    file = tmp_path / "packed.npz"
    np.savez(file, jpeg=np.arange(9, dtype=np.uint8), jpeg_off=np.array([0, 2, 5, 9]), labels=np.arange(3))
    used = np.array([True, False, True])
    found = archives.blanked(archives.Archive(file), "jpeg", used)
    assert found["jpeg"].tolist() == [0, 1, 5, 6, 7, 8]
    assert found["jpeg_off"].tolist() == [0, 2, 2, 6]
    assert archives.blanked(archives.Archive(file), "jpeg_off", used) == {}
    assert archives.blanked(archives.Archive(file), "labels", used)["labels"].tolist() == [0, 1, 2]
