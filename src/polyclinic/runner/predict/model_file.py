"""The file of a released model: its weights, and a card with all that is needed to build the network and to prepare an
image as the training images were.

Nothing of the data is needed to predict. Whoever reads a model compares its weights with the digest in the card, and
the whole file with what the run wrote down about it: a damaged model is not used.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from polyclinic import plugins as plugged
from polyclinic.data.pixels import Shape
from polyclinic.data.reading import Slices, Window
from polyclinic.data.source import FileSource, Source
from polyclinic.data.volumes.preparation import Preparation
from polyclinic.data.volumes.source import OfVolumes
from polyclinic.errors import BadInput
from polyclinic.json_types import parse_json
from polyclinic.models import Backbone, build, is_importable, registry_of
from polyclinic.registry import Registry
from polyclinic.run_folder import RUN_FORMAT, check_format
from polyclinic.runner.evaluate.calibration import Calibration, Looks
from polyclinic.settings import Settings, no_such_choice, sentences
from polyclinic.study import Study
from polyclinic.study.reading import packages_of
from polyclinic.tasks import TASKS, MultiLabel, Target, Task
from polyclinic.tasks.multilabel import labels_in

#: name of the model in a run folder
MODEL = "model.safetensors"
#: name of the card in the header of the file
CARD = "polyclinic"
#: the largest side of images that a card may name: whoever sends a model chooses what memory it takes
LARGEST_SIDE = 2048
#: channels of a volume at most
MOST_CHANNELS = 64


class VolumeCard(Settings):
    """What a model of volumes knows besides: the order of its channels, its structures, and how cases are prepared."""

    channels: tuple[str, ...] = Field(min_length=1, max_length=MOST_CHANNELS)
    structures: dict[str, tuple[int, ...]]
    preparation: Preparation


class Card(Settings):
    """What a model file says about itself."""

    format: int = RUN_FORMAT
    backbones: dict[str, str] = Field(min_length=1, description="the network of each site; one for all stands under ''")
    arguments: dict[str, Any] = Field({}, description="arguments of an importable network")
    plugins: dict[str, str] = Field({}, description="plug-ins that the model needs, with their SHA-256")
    installed: dict[str, str] = Field({}, description="packages whose network or task it needs, with their SHA-256")
    networks: dict[str, str] = Field({}, description="those of importable networks, in older models")
    norm: str
    input_size: int | None = Field(None, ge=1, le=LARGEST_SIDE, description="side to resize images to; None: its own")
    head: Literal["linear", "diagonal", "quadratic"] = Field("linear", description="what follows an encoder")
    channels: int = Field(ge=1, le=MOST_CHANNELS, description="1 or 3; of volumes as many as there are")
    size: int | tuple[int, int, int] = Field(description="side of images in pixels, or of volumes' patches in voxels")
    volume: VolumeCard | None = Field(None, description="for a model of volumes")
    task: dict[str, Any]
    classes: tuple[str, ...] = ()
    unit: str = ""
    label_range: tuple[float, float] | None = None
    shape: Shape = "squash"
    window: Window | None = None
    slices: Slices = "middle"
    graham: bool = False
    calibrations: dict[str, Calibration] = Field(
        {}, description="of each site's model, or of the one for all sites (''): what validation images say about it"
    )
    looks: Looks | None = Field(None, description="what validation images look like; None where nobody has looked")
    method: str
    weights_sha256: str

    @property
    def target(self) -> Target:
        structures = tuple(self.volume.structures.items()) if self.volume else ()
        return Target(self.classes, self.unit, self.label_range, structures)

    @property
    def side(self) -> int:
        """Of square images; BadInput for a model of volumes, which asks for none."""
        if not isinstance(self.size, int):
            raise BadInput("model: is one of volumes, and this is for models of images; name another model")
        return self.size

    @field_validator("size")
    @classmethod
    def _no_larger(cls, size: int | tuple[int, int, int]) -> int | tuple[int, int, int]:
        if not all(1 <= side <= LARGEST_SIDE for side in ([size] if isinstance(size, int) else size)):
            raise ValueError(f"must be sides from 1 to {LARGEST_SIDE}")
        return size

    @model_validator(mode="after")
    def _of_one_kind(self) -> "Card":
        side_and_channels = isinstance(self.size, int), self.channels in (1, 3)
        if self.volume is None and side_and_channels != (True, True):
            raise ValueError("images have one side, and 1 or 3 channels")
        if self.volume is not None and (side_and_channels[0] or self.channels != len(self.volume.channels)):
            raise ValueError("patches of volumes have three sides, and every channel a name")
        return self

    def built_task(self) -> Task:
        """The task; BadInput where nobody here knows it, or its settings."""
        name = self.task.get("name")
        if not isinstance(name, str) or name not in TASKS:
            wrong = no_such_choice(str(name)[:60], list(TASKS))
            raise BadInput(f"the model's card: task: {wrong}; it may need a plug-in, or a newer version of polyclinic")
        try:
            return TASKS[name].model_validate(self.task)
        except ValidationError as error:
            reason = " ".join(str(error).split())[:200]
            raise BadInput(f"the model's card: task: {reason}; fetch the model again") from None


def looked_up_names(task: str, backbones: Mapping[str, str]) -> list[tuple[Registry[Any], str]]:
    """What a model is looked up by: its task and its networks. It needs nothing else to predict."""
    return [(TASKS, task), *((registry_of(name), name) for name in backbones.values())]


def card_of(
    study: Study,
    info: Mapping[str, Any],
    backbones: dict[str, str],
    weights_sha256: str,
    calibrations: Mapping[str, Calibration] | None = None,
    looks: Looks | None = None,
) -> Card:
    """The card of a model trained by `study` on data with these facts (`PreparedSites.info`)."""
    facts = {name: info[name] for name in ("channels", "size", "classes", "unit", "label_range")}
    if isinstance(study.task, MultiLabel):
        facts["classes"] = labels_in(facts["classes"])
    names = looked_up_names(study.task.name, backbones)
    used = {registry.origin(name) for registry, name in names if not is_importable(name)}
    loaded = plugged.load_from_study(study.plugins)
    return Card(
        backbones=backbones,
        arguments=study.model.arguments,
        plugins={name: sha256 for name, sha256 in loaded.items() if f"plug-in {name}" in used},
        installed=packages_of(names),
        norm=study.model.norm,
        input_size=study.model.input_size,
        head=study.method.head,
        task=study.task.model_dump(mode="json"),
        method=study.method.name,
        weights_sha256=weights_sha256,
        calibrations=dict(calibrations or {}),
        looks=looks,
        **facts,
        **preparation_of(study.data),
    )


def preparation_of(data: Source) -> dict[str, Any]:
    """The preparation of the images of a source, as settings of a card."""
    if isinstance(data, OfVolumes):
        known = {name: getattr(data, name) for name in ("channels", "structures", "preparation")}
        return {"volume": VolumeCard(**known)}
    from_files = isinstance(data, FileSource)  # phantoms have settings of the same names and another meaning
    named = [name for name in ("shape", "window", "slices", "graham") if from_files and hasattr(data, name)]
    return {name: getattr(data, name) for name in named}


def model_file(tensors: Mapping[str, Tensor], card: Card) -> bytes:
    """The content of `model.safetensors`: weights (of site X, where each has its own, under "X/...") and card."""
    optional = ("arguments", "plugins", "installed", "networks", "input_size", "calibrations", "looks", "volume")
    empty = {name for name in optional if not getattr(card, name)} | ({"head"} if card.head == "linear" else set())
    return save(dict(tensors), {CARD: card.model_dump_json(exclude=empty)})


def digest_of_weights(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def read_model_file(file: Path) -> tuple[Card, dict[str, Tensor]]:
    """Card and weights of a model that is whole; else BadInput."""
    if not file.is_file():
        raise BadInput(f"{file}: there is no model; name the folder of a finished run, or its {MODEL}")
    try:
        with safe_open(file, "pt") as opened:
            text = (opened.metadata() or {}).get(CARD)
            if text is None:
                raise BadInput(f"{file}: does not say what network it is of; name a model that polyclinic run wrote")
            with contextlib.suppress(ValueError, AttributeError):  # it is no card: that is said below
                check_format(parse_json(text).get("format", 1), RUN_FORMAT, str(file))
            card = TypeAdapter(Card).validate_json(text)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValidationError, OSError) as error:
        words = sentences(error, "card", Card) if isinstance(error, ValidationError) else str(error)
        reason = " ".join(words.split())[:200]
        raise BadInput(f"{file}: is damaged or not a model of polyclinic ({reason}); fetch it again") from None
    if digest_of_weights(tensors) != card.weights_sha256:
        raise BadInput(f"{file}: is damaged: its weights are not those that its card names; fetch it again")
    record = file.parent / "result.json"
    if file.name != MODEL or not record.is_file():
        return card, tensors
    try:
        result = parse_json(record.read_text(encoding="utf-8"))
        weights, whole = result["weights_sha256"], result.get("model_sha256")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{record}: is damaged, and so {file.name} cannot be checked; fetch the run again") from None
    if card.weights_sha256 != weights or (whole and hashlib.sha256(file.read_bytes()).hexdigest() != whole):
        raise BadInput(f"{file}: is not the model that result.json beside it names (SHA-256); fetch the run again")
    return card, tensors


def built_model(card: Card, site: str, tensors: Mapping[str, Tensor], file: Path) -> Backbone:
    """The network of a site, or of all sites (`""`), with its weights; it is not trained."""
    start = f"{site}/" if site else ""
    found = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
    _refuse_other_shapes(card, site, found, file)
    model = _built_network(card, site, file)
    _refuse_missing(model.state_dict(), found, file)
    try:
        model.load_state_dict(found)
    except RuntimeError as error:
        raise BadInput(_not_fitting(file, error)) from None
    return model.eval()


def _refuse_other_shapes(card: Card, site: str, found: Mapping[str, Tensor], file: Path) -> None:
    """BadInput where the network that the card names has tensors of other shapes than the file.

    It is built without memory first: a dense layer for large images would take gigabytes.
    """
    try:
        with torch.device("meta"):
            wanted = _built_network(card, site, file).state_dict()
    except BadInput:
        if not is_importable(card.backbones[site]):
            raise
        return  # some networks of other packages cannot be built without memory
    _refuse_missing(wanted, found, file)
    for name in wanted:
        if wanted[name].shape != found[name].shape:
            shapes = f"'{name}' is {tuple(found[name].shape)}, not {tuple(wanted[name].shape)}"
            raise BadInput(_not_fitting(file, ValueError(shapes)))


def _refuse_missing(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], file: Path) -> None:
    if missing := wanted.keys() - found.keys():
        raise BadInput(
            f"{file}: lacks {len(missing)} tensors of the network, which the sites kept to themselves; predict at a "
            "site, with the model in the folder of its own run"
        )


def _built_network(card: Card, site: str, file: Path) -> Backbone:
    outputs, backbone = card.built_task().outputs(card.target), card.backbones[site]
    try:
        return build(
            backbone,
            channels=card.channels,
            outputs=outputs,
            size=card.size,  # type: ignore[arg-type]  # networks of volumes take sides
            norm=card.norm,
            input_size=card.input_size,
            head=card.head,
            arguments=card.arguments if card.volume or is_importable(backbone) else None,
        )
    except (RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError) as error:  # such as sides of -1
        raise BadInput(_not_fitting(file, error)) from None


def _not_fitting(file: Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:160]
    return f"{file}: its weights are not of the network that its card names ({reason}); fetch it again"


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


class ReleasedModel(nn.Module):
    """One network, or several whose predictions are averaged.

    Input: uint8 [N, channels, size, size]. Output: probabilities [N, C], values in the label's unit [N], or
    probabilities of the mask [N, H, W]. A network's outputs are divided by its temperature first.
    """

    def __init__(
        self, networks: Sequence[nn.Module], temperatures: Sequence[float], task: Task, target: Target
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.temperatures = tuple(temperatures)
        self.task = task
        self.target = target
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        batch = images.float() / 255
        pairs = zip(self.networks, self.temperatures, strict=True)
        outputs = [network(batch) if t == 1 else network(batch) / t for network, t in pairs]
        return torch.stack([self.task.predictions(output, self.target) for output in outputs]).mean(0)
