"""The file formats: how a released model is written, and how the written file is asked for predictions."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic.errors import BadInput
from polyclinic.runner.predict.model_file import ReleasedModel

#: the name of the network's input, and the version of ONNX's operators (the first that resizes as torch does)
INPUT, OPSET = "images", 18
#: uint8 images [N, C, size, size] in, predictions out
Predict = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Format:
    """A format of model files."""

    file: str  #: where the model lies in the exported folder
    write: Callable[[ReleasedModel, np.ndarray, Path, Mapping[str, str]], None]
    load: Callable[[Path], Predict]  #: the written file, as a program of others would use it
    packages: tuple[str, ...] = ()  #: what must be installed to write and check it


def refuse_missing(name: str, packages: tuple[str, ...]) -> None:
    """BadInput if a package is not installed that a format needs."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise BadInput(f"--to {name}: needs {', '.join(missing)}; install them with pip install 'polyclinic[export]'")


def write_torchscript(model: ReleasedModel, sample: np.ndarray, path: Path, facts: Mapping[str, str]) -> None:
    """The network as TorchScript, for torch in Python and in C++."""
    with _quiet(), torch.no_grad():
        traced = torch.jit.freeze(torch.jit.trace(model, torch.from_numpy(sample), check_trace=False))
        content = io.BytesIO()
        torch.jit.save(traced, content, _extra_files={name: text.encode() for name, text in facts.items()})
    _write_without_source_lines(content, path)


def _write_without_source_lines(content: io.BytesIO, path: Path) -> None:
    """TorchScript notes for messages which line of which file a step came from: that names folders of this machine."""
    with zipfile.ZipFile(content) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as kept:
        for entry in whole.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                kept.writestr(zipfile.ZipInfo(entry.filename), whole.read(entry))


def load_torchscript(path: Path) -> Predict:
    with _quiet():
        loaded = torch.jit.load(path)

    def predict(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return loaded(torch.from_numpy(images)).numpy()

    return predict


def write_onnx(model: ReleasedModel, sample: np.ndarray, path: Path, facts: Mapping[str, str]) -> None:
    """The network as ONNX, in one file, for any number of images at a time."""
    import onnx

    with _quiet(), torch.no_grad():
        program: Any = torch.onnx.export(
            model,
            (torch.from_numpy(sample),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=[INPUT],
            output_names=["predictions"],
            opset_version=OPSET,
            verbose=False,
        )
    found = program.model_proto
    _without_places(found)
    for name, text in facts.items():
        found.metadata_props.add(key=name, value=text)
    onnx.checker.check_model(found)
    onnx.save(found, path)


def _without_places(found: Any) -> None:
    """Remove what the exporter notes about each node: it names files of this machine."""
    for node in [*found.graph.node, *(node for function in found.functions for node in function.node)]:
        del node.metadata_props[:]
        node.doc_string = ""
    del found.graph.metadata_props[:]
    for value in [*found.graph.input, *found.graph.output, *found.graph.value_info, *found.graph.initializer]:
        del value.metadata_props[:]


def load_onnx(path: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def predict(images: np.ndarray) -> np.ndarray:
        [found] = session.run(None, {INPUT: images})
        return np.asarray(found)

    return predict


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A while without the exporters' remarks about themselves; what matters is checked afterwards."""
    exporter = logging.getLogger("torch.onnx")
    before = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(before)


FORMATS = {
    "onnx": Format("model.onnx", write_onnx, load_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "torchscript": Format("model.ts", write_torchscript, load_torchscript),
    "monai-bundle": Format("models/model.ts", write_torchscript, load_torchscript, ("monai",)),
}
