"""What only the images and the file of first weights can tell about a study, before it runs."""

from __future__ import annotations

from pathlib import Path

from polyclinic.data.datasets.at_sites import AtSites
from polyclinic.data.file_source import FileSource
from polyclinic.data.parts import PreparedSites, prepare
from polyclinic.data.splits import SPLITS
from polyclinic.errors import BadInput
from polyclinic.models import RANDOM, WeightsFile, read_weights
from polyclinic.runner.assembly import Assembly
from polyclinic.study import Study
from polyclinic.study.checks import network_of


def check_files(study: Study) -> list[str]:
    """What was found, a sentence each; BadInput where the study cannot run with these images or these weights.

    Images are prepared and counted, as a run does it, only where the study asks for a fold, for so many test images of
    each class, or for a network with the weights of a file.
    """
    file = read_weights(Path(study.model.weights)) if study.model.weights != RANDOM else None
    if file is None and not _counts_images(study):
        return []
    parts = _prepared(study)
    found = [_counted(parts)] if parts else ["the images are not here, and were not counted"]
    return [*found, _weights_sentence(study, file, parts)] if file else found


def _counts_images(study: Study) -> bool:
    data = study.data
    return any(setting is not None for setting in (data.fold, data.test_per_class, data.test_total_per_class))


def _prepared(study: Study) -> PreparedSites | None:
    """The sites' images; None where they are not on this machine."""
    if isinstance(study.data, AtSites):
        return None
    if isinstance(study.data, FileSource):
        try:
            study.data.refuse_missing_path()
        except BadInput:
            return None
    return prepare(study.data, study.sites)


def _counted(parts: PreparedSites) -> str:
    counts = parts.info["counts"].values()
    return ", ".join(f"{name} images: {sum(own[name] for own in counts)}" for name in SPLITS)


def _weights_sentence(study: Study, file: WeightsFile, parts: PreparedSites | None) -> str:
    """How much of the file the network takes over. Without the images, channels and classes are not known, so that the
    first and the last layer cannot be compared."""
    backbone = study.model.backbone
    if parts is None:
        file.fitted(network_of(study).state_dict(), backbone)
        return f"{file.path}: its tensors fit {backbone}"
    network = Assembly(study, parts, Path()).build_model()
    return f"{file.path}: {file.fitted(network.state_dict(), backbone).sentence()}"
