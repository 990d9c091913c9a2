"""What a simulated run keeps of each test and validation image: `cases/test.npz` and `cases/validation.npz`.

A deployed run keeps none: no score of a single image leaves a real site. The files are NumPy archives without pickled
objects; `read_cases` checks them, so that a folder from somebody else can be read. docs/report.md has their arrays.
"""

from __future__ import annotations

import functools
import io
import zipfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyclinic.data.archives import UNREADABLE, unpacked_size
from polyclinic.data.parts import ImageSet, open_site
from polyclinic.errors import BadInput
from polyclinic.files import atomic_write
from polyclinic.run_folder import check_whole
from polyclinic.tasks.segmentation import dice, outline_distances

if TYPE_CHECKING:
    from polyclinic.runner.run.assembly import Assembly
    from polyclinic.runner.run.result import Models
    from polyclinic.training.loop import Trainer
    from polyclinic.training.volumes import VolumeTrainer

FOLDER = "cases"
#: masks kept of the worst, of the middle and of the best test images
EXAMPLES = 3
#: bytes of a file that is read
LARGEST = 2**32
CUBIC_MM = 1000.0  #: in a millilitre
#: where the sub-groups that a source knows by itself stand among the columns
SUBGROUP = "subgroup"


@dataclass(frozen=True)
class Cases:
    """The images of one split, site by site, each in the order of the site's part.

    like: classification, regression or segmentation; sites str [S]; site int64 [N], a number in `sites` labels [N];
    patients int64 [N], equal for images of one patient, or None outputs float32 [N, C]: the logits of classes, or None
    predictions float64: probabilities [N, C] or values [N] in the label's unit; None for masks areas int64 [N, 3]:
    pixels predicted and true at once, predicted, and true; None but for masks distances float64 [N, 2]: Hausdorff (95
    %) and average surface distance in pixels, NaN where there is none, or None scores float64 [N, S, 3]: of volumes,
    the Dice, HD95 (mm) and surface Dice of each structure; NaN where it does not count; structures str [S]; millilitres
    float64 [N, S, 2]: of each structure, true and predicted columns str [N, K] and column_names str [K]: what
    `data.columns` named, and the source's sub-groups examples int64 [E]: the images of which `masks` uint8 [E, H, W]
    has the mask predicted, from worst to best; of volumes, three planes of it (`planes_of`)
    """

    like: str
    sites: np.ndarray
    site: np.ndarray
    labels: np.ndarray
    patients: np.ndarray | None = None
    outputs: np.ndarray | None = None
    predictions: np.ndarray | None = None
    areas: np.ndarray | None = None
    distances: np.ndarray | None = None
    scores: np.ndarray | None = None
    structures: np.ndarray | None = None
    millilitres: np.ndarray | None = None
    columns: np.ndarray | None = None
    column_names: np.ndarray | None = None
    examples: np.ndarray | None = None
    masks: np.ndarray | None = None

    #: fields with an entry for each image
    PER_CASE = (
        *("site", "labels", "patients", "outputs", "predictions", "areas", "distances", "scores", "millilitres"),
        "columns",
    )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> Cases:
        """Some of the images, without example masks."""
        known = {name: getattr(self, name) for name in self.PER_CASE}
        chosen = {name: array[rows] for name, array in known.items() if array is not None}
        return replace(self, examples=None, masks=None, **chosen)

    def of_site(self, name: str) -> Cases:
        """The images of one site."""
        return self.take(np.flatnonzero(self.sites[self.site] == name))

    def column(self, name: str) -> np.ndarray:
        """The values of a column, str [N]; `site` is one, too. BadInput names those that there are."""
        names = [] if self.column_names is None else self.column_names.tolist()
        if self.columns is not None and name in names:
            return self.columns[:, names.index(name)]
        if name == "site":
            return self.sites[self.site]
        raise BadInput(
            f"--by {name}: the run kept no such column; choose from {', '.join([*names, 'site'])}, or run the study "
            f"with data.columns = ['{name}']"
        )

    @property
    def dices(self) -> np.ndarray:
        """The Dice of each image, [N]; of a volume, the mean over its structures."""
        if self.scores is not None:
            return mean_over_structures(self.scores)[:, 0]
        assert self.areas is not None, "only segmentation has areas"
        return dice(torch.from_numpy(self.areas).double()).numpy()


