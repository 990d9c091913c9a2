"""A look at a file of first weights without torch: the names of its tensors, for `study check`.

Nothing is unpickled. Of a file that torch wrote (a zip with a pickle in it) the pickle's instructions are listed and
not carried out; the names of tensors are among its strings.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from polyclinic.errors import BadInput
from polyclinic.models.weights_file import PICKLE, PREFIX, cannot_read, nothing_fits, what_is_wrong

#: the longest list of instructions that is looked at; that of a network with 10,000 tensors has 2 MB
LONGEST_PICKLE = 64 * 2**20
#: whose functions and classes a file of tensors names; whole networks name classes of torch.nn
OF_TENSORS = ("torch", "collections", "builtins", "__builtin__", "_codecs", "numpy")
NETWORKS = "torch.nn.modules"
DOTTED = re.compile(r"\w+(\.\w+)+")
ZIP = b"PK"
OLD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"  # what files of torch before 1.6 begin with


@dataclass(frozen=True)
class LookedAt:
    """The names of the tensors in a file; None where they cannot be told without torch."""

    path: Path
    names: tuple[str, ...] | None

    def sentence(self, children: Iterable[str], own_name: Callable[[str], str], backbone: str) -> str:
        """How many names belong to layers (`children`) of a network, and a warning where few do; BadInput for none."""
        if self.names is None:
            return f"{self.path}: an old file of torch; the run compares its tensors with {backbone}"
        own = set(children)
        fit = [name for name in self.names if own_name(name.removeprefix(PREFIX)).partition(".")[0] in own]
        if not fit:
            raise BadInput(nothing_fits(self.path, backbone, self.names, sorted(own)))
        many = f"{len(fit)} of {len(self.names)} tensors have names of {backbone}"
        if 2 * len(fit) < len(self.names):
            return f"WARNING: {self.path}: only {many}; it may be a file of another network"
        return f"{self.path}: {many}; the run compares their shapes"


def look_at_weights(path: Path) -> LookedAt:
    """The names in a file of weights; BadInput where it can be seen that it is none."""
    start = b""
    try:
        with path.expanduser().open("rb") as file:
            start = file.read(len(OLD))
        return LookedAt(path, _names(path.expanduser(), start))
    except OSError as error:
        raise BadInput(cannot_read(path, error)) from None
    except Exception:  # whatever a reader says about a file that is something else
        by_torch = start.startswith((ZIP, PICKLE))
        raise BadInput(f"model.weights: '{path}' {what_is_wrong(path, by_torch=by_torch)}") from None


def _names(path: Path, start: bytes) -> tuple[str, ...] | None:
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as opened:
            return tuple(opened.keys())
    if start == OLD:
        return None
    if not start.startswith(ZIP):
        raise ValueError("no file of torch")
    with zipfile.ZipFile(path) as archive:
        (pickle,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        if pickle.file_size > LONGEST_PICKLE:
            raise ValueError("more than names of tensors")
        return _dotted(archive.read(pickle))


def _dotted(pickle: bytes) -> tuple[str, ...]:
    """The strings of a pickle that look like `layer.weight`; ValueError where other objects than tensors are made.

    Its instructions are read one by one, and none is carried out.
    """
    strings: dict[str, None] = {}
    for instruction, value, _ in pickletools.genops(pickle):
        if instruction.name == "STACK_GLOBAL" or (instruction.name == "GLOBAL" and not _is_of_tensors(str(value))):
            raise ValueError("other objects than tensors")
        if "UNICODE" in instruction.name and DOTTED.fullmatch(str(value)):
            strings[str(value)] = None
    return tuple(strings)


def _is_of_tensors(name: str) -> bool:
    return name.partition(" ")[0].partition(".")[0] in OF_TENSORS and not name.startswith(NETWORKS)
