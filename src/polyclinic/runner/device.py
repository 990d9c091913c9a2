"""What `[engine]` means on this machine: the device, its precision, CUDA graphs, the order of sums."""

from __future__ import annotations

import os

import torch

from polyclinic.errors import BadInput
from polyclinic.study.small_tables import EngineSettings


def device_of(name: str) -> str:
    """The device that `engine.device` means on this machine."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadInput(f"engine.device: torch knows no device '{name}'; write auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"engine.device: there is no GPU for '{name}' here; set engine.device = 'cpu' or 'auto'")
    return name


def precision_of(name: str, device: str) -> str:
    return name if name != "auto" else "fp32" if device == "cpu" else "bf16"


def record_steps(engine: EngineSettings, device: str) -> bool:
    """Whether training steps are recorded as CUDA graphs."""
    return engine.graphs is not False and device != "cpu" and not engine.reproducible


def fix_order_of_sums() -> None:
    """Have a GPU add numbers up in the same order every time, as far as it can; for the rest of this process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
