"""Files that declare more than they should, that lie elsewhere, and labels that are none."""

import gzip
import io
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib

import numpy as np
import pydicom
import pytest
from medical_files import write_dicom, write_nifti
from PIL import Image

from polyclinic.audits.external_files import read_tensors
from polyclinic.data.allowed_paths import refuse_outside
from polyclinic.data.archives import Archive, Packed
from polyclinic.data.datasets import SOURCES
from polyclinic.data.datasets.benchmarks import read_idx
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
    content = np.frombuffer(png_that_declares(9000, 9000), np.uint8)
    with pytest.raises(ValueError, match="above the limit"):
        Packed(content, np.array([0, len(content)]))[0]
    Image.fromarray(np.zeros((5, 4), np.uint8)).save(tmp_path / "b.png")
    assert Reader(max_pixels=20).pixels(tmp_path / "b.png").shape == (5, 4)
    with pytest.raises(ValueError, match="4 x 5 pixels, above the limit of 19"):
        Reader(max_pixels=19).pixels(tmp_path / "b.png")


def test_a_picture_is_refused_by_the_tiles_that_it_declares(tmp_path):
    """A decoder makes room for a whole tile, or for all that it knows of each tile, before the pixels come."""
    sizes = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: 20_000, 323: 20_000, 324: 8, 325: 8}
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sizes.items())
    (tmp_path / "a.tif").write_bytes(b"II*\0" + struct.pack("<IQH", 16, 0, len(sizes)) + table + bytes(4))
    with pytest.raises(ValueError, match="its tiles have 20000 x 20000 pixels, more than the image"):
        Reader().pixels(tmp_path / "a.tif")
    written = io.BytesIO()
    Image.new("L", (255, 255)).save(written, "JPEG2000", no_jp2=True)
    whole = written.getvalue()
    many = whole[:24] + struct.pack(">II", 1, 1) + whole[32:]
    header = pydicom.dcmread(write_dicom(tmp_path / "a.dcm", np.zeros((255, 255), np.uint8)))
    header.PixelData = pydicom.encaps.encapsulate([many])
    header["PixelData"].VR, header["PixelData"].is_undefined_length = "OB", True
    header.file_meta.TransferSyntaxUID = pydicom.uid.JPEG2000Lossless
    header.save_as(tmp_path / "a.dcm")
    (tmp_path / "a.png").write_bytes(many)
    for name in ("a.png", "a.dcm"):
        with pytest.raises(ValueError, match="it declares 65025 tiles, above the limit of 4096; export it again"):
            Reader().pixels(tmp_path / name)
    (tmp_path / "b.png").write_bytes(whole)
    assert Reader().pixels(tmp_path / "b.png").shape == (255, 255)


def test_dicom_nifti_and_arrays_are_refused_by_what_they_declare(tmp_path):
    write_dicom(tmp_path / "a.dcm", np.zeros((6, 4), np.uint16))
    write_nifti(tmp_path / "a.nii.gz", np.zeros((6, 4, 9), np.int16))
    for name in ("a.dcm", "a.nii.gz"):
        Reader(max_pixels=27).pixels(tmp_path / name)
        with pytest.raises(ValueError, match="above the limit of 23"):
            Reader(max_pixels=23).pixels(tmp_path / name)
    with pytest.raises(ValueError, match=r"6 x 4 x 9 voxels, above the limit of 8 x 26"):
        Reader(max_pixels=26).pixels(tmp_path / "a.nii.gz")
    archive_that_declares(tmp_path / "lies.npz", (10**6, 10**6))
    with pytest.raises(BadInput, match=r"'images' cannot be read \(it declares 10000000001\d\d bytes, and the archive"):
        Archive(tmp_path / "lies.npz")["images"]
    archive_that_declares(tmp_path / "large.npz", (1, 2, 4))
    assert Archive(tmp_path / "large.npz", 8)["images"].shape == (1, 2, 4)
    with pytest.raises(BadInput, match=r"4 x 2 pixels, above the limit of 7; raise data\.max_pixels"):
        Archive(tmp_path / "large.npz", 7)["images"]


def archive_that_declares(path, shape, content=b"\0" * 8):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("images.npy", header.getvalue() + content)


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


def test_labels_and_cells_that_are_none(table, tmp_path):
    table.write_text("path,label\na.png,x\n../b.png,NaN\n")
    with pytest.raises(BadInput, match=r"row 3.*: the label is NaN, which is no class"):
        SOURCES.get("csv")(path=table, size=28).listing()
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 30, 30), np.uint8), labels=np.array([0.0, np.nan]))
    with pytest.raises(BadInput, match="image 1: the label is NaN"):
        SOURCES.get("npz")(path=tmp_path / "a.npz", size=28).listing()
    (tmp_path / "a.csv").write_bytes(b"path,label\na.png,\0\n")
    with pytest.raises(BadInput, match="holds NUL characters"):
        read_table(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_bytes(b"path,label\na.png," + b"x" * 200_000 + b"\n")
    with pytest.raises(BadInput, match=r"b\.csv row 2: cannot be read \(field larger"):
        read_table(tmp_path / "b.csv")


def peak_of(work) -> int:
    """Bytes that Python had at once while this was refused with a sentence."""
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, BadInput)) as refused:
            work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        assert len(str(refused.value)) > 20