def keep_cases(assembly: Assembly, models: Models) -> dict[str, Cases]:
    """Predict the test and validation images with the released models, each site's with its own where it has one, and
    write `cases/`; by split. Nothing is tested where the study says so (`evaluation.final`)."""
    final = assembly.study.evaluation.final
    if assembly.study.task.name == "multilabel":
        raise BadInput("cases: those of several labels an image are not kept")
    splits = {"test": ("validation", "test"), "validation": ("validation",)}.get(final, ())
    found: dict[str, list[Cases]] = {split: [] for split in splits}
    trainer_of = functools.cache(assembly.trainer)
    for number, site in enumerate(assembly.prepared.names if splits else ()):
        trainer = trainer_of(assembly.backbones.get(site))
        trainer.load(models[""] if "" in models else models[site])
        data = open_site(assembly.prepared.folder, site)
        for split in splits:
            if len(part := getattr(data, split)):
                one = _cases_of(trainer, part, np.array(assembly.prepared.names), assembly.prepared.info)
                found[split].append(replace(one, site=np.full(len(part), number)))
    joined = {split: joined_cases(some) for split, some in found.items() if some}
    for split, cases in joined.items():
        write_cases(cases, assembly.folder, split)
    return joined


def _cases_of(trainer: Trainer, part: ImageSet, names: np.ndarray, info: dict[str, Any]) -> Cases:
    """What a model says about the images of one site's part; the caller says which site that is."""
    task, target = trainer.task, trainer.target
    columns, column_names = _columns(part, info.get("columns", []))
    none = np.empty(0, np.int64)
    common = Cases(task.like, names, none, part.labels, part.cases, columns=columns, column_names=column_names)
    if task.dense:
        return _masks_of(trainer, part, common)
    outputs = torch.cat([output.cpu() for output, _ in trainer.outputs(part)])
    predictions = task.predictions(outputs.double(), target).numpy()
    return replace(common, outputs=outputs.numpy() if task.like == "classification" else None, predictions=predictions)


def _masks_of(trainer: Trainer, part: ImageSet, common: Cases) -> Cases:
    from polyclinic.training.volumes import VolumeTrainer

    if isinstance(trainer, VolumeTrainer):
        return _volumes_of(trainer, part, common)
    task, areas, distances, masks = trainer.task, [], [], []
    for output, target in trainer.outputs(part):
        predicted, true = task.predictions(output, trainer.target)[:, None] > 0.5, target > 0.5
        areas.append(torch.stack([mask.sum((1, 2, 3)) for mask in (predicted & true, predicted, true)], 1).cpu())
        if predicted.shape != true.shape:
            raise BadInput("cases: the task gives no mask for each image, and none is kept")
        masks.append(predicted[:, 0].cpu().numpy().astype(np.uint8))
        if getattr(task, "surface_distances", False):
            found = outline_distances(predicted, true).numpy()
            distances.append(np.where(found[:, 2:] > 0, found[:, :2], np.nan))
    known = replace(common, areas=torch.cat(areas).numpy(), distances=np.concatenate(distances) if distances else None)
    chosen = example_rows(known)
    return replace(known, examples=chosen, masks=np.concatenate(masks)[chosen])


