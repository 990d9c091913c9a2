"""Packages that not everybody needs: the extra that brings each of them, and one sentence where it is missing."""

import contextlib
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from polyclinic.errors import BadInput
from polyclinic.registry import notice_once

#: by the name of the extra: the package that it is known by, and what it is for
EXTRAS = {
    "figures": ("matplotlib", "pictures and reports (`polyclinic report`)"),
    "pdf": ("weasyprint", "reports as PDF (`polyclinic report --pdf`)"),
    "segmentation": ("monai", "masks: `task.name = 'segmentation'`, U-Nets, MONAI's networks"),
    "nvflare": ("nvflare", "deployments across institutions (`polyclinic deploy`)"),
    "ray": ("ray", "many sites on a cluster (`--engine ray`)"),
    "serve": ("fastapi", "the page of a running study (`polyclinic serve`)"),
    "export": ("onnx", "models for other programs (`polyclinic export --to onnx`)"),
    "dicom-seg": ("highdicom", "predicted masks as DICOM SEG (`polyclinic predict`)"),
    "logging": ("mlflow", "curves of a run in TensorBoard and MLflow"),
}


def is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # it was imported and is hidden
        return False


def missing_sentence(package: str, who: str = "this command") -> str | None:
    """What to do about a missing package; None for one that no extra brings."""
    package = package.partition(".")[0]
    extra = next((name for name, (known, _) in EXTRAS.items() if known == package), None)
    return extra and f"{who} needs {package}, which is not installed; run `pip install 'polyclinic[{extra}]'`"


def need(package: str, who: str) -> None:
    """BadInput where the package is not installed; `who` is the setting or the function that needs it."""
    if not is_installed(package):
        raise BadInput(missing_sentence(package, who) or f"{who} needs {package}, which is not installed")


@contextlib.contextmanager
def picture_if_possible() -> Iterator[None]:
    """For pictures beside other results: without matplotlib, or without its fonts, there is a notice in their place."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        notice_once("no picture was drawn: matplotlib is not installed; run `pip install 'polyclinic[figures]'`")
    except (OSError, RuntimeError, ValueError) as error:
        frames = [Path(frame.filename).parts[-2:] for frame in traceback.extract_tb(error.__traceback__)]
        if ("matplotlib", "font_manager.py") not in frames:  # who looks for fonts and opens them
            raise
        notice_once(
            f"no picture was drawn: matplotlib cannot open a font ({error}); install it again with "
            "`pip install --force-reinstall --no-deps matplotlib`"
        )
