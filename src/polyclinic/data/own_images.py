"""A deployed site's own images: `[datasets.NAME]` in its `local/site.toml` says where they are."""

import contextlib
import dataclasses
import json
import secrets
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from polyclinic import plugins
from polyclinic.data.datasets import SOURCES
from polyclinic.data.opt_out import OPT_OUT
from polyclinic.data.partitions.base import Iid
from polyclinic.data.parts import ImageSet, SiteData, open_site, prepare
from polyclinic.data.source import DATA_FOLDER, AtSites, Source
from polyclinic.data.volumes.source import OfVolumes
from polyclinic.errors import BadInput, did_you_mean
from polyclinic.files import atomic_write, lock
from polyclinic.settings import sentences, variant

T = TypeVar("T")
#: settings by which a study would split images, and which a deployed site does not take from it
NOT_THE_STUDYS = ("fold", "tuning_fold", "test_per_class", "test_total_per_class", "opt_out")
#: in the folder `local` of a kit: the split of each dataset, drawn once
SPLITS_FILE = "splits.json"
#: in a table of site.toml: what the site's classes are called in the study, and the name of one that is left out
LABEL_MAP, LEFT_OUT = "label_map", "-"


def find_kit(folder: Path) -> Path | None:
    """The kit of the deployed site, or of the server, whose part of a run this is."""
    runs = folder.resolve().parent
    is_kit = (runs.parent / "local" / "site.toml").is_file() or (runs.parent / "startup").is_dir()
    return runs.parent if runs.name == "runs" and is_kit else None


def load_site_plugins(file: Path) -> None:
    """Load the plug-ins that a site lists in its file; this process is the site's and knows nothing else from now on:
    no entry point, no study's."""
    plugins.load_at_site(_listed(file), file)


@contextlib.contextmanager
def only_site_plugins(folder: Path) -> Iterator[Path | None]:
    """The kit that a run folder lies in, within which only the plug-ins of its site.toml are known; None elsewhere."""
    kit = find_kit(folder)
    file = kit / "local" / "site.toml" if kit else None
    with plugins.only_of_site(_listed(file), file) if file else contextlib.nullcontext():
        yield kit


def _listed(file: Path) -> Any:
    """The plug-ins of a site's file. BadInput where the list has another name or place: a site whose people believe
    that they have added a layer must have it."""
    tables = read_toml(file) if file.exists() else {}
    for name in tables.keys() - {"plugins", "datasets"}:
        hint = did_you_mean(name, ["plugins", "datasets"])
        raise BadInput(f"{file}: {name}: there is no such setting{hint}; take it out")
    datasets = tables.get("datasets", {})
    if isinstance(datasets, dict) and any("plugins" in one for one in datasets.values() if isinstance(one, dict)):
        raise BadInput(f"{file}: plugins: stands in a table [datasets.NAME]; move the line above the first table")
    return tables.get("plugins", [])


def own_data(file: Path, wanted: AtSites, site: str, cache: Path) -> SiteData:
    """The site's own images under the name that the study uses, with labels as the study numbers its classes."""
    if (found := _lying_prepared(file, wanted)) is not None:
        return found
    data, classes = _prepared(own_source(file, wanted), wanted, site, cache)
    return _as_numbered(data, classes, wanted, file)


def look_at_training_images(file: Path, wanted: AtSites, site: str, look: Callable[[ImageSet], T]) -> T:
    """What `look` says of the images that a study would train on; nothing is kept, neither images nor a split."""
    if (found := _lying_prepared(file, wanted)) is not None:
        return look(found.train)
    with tempfile.TemporaryDirectory() as folder:
        data, classes = _prepared(_source(file, wanted, split_of(file, wanted)), wanted, site, Path(folder))
        return look(_as_numbered(data, classes, wanted, file).train)


def _lying_prepared(file: Path, wanted: AtSites) -> SiteData | None:
    """The site's images where they lie prepared already, as in a rehearsal."""
    table = _table(file, wanted)
    if "prepared" not in table:
        return None
    if (file.parent / OPT_OUT).is_file():
        raise BadInput(f"{file.parent / OPT_OUT}: images lie prepared, without names of patients; take the list away")
    folder = file.parent / table["prepared"]
    return open_site(folder.parent, folder.name)


def _table(file: Path, wanted: AtSites) -> dict[str, Any]:
    """The table of a site's file about the images of a study."""
    datasets = read_toml(file).get("datasets", {})
    if wanted.dataset not in datasets:
        hint = did_you_mean(wanted.dataset, list(datasets))
        raise BadInput(f"{file}: there is no table [datasets.{wanted.dataset}]{hint}; the study asks for it")
    return dict(datasets[wanted.dataset])


def own_source(file: Path, wanted: AtSites) -> Source:
    """The source of a site's images, at the size of the study and with the split of the site; the study's own words
    where they lie prepared already, as in a rehearsal."""
    if "prepared" in _table(file, wanted):
        return wanted
    return _source(file, wanted, own_split(file, wanted))


