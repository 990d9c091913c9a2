"""Models as anybody may bring them: one function from prepared images to predictions, whatever the file's format."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from polyclinic.errors import BadInput
from polyclinic.runner.export.formats import FORMATS, Predict, refuse_missing
from polyclinic.runner.predict.model_file import ReleasedModel
from polyclinic.runner.predict.predict import load_predictor

if TYPE_CHECKING:
    from polyclinic.runner.run.assembly import Assembly

#: what the numbers of a foreign model are
Outputs = Literal["probabilities", "logits"]
BATCH = 64


@dataclass(frozen=True)
class GivenModel:
    """A model that somebody brought. `classes` are the names that it knows, None where its file says none."""

    what: str
    predict: Predict
    classes: tuple[str, ...] | None = None
    size: int | None = None

    def of_all(self, images: np.ndarray) -> np.ndarray:
        """Predictions for uint8 images [N, C, H, W], in pieces."""
        pieces = [self.predict(np.array(images[at : at + BATCH])) for at in range(0, len(images), BATCH)]
        return np.concatenate(pieces).astype(np.float64)


def load_model(
    path: Path,
    assembly: Assembly,
    *,
    outputs: Outputs = "probabilities",
    site: str | None = None,
    ensemble: bool = False,
    plugins: Sequence[str] = (),
    allow_import: Sequence[str] = (),
) -> GivenModel:
    """The model of a run folder or `model.safetensors`, of an export (ONNX, TorchScript, MONAI bundle), or weights for
    the study's own network, which may come from a plug-in."""
    if not path.exists():
        raise BadInput(f"MODEL {path}: there is no such file or folder; name a run folder or a model file")
    file = _model_in(path)
    if file.suffix == ".onnx":
        refuse_missing("onnx", ("onnxruntime",))
        return GivenModel("an ONNX file", _finished(_onnx(file), assembly, outputs))
    if file.suffix in (".ts", ".pt", ".pth") and _is_torchscript(file):
        return GivenModel("a TorchScript file", _finished(_torchscript(file), assembly, outputs))
    if path.is_dir() or _has_card(file):
        found = load_predictor(path, site=site, ensemble=ensemble, plugins=plugins, allow_import=allow_import)
        card = found.card
        return GivenModel("a model of a run", _released(found.model), card.classes, card.size)
    return GivenModel("weights of the study's network", _weights(file, assembly), tuple(assembly.target.classes))


def _released(model: ReleasedModel) -> Predict:
    """As `predict` has it, but in float64: probabilities that float32 cannot tell apart keep their order."""

    @torch.no_grad()
    def predict(images: np.ndarray) -> np.ndarray:
        batch = torch.from_numpy(images).float() / 255
        pairs = zip(model.networks, model.temperatures, strict=True)
        said = [model.task.predictions(network(batch).double() / t, model.target) for network, t in pairs]
        return torch.stack(said).mean(0).numpy()

    return predict


def _model_in(path: Path) -> Path:
    """The file of a model, in a bundle or an exported folder too."""
    if path.is_dir():
        for form in FORMATS.values():
            if (path / form.file).is_file():
                return path / form.file
    return path


def _is_torchscript(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as content:
        return any("/code/" in name for name in content.namelist())


def _has_card(file: Path) -> bool:
    from polyclinic.runner.predict.model_file import read_model_file

    try:
        read_model_file(file)
    except BadInput:
        return False
    return True


def _torchscript(file: Path) -> Predict:
    try:
        loaded = torch.jit.load(file, map_location="cpu").eval()
    except RuntimeError as error:
        raise BadInput(f"MODEL {file}: cannot be read as TorchScript ({str(error).splitlines()[0]})") from None

    def predict(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            try:  # ours take uint8, others numbers from 0 to 1
                found = loaded(torch.from_numpy(images))
            except RuntimeError:
                found = loaded(torch.from_numpy(images).float() / 255)
        return found.numpy()

    return predict


def _onnx(file: Path) -> Predict:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise BadInput(f"MODEL {file}: is no ONNX file that can be read ({str(error).splitlines()[0][:120]})") from None
    given = session.get_inputs()[0]
    as_float = "uint8" not in given.type

    def predict(images: np.ndarray) -> np.ndarray:
        batch: Any = images.astype(np.float32) / 255 if as_float else images
        return np.asarray(session.run(None, {given.name: batch})[0])

    return predict


def _finished(predict: Predict, assembly: Assembly, outputs: Outputs) -> Predict:
    """The same with logits as the task reads them, and one column a class."""
    task, target = assembly.study.task, assembly.target

    def finished(images: np.ndarray) -> np.ndarray:
        try:
            found = torch.from_numpy(np.array(predict(images), np.float64))
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0][:160]
            shape = "x".join(str(side) for side in images.shape[1:])
            raise BadInput(f"MODEL: cannot take images of {shape} ({first}); set data.size to its own") from None
        return (task.predictions(found, target) if outputs == "logits" else found).numpy()

    return finished


def _weights(file: Path, assembly: Assembly) -> Callable[[np.ndarray], np.ndarray]:
    from polyclinic.models import find_weights

    study, trainer = assembly.study, assembly.trainer()
    size = study.model.input_size or assembly.prepared.info["size"]
    found = find_weights(str(file), study.model.backbone, size=size, arguments=study.model.arguments)
    assert found is not None, "a file is named"
    trainer.load(found.fitted(assembly.initial_weights(), study.model.backbone).weights)

    @torch.no_grad()
    def predict(images: np.ndarray) -> np.ndarray:
        batch = torch.from_numpy(images).to(trainer.device).float() / 255
        return study.task.predictions(trainer.model.eval()(batch).double().cpu(), assembly.target).numpy()

    return predict
