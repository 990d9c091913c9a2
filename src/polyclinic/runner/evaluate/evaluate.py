"""Evaluation only: a model that somebody brought, on the images of a study's simulated sites. Nothing is trained."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch

from polyclinic.data.archives import UNREADABLE
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.json_types import JsonObject
from polyclinic.models import find_weights
from polyclinic.runner.evaluate.case_scores import Cases, joined_cases
from polyclinic.runner.evaluate.case_statistics import changes_of, intervals_of, metrics_of, statistics_of_cases
from polyclinic.runner.export.export import FORMATS, Format, Predict, refuse_missing
from polyclinic.runner.predict.model_file import ReleasedModel, read_model_file
from polyclinic.runner.predict.predict import Chosen, load_predictor
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study

Split = Literal["test", "validation"]
#: what the numbers of a foreign model are
Outputs = Literal["probabilities", "logits"]
#: sub-groups of fewer images get no figures: they would say nothing
FEWEST = 10


def evaluate(
    model: str | Path,
    study: Study,
    *,
    split: Split = "test",
    outputs: Outputs = "probabilities",
    label_map: Sequence[str] = (),
    by: Sequence[str] = (),
    against: str | Path | None = None,
    cache: Path | None = None,
    **chosen: Unpack[Chosen],
) -> JsonObject:
    """Metrics of a model on the sites of a study: pooled, per site and of sub-groups, with intervals and calibration.

    `label_map`: classes of the study, or of one site, that the model calls otherwise: `ill=sick`, `north:ill=sick`.
    `by`: columns (`data.columns`) whose values are sub-groups. `outputs`: what a foreign model's numbers are.
    `against`: a second model, which the first one is compared with on the same cases. `chosen`: which of a run's models
    is meant, and the code that it may use.
    """
    if study.task.name == "multilabel":
        raise BadInput("--study: models of several labels an image are scored in their runs only; name another study")
    parts = prepare(study.data, study.sites, cache=cache)
    assembly = Assembly(study, parts, Path())
    names = LabelMap.parse(label_map, parts.names, parts.info["classes"])

    def scored(file: str | Path) -> tuple[GivenModel, Cases]:
        given = load_model(Path(file), assembly, outputs, **chosen)
        return given, _all_cases(given, assembly, split, names)

    given, cases = scored(model)
    found = _report(given, assembly, cases, split, by)
    if against is None:
        return found
    other, before = scored(against)
    if given.classes != other.classes:
        raise BadInput(f"--against {against}: has other classes than {model}; name a model of the same classes")
    return {**found, "against": f"{against} ({other.what})", "changes": changes_of(cases, before, (split,))}


def _all_cases(given: "GivenModel", assembly: Assembly, split: Split, names: "LabelMap") -> Cases:
    """What the model says about all sites' images."""
    parts = assembly.prepared
    if given.size not in (None, parts.info["size"]):
        raise BadInput(f"data.size: the model takes images of {given.size} px; add --set data.size={given.size}")
    cases = [_cases_of(given, assembly, one, split, names) for one in parts.names]
    found = [one for one in cases if one is not None and len(one)]
    if not found:
        raise BadInput(f"--split {split}: no site has images to score; choose another split")
    return joined_cases(found)


def _cases_of(given: "GivenModel", assembly: Assembly, site: str, split: Split, names: "LabelMap") -> Cases | None:
    """What the model says about one site's images."""
    data = open_site(assembly.prepared.folder, site)
    part: ImageSet = data.test if split == "test" else data.validation
    if not len(part):
        return None
    info, task = assembly.prepared.info, assembly.study.task
    said = given.of_all(part.images)
    number = np.full(len(part), assembly.prepared.names.index(site))
    common = Cases(task.like, np.array(assembly.prepared.names), number, np.array(part.labels), part.cases)
    if part.columns is not None:
        common = replace(common, columns=np.array(part.columns), column_names=np.array(info.get("columns", [])))
    if task.dense:
        assert part.masks is not None, "segmentation has masks"
        predicted, true = said.reshape(len(part), *said.shape[-2:]) > 0.5, np.asarray(part.masks) > 0
        pixels = [some.reshape(len(part), -1).sum(1) for some in (predicted & true, predicted, true)]
        return replace(common, areas=np.stack(pixels, 1).astype(np.int64))
    if task.like == "regression":
        return replace(common, predictions=said.reshape(len(part)))
    classes = info["classes"]
    of_model = given.classes or tuple(classes)
    if said.ndim != 2 or said.shape[1] != len(of_model):
        wide = "x".join(str(side) for side in said.shape[1:]) or "1"
        raise BadInput(f"MODEL: gives {wide} numbers for an image, and {len(of_model)} classes are known; check both")
    numbers = names.numbers(site, classes, of_model)[common.labels]
    known = numbers >= 0
    cases = replace(common, labels=numbers, predictions=said)
    return cases.take(np.flatnonzero(known)) if not known.all() else cases