def _volumes_of(trainer: VolumeTrainer, part: ImageSet, common: Cases) -> Cases:
    from polyclinic.data.volumes.planes import planes_of
    from polyclinic.tasks.volume_segmentation import structures_of

    task, target, scores, masks, areas, millilitres = trainer.task, trainer.target, [], [], [], []
    for (output, truth), volume in zip(trainer.outputs(part), part.images, strict=True):
        seen, found = task.observe_case(output, truth, target, volume.spacing), task.predicted(output, target)[0].cpu()
        scores.append(seen[0, 1:].reshape(-1, 3).numpy())
        both = torch.stack([structures_of(truth[0, 0], target).cpu(), found], 1)
        millilitres.append(both.sum((2, 3, 4)).numpy() * (np.prod(volume.spacing) / CUBIC_MM))
        numbers = (found * torch.arange(1, len(found) + 1)[:, None, None, None]).amax(0).to(torch.uint8).numpy()
        masks.append(planes_of(numbers, volume.mask, volume.spacing))
        said, true = numbers > 0, volume.mask > 0
        areas.append([int(one.sum()) for one in (said & true, said, true)])
    names = np.array([name for name, _ in target.structures])
    known = replace(common, areas=np.array(areas), scores=np.stack(scores), structures=names)
    known = replace(known, millilitres=np.stack(millilitres))
    chosen = example_rows(known)
    return replace(known, examples=chosen, masks=np.stack(masks)[chosen])


def mean_over_structures(scores: np.ndarray) -> np.ndarray:
    """Scores [N, S, 3] as those of each case, [N, 3], over the structures that count; NaN where none does."""
    count = np.isfinite(scores).sum(1)
    return np.where(count > 0, np.nansum(scores, 1) / np.maximum(count, 1), np.nan)


def example_rows(cases: Cases, among: np.ndarray | None = None) -> np.ndarray:
    """The images with the worst Dice, with those nearest to the median, and with the best, from worst to best, of those
    that have a true mask; `among` are the only images to choose from."""
    assert cases.areas is not None
    outlined = np.flatnonzero(cases.areas[:, 2] > 0)
    if not len(outlined):
        return outlined
    median = np.median(cases.dices[outlined])
    offered = outlined if among is None else np.intersect1d(outlined, among)
    ordered = offered[np.argsort(cases.dices[offered], kind="stable")]
    nearest = np.argsort(np.abs(cases.dices[ordered] - median), kind="stable")[:EXAMPLES]
    ends = [*range(EXAMPLES), *range(len(ordered) - EXAMPLES, len(ordered))]
    return ordered[sorted({*nearest.tolist(), *(place for place in ends if 0 <= place < len(ordered))})]


