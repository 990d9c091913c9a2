"""What a study takes from outside: its plug-ins and entry points, their SHA-256, and whether other processes find them.

A run folder keeps the digests in `plugins.json`, and no code; in a deployed site's or server's, `listed` has those of
what its own people listed, for the record. Whoever audits somebody else's folder runs nothing that
came with it. The plug-in files stay where they are, and one that has changed since is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyclinic import plugins
from polyclinic.data.datasets import SOURCES
from polyclinic.data.partitions import PARTITIONS
from polyclinic.data.source import AtSites
from polyclinic.errors import BadInput
from polyclinic.federation.ledger.kinds import KINDS
from polyclinic.federation.operation import Operation
from polyclinic.generators import GENERATORS
from polyclinic.json_types import parse_json
from polyclinic.methods import METHODS, Method
from polyclinic.models import is_importable, registry_of
from polyclinic.questions import QUESTIONS
from polyclinic.registry import PLUGGED, Registry
from polyclinic.settings import no_such_choice
from polyclinic.tasks import TASKS

if TYPE_CHECKING:
    from polyclinic.study.tables import Study

FILE = "plugins.json"
KEPT = ("plugins", "installed", "networks")  #: what is in it, and must not have changed


def entries_of(study: Study) -> Iterator[tuple[str, Registry[Any], str]]:
    """Every name that the study looks up: (setting, registry, name)."""
    yield "data.source", SOURCES, study.data.source
    yield "sites.partition", PARTITIONS, study.sites.partition
    yield "task.name", TASKS, study.task.name
    if study.method.name not in QUESTIONS:
        yield "method.name", METHODS, study.method.name
    yield "generator.name", GENERATORS, study.generator.name
    for name in (study.model.backbone, *study.model.backbones.values()):
        if not is_importable(name):
            yield "model.backbone", registry_of(name), name
    for name in study.policy.kinds:
        yield "policy.kinds", KINDS, name


def unknown_elsewhere(study: Study) -> str | None:
    """Why no other process can work on this study: it has something that was put into a registry by hand."""
    for setting, registry, name in entries_of(study):
        if registry.is_by_hand(name):
            table = registry.kind.upper()
            return (
                f"{setting}: '{name}' was put into {table} by hand, where no other process finds it; put it into a "
                f"Python file with a dict {table} and name that file in plugins, or set engine.workers = 1"
            )
    return None


def digests_of(study: Study) -> dict[str, dict[str, str]]:
    """The SHA-256 of each plug-in, in order, and of the packages of entry points and networks that the study uses."""
    names = [(registry, name) for _, registry, name in entries_of(study)]
    networks = [name for name in (study.model.backbone, *study.model.backbones.values()) if is_importable(name)]
    return {
        "plugins": plugins.load_from_study(study.plugins),
        "installed": packages_of(names),
        "networks": networks_of(networks),
        "listed": plugins.listed_at_site(),
    }


def packages_of(names: Iterable[tuple[Registry[Any], str]]) -> dict[str, str]:
    """The SHA-256 of each installed package, with its version, whose entry point is one of the names."""
    used = [(registry, name) for registry, name in names if registry.is_installed(name)]
    return {reg.origin(name): plugins.digest_of_package(reg[name].__module__)[1] for reg, name in used}


def networks_of(backbones: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of the package of each importable network, `package.module:callable`."""
    used = [name for name in backbones if is_importable(name)]
    return {name: plugins.digest_of_package(name.partition(":")[0])[1] for name in used}


def read_digests(folder: Path) -> dict[str, dict[str, str]]:
    """What a run folder was begun with; nothing where it has no such file, or is older than a part of it."""
    file = folder / FILE
    if not file.exists():
        return {kind: {} for kind in KEPT}
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
        return {kind: {str(name): str(sha) for name, sha in found.get(kind, {}).items()} for kind in KEPT}
    except (OSError, ValueError, AttributeError, TypeError):
        raise BadInput(f"{file}: cannot be read; restore it, or run the study again in another folder") from None


def load_checked(names: Sequence[str], folder: Path) -> None:
    """Load the plug-ins of a study in `folder`; in a run folder each must be the one that the run was begun with.

    A file may have moved since: then `plugins` in the folder's study.toml says where it is now.
    """
    noted = list(read_digests(folder)["plugins"].values())
    if noted and len(noted) != len(names):
        raise BadInput(f"plugins: {folder} was begun with {len(noted)} plug-ins; name the same ones in the same order")
    plugins.load_from_study(names, dict(zip(names, noted, strict=False)))


def check_installed(study: Study, folder: Path) -> None:
    """BadInput if a package whose entry point or network the study uses is another than the run was begun with."""
    noted = read_digests(folder)
    if noted["installed"] or noted["networks"]:
        now = digests_of(study)
        refuse_changed(noted["installed"], now["installed"], folder)
        refuse_changed(noted["networks"], now["networks"], folder)


def refuse_changed(noted: Mapping[str, str], now: Mapping[str, str], made: Path) -> None:
    """BadInput if a package (or a network of one) is not as it was when `made`, a run or a model, was made with it.

    Any file of a package counts: what a module imports while it runs cannot be told from its text.
    """
    for name, sha256 in noted.items():
        if now.get(name) != sha256:
            what = f"the network {name}" if is_importable(name) else f"the package {name}"
            has = f"SHA-256 {now[name][:12]}, not {sha256[:12]}" if name in now else ", ".join(now) or "nothing of it"
            raise BadInput(
                f"plugins: {made} was made with {what} as it was then, and its package has changed ({has} is "
                "installed now); install that version again, or run the study in another folder"
            )


def check_kinds(study: Study) -> None:
    """BadInput if an operation of the method releases what is no kind of parcel, or a plug-in's kind that the policy
    of simulated sites does not let out. A deployed site has a policy of its own."""
    allowed = None if isinstance(study.data, AtSites) else study.policy.kinds
    released = [(name, kind) for name, found in operations_of(study.method).items() for kind in found.releases]
    for operation, kind in released:
        if kind not in KINDS:
            raise BadInput(
                f"method.name: '{operation}' of '{study.method.name}' releases '{kind}', which is no kind of parcel; "
                "add a class of it to KINDS of a plug-in, or write one that `polyclinic list kinds` names"
            )
        if allowed is not None and kind not in KINDS.builtin and kind not in allowed:
            raise BadInput(
                f"policy.kinds: lacks '{kind}', which '{operation}' of '{study.method.name}' releases; add it there"
            )


def operations_of(method: Method) -> dict[str, Operation]:
    """The operations of a method, by name."""
    found = {name: getattr(getattr(type(method), name, None), "operation", None) for name in dir(type(method))}
    return {name: declared for name, declared in found.items() if isinstance(declared, Operation)}


def check_attacks() -> None:
    """BadInput if an attack of a plug-in names no kind of parcel, or one that does not exist: it would never run."""
    for name, (attack, origin) in PLUGGED["polyclinic.attacks"].items():
        kinds = getattr(attack, "kinds", None)
        if not isinstance(kinds, tuple) or not kinds:
            raise BadInput(f"{origin}: the attack '{name}' lacks kinds, a tuple with the kinds of parcel that it fits")
        for kind in kinds:
            if kind not in KINDS:
                raise BadInput(f"{origin}: kinds of the attack '{name}': {no_such_choice(str(kind), list(KINDS))}")
