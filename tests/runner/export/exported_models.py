"""Model files for tests of `export`: networks with drawn weights, and names that somebody hostile chose."""

from pathlib import Path
from typing import Any

import torch

from polyclinic import models
from polyclinic.runner.evaluate.calibration import Calibration
from polyclinic.runner.predict.model_file import MODEL, Card, digest_of_weights, model_file

#: what a bundle's reader would evaluate, refer to or include, and what a page would take for markup
HOSTILE = ("$__import__('pathlib').Path('pwned').touch()", "@bundle_root", "%x.json#y", "<script>|`a`\n# b</script>")


def write_model(folder: Path, backbone: str = "lenet5", **facts: Any) -> Path:
    """A model with drawn weights, in a folder without a run."""
    task = facts.pop("task", {"name": "classification"})
    settings: dict[str, Any] = {
        "backbones": {"": backbone},
        "norm": "batch",
        "channels": 1,
        "size": 28,
        "task": task,
        "classes": HOSTILE if task["name"] == "classification" else (),
        "method": "fedavg",
        "weights_sha256": "0" * 64,
        **facts,
    }
    card = Card(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = card.built_task().outputs(card.target)
        network = models.build(
            backbone,
            channels=card.channels,
            outputs=outputs,
            size=card.size,
            norm=card.norm,
            input_size=card.input_size,
            head=card.head,
        )
        weights = {name: _drawn(tensor) for name, tensor in network.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    card = card.model_copy(update={"weights_sha256": digest_of_weights(weights)})
    (folder / MODEL).write_bytes(model_file(weights, card))
    return folder


def _drawn(tensor: torch.Tensor) -> torch.Tensor:
    """As it is, but for what is all zeros: a head of zeros would agree with any other network."""
    if tensor.is_floating_point() and tensor.numel() > 1 and not tensor.any():
        return torch.randn(tensor.shape) * 0.05
    return tensor.clone()


CALIBRATED = {"": Calibration(cases=40, temperature=1.7, quantiles={"0.9": 0.97})}
