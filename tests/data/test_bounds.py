"""Files that declare more than they should, that lie elsewhere, and labels that are none."""

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest
from medical_files import write_dicom, write_nifti
from PIL import Image

from polyclinic.data.allowed_paths import refuse_outside
from polyclinic.data.archives import Archive, Packed
from polyclinic.data.datasets import SOURCES
from polyclinic.data.reading import Reader
from polyclinic.data.tables import read_table
from polyclinic.errors import BadInput


def png_that_declares(width, height):
    """A PNG whose header declares a size, without the pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_a_picture_is_refused_by_what_it_declares(tmp_path):
    (tmp_path / "a.png").write_bytes(png_that_declares(9000, 9000))
    with pytest.raises(ValueError, match=r"9000 x 9000 pixels, above the limit of 67108864; raise data\.max_pixels"):
        Reader().pixels(tmp_path / "a.png")
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(tmp_path / "b.png")
    assert Reader(max_pixels=20).pixels(tmp_path / "b.png").shape == (5, 4)
    with pytest.raises(ValueError, match="4 x 5 pixels, above the limit of 19"):
        Reader(max_pixels=19).pixels(tmp_path / "b.png")


def test_dicom_and_nifti_are_refused_by_what_they_declare(tmp_path):
    write_dicom(tmp_path / "a.dcm", np.zeros((6, 4), np.uint16))
    write_nifti(tmp_path / "a.nii.gz", np.zeros((6, 4, 9), np.int16))
    for name in ("a.dcm", "a.nii.gz"):
        Reader(max_pixels=27).pixels(tmp_path / name)
        with pytest.raises(ValueError, match="above the limit of 23"):
            Reader(max_pixels=23).pixels(tmp_path / name)
    with pytest.raises(ValueError, match=r"6 x 4 x 9 voxels, above the limit of 8 x 26"):
        Reader(max_pixels=26).pixels(tmp_path / "a.nii.gz")


def archive_that_declares(path, shape, content=b"\0" * 8):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("images.npy", header.getvalue() + content)


def test_an_array_is_refused_by_what_it_declares(tmp_path):
    archive_that_declares(tmp_path / "lies.npz", (10**6, 10**6))
    with pytest.raises(BadInput, match=r"'images' cannot be read \(it declares 10000000001\d\d bytes, and the archive"):
        Archive(tmp_path / "lies.npz")["images"]
    archive_that_declares(tmp_path / "large.npz", (1, 2, 4))
    assert Archive(tmp_path / "large.npz", 8)["images"].shape == (1, 2, 4)
    with pytest.raises(BadInput, match=r"4 x 2 pixels, above the limit of 7; raise data\.max_pixels"):
        Archive(tmp_path / "large.npz", 7)["images"]


def test_a_packed_picture_is_refused_by_what_it_declares():
    content = np.frombuffer(png_that_declares(9000, 9000), np.uint8)
    with pytest.raises(ValueError, match="above the limit"):
        Packed(content, np.array([0, len(content)]))[0]


def test_files_outside_their_folder(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "inside-by-name"
    inside.mkdir()
    outside.mkdir()
    (outside / "a.png").touch()
    (inside / "link.png").symlink_to(outside / "a.png")
    (inside / "b.png").touch()
    refuse_outside([inside / "b.png", inside / "." / "b.png"], inside)
    for path in (outside / "a.png", inside / ".." / "inside-by-name" / "a.png", inside / "link.png"):
        with pytest.raises(BadInput, match=r"lies outside '.*in'; .*or set data\.allow_outside = true"):
            refuse_outside([path], inside)


@pytest.fixture
def table(tmp_path):
    """A table one of whose images lies beside its folder."""
    (tmp_path / "t").mkdir()
    for number, name in enumerate(("t/a.png", "b.png")):
        Image.fromarray(np.full((30, 30), 50 * number, np.uint8)).save(tmp_path / name)
    (tmp_path / "t" / "t.csv").write_text("path,label\na.png,x\n../b.png,y\n")
    return tmp_path / "t" / "t.csv"


def test_a_table_names_files_of_its_own_folder_only(table, tmp_path):
    source = SOURCES.get("csv")
    with pytest.raises(BadInput, match=r"b\.png' lies outside"):
        source(path=table, size=28).prepared(tmp_path / "cache")
    assert len(source(path=table, size=28, allow_outside=True).prepared(tmp_path / "cache")) == 2


def test_a_label_that_is_nan_is_no_class(table, tmp_path):
    table.write_text("path,label\na.png,x\na.png,NaN\n")
    with pytest.raises(BadInput, match=r"row 3.*: the label is NaN, which is no class"):
        SOURCES.get("csv")(path=table, size=28).listing()
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 30, 30), np.uint8), labels=np.array([0.0, np.nan]))
    with pytest.raises(BadInput, match="image 1: the label is NaN"):
        SOURCES.get("npz")(path=tmp_path / "a.npz", size=28).listing()


def test_nul_and_endless_cells_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"path,label\na.png,\0\n")
    with pytest.raises(BadInput, match="holds NUL characters"):
        read_table(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_bytes(b"path,label\na.png," + b"x" * 200_000 + b"\n")
    with pytest.raises(BadInput, match=r"b\.csv row 2: cannot be read \(field larger"):
        read_table(tmp_path / "b.csv")
