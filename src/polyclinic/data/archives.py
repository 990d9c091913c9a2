"""Reading .npz archives: arrays by name, never pickles, large ones without holding them in memory."""

import contextlib
import io
import lzma
import math
import shutil
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from polyclinic.data.pixels import FORMATS, MOST_PIXELS, check_picture, check_pixels, to_uint8
from polyclinic.errors import BadInput
from polyclinic.registry import reason

#: what reading a broken archive raises; numpy reads the header of an array as Python does
UNREADABLE = (
    *(ValueError, TypeError, LookupError, OverflowError, SyntaxError, OSError, EOFError, RuntimeError, MemoryError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, tokenize.TokenError),
)
#: bytes of the header of an array, which numpy bounds only once it has read them
LONGEST_HEADER = 2**16
#: arrays above this many bytes are unpacked to a temporary file and memory-mapped
LARGE = 1 << 30


class Archive(Mapping[str, np.ndarray]):
    """An .npz file: arrays by name, read when asked for."""

    def __init__(self, file: Path, max_pixels: int = MOST_PIXELS) -> None:
        """`max_pixels`: of one image; see `pixels.check_pixels`."""
        self.file, self.max_pixels = file, max_pixels
        try:
            with zipfile.ZipFile(file) as packed:
                unpacked_size(packed)
                self._bytes = {
                    entry.filename.removesuffix(".npy"): entry.file_size
                    for entry in packed.infolist()
                    if entry.filename.endswith(".npy")
                }
        except UNREADABLE as error:  # an unknown version of the format is a NotImplementedError, a RuntimeError
            raise BadInput(
                f"data.path: '{file}' cannot be opened as an .npz archive ({reason(error)}); name a file that "
                "numpy.savez has written"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def __contains__(self, name: object) -> bool:
        return name in self._bytes

    def __getitem__(self, name: str) -> np.ndarray:
        """The array of that name; a sentence names the others when there is none."""
        if name not in self._bytes:
            raise BadInput(f"{self.file}: there is no array '{name}'; it has {', '.join(self)}")
        with self._stream(name) as stream:
            self._check_declared(name, stream)
        with self._stream(name) as stream:
            if self._bytes[name] > LARGE:
                return _unpacked(stream)
            return np.lib.format.read_array(stream, allow_pickle=False)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array, which is not read."""
        with self._stream(name) as stream:
            return _read_header(stream)[0]

    def first(self, name: str) -> np.ndarray:
        """The first entry of an array, of which no more is read; nothing where it does not stand at the beginning."""
        with self._stream(name) as stream:
            shape, fortran, dtype = _read_header(stream)
            check_pixels(math.prod(shape[1:]), 1, self.max_pixels * 3)
            count = 0 if fortran or not shape or not shape[0] else math.prod(shape[1:])
            return np.frombuffer(stream.read(count * dtype.itemsize), dtype)

    @contextlib.contextmanager
    def _stream(self, name: str) -> Iterator[IO[bytes]]:
        """The bytes of an array; whatever goes wrong with them is told as BadInput."""
        try:
            with zipfile.ZipFile(self.file) as packed, packed.open(f"{name}.npy") as stream:
                yield stream
        except UNREADABLE as error:
            raise BadInput(f"{self.file}: the array '{name}' cannot be read ({error})") from None

    def _check_declared(self, name: str, stream: IO[bytes]) -> None:
        """ValueError for an array that is not as large as it declares, whose images are larger than the study allows,
        or for which there is no room."""
        shape, _, dtype = _read_header(stream)
        declared = stream.tell() + math.prod(shape) * dtype.itemsize
        if declared != self._bytes[name]:
            raise ValueError(f"it declares {declared} bytes, and the archive has {self._bytes[name]}")
        if len(shape) >= 3:
            height, width = sides_of(shape)
            check_pixels(width, height, self.max_pixels)
        if declared > LARGE and declared > shutil.disk_usage(tempfile.gettempdir()).free:
            raise ValueError(f"it has {declared} bytes, and {tempfile.gettempdir()} has no room to unpack it")


def unpacked_size(packed: zipfile.ZipFile) -> int:
    """Bytes of all that an archive holds; ValueError where one is compressed as numpy and torch never do: zipfile
    unpacks those ways without a bound, gigabytes from the first 4,096 bytes."""
    for entry in packed.infolist():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"'{entry.filename}' is compressed in another way than numpy does; save it again")
    return sum(entry.file_size for entry in packed.infolist())


def sides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width of images [N, H, W], [N, H, W, C] or [N, C, H, W]."""
    return shape[2:4] if len(shape) == 4 and shape[1] in (1, 3) else shape[1:3]


def _unpacked(stream: IO[bytes]) -> np.ndarray:
    """A read-only memory map of a temporary copy, which the system frees with the map. It is made of the open file:
    Windows opens no temporary file a second time, by its name."""
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(stream, copy, 1 << 20)
        copy.seek(0)
        shape, fortran, dtype = _read_header(copy)
        return np.memmap(copy, dtype, "r", copy.tell(), shape, "F" if fortran else "C")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in read_header:
        raise ValueError(f"version {version} of the .npy format is unknown")
    width = 2 * version[0]
    start = file.read(width)
    if (length := int.from_bytes(start, "little")) > LONGEST_HEADER:
        raise ValueError(f"its header has {length} bytes")
    shape, fortran, dtype = read_header[version](io.BytesIO(start + file.read(length)))
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return shape, fortran, dtype


class Chain(Sequence[np.ndarray]):
    """Several arrays of images as one, without copying them together."""

    def __init__(self, parts: list[Sequence[np.ndarray] | np.ndarray]) -> None:
        self.parts = parts
        self.lengths = [len(part) for part in parts]
        self.starts = np.cumsum([0, *self.lengths])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, i: Any) -> Any:
        part = int(np.searchsorted(self.starts, i, side="right")) - 1
        return self.parts[part][i - self.starts[part]]