def _source(file: Path, wanted: AtSites, split: Mapping[str, Any]) -> Source:
    table, base = _table(file, wanted), file.parent
    table.pop(LABEL_MAP, None)  # what its classes are called in the study is seen to later
    kind = variant(SOURCES, table, path=f"datasets.{wanted.dataset}", key="source")
    settings = {**split, **table, "size": wanted.size}
    if (base / OPT_OUT).is_file():
        settings.setdefault("opt_out", base / OPT_OUT)
    if "path" in settings:
        path = Path(settings["path"]).expanduser()
        settings["path"] = path if path.parts[:1] == (DATA_FOLDER,) else base / path
    if kind.volumes != wanted.volumes:
        other = "volumes" if wanted.volumes else "images"
        raise BadInput(f"datasets.{wanted.dataset}.source: '{kind.__name__}' is not for {other}, which the study wants")
    if "channels" in kind.model_fields:
        settings.setdefault("channels", wanted.channels)
    if isinstance(wanted, OfVolumes):
        settings["structures"] = wanted.structures
        settings["preparation"] = wanted.preparation.model_dump(mode="json", exclude_none=True)
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        raise BadInput(sentences(error, f"datasets.{wanted.dataset}", kind)) from None


def own_split(file: Path, wanted: AtSites) -> dict[str, Any]:
    """The split of a dataset at a site: drawn once and kept, so that no study's training image is another one's test
    image.

    A study has no say in it. The table of the dataset in site.toml may say otherwise.
    """
    with lock(file.parent / f".{SPLITS_FILE}.lock"):
        split = split_of(file, wanted)
        splits = _kept_splits(file)
        if wanted.dataset not in splits:
            split = splits[wanted.dataset] = {**split, "seed": secrets.randbelow(2**31)}
            atomic_write(file.parent / SPLITS_FILE, json.dumps(splits, indent=1) + "\n", private=True)
    return split


def split_of(file: Path, wanted: AtSites) -> dict[str, Any]:
    """The split that is kept for a dataset; the shares that it will have, if it is not drawn yet. Writes nothing."""
    for name in NOT_THE_STUDYS:
        if getattr(wanted, name) is not None:
            raise BadInput(f"data.{name}: a deployed site has one split for all studies; take the setting out")
    shares = {name: Source.model_fields[name].default for name in ("validation", "test")}
    kept = _kept_splits(file).get(wanted.dataset, shares)
    return {name: value for name, value in kept.items() if value is not None}


def _kept_splits(file: Path) -> dict[str, Any]:
    kept = file.parent / SPLITS_FILE
    return dict(json.loads(kept.read_text(encoding="utf-8"))) if kept.exists() else {}


def split_in_words(file: Path, wanted: AtSites) -> str:
    """A sentence about how a site's images are split."""
    table = _table(file, wanted)
    if "prepared" in table:
        return "Your images lie prepared, and are split already."
    split = {**split_of(file, wanted), **table}
    test = f"{split['test']:.0%}" if split.get("test_per_class") is None else f"{split['test_per_class']} of each class"
    return (
        f"Your site splits its images itself, whatever the study says: {test} for test, {split['validation']:.0%} for "
        "validation, the rest for training (site.toml)."
    )


def _prepared(source: Source, wanted: AtSites, site: str, cache: Path) -> tuple[SiteData, list[str]]:
    """The site's part of a source, and its classes."""
    parts = prepare(source, Iid(partition="iid", names=(site,)), cache=cache)
    channels = wanted.info(())["channels"]
    if parts.info["channels"] != channels:
        found = f"images have {parts.info['channels']} channels, and the study's {channels}"
        raise BadInput(f"datasets.{wanted.dataset}: {found}; set channels")
    return open_site(parts.folder, site), parts.info["classes"]


def _as_numbered(data: SiteData, classes: list[str], wanted: AtSites, file: Path) -> SiteData:
    """A site may lack a class, list its classes in another order, or call them otherwise (`label_map`); it may not have
    one that nobody knows."""
    names = _label_map(file, wanted, classes)
    meant = [names.get(name, name) for name in classes]
    if tuple(meant) == wanted.classes or not wanted.classes:
        return data
    unknown = [name for name in meant if name not in (*wanted.classes, LEFT_OUT)]
    if unknown:
        known = ", ".join(wanted.classes)
        raise BadInput(
            f"{file}: '{unknown[0]}' is none of the study's classes, {known}; rename it, say what it is in the study "
            f'(label_map = {{ "{unknown[0]}" = "{wanted.classes[0]}" }}), or leave it out ("{LEFT_OUT}")'
        )
    numbers = np.array([-1 if name == LEFT_OUT else wanted.classes.index(name) for name in meant])

    def renumbered(part: ImageSet) -> ImageSet:
        part = dataclasses.replace(part, labels=numbers[part.labels])
        rows = np.flatnonzero(part.labels >= 0)
        return part if len(rows) == len(part) else part.take(rows)

    return data.changed(renumbered)


def _label_map(file: Path, wanted: AtSites, classes: Sequence[str]) -> dict[str, str]:
    """The names that the site's people give to the study's classes: their name, and the study's, or "-" to leave images
    out."""
    found = _table(file, wanted).get(LABEL_MAP, {})
    about = f"{file}: datasets.{wanted.dataset}.{LABEL_MAP}"
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise BadInput(f"{about}: write the site's class and the study's, such as {{ sick = \"ill\" }}")
    for name in found:
        if name not in classes:
            raise BadInput(f"{about}: the site has no class '{name}'{did_you_mean(name, list(classes))}; take it out")
    return dict(found)


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a site's file; BadInput says what is wrong with it."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{file}: no such file; every site's kit has one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{file}: cannot be read: {error}") from None