def _report(given: "GivenModel", assembly: Assembly, cases: Cases, split: Split, by: Sequence[str]) -> JsonObject:
    study, classes = assembly.study, given.classes or tuple(assembly.prepared.info["classes"])
    sites = [name for name in cases.sites.tolist() if len(cases.of_site(name))]
    per_site = {name: metrics_of(cases.of_site(name)) for name in sites}
    seen = {name: set(cases.of_site(name).labels.tolist()) for name in sites if cases.like == "classification"}
    missing = {site: [name for i, name in enumerate(classes) if i not in own] for site, own in seen.items()}
    return {
        "model": given.what,
        "task": study.task.name,
        "split": split,
        "images": {name: len(cases.of_site(name)) for name in sites},
        "classes": list(classes),
        "metrics": {"pooled": metrics_of(cases), "per_site": per_site},
        **statistics_of_cases(cases, split),
        "subgroups": {column: _subgroups(cases, column, split) for column in by},
        "notes": [f"site '{name}' has no image of {', '.join(gone)}" for name, gone in missing.items() if gone],
    }


def _subgroups(cases: Cases, column: str, split: Split) -> JsonObject:
    """Metrics with intervals of each value of a column."""
    values, found = cases.column(column), {}
    for value in np.unique(values).tolist():
        some = cases.take(np.flatnonzero(values == value))
        found[value] = {"images": len(some), "metrics": {}, "intervals": {}}
        if len(some) >= FEWEST:
            intervals = intervals_of(some, (split, column, value))
            found[value]["intervals"] = {name: {"low": one.low, "high": one.high} for name, one in intervals.items()}
            found[value]["metrics"] = metrics_of(some)
    return found


#: written instead of a model's class: images of this class are left out
LEFT_OUT = "-"


@dataclass(frozen=True)
class LabelMap:
    """`of_all`: the model's class by the study's; `of_site`: the same of single sites, which counts before it."""

    of_all: Mapping[str, str]
    of_site: Mapping[str, Mapping[str, str]]

    @classmethod
    def parse(cls, given: Sequence[str], sites: Sequence[str], classes: Sequence[str]) -> "LabelMap":
        """From `ill=sick` and `north:ill=sick`; BadInput for what is neither."""
        of_all: dict[str, str] = {}
        of_site: dict[str, dict[str, str]] = {}
        for text in given:
            where, _, pair = text.rpartition(":")
            name, equals, other = pair.partition("=")
            if not equals or not name or not other:
                raise BadInput(f"--label-map {text}: write CLASS=CLASS_OF_MODEL, or SITE:CLASS=CLASS_OF_MODEL")
            if where and where not in sites:
                raise BadInput(f"--label-map {text}: there is no site '{where}'; the sites are {', '.join(sites)}")
            if name not in classes:
                hint = did_you_mean(name, list(classes))
                raise BadInput(
                    f"--label-map {text}: there is no class '{name}'{hint}; choose from {', '.join(classes)}"
                )
            (of_site.setdefault(where, {}) if where else of_all)[name] = other
        return cls(of_all, of_site)

    def numbers(self, site: str, classes: Sequence[str], of_model: Sequence[str]) -> np.ndarray:
        """For each class of the study its number in the model, -1 for one that is left out. BadInput for a class that
        the model does not know."""
        found = []
        for name in classes:
            meant = self.of_site.get(site, {}).get(name, self.of_all.get(name, name))
            if meant != LEFT_OUT and meant not in of_model:
                raise BadInput(
                    f"classes: the model does not know '{meant}' (it knows {', '.join(of_model)}); add --label-map "
                    f"{name}=CLASS_OF_MODEL, or {name}={LEFT_OUT} to leave these images out"
                )
            found.append(-1 if meant == LEFT_OUT else list(of_model).index(meant))
        return np.array(found, np.int64)


# --- models as anybody may bring them: one function from prepared images to predictions -------------------


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


def load_model(path: Path, assembly: Assembly, outputs: Outputs, **chosen: Unpack[Chosen]) -> GivenModel:
    """The model of a run folder or `model.safetensors`, of an export (ONNX, TorchScript, MONAI bundle), or weights for
    the study's own network, which may come from a plug-in."""
    if not path.exists():
        raise BadInput(f"MODEL {path}: there is no such file or folder; name a run folder or a model file")
    # the file of a model, in a bundle or an exported folder too
    inside = (path / form.file for form in FORMATS.values() if path.is_dir())
    file = next((one for one in inside if one.is_file()), path)
    if file.suffix == ".onnx":
        refuse_missing("onnx", ("onnxruntime",))
        said = _opened(file, FORMATS["onnx"], "ONNX")
        return GivenModel("an ONNX file", _finished(said, assembly, outputs))
    if file.suffix in (".ts", ".pt", ".pth") and _is_torchscript(file):
        said = _opened(file, FORMATS["torchscript"], "TorchScript")
        return GivenModel("a TorchScript file", _finished(said, assembly, outputs))
    if path.is_dir() or _has_card(file):
        found = load_predictor(path, **chosen)
        card = found.card
        return GivenModel("a model of a run", _released(found.model), card.classes, card.side)
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


def _is_torchscript(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as content:
            return any("/code/" in name for name in content.namelist())
    except UNREADABLE:  # not TorchScript, or cut short
        return False


def _has_card(file: Path) -> bool:
    try:
        read_model_file(file)
    except BadInput:
        return False
    return True


def _opened(file: Path, form: Format, what: str) -> Predict:
    try:
        return form.load(file)
    except Exception as error:  # whatever the library of a format raises
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise BadInput(f"MODEL {file}: cannot be read as {what} ({reason})") from None


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
