"""Prediction with a released model: what it says about image files."""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from polyclinic.data.own_images import only_site_plugins
from polyclinic.data.pixels import Fit, fit_image, graham
from polyclinic.data.reading import Reader, Slices, is_image_name
from polyclinic.data.survey_cases import masks_among
from polyclinic.data.survey_tables import pictures_in
from polyclinic.errors import BadInput, Notice
from polyclinic.metrics.statistics.calibration import COVERAGE
from polyclinic.run_folder import check_whole
from polyclinic.runner.evaluate.calibration import COVERAGES, Calibration, least_cases, share_key
from polyclinic.runner.predict import model_file
from polyclinic.runner.predict.masks import in_own_size
from polyclinic.runner.predict.model_file import MODEL, Card, ReleasedModel
from polyclinic.runner.predict.volumes import predict_volumes
from polyclinic.settings import NO_LABEL
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
    size, or None; of a volume uint8 [X, Y, Z], the values of its structures, with `affine`. `unlike` says how the image
    differs from those of the study, where it seems to be of another kind."""

    file: Path
    frame: int | None
    values: dict[str, Any]
    mask: np.ndarray | None = None
    unlike: str = ""
    affine: np.ndarray | None = None


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

    @torch.no_grad()
    def outputs(self, images: np.ndarray) -> Tensor:
        """Probabilities [N, C], values in the label's unit [N], or probabilities of the mask [N, H, W].

        `images` are uint8 [N, channels, size, size], as `prepared` gives them.
        """
        return self.model(torch.from_numpy(images))

    def _batch(self) -> int:
        """Images that go through the network at once."""
        side = max(self.card.side, self.card.input_size or 0)
        return max(1, min(BATCH, BATCH_PIXELS // side**2))

    def prepared(self, file: Path, frame: int | None) -> np.ndarray:
        """An image as the training images were prepared."""
        return self._fitted(Reader(self.card.window, self.card.slices).pixels(file, frame))

    def _fitted(self, pixels: np.ndarray) -> np.ndarray:
        card = self.card
        return fit_image(graham(pixels) if card.graham else pixels, Fit(card.side, card.shape), card.channels)

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
        if self.card.volume is not None:
            if slices is not None or specificity is not None:
                flag = "--slices" if slices is not None else "--specificity"
                raise BadInput(f"{flag}: this model takes whole volumes and draws masks; leave it out")
            yield from predict_volumes(self, paths, on_bad_file)
            return
        read = self._read_all(Reader(self.card.window, slices or self.card.slices), paths, on_bad_file)
        while batch := list(itertools.islice(read, self._batch())):
            self._check(coverage, specificity)
            outputs = self.outputs(np.stack([one.image for one in batch]))
            for one, output in zip(batch, outputs, strict=True):
                mask = None
                if self.task.dense:
                    own = output.numpy()
                    mask = (own if self.card.graham else in_own_size(own, one.shape, self.card.shape)) > 0.5
                    values: dict[str, Any] = {"pixels": int(mask.sum()), "share": round(float(mask.mean()), 6)}
                elif self.task.like == "regression":
                    values = self._value(float(output), coverage)
                else:
                    values = self._classes(output.double().numpy(), coverage, specificity)
                yield Prediction(one.file, one.frame, values, mask, one.unlike)

    def _read_all(self, reader: Reader, paths: Iterable[Path], on_bad_file: OnBadFile | None) -> Iterator[_Read]:
        """Every image that can be read."""
        for file in image_files(paths):
            try:
                images = [self._read(file, frame, pixels) for frame, pixels in _pictures(reader, file)]
            except Exception as error:  # whatever a decoder raises on a broken file is a fact about that file
                words = " ".join(str(error).split())[:200] or type(error).__name__
                reason = f"cannot be read as an image: {words}"
                if on_bad_file is None:
                    raise BadInput(f"{file}: {reason}") from None
                on_bad_file(file, reason)
                continue
            yield from images

    def _read(self, file: Path, frame: int | None, pixels: np.ndarray) -> _Read:
        image, looks = self._fitted(pixels), self.card.looks
        return _Read(file, frame, image, pixels.shape[:2], looks.unlike(image, pixels) if looks else "")

    def _check(self, coverage: float, specificity: float | None) -> None:
        if coverage not in COVERAGES:
            known = ", ".join(share_key(share) for share in COVERAGES)
            raise BadInput(f"--coverage: {coverage:g} is not kept with the model; choose one of {known}")
        thresholds = self.calibration.thresholds if self.calibration else {}
        if specificity is not None and not thresholds:
            raise BadInput("--specificity: the model has no thresholds (two classes and a calibration); leave it out")
        if specificity is not None and share_key(specificity) not in thresholds:
            known = ", ".join(thresholds)
            raise BadInput(f"--specificity: {specificity:g} is not kept with the model; choose one of {known}")

    def _value(self, value: float, coverage: float) -> dict[str, Any]:
        row = {self.card.unit or "value": round(value, 4)}
        reach = self.calibration.reach(coverage) if self.calibration else None
        if reach is None:
            return row
        # labels lie in this range, so that an interval without what is outside it holds the truth as often
        lowest, highest = self.card.label_range or (-math.inf, math.inf)
        low, high = (min(max(end, lowest), highest) for end in (value - reach, value + reach))
        return row | {f"low_{_percent(coverage)}": round(low, 4), f"high_{_percent(coverage)}": round(high, 4)}

    def _classes(self, shares: np.ndarray, coverage: float, specificity: float | None) -> dict[str, Any]:
        if self.task.name == "multilabel":
            each = dict(zip(self.card.classes, shares.tolist(), strict=True))
            told = BETWEEN.join(name for name, share in each.items() if share > 0.5)
            return {"labels": told or NO_LABEL, **{f"p({name})": round(share, 6) for name, share in each.items()}}
        shares, classes = shares / shares.sum(), self.card.classes  # float32 sums to one only nearly
        row: dict[str, Any] = {"class": classes[int(shares.argmax())]}
        row |= {f"p({name})": round(float(p), 6) for name, p in zip(classes, shares, strict=True)}
        sets = self.calibration.sets(shares[None], coverage) if self.calibration else None
        if sets is not None:
            row[f"set_{_percent(coverage)}"] = [name for name, is_in in zip(classes, sets[0], strict=True) if is_in]
        if specificity is not None and self.calibration is not None:
            cut = self.calibration.thresholds[share_key(specificity)]
            row[f"positive_{_percent(specificity)}"] = bool(shares[1] > cut)
        return row

    def why_no_set(self, coverage: float, cases: int | None, site: str | None) -> str:
        """The reason why rows have no set or interval of this coverage, "" where they have one or need none; `cases`
        are the patients of the validation images, of a site where the model is its own; None: not known."""
        if (
            self.task.dense
            or self.task.name == "multilabel"
            or (self.calibration and share_key(coverage) in self.calibration.quantiles)
        ):
            return ""
        percent, needed = _percent(coverage), least_cases(coverage)
        missing = f"set_{percent}" if self.task.like == "classification" else f"low_{percent} and high_{percent}"
        had = self.calibration.cases if self.calibration else cases
        if had is None or had >= needed:
            return f"no {missing}: the model has no calibration"
        return f"no {missing}: a calibration needs {needed} validation patients, {site or 'this run'} had {had}"


def _pictures(reader: Reader, file: Path) -> Iterator[tuple[int | None, np.ndarray]]:
    """Slices of a volume, images of an archive, or the only image of a file, each with its number."""
    if file.suffix.lower() == ".npz":
        yield from enumerate(pictures_in(file))
    else:
        yield from ((frame, reader.pixels(file, frame)) for frame in reader.frames(file))


class Chosen(TypedDict, total=False):
    """Which of a file's models is meant, and the code that it may use: a model from somebody else does not choose what
    runs here. In a kit, its site.toml says so.

    `site` names the model of a site, `ensemble` takes those of all sites together. `plugins`: its plug-in files, where
    they are now. `allow_import`: modules, or packages, that may be imported for it.
    """

    site: str | None
    ensemble: bool
    plugins: Sequence[str]
    allow_import: Sequence[str]


def load_predictor(path: Path, **chosen: Unpack[Chosen]) -> Predictor:
    """The model of a run folder or of a `model.safetensors`; where each site has one, the `chosen`."""
    if path.is_dir():
        check_whole(path)
    file = path / MODEL if path.is_dir() else path
    card, tensors = model_file.read_model_file(file)
    with only_site_plugins(file.parent) as kit:
        if kit is None:
            plugins = chosen.get("plugins", ())
            model_file.refuse_imports(card, file, [*chosen.get("allow_import", ()), *plugins])
            model_file.load_plugins(card, file, plugins)
        names = _names(list(card.backbones), file, chosen.get("site"), chosen.get("ensemble", False))
        networks = [model_file.built_model(card, name, tensors, file) for name in names]
        looked_up = model_file.looked_up_names(card.task["name"], card.backbones)
        refuse_changed(card.installed | card.networks, looked_up, file)
        task = card.built_task()
    fitted = [card.calibrations.get(name) for name in names]
    temperatures = [(one and one.temperature) or 1.0 for one in fitted]
    model = ReleasedModel(networks, temperatures, task, card.target)
    return Predictor(card, model, task, fitted[0] if len(fitted) == 1 else None)


def _names(names: list[str], file: Path, site: str | None, ensemble: bool) -> list[str]:
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
    coverage: float = COVERAGE,
    specificity: float | None = None,
    slices: Slices | None = None,
    strict: bool = True,
    **chosen: Unpack[Chosen],
) -> list[Prediction]:
    """What a released model (a run folder, or its `model.safetensors`) says about files and folders of images.

    Without `strict`, a file that cannot be read is named in a warning and skipped. `chosen`: `site`, `ensemble`,
    `plugins` and `allow_import`, as `Chosen` says.
    """

    def skip(file: Path, reason: str) -> None:
        warnings.warn(f"{file}: {reason}; skipped", Notice, stacklevel=2)

    wanted: Any = {"coverage": coverage, "specificity": specificity, "slices": slices}
    predictor = load_predictor(Path(model), **chosen)
    found = list(predictor.predict(map(Path, images), **wanted, on_bad_file=None if strict else skip))
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


def _percent(share: float) -> str:
    return f"{100 * share:g}"
