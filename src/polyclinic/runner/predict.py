"""Prediction with a released model: the model file with its card, and predictions for image files.

`model.safetensors` holds the weights and, in its header, a card with all that is needed to build the network and to
prepare an image as the training images were. Nothing of the data is needed to predict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from polyclinic import plugins as plugged
from polyclinic.data.file_source import FileSource
from polyclinic.data.own_images import only_site_plugins
from polyclinic.data.preprocessing.fit import Fit, Shape, fit_image
from polyclinic.data.preprocessing.graham import graham
from polyclinic.data.reading import Reader, Slices, Window, is_image_name
from polyclinic.data.source import Source
from polyclinic.errors import BadInput
from polyclinic.formats import RUN_FORMAT, check_format, check_run_format
from polyclinic.models import Backbone, build, is_importable, registry_of
from polyclinic.registry import Registry
from polyclinic.settings import Settings
from polyclinic.study import Study
from polyclinic.study.plugged import networks_of, packages_of, refuse_changed
from polyclinic.tasks import TASKS, Target, Task

#: name of the card in the header of the file
CARD = "polyclinic"
BATCH = 64


class Card(Settings):
    """What a model file says about itself."""

    format: int = RUN_FORMAT
    backbones: dict[str, str] = Field(description="the network of each site; one for all sites stands under ''")
    arguments: dict[str, Any] = Field({}, description="arguments of an importable network")
    plugins: dict[str, str] = Field({}, description="plug-ins that the model needs, with their SHA-256")
    installed: dict[str, str] = Field({}, description="packages whose network or task it needs, with their SHA-256")
    networks: dict[str, str] = Field({}, description="importable networks, with the SHA-256 of their packages")
    norm: str
    input_size: int | None = Field(None, description="side to which the network resizes images; None: its own choice")
    head: Literal["linear", "diagonal", "quadratic"] = Field("linear", description="what follows an encoder")
    channels: Literal[1, 3]
    size: int
    task: dict[str, Any]
    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None
    shape: Shape = "squash"
    window: Window | None = None
    slices: Slices = "middle"
    graham: bool = False
    method: str
    weights_sha256: str

    @property
    def target(self) -> Target:
        return Target(self.classes, self.unit, self.label_range)

    def built_task(self) -> Task:
        return TASKS[self.task["name"]].model_validate(self.task)


def _names(task: str, backbones: Mapping[str, str]) -> list[tuple[Registry[Any], str]]:
    """What a model is looked up by: its task and its networks. It needs nothing else to predict."""
    return [(TASKS, task), *((registry_of(name), name) for name in backbones.values() if not is_importable(name))]


def _needed_plugins(study: Study, backbones: Mapping[str, str]) -> dict[str, str]:
    """The plug-ins, with their SHA-256, that have the network or the task."""
    used = {registry.origin(name) for registry, name in _names(study.task.name, backbones)}
    loaded = plugged.load_from_study(study.plugins)
    return {name: sha256 for name, sha256 in loaded.items() if f"plug-in {name}" in used}


def card_of(study: Study, info: Mapping[str, Any], backbones: dict[str, str], weights_sha256: str) -> Card:
    """The card of a model trained by `study` on data with these facts (`PreparedSites.info`)."""
    facts = {name: info[name] for name in ("channels", "size", "classes", "unit", "label_range")}
    return Card(
        backbones=backbones,
        arguments=study.model.arguments,
        plugins=_needed_plugins(study, backbones),
        installed=packages_of(_names(study.task.name, backbones)),
        networks=networks_of(backbones.values()),
        norm=study.model.norm,
        input_size=study.model.input_size,
        head=study.method.head,
        task=study.task.model_dump(mode="json"),
        method=study.method.name,
        weights_sha256=weights_sha256,
        **facts,
        **preparation_of(study.data),
    )


def preparation_of(data: Source) -> dict[str, Any]:
    """How the images of a source are prepared, as settings of a card."""
    from_files = isinstance(data, FileSource)  # phantoms have settings of the same names and another meaning
    named = [name for name in ("shape", "window", "slices", "graham") if from_files and hasattr(data, name)]
    return {name: getattr(data, name) for name in named}


def model_file(tensors: Mapping[str, Tensor], card: Card) -> bytes:
    """The content of `model.safetensors`: weights (of site X, where each has its own, under "X/...") and card."""
    optional = ("arguments", "plugins", "installed", "networks", "input_size")
    empty = {name for name in optional if not getattr(card, name)} | ({"head"} if card.head == "linear" else set())
    return save(dict(tensors), {CARD: card.model_dump_json(exclude=empty)})


@dataclass(frozen=True)
class Prediction:
    """What the model says about one image. `values` is what a table shows; `mask` bool [size, size] or None."""

    file: Path
    frame: int | None
    values: dict[str, Any]
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Predictor:
    """One model, or several whose outputs are averaged."""

    card: Card
    models: tuple[Backbone, ...]
    task: Task

    @torch.no_grad()
    def outputs(self, images: np.ndarray) -> Tensor:
        """Probabilities [N, C], values in the label's unit [N], or probabilities of the mask [N, H, W].

        `images` are uint8 [N, channels, size, size], as `prepared` gives them.
        """
        batch, task = torch.from_numpy(images).float().div_(255), self.task
        return torch.stack([task.predictions(model(batch), self.card.target) for model in self.models]).mean(0)

    def prepared(self, file: Path, frame: int | None) -> np.ndarray:
        """An image as the training images were prepared."""
        card = self.card
        pixels = Reader(card.window, card.slices).pixels(file, frame)
        return fit_image(graham(pixels) if card.graham else pixels, Fit(card.size, card.shape), card.channels)

    def predict(self, paths: Iterable[Path]) -> Iterator[Prediction]:
        """What the model says about every image of files and folders."""
        reader = Reader(self.card.window, self.card.slices)
        wanted = [(file, frame) for file in image_files(paths) for frame in reader.frames(file)]
        for start in range(0, len(wanted), BATCH):
            some = wanted[start : start + BATCH]
            outputs = self.outputs(np.stack([self._read(*one) for one in some]))
            for (file, frame), output in zip(some, outputs, strict=True):
                yield self._prediction(file, frame, output)

    def _read(self, file: Path, frame: int | None) -> np.ndarray:
        try:
            return self.prepared(file, frame)
        except Exception as error:  # whatever a decoder raises on a broken file is a fact about that file
            raise BadInput(f"{file}: cannot be read as an image: {' '.join(str(error).split())}") from None

    def _prediction(self, file: Path, frame: int | None, output: Tensor) -> Prediction:
        card, task = self.card, self.task
        if task.like == "regression":
            return Prediction(file, frame, {card.unit or "value": round(float(output), 4)})
        if task.dense:
            mask = (output > 0.5).numpy()
            return Prediction(file, frame, {"pixels": int(mask.sum()), "share": round(float(mask.mean()), 6)}, mask)
        shares = {f"p({name})": round(float(p), 6) for name, p in zip(card.classes, output, strict=True)}
        return Prediction(file, frame, {"class": card.classes[int(output.argmax())], **shares})


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
        check_run_format(path)
    file = path / "model.safetensors" if path.is_dir() else path
    card, tensors = _read_file(file)
    with only_site_plugins(file.parent) as kit:
        if kit is None:
            refuse_imports(card, file, [*allow_import, *plugins])
            load_plugins(card, file, plugins)
        chosen = _chosen(list(card.backbones), file, site, ensemble)
        models = tuple(_model(card, name, tensors, file) for name in chosen)
        refuse_changed(card.installed, packages_of(_names(card.task["name"], card.backbones)), file)
        refuse_changed(card.networks, networks_of(card.backbones.values()), file)
        return Predictor(card, models, card.built_task())


def refuse_imports(card: Card, file: Path, allowed: Sequence[str]) -> None:
    """BadInput if a model needs a module that the user has not allowed."""
    networks = [name.partition(":")[0] for name in card.backbones.values() if is_importable(name)]
    for module in [*networks, *(name for name in card.plugins if not plugged.is_file(name))]:
        if not any(module == one or module.startswith(f"{one}.") for one in allowed):
            raise BadInput(
                f"{file}: needs code of the module '{module}', and a model does not choose what is imported here; if "
                f"you trust who sent it, add --allow-import {module}"
            )


def load_plugins(card: Card, file: Path, moved: Sequence[str]) -> None:
    """Load a model's plug-ins from where they are now; BadInput if one is not the same any more, or is a file that
    the user has not named and this process has not loaded."""
    if not moved:
        plugged.refuse_sent_files(card.plugins, file.parent)
        for name in card.plugins:
            if plugged.is_file(name) and name not in plugged.LOADED:
                raise BadInput(
                    f"{file}: needs code of the plug-in file {name}, and a model does not choose what runs here; if "
                    f"you trust that file, add --plugin {name}"
                )
        plugged.load_from_study(list(card.plugins), card.plugins)
        return
    found = plugged.load_from_study(plugged.resolve(list(moved), Path()))
    for name, sha256 in card.plugins.items():
        if sha256 not in found.values():
            raise BadInput(
                f"--plugin: the model needs {name} as it was when the model was made (SHA-256 {sha256[:12]}), and none "
                "of the plug-ins is; name that file"
            )


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
) -> list[Prediction]:
    """What a released model (a run folder, or its `model.safetensors`) says about files and folders of images.

    `plugins` and `allow_import` say where the code is that the model needs, and may use (`load_predictor`).
    """
    predictor = load_predictor(Path(model), site=site, ensemble=ensemble, plugins=plugins, allow_import=allow_import)
    return list(predictor.predict(Path(image) for image in images))


def image_files(paths: Iterable[Path]) -> list[Path]:
    """The files named, and all images below the folders named, in the order of their names."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path}: there is no such file or folder; name images or folders with images")
        inside = sorted(file for file in path.rglob("*") if file.is_file() and is_image_name(file))
        if path.is_dir() and not inside:
            raise BadInput(f"{path}: holds no image that can be read; name images or folders with images")
        found += inside if path.is_dir() else [path]
    return found


