"""The code that a model needs: what may be imported for it, and its plug-ins where they are now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyclinic import plugins as plugged
from polyclinic.errors import BadInput
from polyclinic.models import is_importable
from polyclinic.runner.model_file import Card


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
