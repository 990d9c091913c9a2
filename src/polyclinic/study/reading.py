"""Reading a study from a TOML file; the digests of the code that it takes from outside."""

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyclinic import plugins
from polyclinic.data.datasets import SOURCES
from polyclinic.data.own_images import only_site_plugins
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.source import DATA_FOLDER
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.files import atomic_write
from polyclinic.generators import GENERATORS
from polyclinic.json_types import JsonMapping, JsonObject, parse_json
from polyclinic.methods import METHODS
from polyclinic.models import is_importable, registry_of
from polyclinic.questions import QUESTIONS
from polyclinic.registry import BY_HAND, Registry, notice_once
from polyclinic.run_folder import check_whole
from polyclinic.settings import GONE, RENAMED
from polyclinic.study.study import Study, apply_changes, fit_to_variants, parse_sets, parse_study
from polyclinic.study.unused import notice_other_images
from polyclinic.tasks import TASKS

#: settings of the study that comes with the package, by method: every method shall end within two minutes there
BRIEF_FELICIA = {"method.steps": 40, "method.learner_steps": 100}
BRIEF = {"generator.epochs": 8, "generator.steps": 60, "tuning.measured": 40}


def load_default(sets: list[str]) -> Study:
    """The study that comes with the package, with settings on top; it trains generators briefly, and says so."""
    study = load_study(default_path(), sets)
    if not study.method.needs_generator() and study.replay is None:
        return study
    given = parse_sets(sets)
    usual = BRIEF_FELICIA if study.method.name == "felicia" else BRIEF
    # those whose table the study has, and whose setting the chosen variant has
    tables = {name: type(getattr(study, name)) for name in ("method", "generator", "tuning")}
    paths = {f"{table}.{name}" for table, kind in tables.items() for name in getattr(kind, "model_fields", {})}
    brief = {name: value for name, value in usual.items() if name not in given and name in paths}
    if "tuning.most_steps" in given:  # it says how long a generator is trained
        brief.pop("generator.steps", None)
    if brief:
        words = ", ".join(f"{name} = {value}" for name, value in brief.items())
        notice_once(f"the study that comes with polyclinic trains generators briefly ({words}); --set them for more")
    return study.with_settings(brief)


def load_study(path: Path, sets: list[str] | None = None) -> Study:
    """The study in a TOML file, with `a.b=c` settings on top; BadInput says what is wrong with it."""
    try:
        return _load(path, _tables_in(path), sets)
    except BadInput as error:
        old = [
            one for one in (*GONE, *RENAMED) if str(error).startswith(f"{one}:") and one not in parse_sets(sets or [])
        ]
        if not old:
            raise
        raise BadInput(f"{path}: {error}") from None  # written by an older version, maybe long ago


def _tables_in(path: Path) -> JsonObject:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; `polyclinic study new {path}` writes one") from None
    except UnicodeDecodeError:
        raise BadInput(f"{path}: is no text, and a study is a TOML file; name one") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}), and a study is a TOML file; name one") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path}: is not valid TOML: {error}") from None


def _load(path: Path, tables: JsonMapping, sets: list[str] | None) -> Study:
    changes, folder = parse_sets(sets or []), Path(path).parent
    tables = with_whole_path(tables, Path(path), has_new_path="data.path" in changes)
    changed = apply_changes(tables, changes)
    with only_site_plugins(folder):  # in a kit a study brings no code
        if changed.get("plugins"):
            # as with data.path: a path on the command line begins where polyclinic is started
            changed["plugins"] = plugins.resolve(changed["plugins"], Path() if "plugins" in changes else folder)
            load_checked(changed["plugins"], folder)
        study = parse_study(fit_to_variants(tables, changed, changes))
        data = [name.removeprefix("data.") for name in changes if name.startswith("data.")]
        notice_other_images(study.data.source, [one for one in data if one not in type(study.data).model_fields])
        refuse_changed(_noted(folder)[1], ((registry, name) for _, registry, name in entries_of(study)), folder)
    return study


def with_whole_path(tables: JsonMapping, file: Path, *, has_new_path: bool) -> JsonObject:
    """The tables of a study's file; a relative `data.path` begins at the file's folder."""
    data = tables.get("data")
    path = data.get("path") if isinstance(data, Mapping) else None
    if has_new_path or not isinstance(path, str) or path.startswith((DATA_FOLDER, "~")) or Path(path).is_absolute():
        return dict(tables)
    whole = file.parent / path
    if not whole.exists() and Path(path).exists():
        if any((file.parent / name).exists() for name in ("history.jsonl", "checkpoint", "ledger")):
            return dict(tables)  # a run folder of an older version, which wrote paths as they were given
        raise BadInput(
            f"data.path: '{path}' begins at the folder of {file}, where there is nothing of that name; it does not "
            f"begin where polyclinic is started, as it once did: write '{os.path.relpath(path, file.parent)}'"
        )
    return {**tables, "data": {**tables["data"], "path": str(whole)}}