def _read_file(file: Path) -> tuple[Card, dict[str, Tensor]]:
    if not file.is_file():
        raise BadInput(f"{file}: there is no model; name the folder of a finished run, or its model.safetensors")
    try:
        with safe_open(file, "pt") as opened:
            text = (opened.metadata() or {}).get(CARD)
            if text is None:
                raise BadInput(f"{file}: does not say what network it is of; name a model that polyclinic run wrote")
            check_format(_format_of(text), RUN_FORMAT, str(file))
            return TypeAdapter(Card).validate_json(text), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{file}: is damaged or not a model of polyclinic ({reason}); fetch it again") from None


def _format_of(card: str) -> object:
    """The format number in a card; 1 where there is none, or where what is written is no card at all."""
    try:
        return json.loads(card).get("format", 1)
    except (ValueError, AttributeError):
        return 1


def _model(card: Card, site: str, tensors: Mapping[str, Tensor], file: Path) -> Backbone:
    outputs = card.built_task().outputs(card.target)
    backbone = card.backbones[site]
    model = build(
        backbone,
        channels=card.channels,
        outputs=outputs,
        size=card.size,
        norm=card.norm,
        input_size=card.input_size,
        head=card.head,
        arguments=card.arguments if is_importable(backbone) else None,
    )
    start = f"{site}/" if site else ""
    found = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
    if missing := model.state_dict().keys() - found.keys():
        raise BadInput(
            f"{file}: lacks {len(missing)} tensors of the network, which the sites kept to themselves; predict at a "
            "site, with the model in the folder of its own run"
        )
    model.load_state_dict(found)
    return model.eval()
