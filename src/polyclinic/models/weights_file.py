"""First weights out of a file (`model.weights`): what it holds, and what of it a network takes over."""

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyclinic.errors import BadInput
from polyclinic.files import decode_tensors

#: the setting that names no file: weights are drawn
RANDOM = "random"
#: the setting that names the public weights of the backbone, out of a package
PUBLIC = "public"
#: names under which training programs keep the weights beside other things, and what they put before every name
WRAPPERS = ("state_dict", "model_state_dict", "model")
PREFIX = "module."
SHOWN = 3  # names in a sentence
SMALL = 2**24  # bytes that no tensor is refused for
PICKLE = b"\x80"  # what a pickle begins with


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file, by name, and the SHA-256 of its bytes."""

    path: Path
    sha256: str
    tensors: Mapping[str, Tensor]

    def renamed(self, own_name: Callable[[str], str]) -> "WeightsFile":
        """The same tensors under a backbone's own names."""
        return replace(self, tensors={own_name(name): tensor for name, tensor in self.tensors.items()})

    def fitted(self, drawn: Mapping[str, Tensor], backbone: str) -> "Fitted":
        """The weights of a network: the file's where name, shape and kind of number agree, else as they were drawn.

        BadInput if nothing agrees, or if what is taken over is not finite.
        """
        fits = {name: tensor for name, tensor in self.tensors.items() if name in drawn and alike(tensor, drawn[name])}
        # a copy in the network's own kind of number: a parameter brings gradients along, and 1e300 is no float32
        taken = {name: tensor.detach().to(drawn[name].dtype, copy=True) for name, tensor in fits.items()}
        if not any(tensor.is_floating_point() for tensor in taken.values()):
            raise BadInput(nothing_fits(self.path, backbone, list(self.tensors), list(drawn)))
        for name, tensor in taken.items():
            if not tensor.isfinite().all():
                raise BadInput(f"model.weights: '{name}' in '{self.path}' is not finite; name another file")
        return Fitted(
            {name: taken.get(name, tensor) for name, tensor in drawn.items()},
            loaded=tuple(taken),
            other_shape=tuple(name for name in drawn if name in self.tensors and name not in taken),
            missing=tuple(name for name in drawn if name not in self.tensors),
            unused=tuple(name for name in self.tensors if name not in drawn),
        )


@dataclass(frozen=True)
class Fitted:
    """A network's first weights, and the names of what came from the file and what did not."""

    weights: dict[str, Tensor]
    loaded: tuple[str, ...]
    other_shape: tuple[str, ...]  #: in the file with another shape or kind of number; drawn
    missing: tuple[str, ...]  #: not in the file; drawn
    unused: tuple[str, ...]  #: in the file, and not in the network

    def report(self) -> dict[str, Any]:
        """The names, as plain values."""
        return {name: list(getattr(self, name)) for name in ("loaded", "other_shape", "missing", "unused")}

    def sentence(self) -> str:
        """A sentence about what was taken over."""
        parts = [f"{len(self.loaded)} of {len(self.weights)} tensors loaded"]
        for names, what in (
            (self.other_shape, "drawn at random, as their shape or kind differs"),
            (self.missing, "drawn at random, as the file lacks them"),
            (self.unused, "in the file not used"),
        ):
            if names:
                parts.append(f"{len(names)} {what} ({_some(names)})")
        return "; ".join(parts)


def alike(tensor: Tensor, drawn: Tensor) -> bool:
    """True where a tensor of a file can be one of a network; sparse ones and those without values cannot."""
    same_kind = tensor.is_floating_point() == drawn.is_floating_point()
    return has_values(tensor) and tensor.shape == drawn.shape and same_kind


def has_values(tensor: Tensor) -> bool:
    """True for an ordinary tensor of real numbers."""
    unusual = tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor.is_complex()
    return tensor.layout == torch.strided and not unusual


def read_weights(path: Path, setting: str = "model.weights") -> WeightsFile:
    """The weights in a safetensors file, or in one that torch wrote, of which only tensors are read; else BadInput with
    the name of the `setting`."""
    try:
        content = path.expanduser().read_bytes()
    except OSError as error:
        choices = "a file, 'random' or 'public'" if setting == "model.weights" else "a file of weights"
        raise BadInput(f"{setting}: '{path}' cannot be read ({error.strerror or error}); name {choices}") from None
    try:
        if path.suffix == ".safetensors":
            found: Any = decode_tensors(content)
        else:
            # torch never packs, and a few kilobytes can unpack to gigabytes
            if zipfile.is_zipfile(io.BytesIO(content)):
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    if sum(entry.file_size for entry in archive.infolist()) > len(content):
                        raise ValueError("packed")
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # whatever a reader says about a file that is something else
        raise BadInput(f"{setting}: '{path}' {_what_is_wrong(path, content)}") from None
    tensors = _tensors(found, path)
    for name, tensor in tensors.items():  # one number can stand for all places of a tensor
        if has_values(tensor) and tensor.numel() * tensor.element_size() > max(len(content), SMALL):
            raise BadInput(f"{setting}: '{name}' in '{path}' is larger than the file; write it again as contiguous")
    return WeightsFile(path, hashlib.sha256(content).hexdigest(), tensors)


def nothing_fits(path: Path, backbone: str, in_file: Sequence[str], in_network: Sequence[str]) -> str:
    return (
        f"model.weights: no tensor of '{path}' fits {backbone}: the file has {_some(in_file)}, the network "
        f"{_some(in_network)}; name another file, or the model.backbone that it is of"
    )


def _what_is_wrong(path: Path, content: bytes) -> str:
    """The reason why a file cannot be read as weights, and the cure. torch's own words advise to run the code in the
    file."""
    save = "torch.save(network.state_dict(), FILE)"
    if path.suffix == ".safetensors":
        return f"is not a safetensors file, or is damaged; name another one, or a .pt file of {save}"
    if zipfile.is_zipfile(io.BytesIO(content)) or content[:1] == PICKLE:
        return (
            f"holds other objects than tensors, or is damaged; only tensors are read, since other objects can run "
            f"code: write it again with {save}"
        )
    return f"is not a file of weights; name a .safetensors file, or one of {save}"


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    """The state dict in what a file holds, without the wrapping of training programs."""
    for name in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    tensors = {str(n): t for n, t in found.items() if isinstance(t, Tensor)} if isinstance(found, Mapping) else {}
    if not tensors:
        raise BadInput(f"model.weights: '{path}' holds no named tensors; name a file with a network's state dict")
    wrapped = all(name.startswith(PREFIX) for name in tensors)
    return {name.removeprefix(PREFIX) if wrapped else name: tensor for name, tensor in tensors.items()}


def _some(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