def load_run_study(folder: Path, sets: list[str] | None = None, *, moved: Sequence[str] = ()) -> Study:
    """The study that a run folder was begun with; BadInput if the folder is of a newer format.

    `moved`: its plug-ins, all of them and in the same order, where they are now.
    """
    check_whole(folder)
    if moved:
        sets = [*(sets or []), f"plugins={json.dumps(plugins.resolve(list(moved), Path()))}"]
    begun = _tables_in(folder / "study.toml")
    named = begun.get("plugins", [])
    if isinstance(named, list) and not any(text.partition("=")[0].strip() == "plugins" for text in sets or []):
        plugins.refuse_sent_files((name for name in named if isinstance(name, str)), folder)
    for setting in (*GONE, *RENAMED):  # of an older version, which wrote them all
        *tables, name = setting.split(".")
        inside: object = begun
        for table in tables:
            inside = inside.get(table) if isinstance(inside, dict) else None
        if isinstance(inside, dict) and name in inside:
            value = inside.pop(name)
            if setting in RENAMED:
                inside.setdefault(RENAMED[setting], value)
    return _load(folder / "study.toml", begun, sets)


def default_path() -> Path:
    """The embedded study that commands use when none is given."""
    return Path(__file__).with_name("default_study.toml")


# --- code from outside --------------------------------------------------------------------------------

#: SHA-256 of the code that a run was begun with, and no code: whoever audits somebody else's folder runs nothing of it
DIGESTS = "plugins.json"


def entries_of(study: Study) -> Iterator[tuple[str, Registry[Any], str]]:
    """Every name that the study looks up: (setting, registry, name)."""
    yield "data.source", SOURCES, study.data.source
    yield "sites.partition", PARTITIONS, study.sites.partition
    yield "task.name", TASKS, study.task.name
    if study.method.name not in QUESTIONS:
        yield "method.name", METHODS, study.method.name
    yield "generator.name", GENERATORS, study.generator.name
    for name in (study.model.backbone, *study.model.backbones.values()):
        yield "model.backbone", registry_of(name), name
    for name in study.policy.kinds:
        yield "policy.kinds", KINDS, name


def unknown_elsewhere(study: Study) -> str | None:
    """Why no other process can work on this study: it has something that was put into a registry by hand."""
    for setting, registry, name in entries_of(study):
        if name in registry and registry.origin(name) == BY_HAND:
            table = registry.kind.upper()
            return (
                f"{setting}: '{name}' was put into {table} by hand, where no other process finds it; put it into a "
                f"Python file with a dict {table} and name that file in plugins, or set engine.workers = 1"
            )
    return None


def packages_of(names: Iterable[tuple[Registry[Any], str]]) -> dict[str, str]:
    """The SHA-256 of the package of each importable network (`package.module:callable`), and of each entry point, by
    its distribution and version. Any file of a package counts: what a module imports cannot be told from its text."""
    found = {}
    for registry, name in names:
        if is_importable(name):
            found[name] = plugins.digest_of_package(name.partition(":")[0])[1]
        elif registry.is_installed(name):
            found[registry.origin(name)] = plugins.digest_of_package(registry[name].__module__)[1]
    return found


def note_plugins(folder: Path, study: Study) -> None:
    """Write down the digests of what the study takes from outside, unless the run was begun with them already;
    `listed`: what a deployed site's own people listed, for the record."""
    packages = packages_of((registry, name) for _, registry, name in entries_of(study))
    digests = {"plugins": plugins.load_from_study(study.plugins), "installed": packages}
    listed = plugins.listed_at_site()
    if (any(digests.values()) or listed) and not (folder / DIGESTS).exists():
        content = {**digests, "listed": listed} if listed else digests
        atomic_write(folder / DIGESTS, json.dumps(content, indent=1) + "\n")


def _noted(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of plug-ins, and of packages, that a run folder was begun with; those of networks stood apart once."""
    file = folder / DIGESTS
    if not file.exists():
        return {}, {}
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
        kept = [dict(found.get(kind, {})) for kind in ("plugins", "installed", "networks")]
        return kept[0], kept[1] | kept[2]
    except (OSError, ValueError, AttributeError, TypeError):
        raise BadInput(f"{file}: cannot be read; restore it, or run the study again in another folder") from None


def load_checked(names: Sequence[str], folder: Path) -> None:
    """Load the plug-ins of a study in `folder`; in a run folder each must be the one that the run was begun with.

    A file may have moved since: then `plugins` in the folder's study.toml says where it is now.
    """
    noted = list(_noted(folder)[0].values())
    if noted and len(noted) != len(names):
        raise BadInput(f"plugins: {folder} was begun with {len(noted)} plug-ins; name the same ones in the same order")
    plugins.load_from_study(names, dict(zip(names, noted, strict=False)))


def changed_plugins(folder: Path, study: Study) -> list[str]:
    """The plug-ins of a study that are not as they were when the run in `folder` was begun with them."""
    noted, now = _noted(folder)[0], plugins.load_from_study(study.plugins)
    pairs = zip(now.items(), noted.values(), strict=True) if len(noted) == len(now) else ()
    return [name for (name, sha256), before in pairs if sha256 != before]


def takes_from(study: Study, names: Iterable[str]) -> bool:
    """Whether a study uses anything out of these plug-ins."""
    origins = {f"plug-in {name}" for name in names}
    return any(name in registry and registry.origin(name) in origins for _, registry, name in entries_of(study))


def refuse_changed(noted: Mapping[str, str], now: Iterable[tuple[Registry[Any], str]], made: Path) -> None:
    """BadInput if a package is not as it was when `made`, a run or a model, was made with it."""
    found = packages_of(now) if noted else {}
    for name, sha256 in noted.items():
        if found.get(name) != sha256:
            has = (
                f"SHA-256 {found[name][:12]}, not {sha256[:12]}" if name in found else ", ".join(found) or "none of it"
            )
            raise BadInput(
                f"plugins: {made} was made with {name} as it was then, and its package has changed ({has} is "
                "installed now); install that version again, or run the study in another folder"
            )