class Packed(Sequence[np.ndarray]):
    """Compressed pictures one behind the other: `data` picture i from `offsets[i]` to `offsets[i + 1]`."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray, max_pixels: int = MOST_PIXELS) -> None:
        self.data, self.offsets, self.max_pixels = data, offsets, max_pixels

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: Any) -> Any:
        """uint8 [H, W] or [H, W, 3]."""
        encoded = self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as picture:
            check_picture(picture, self.max_pixels)
            return np.asarray(picture.convert("L" if picture.mode in ("1", "L", "I;16") else "RGB"))


def channels_last(images: np.ndarray, what: str) -> np.ndarray:
    """[N, H, W], [N, H, W, C] or [N, C, H, W] as a view [N, H, W] or [N, H, W, 3]."""
    if images.ndim == 4 and images.shape[3] not in (1, 3) and images.shape[1] in (1, 3):
        images = images.transpose(0, 2, 3, 1)
    if images.ndim == 4 and images.shape[3] == 1:
        images = images[..., 0]
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] != 3):
        raise BadInput(f"{what}: images must be [N, H, W], [N, H, W, 3] or [N, 3, H, W], not {list(images.shape)}")
    if not _is_taken(images.dtype):
        raise BadInput(f"{what}: {NO_PIXELS} {images.dtype}{SCALE}")
    return images


SCALE = "; scale them with (x - lowest) / (highest - lowest)"
NO_PIXELS = "images must be uint8, or floats from 0 to 1, not"


def _is_taken(dtype: np.dtype) -> bool:
    return dtype in (np.uint8, np.bool_) or bool(np.issubdtype(dtype, np.floating))


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """One image as uint8; floats are taken to run from 0 to 1, and so do truth values."""
    if pixels.dtype == np.uint8:
        return pixels
    if not _is_taken(pixels.dtype):
        raise ValueError(f"{NO_PIXELS} {pixels.dtype}{SCALE}")
    if not np.isfinite(pixels).all():
        raise ValueError("it holds values that are no numbers (NaN or infinite) instead of 0 to 1; take the image out")
    if not (pixels.min() >= 0 and pixels.max() <= 1):
        cure = "; divide them by 255, or save them as uint8" if pixels.min() >= 0 and 1 < pixels.max() <= 255 else SCALE
        raise ValueError(f"its values run from {pixels.min():g} to {pixels.max():g} instead of 0 to 1{cure}")
    return to_uint8(pixels)
