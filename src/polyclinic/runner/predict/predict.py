"""Prediction with a released model: what it says about image files."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyclinic.data.own_images import only_site_plugins
from polyclinic.data.pixels import Fit, fit_image, graham
from polyclinic.data.reading import Reader, Slices, is_image_name
from polyclinic.data.survey_cases import masks_among
from polyclinic.data.survey_tables import pictures_in
from polyclinic.errors import BadInput, Notice
from polyclinic.metrics.statistics.calibration import COVERAGE
from polyclinic.run_folder import check_whole
from polyclinic.runner.evaluate.calibration import COVERAGES, Calibration, least_cases, share_key
from polyclinic.runner.predict.masks import in_own_size
from polyclinic.runner.predict.model_file import (
    MODEL,
    Card,
    ReleasedModel,
    built_model,
    load_plugins,
    looked_up_names,
    read_model_file,
    refuse_imports,
)
from polyclinic.study.reading import refuse_changed
from polyclinic.tasks import Task

BATCH = 64
#: pixels of a batch: 64 images of 512 x 512; larger images come in smaller batches
BATCH_PIXELS = BATCH * 512**2
#: told of a file that cannot be read, and why
OnBadFile = Callable[[Path, str], None]


@dataclass(frozen=True)
class Prediction:
    """What the model says about one image. `values` is what a table shows; `mask` bool [H, W], in the image's own
    size, or None. `unlike` says how the image differs from those of the study, where it seems to be of another kind."""

    file: Path
    frame: int | None
    values: dict[str, Any]
    mask: np.ndarray | None = None
    unlike: str = ""


class _Read(NamedTuple):
    """An image that was read: its file and slice, prepared, its own height and width, and how it differs."""

    file: Path
    frame: int | None
    image: np.ndarray
    shape: tuple[int, ...]
    unlike: str


@dataclass(frozen=True)
class Predictor:
    """One model, or several whose outputs are averaged.

    `calibration` is what was fitted on validation images, None where nothing was, or for several models.
    """

    card: Card
    model: ReleasedModel
    task: Task
    calibration: Calibration | None = None

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The networks whose outputs are averaged; mostly one."""
        return tuple(self.model.networks)

    @torch.no_grad()
    def outputs(self, images: np.ndarray) -> Tensor:
        """Probabilities [N, C], values in the label's unit [N], or probabilities of the mask [N, H, W].

        `images` are uint8 [N, channels, size, size], as `prepared` gives them.
        """
        return self.model(torch.from_numpy(images))

    def _batch(self) -> int:
        """How many images go through the network at once."""
        side = max(self.card.size, self.card.input_size or 0)
        return max(1, min(BATCH, BATCH_PIXELS // side**2))

    def prepared(self, file: Path, frame: int | None) -> np.ndarray:
        """An image as the training images were prepared."""
        return self._fitted(Reader(self.card.window, self.card.slices).pixels(file, frame))

    def _fitted(self, pixels: np.ndarray) -> np.ndarray:
        card = self.card
        return fit_image(graham(pixels) if card.graham else pixels, Fit(card.size, card.shape), card.channels)

    def prepared_images(self, paths: Iterable[Path], most: int) -> np.ndarray:
        """The first images of files and folders, prepared, at most so many; BadInput for one that cannot be read."""
        reader = Reader(self.card.window, self.card.slices)
        found = itertools.islice(self._read_all(reader, paths, None), most)
        return np.stack([one.image for one in found])

    def predict(
        self,
        paths: Iterable[Path],
        *,
        coverage: float = COVERAGE,
        specificity: float | None = None,
        slices: Slices | None = None,
        on_bad_file: OnBadFile | None = None,
    ) -> Iterator[Prediction]:
        """What the model says about every image of files and folders.

        BadInput for a file that cannot be read, unless `on_bad_file` is there: it is told, and the file is skipped.
        `slices` of volumes, if not those of the training images.
        """
        reader = Reader(self.card.window, slices or self.card.slices)
        for batch in _batches(self._read_all(reader, paths, on_bad_file), self._batch()):
            outputs = self.outputs(np.stack([one.image for one in batch]))
            readings = readings_of(self.card, self.task, self.calibration, outputs, coverage, specificity)
            for one, output, values in zip(batch, outputs, readings, strict=True):
                yield self._prediction(one, output, values)

    def _read_all(self, reader: Reader, paths: Iterable[Path], on_bad_file: OnBadFile | None) -> Iterator[_Read]:
        """Every image that can be read."""
        for file in image_files(paths):
            try:
                images = [self._read(file, frame, pixels) for frame, pixels in _pictures(reader, file)]
            except Exception as error:  # whatever a decoder raises on a broken file is a fact about that file
                reason = _why_unreadable(file, error)
                if on_bad_file is None:
                    raise BadInput(f"{file}: {reason}") from None
                on_bad_file(file, reason)
                continue
            yield from images

    def _read(self, file: Path, frame: int | None, pixels: np.ndarray) -> _Read:
        image, looks = self._fitted(pixels), self.card.looks
        return _Read(file, frame, image, pixels.shape[:2], looks.unlike(image, pixels) if looks else "")

    def _prediction(self, one: _Read, output: Tensor, values: dict[str, Any]) -> Prediction:
        if not self.task.dense:
            return Prediction(one.file, one.frame, values, unlike=one.unlike)
        own = output.numpy() if self.card.graham else in_own_size(output.numpy(), one.shape, self.card.shape)
        mask = own > 0.5
        values = {"pixels": int(mask.sum()), "share": round(float(mask.mean()), 6)}
        return Prediction(one.file, one.frame, values, mask, one.unlike)


def _pictures(reader: Reader, file: Path) -> Iterator[tuple[int | None, np.ndarray]]:
    """Slices of a volume, images of an archive, or the only image of a file, each with its number."""
    if file.suffix.lower() == ".npz":
        yield from enumerate(pictures_in(file))
    else:
        yield from ((frame, reader.pixels(file, frame)) for frame in reader.frames(file))


def _why_unreadable(file: Path, error: Exception) -> str:
    return f"cannot be read as an image: {' '.join(str(error).split())[:200] or type(error).__name__}"


def _batches(images: Iterator[Any], most: int) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(images, most)):
        yield batch


def load_predictor(
    path: Path,
    *,
    site: str | None = None,
    ensemble: bool = False,
    plugins: Sequence[str] = (),
    allow_import: Sequence[str] = (),
) -> Predictor:
    """The model of a run folder or of a `model.safetensors`; where each site has one, a site's or all together.

    `plugins`: its plug-in files, where they are now. `allow_import`: modules, or packages, that may be imported for it.
    A model from somebody else does not choose what code runs here. In a kit, its site.toml says both.
    """
    if path.is_dir():
        check_whole(path)
    file = path / MODEL if path.is_dir() else path
    card, tensors = read_model_file(file)
    with only_site_plugins(file.parent) as kit:
        if kit is None:
            refuse_imports(card, file, [*allow_import, *plugins])
            load_plugins(card, file, plugins)
        chosen = _chosen(list(card.backbones), file, site, ensemble)
        networks = [built_model(card, name, tensors, file) for name in chosen]
        refuse_changed(card.installed | card.networks, looked_up_names(card.task["name"], card.backbones), file)
        task = card.built_task()
    fitted = [card.calibrations.get(name) for name in chosen]
    temperatures = [(one and one.temperature) or 1.0 for one in fitted]
    model = ReleasedModel(networks, temperatures, task, card.target)
    return Predictor(card, model, task, fitted[0] if len(fitted) == 1 else None)


def _chosen(names: list[str], file: Path, site: str | None, ensemble: bool) -> list[str]:
    """Of the sites whose models a file has, those to predict with."""
    if site and ensemble:
        raise BadInput("--site: names one model, and --ensemble takes all of them; give one of the two")
    if names == [""] and (site or ensemble):
        raise BadInput(f"--{'site' if site else 'ensemble'}: {file} holds one model for all sites; leave it out")
    if names != [""] and not ensemble and site not in names:
        wanted = "each site has a model of its own" if site is None else f"there is no model of site '{site}'"
        raise BadInput(f"--site: {wanted} in {file}; name one of {', '.join(names)}, or give --ensemble")
    return names if ensemble else [site or ""]


def predict(
    model: str | Path,
    images: Iterable[str | Path],
    *,
    site: str | None = None,
    ensemble: bool = False,
    plugins: Sequence[str] = (),
    allow_import: Sequence[str] = (),
    coverage: float = COVERAGE,
    specificity: float | None = None,
    slices: Slices | None = None,
    strict: bool = True,
) -> list[Prediction]:
    """What a released model (a run folder, or its `model.safetensors`) says about files and folders of images.

    `plugins` and `allow_import` say where the code is that the model needs, and may use (`load_predictor`). Without
    `strict`, a file that cannot be read is named in a warning and skipped.
    """
    predictor = load_predictor(Path(model), site=site, ensemble=ensemble, plugins=plugins, allow_import=allow_import)
    found = list(
        predictor.predict(
            (Path(image) for image in images),
            coverage=coverage,
            specificity=specificity,
            slices=slices,
            on_bad_file=None if strict else warn_of_bad_file,
        )
    )
    if said := other_kind(found):
        warnings.warn(said, Notice, stacklevel=2)
    return found


def other_kind(found: Sequence[Prediction]) -> str:
    """What to say of images that are unlike those of the study; nothing where none is."""
    odd = [one for one in found if one.unlike]
    if not odd:
        return ""
    return (
        f"{len(odd)} of {len(found)} images do not look like those of the study, such as {odd[0].file.name} "
        f"({odd[0].unlike}): what the model says of such an image may mean nothing"
    )


def warn_of_bad_file(file: Path, reason: str) -> None:
    warnings.warn(f"{file}: {reason}; skipped", Notice, stacklevel=2)


def image_files(paths: Iterable[Path]) -> list[Path]:
    """The files named, and all images below the folders named, in the order of their names. Files of a folder that are
    masks of its other files are left out, with a notice."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path}: there is no such file or folder; name images or folders with images")
        inside = sorted(file for file in path.rglob("*") if file.is_file() and is_image_name(file))
        if path.is_dir() and not inside:
            raise BadInput(f"{path}: holds no image that can be read; name images or folders with images")
        if drawn := masks_among(inside, path):
            inside = [file for file in inside if file not in set(drawn)]
            said = f"{path}: {len(drawn)} files are masks of the others, such as {drawn[0].name}: not predicted"
            warnings.warn(said, Notice, stacklevel=2)
        found += inside if path.is_dir() else [path]
    return found


#: between the classes of a set, in a table
BETWEEN = " | "


def readings_of(
    card: Card, task: Task, calibration: Calibration | None, outputs: Tensor, coverage: float, specificity: float | None
) -> list[dict[str, Any]]:
    """A row for each image of a batch; an empty one where the model draws masks."""
    _check(task, calibration, coverage, specificity)
    if task.dense:
        return [{} for _ in outputs]
    if task.like == "regression":
        return [_value(card, calibration, float(value), coverage) for value in outputs]
    return _classes(card, calibration, outputs.double().numpy(), coverage, specificity)


def why_no_set(
    task: Task, calibration: Calibration | None, coverage: float, cases: int | None, site: str | None
) -> str:
    """Why rows have no set or interval of this coverage, "" where they have one or need none; `cases` are the patients
    of the validation images, of a site where the model is its own, or None where that is not known."""
    if task.dense or (calibration and share_key(coverage) in calibration.quantiles):
        return ""
    percent, needed = _percent(coverage), least_cases(coverage)
    missing = f"set_{percent}" if task.like == "classification" else f"low_{percent} and high_{percent}"
    had = calibration.cases if calibration else cases
    if had is None or had >= needed:
        return f"no {missing}: the model has no calibration"
    return f"no {missing}: a calibration needs {needed} validation patients, {site or 'this run'} had {had}"


def _check(task: Task, calibration: Calibration | None, coverage: float, specificity: float | None) -> None:
    if coverage not in COVERAGES:
        known = ", ".join(share_key(share) for share in COVERAGES)
        raise BadInput(f"--coverage: {coverage:g} is not kept with the model; choose one of {known}")
    if specificity is None:
        return
    known = ", ".join(calibration.thresholds) if calibration else ""
    if not known:
        raise BadInput("--specificity: the model has no thresholds (two classes and a calibration); leave it out")
    if calibration and share_key(specificity) not in calibration.thresholds:
        raise BadInput(f"--specificity: {specificity:g} is not kept with the model; choose one of {known}")


def _value(card: Card, calibration: Calibration | None, value: float, coverage: float) -> dict[str, Any]:
    row = {card.unit or "value": round(value, 4)}
    reach = calibration.reach(coverage) if calibration else None
    if reach is None:
        return row
    # labels lie in this range, so that an interval without what is outside it holds the truth as often
    lowest, highest = card.label_range or (-math.inf, math.inf)
    low, high = (min(max(end, lowest), highest) for end in (value - reach, value + reach))
    return row | {f"low_{_percent(coverage)}": round(low, 4), f"high_{_percent(coverage)}": round(high, 4)}


def _classes(
    card: Card, calibration: Calibration | None, shares: np.ndarray, coverage: float, specificity: float | None
) -> list[dict[str, Any]]:
    shares = shares / shares.sum(1, keepdims=True)  # float32 sums to one only nearly
    sets = calibration.sets(shares, coverage) if calibration else None
    rows = []
    for number, of_image in enumerate(shares):
        named = {f"p({name})": round(float(p), 6) for name, p in zip(card.classes, of_image, strict=True)}
        row: dict[str, Any] = {"class": card.classes[int(of_image.argmax())], **named}
        if sets is not None:
            inside = [name for name, taken in zip(card.classes, sets[number], strict=True) if taken]
            row[f"set_{_percent(coverage)}"] = inside
        if specificity is not None and calibration is not None:
            cut = calibration.thresholds[share_key(specificity)]
            row[f"positive_{_percent(specificity)}"] = bool(of_image[1] > cut)
        rows.append(row)
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:g}"
