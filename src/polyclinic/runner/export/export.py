"""Writes a released model for other programs, and checks that both say the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyclinic import __version__
from polyclinic.errors import BadInput, WorkFailed
from polyclinic.files import atomic_folder
from polyclinic.randomness import numpy_rng
from polyclinic.runner.export.formats import FORMATS, Format, Predict, refuse_missing
from polyclinic.runner.export.model_card import model_card
from polyclinic.runner.export.preparation import write_bundle, write_preparation
from polyclinic.runner.predict.model_file import MODEL, Card
from polyclinic.runner.predict.predict import Predictor, load_predictor
from polyclinic.settings import no_such_choice

#: images of the user's that are compared at most
SAMPLES = 32


@dataclass(frozen=True)
class Exported:
    """An exported model: its folder, its file, and how far it agrees with the released one."""

    folder: Path
    file: Path
    agreement: Agreement


def export(
    run: str | Path,
    to: str,
    out: str | Path | None = None,
    *,
    images: Sequence[str | Path] = (),
    site: str | None = None,
    ensemble: bool = False,
    plugins: Sequence[str] = (),
    allow_import: Sequence[str] = (),
) -> Exported:
    """Write the model of a run (its folder, or its `model.safetensors`) as `onnx`, `torchscript` or `monai-bundle`.

    `out` is a new folder, by default `exported/<to>` in the run folder. Predictions are compared on `images`, files or
    folders, or on images that are drawn; WorkFailed, and nothing is written, if they differ by more than 1e-5.
    """
    if to not in FORMATS:
        raise BadInput(f"--to: {no_such_choice(to, list(FORMATS))}")
    format_ = FORMATS[to]
    refuse_missing(to, format_.packages)
    path = Path(run)
    predictor = load_predictor(path, site=site, ensemble=ensemble, plugins=plugins, allow_import=allow_import)
    home = path if path.is_dir() else path.parent
    folder = Path(out) if out is not None else home / "exported" / to
    samples, what = _samples(predictor, [Path(image) for image in images])
    _make_room(folder)
    try:
        with atomic_folder(folder) as partial:
            file = partial / format_.file
            file.parent.mkdir(exist_ok=True)
            agreement = _write_and_check(predictor, format_, file, samples, what)
            chosen = {"file": MODEL, "site": site, "ensemble": ensemble}
            _write_beside(partial, home, predictor, to, agreement, chosen)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be written ({error.strerror or error}); name another place") from None
    return Exported(folder, folder / format_.file, agreement)


def _samples(predictor: Predictor, images: Sequence[Path]) -> tuple[np.ndarray, str]:
    """The images to compare predictions on, and what they are."""
    if not images:
        return drawn_images(predictor.card), "drawn images (black, white, shades, noise)"
    found = predictor.prepared_images(images, SAMPLES)
    return found, f"{len(found)} of the user's images"


def _make_room(folder: Path) -> None:
    if folder.exists():
        raise BadInput(f"--out {folder}: is there already; remove it, or name another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {folder}: cannot be written ({error.strerror or error}); name another place") from None


def _write_and_check(predictor: Predictor, format_: Format, file: Path, samples: np.ndarray, what: str) -> Agreement:
    facts = {"polyclinic": __version__, "weights_sha256": predictor.card.weights_sha256}
    predictor.outputs(samples[:2])  # an encoder is loaded at its first use, of which no exporter must be a witness
    try:
        format_.write(predictor.model, samples[:2], file, facts)
    except OSError:
        raise
    except Exception as error:  # an exporter meets an operation that its format does not have
        reason = " ".join(str(error).split())[:300]
        raise WorkFailed(f"the network cannot be written in this format ({reason}); try another one") from None
    return check_agreement(
        lambda images: predictor.outputs(images).numpy(), format_.load(file), samples, what, predictor.card
    )


def _write_beside(
    folder: Path, home: Path, predictor: Predictor, to: str, agreement: Agreement, chosen: dict[str, Any]
) -> None:
    """What lies beside the model: preparation, card, and what was done with the model that was `chosen`."""
    card = model_card(home, predictor.card, FORMATS[to].file, to)
    (folder / "model_card.md").write_text(card, encoding="utf-8")
    write_preparation(folder, predictor.card, predictor.calibration)
    if to == "monai-bundle":
        write_bundle(folder, predictor.card, card)
    files = {path.relative_to(folder).as_posix(): _sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    content: dict[str, Any] = {
        "polyclinic": __version__,
        "format": to,
        "from": {**chosen, "weights_sha256": predictor.card.weights_sha256},
        "agreement": agreement.as_json(),
        "sha256": files,
    }
    (folder / "export.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def drawn_images(card: Card) -> np.ndarray:
    """Images of many kinds, the same every time: black, white, smooth shades, and noise; uint8 [12, C, size, size]."""
    rng = numpy_rng("sample images of an export")
    size, channels = card.size, card.channels
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
    scale = _scale(card)
    expected = ours(images)
    found = Agreement(
        len(images),
        what,
        TOLERANCE,
        _largest(theirs(images), expected) / scale,
        max(_largest(theirs(images[i : i + 1]), expected[i : i + 1]) for i in range(len(images))) / scale,
    )
    worst = max(found.largest_difference, found.each_alone)
    if not worst <= TOLERANCE:  # NaN is not
        raise WorkFailed(
            f"the exported model differs from the released one by {worst:.2g} on {what}, and {TOLERANCE:g} is the most "
            "that counts as the same; nothing was written: try another format"
        )
    return found


def _scale(card: Card) -> float:
    """Half the range of labels where the model gives values; 1 for probabilities."""
    low, high = card.label_range or (-1.0, 1.0)
    return (high - low) / 2 if card.built_task().like == "regression" else 1.0


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        raise WorkFailed(
            f"the exported model gives {a.shape} where the released one gives {b.shape}; try another format"
        )
    return float(np.abs(a.astype(np.float64) - b).max())