def _columns(part: ImageSet, names: list[str]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The columns of a part, its sub-groups among them, and their names; None where it has none."""
    found = [] if part.columns is None else [*zip(names, part.columns.T, strict=True)]
    if part.subgroup is not None and SUBGROUP not in names:
        found.append((SUBGROUP, part.subgroup))
    if not found:
        return None, None
    return np.stack([values for _, values in found], axis=1), np.array([name for name, _ in found])


def joined_cases(parts: list[Cases]) -> Cases:
    """The images of all sites; of example masks, those that are the worst, middle and best of all."""
    arrays = {name: [getattr(part, name) for part in parts] for name in Cases.PER_CASE}
    whole: dict[str, Any] = {
        name: np.concatenate(some) for name, some in arrays.items() if all(one is not None for one in some)
    }
    joined = replace(parts[0], examples=None, masks=None, **whole)
    if parts[0].examples is None:
        return joined
    starts = np.cumsum([0, *(len(part) for part in parts)])
    masks = {
        int(row + start): mask
        for part, start in zip(parts, starts, strict=False)
        for row, mask in zip(part.examples, part.masks, strict=True)  # type: ignore[arg-type]
    }
    kept = np.array(sorted(masks), dtype=np.int64)
    chosen = example_rows(joined, kept)
    if not len(chosen):
        return joined
    return replace(joined, examples=chosen, masks=np.stack([masks[row] for row in chosen.tolist()]))


# --- the files ----------------------------------------------------------------------------------------


def write_cases(cases: Cases, folder: Path, split: str) -> None:
    """`cases/<split>.npz` of a run folder."""
    arrays = {field.name: getattr(cases, field.name) for field in fields(Cases)}
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{name: np.asarray(a) for name, a in arrays.items() if a is not None})
    (folder / FOLDER).mkdir(exist_ok=True)
    atomic_write(folder / FOLDER / f"{split}.npz", content.getvalue())


def read_cases(folder: Path, split: str = "test") -> Cases | None:
    """What a run kept of each image of a split; None where it kept nothing, as deployed and older runs did.

    BadInput for a file that is damaged or was made to mislead: no array is unpickled, all lengths must agree.
    """
    file = folder / FOLDER / f"{split}.npz"
    check_whole(folder, f"{FOLDER}/{split}.npz")
    if not file.is_file():
        return None
    try:
        with zipfile.ZipFile(file) as packed:
            if unpacked_size(packed) > LARGEST:
                raise ValueError("its arrays are larger than any run's")
        with np.load(file, allow_pickle=False) as archive:
            known = {field.name for field in fields(Cases)}
            arrays = {name: archive[name] for name in archive.files if name in known}
        cases = Cases(**{**arrays, "like": str(arrays["like"])})
        _check(cases)
    except UNREADABLE as error:
        raise BadInput(f"{file}: is damaged ({' '.join(str(error).split())}); fetch the run folder again") from None
    return cases


def _check(cases: Cases) -> None:
    """ValueError unless the arrays fit each other."""
    count = len(cases.labels)
    for name in Cases.PER_CASE:
        array = getattr(cases, name)
        if array is not None and len(array) != count:
            raise ValueError(f"{name} has {len(array)} entries for {count} images")
    if not _numbers_below(cases.site, len(cases.sites)):
        raise ValueError("site has numbers that are none of a site")
    if any(
        texts is not None and texts.dtype.kind != "U"
        for texts in (cases.sites, cases.structures, cases.columns, cases.column_names)
    ):
        raise ValueError("names must be texts")
    array = cases.areas if cases.like == "segmentation" else cases.predictions
    dimensions = {"classification": 2, "regression": 1, "segmentation": 2}[cases.like]
    if array is None or array.ndim != dimensions or array.dtype.kind not in "fiu":
        raise ValueError(f"what the model said is missing, or has another shape than {cases.like} has")
    if cases.like == "classification":
        if not _numbers_below(cases.labels, array.shape[1]):
            raise ValueError("labels has numbers that are none of a class")
        if cases.outputs is not None and cases.outputs.shape != array.shape:
            raise ValueError("outputs has another shape than predictions")
    if cases.like == "segmentation" and array.shape[1] != 3:
        raise ValueError("areas must be three for each image")
    if (cases.scores is None) != (cases.structures is None):
        raise ValueError("scores and structures belong together")
    if cases.scores is not None and cases.scores.shape != (count, len(cases.structures), 3):  # type: ignore[arg-type]
        raise ValueError("scores has another shape than structures says")
    if cases.millilitres is not None and (
        cases.scores is None or cases.millilitres.shape != (*cases.scores.shape[:2], 2)
    ):
        raise ValueError("millilitres has another shape than structures says")
    if (cases.columns is None) != (cases.column_names is None):
        raise ValueError("columns and column_names belong together")
    if cases.columns is not None and cases.columns.shape != (count, len(cases.column_names)):  # type: ignore[arg-type]
        raise ValueError("columns has another shape than column_names says")
    if cases.examples is not None and cases.masks is not None:
        fits = cases.masks.ndim == 3 and len(cases.masks) == len(cases.examples)
        if not fits or not _numbers_below(cases.examples, count):
            raise ValueError("examples and masks do not fit each other")


def _numbers_below(values: np.ndarray, bound: int) -> bool:
    """Whether values [N] are whole numbers from 0 to below the bound."""
    if values.ndim != 1 or values.dtype.kind not in "iu":
        return False
    return not len(values) or (values.min() >= 0 and values.max() < bound)
