"""Reading a study from a TOML file."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyclinic import plugins
from polyclinic.data.file_source import DATA_FOLDER
from polyclinic.data.own_images import only_site_plugins
from polyclinic.errors import BadInput
from polyclinic.files import check_own_digest
from polyclinic.formats import check_run_format
from polyclinic.json_types import JsonMapping, JsonObject
from polyclinic.registry import notice_once
from polyclinic.settings import GONE, RENAMED
from polyclinic.study.changes import apply_changes, fit_to_variants, parse_sets
from polyclinic.study.ignored import notice_other_images
from polyclinic.study.plugged import check_installed, load_checked
from polyclinic.study.tables import Study, parse_study

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
    brief = {name: value for name, value in usual.items() if name not in given and _has(study, name)}
    if "tuning.most_steps" in given:  # it says how long a generator is trained
        brief.pop("generator.steps", None)
    if brief:
        words = ", ".join(f"{name} = {value}" for name, value in brief.items())
        notice_once(f"the study that comes with polyclinic trains generators briefly ({words}); --set them for more")
    return study.with_settings(brief)


def _has(study: Study, setting: str) -> bool:
    """Whether the study has the table of `table.setting`, and the chosen variant the setting."""
    table, _, name = setting.partition(".")
    return name in getattr(type(getattr(study, table)), "model_fields", {})


def load_study(path: Path, sets: list[str] | None = None) -> Study:
    """The study in a TOML file, with `a.b=c` settings on top; BadInput says what is wrong with it."""
    return _load(path, _tables_in(path), sets)


def _tables_in(path: Path) -> JsonObject:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; `polyclinic study new {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
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
        check_installed(study, folder)
    return study


def with_whole_path(tables: JsonMapping, file: Path, *, has_new_path: bool) -> JsonObject:
    """The tables of a study's file; a relative `data.path` begins at the file's folder."""
    data = tables.get("data")
    path = data.get("path") if isinstance(data, Mapping) else None
    if has_new_path or not isinstance(path, str) or path.startswith((DATA_FOLDER, "~")) or Path(path).is_absolute():
        return dict(tables)
    whole = file.parent / path
    if not whole.exists() and Path(path).exists():
        if _is_run_folder(file.parent):  # of an older version, which wrote paths as they were given
            return dict(tables)
        raise BadInput(
            f"data.path: '{path}' begins at the folder of {file}, where there is nothing of that name; it does not "
            f"begin where polyclinic is started, as it once did: write '{os.path.relpath(path, file.parent)}'"
        )
    return {**tables, "data": {**tables["data"], "path": str(whole)}}


def _is_run_folder(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("history.jsonl", "checkpoint", "ledger"))


def load_run_study(folder: Path, sets: list[str] | None = None, *, moved: Sequence[str] = ()) -> Study:
    """The study that a run folder was begun with; BadInput if the folder is of a newer format.

    `moved`: its plug-ins, all of them and in the same order, where they are now.
    """
    check_run_format(folder)
    check_own_digest(folder / "study.toml")
    if moved:
        sets = [*(sets or []), f"plugins={json.dumps(plugins.resolve(list(moved), Path()))}"]
    if not any(text.partition("=")[0].strip() == "plugins" for text in sets or []):
        plugins.refuse_sent_files(_plugins_in(folder / "study.toml"), folder)
    begun = _tables_in(folder / "study.toml")
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


def _plugins_in(path: Path) -> list[str]:
    """What a study names as plug-ins, if it can be read at all."""
    try:
        names = tomllib.loads(path.read_text(encoding="utf-8")).get("plugins", [])
    except (OSError, ValueError):
        return []
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def default_path() -> Path:
    """The embedded study that commands use when none is given."""
    return Path(__file__).with_name("default_study.toml")
