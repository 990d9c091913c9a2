"""Writes a released model for other programs, and checks that both say the same."""

import contextlib
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from polyclinic import __version__
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import atomic_folder, sha256_of
from polyclinic.randomness import numpy_rng
from polyclinic.runner.export import volumes
from polyclinic.runner.export.model_card import model_card
from polyclinic.runner.export.preparation import INPUT, write_bundle, write_preparation
from polyclinic.runner.predict.model_file import MODEL, Card
from polyclinic.runner.predict.predict import Chosen, Predictor, load_predictor
from polyclinic.settings import no_such_choice

#: images of the user's that are compared at most
SAMPLES = 32
#: the version of ONNX's operators, the first that resizes as torch does
OPSET = 18
#: uint8 images [N, C, size, size] in, predictions out
Predict = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Exported:
    """An exported model: its folder, its file, and how far it agrees with the released one."""

    folder: Path
    file: Path
    agreement: "Agreement"


def export(
    run: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    images: Sequence[str | Path] = (),
    **chosen: Unpack[Chosen],
) -> Exported:
    """Write the model of a run (its folder, or its `model.safetensors`) as `onnx`, `torchscript` or `monai-bundle`.

    `out` is a new folder, by default `exported/<to>` in the run folder. Predictions are compared on `images`, files or
    folders, or on images that are drawn; WorkFailed, and nothing is written, if they differ by more than 1e-5.
    `chosen`: which of a run's models is meant, and the code that it may use.
    """
    if to not in FORMATS:
        raise BadInput(f"--to: {no_such_choice(to, list(FORMATS))}")
    format_, path = FORMATS[to], Path(run)
    predictor = load_predictor(path, **chosen)
    of_volumes = predictor.card.volume is not None
    if of_volumes and (images or len(predictor.model.networks) > 1):
        flag = "--images" if images else "--ensemble"
        raise BadInput(f"{flag}: one network of volumes is exported, and compared on drawn patches; leave it out")
    refuse_missing(to, format_.packages)
    home = path if path.is_dir() else path.parent
    folder = Path(out) if out is not None else home / "exported" / to
    if of_volumes:
        samples, what = volumes.drawn_patches(predictor.card), "drawn patches (shades, noise)"
    else:
        samples, what = drawn_images(predictor.card), "drawn images (black, white, shades, noise)"
    if images:
        samples = predictor.prepared_images(map(Path, images), SAMPLES)
        what = f"{len(samples)} of the user's images"
    if folder.exists():
        raise BadInput(f"--out {folder}: is there already; remove it, or name another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder) as partial:
            file = partial / format_.file
            file.parent.mkdir(exist_ok=True)
            agreement = _write_and_check(predictor, format_, file, samples, what)
            card = model_card(home, predictor.card, format_.file, to)
            (partial / "model_card.md").write_text(card, encoding="utf-8")
            if of_volumes:
                volumes.write_preparation(partial, predictor.card)
            else:
                write_preparation(partial, predictor.card, predictor.calibration)
            if to == "monai-bundle":
                (volumes.write_bundle if of_volumes else write_bundle)(partial, predictor.card, card)
            origin = {"file": MODEL, "site": chosen.get("site"), "ensemble": chosen.get("ensemble", False)}
            content = {
                "polyclinic": __version__,
                "format": to,
                "from": {**origin, "weights_sha256": predictor.card.weights_sha256},
                "agreement": asdict(agreement),
                "sha256": {
                    path.relative_to(partial).as_posix(): sha256_of(path)
                    for path in sorted(partial.rglob("*"))
                    if path.is_file()
                },
            }
            (partial / "export.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be written ({error.strerror or error}); name another place") from None
    return Exported(folder, folder / format_.file, agreement)


def _write_and_check(
    predictor: Predictor, format_: "Format", file: Path, samples: np.ndarray, what: str
) -> "Agreement":
    facts = {"polyclinic": __version__, "weights_sha256": predictor.card.weights_sha256}
    model = predictor.model.networks[0] if predictor.card.volume else predictor.model
    with torch.no_grad():
        model(torch.from_numpy(samples[:2]))  # an encoder is loaded at its first use, which no exporter must see
    try:
        format_.write(model, samples[:2], file, facts)
    except OSError:
        raise
    except Exception as error:  # an exporter meets an operation that its format does not have
        reason = " ".join(str(error).split())[:300]
        raise WorkFailed(f"the network cannot be written in this format ({reason}); try another one") from None

    @torch.no_grad()
    def ours(images: np.ndarray) -> np.ndarray:
        found: np.ndarray = model(torch.from_numpy(images)).numpy()
        return found

    return check_agreement(ours, format_.load(file), samples, what, predictor.card)


#: how far a probability may differ; of a value, in the network's own scale, where the range of labels is -1 to 1
TOLERANCE = 1e-5
DRAWN = 12


@dataclass(frozen=True)
class Agreement:
    """The largest difference on `images`, in the network's scale; `each_alone`: of images given one at a time."""

    images: int
    what: str
    tolerance: float
    largest_difference: float
    each_alone: float


def drawn_images(card: Card) -> np.ndarray:
    """Images of many kinds, the same every time: black, white, smooth shades, and noise; uint8 [12, C, size, size]."""
    rng = numpy_rng("sample images of an export")
    size, channels = card.side, card.channels
    across = np.linspace(0, 1, size)
    images = [np.zeros((channels, size, size)), np.ones((channels, size, size))]
    for number in range(DRAWN - 2):
        angle, waves = rng.uniform(0, np.pi), rng.uniform(0.5, 4, (channels, 1, 1))
        along = np.cos(angle) * across[:, None] + np.sin(angle) * across[None, :]
        smooth = 0.5 + 0.5 * np.sin(2 * np.pi * waves * along[None])
        noise = rng.uniform(0, 1, (channels, size, size))
        share = number / (DRAWN - 3)
        images.append((1 - share) * smooth + share * noise)
    return np.stack([(image * 255 + 0.5).astype(np.uint8) for image in images])


def check_agreement(ours: Predict, theirs: Predict, images: np.ndarray, what: str, card: Card) -> Agreement:
    """The differences between two models; WorkFailed if they are larger than the tolerance.

    All images at once and each alone: an exporter that fixed the number of images is found, too.
    """
    # half the range of labels where the model gives values; 1 for probabilities
    low, high = (card.label_range if card.built_task().like == "regression" else None) or (-1.0, 1.0)
    scale, expected = (high - low) / 2, ours(images)
    tolerance = volumes.TOLERANCE if card.volume else TOLERANCE
    found = Agreement(
        len(images),
        what,
        tolerance,
        _largest(theirs(images), expected) / scale,
        max(_largest(theirs(images[i : i + 1]), expected[i : i + 1]) for i in range(len(images))) / scale,
    )
    worst = max(found.largest_difference, found.each_alone)
    if not worst <= tolerance:  # NaN is not
        raise WorkFailed(
            f"the exported model differs from the released one by {worst:.2g} on {what}, and {tolerance:g} is the most "
            "that counts as the same; nothing was written: try another format"
        )
    return found


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        raise WorkFailed(f"the exported model gives {a.shape}, and the released one {b.shape}; try another format")
    return float(np.abs(a.astype(np.float64) - b).max())


# --- the file formats: how a model is written, and how the written file is asked for predictions ----------


@dataclass(frozen=True)
class Format:
    """A format of model files."""

    file: str  #: where the model lies in the exported folder
    write: Callable[[nn.Module, np.ndarray, Path, Mapping[str, str]], None]
    load: Callable[[Path], Predict]  #: the written file, as a program of others would use it
    packages: tuple[str, ...] = ()  #: what must be installed to write and check it


def refuse_missing(name: str, packages: tuple[str, ...]) -> None:
    """BadInput if a package is not installed that a format needs."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise BadInput(f"--to {name}: needs {', '.join(missing)}; install them with pip install 'polyclinic[export]'")


def write_torchscript(model: nn.Module, sample: np.ndarray, path: Path, facts: Mapping[str, str]) -> None:
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
        loaded = torch.jit.load(path, map_location="cpu").eval()

    @torch.no_grad()
    def predict(images: np.ndarray) -> np.ndarray:
        try:  # ours take uint8, or patches of volumes; others numbers from 0 to 1
            return loaded(torch.from_numpy(images)).numpy()
        except RuntimeError:
            return loaded(torch.from_numpy(images).float() / 255).numpy()

    return predict


def write_onnx(model: nn.Module, sample: np.ndarray, path: Path, facts: Mapping[str, str]) -> None:
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

    given = session.get_inputs()[0]
    takes_bytes = "uint8" in given.type

    def predict(images: np.ndarray) -> np.ndarray:
        batch: Any = images if takes_bytes or images.dtype == np.float32 else images.astype(np.float32) / 255
        return np.asarray(session.run(None, {given.name: batch})[0])

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