def deflated(path, plain: bytes, zeros: int, tail: bytes = b""):
    """A DICOM file whose compressed part becomes `plain`, so many zeros and `tail`."""
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
    content, deflate = io.BytesIO(bytes(128) + b"DICM"), zlib.compressobj(9, zlib.DEFLATED, -15)
    content.seek(132)
    pydicom.filewriter.write_file_meta_info(content, meta)
    pieces = [plain, *[bytes(2**20)] * (zeros // 2**20), bytes(zeros % 2**20), tail]
    path.write_bytes(content.getvalue() + b"".join(map(deflate.compress, pieces)) + deflate.flush())
    return path


def header_of(rows: int, columns: int, pixels: int) -> bytes:
    def short(tag, value):
        return struct.pack("<HH2sHH", 0x28, tag, b"US", 2, value)

    grey = struct.pack("<HH2sH", 0x28, 4, b"CS", 12) + b"MONOCHROME2 "
    bits = short(0x100, 16) + short(0x101, 16) + short(0x102, 15) + short(0x103, 0)
    sides = short(2, 1) + grey + short(0x10, rows) + short(0x11, columns) + bits
    return sides + struct.pack("<HH2sHI", 0x7FE0, 0x10, b"OW", 0, pixels)


def test_a_deflated_dicom_becomes_no_more_than_it_declares(tmp_path):
    """400 kB that would become 400 MB, and several times that while it was read; its header alone, too."""
    many = 400 * 2**20
    files = [
        deflated(tmp_path / "small.dcm", header_of(8, 8, many), many),
        deflated(tmp_path / "sides.dcm", header_of(60000, 60000, many), many),
        deflated(tmp_path / "header.dcm", struct.pack("<HH2sHI", 9, 0x10, b"OB", 0, many), many, header_of(8, 8, 128)),
    ]
    for file in files:
        assert file.stat().st_size < 500_000
        assert peak_of(lambda file=file: Reader().pixels(file)) < 80 * 2**20
    tracemalloc.start()
    assert Reader(slices="all").frames(files[0]) == (0,)
    assert Reader().spacing(files[2])[0] != 0
    assert tracemalloc.get_traced_memory()[1] < 80 * 2**20
    tracemalloc.stop()


def test_a_deflated_dicom_is_read_as_any_other(tmp_path):
    values = np.arange(24, dtype=np.uint16).reshape(6, 4)
    plain = write_dicom(tmp_path / "plain.dcm", values)
    packed = deflated(
        tmp_path / "packed.dcm", header_of(6, 4, 48) + values.tobytes(), 0, b"\xfc\xff\xfc\xffOB" + bytes(6)
    )
    assert np.array_equal(Reader().pixels(packed), Reader().pixels(plain))


def test_compressed_frames_are_no_larger_than_their_header_says(tmp_path):
    written = io.BytesIO()
    Image.fromarray(np.zeros((64, 64), np.uint8)).save(written, "JPEG")
    for side in (64, 8):
        file = write_dicom(tmp_path / "a.dcm", np.zeros((side, side), np.uint8))
        header = pydicom.dcmread(file)
        header.PixelData = pydicom.encaps.encapsulate([written.getvalue()])
        header["PixelData"].VR = "OB"
        header["PixelData"].is_undefined_length = True
        header.file_meta.TransferSyntaxUID = pydicom.uid.JPEGBaseline8Bit
        header.save_as(file)
        if side == 64:
            assert Reader().pixels(file).shape == (64, 64)
        else:
            with pytest.raises(ValueError, match="frame has 64 x 64 pixels where the DICOM header declares 8 x 8"):
                Reader().pixels(file)


def test_run_lengths_become_no_more_than_their_pixels(tmp_path):
    """16 kB of run lengths for each megabyte that they would become, in a file of 8 x 8 pixels."""
    file = write_dicom(tmp_path / "a.dcm", np.zeros((8, 8), np.uint8))
    header = pydicom.dcmread(file)
    header.PixelData = pydicom.encaps.encapsulate([struct.pack("<16I", 1, 64, *[0] * 14) + b"\x81\0" * 2**20])
    header["PixelData"].VR, header["PixelData"].is_undefined_length = "OB", True
    header.file_meta.TransferSyntaxUID = pydicom.uid.RLELossless
    header.save_as(file)
    assert peak_of(lambda: Reader().pixels(file)) < 20 * 2**20


@pytest.mark.parametrize("way", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_is_packed_as_numpy_packs(tmp_path, way):
    """zipfile unpacks other ways without a bound: a hundred megabytes from a few hundred bytes."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w", way) as packed:
        packed.writestr("images.npy", bytes(100 * 2**20))
    for read in (
        lambda: Archive(tmp_path / "a.npz").shape("images"),
        lambda: read_tensors(tmp_path / "a.npz", "WEIGHTS"),
    ):
        assert peak_of(read) < 2**20


@pytest.mark.parametrize("what", ["place of the voxels", "extension"])
def test_a_nifti_header_becomes_no_more_than_any_header(tmp_path, what):
    many = 300 * 2**20
    write_nifti(tmp_path / "a.nii", np.zeros((4, 4, 4), np.uint8))
    start = bytearray((tmp_path / "a.nii").read_bytes()[:352])
    start[348] = 1
    struct.pack_into("<f", start, 108, many if what == "place of the voxels" else 4096.0)
    with gzip.open(tmp_path / "b.nii.gz", "wb") as stream:
        stream.write(bytes(start) + struct.pack("<ii", many, 4) + bytes(many))
    assert peak_of(lambda: Reader().pixels(tmp_path / "b.nii.gz")) < 40 * 2**20
    assert Reader(slices="all").frames(tmp_path / "b.nii.gz") == (0,)


def test_a_volume_takes_few_times_its_voxels(tmp_path):
    """A packed file of zeros and ones: as float32 once, and once more those that are not zero."""
    start = write_nifti(tmp_path / "a.nii", np.zeros((4, 4, 4), np.uint8)).read_bytes()[:352]
    start = bytearray(start)
    struct.pack_into("<3h", start, 42, 256, 256, 256)
    struct.pack_into("<ff", start, 112, 2.0, 1.0)  # a scale, as CT has
    with gzip.open(tmp_path / "b.nii.gz", "wb", compresslevel=1) as stream:
        stream.write(bytes(start) + b"\1" * 2**24)
    tracemalloc.start()
    try:
        assert Reader().pixels(tmp_path / "b.nii.gz").shape == (256, 256)
        assert tracemalloc.get_traced_memory()[1] < 11 * 2**24
    finally:
        tracemalloc.stop()


def test_headers_of_arrays_and_idx_files_become_no_more_than_their_bound(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("images.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 300 * 2**20) + bytes(300 * 2**20))
    assert peak_of(lambda: Archive(tmp_path / "a.npz")["images"]) < 2**20
    (tmp_path / "a.gz").write_bytes(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 500 * 2**20) + bytes(500 * 2**20)))
    assert peak_of(lambda: read_idx(tmp_path / "a.gz")) < 300 * 2**20


BAD_HEADERS = [
    "{'descr': '|u1',",
    "(" * 500,
    "{'descr': '''",
    "  {\n {",
    "{'descr': 3, 'fortran_order': 0, 'shape': 1}",
]


@pytest.mark.parametrize("text", BAD_HEADERS)
@pytest.mark.parametrize("version", [1, 2])
def test_a_header_that_is_no_python_is_told_in_one_sentence(tmp_path, text, version):
    header = struct.pack("<H" if version == 1 else "<I", len(text)) + text.encode()
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as packed:
        packed.writestr("images.npy", b"\x93NUMPY" + bytes([version, 0]) + header)
    for read in (lambda a: a["images"], lambda a: a.shape("images"), lambda a: a.first("images")):
        with pytest.raises(BadInput, match=r"a\.npz: the array 'images' cannot be read"):
            read(Archive(tmp_path / "a.npz"))


def test_a_file_of_another_format_is_no_picture(tmp_path):
    """PostScript under the name of a PNG, or in an archive, would start a program."""
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    (tmp_path / "a.png").write_bytes(content)
    packed = Packed(np.frombuffer(content, np.uint8), np.array([0, len(content)]))
    for read in (lambda: packed[0], lambda: Reader().pixels(tmp_path / "a.png")):
        with pytest.raises(OSError, match="cannot identify"):
            read()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
def test_the_bombs_fit_where_there_is_little_memory(tmp_path):
    """The whole process, with what libraries allocate beside Python, in 600 MB more than it has."""
    many = 2**30
    deflated(tmp_path / "a.dcm", header_of(8, 8, many), many)
    code = f"""
import resource, numpy, pydicom, pydicom.pixels, nibabel
from pathlib import Path
from polyclinic.data.reading import Reader
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20,) * 2)
try:
    Reader().pixels(Path({str(tmp_path / "a.dcm")!r}))
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "bytes of pixels where its header declares 128" in done.stdout, done.stderr
