"""`polyclinic privacy`: what training with differential privacy costs, before any is done."""

from __future__ import annotations

import json as json_format
import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from polyclinic.privacy.epsilon import Accountant

COVERS = "what DP-SGD with Poisson sampling learns from these images, and whatever is computed from that alone"
DOES_NOT_COVER = (
    "anything else computed from real images: codes, latents, batch-norm statistics, an EMA codebook, scores",
    "a patient with several images: epsilon is for one image and its label",
)


def privacy(
    samples: int | None = typer.Option(None, "--samples", help="Training images of the site."),
    batch: int = typer.Option(32, "--batch", help="Images in a mini-batch, on average."),
    noise: float | None = typer.Option(None, "--noise", help="Standard deviation of the noise, in clipping norms."),
    epochs: float | None = typer.Option(None, "--epochs", help="How often an image takes part, on average."),
    delta: float | None = typer.Option(None, "--delta", help="Delta of the guarantee; 1 / samples if not given."),
    accountant: str = typer.Option("rdp", "--accountant", help="rdp, or prv (tighter, takes seconds)."),
    target_epsilon: float | None = typer.Option(
        None, "--target-epsilon", help="Say what reaches this epsilon: the noise for --epochs, the epochs for --noise."
    ),
    curve: Path | None = typer.Option(None, "--curve", help="Draw epsilon against epochs into this PNG file."),
    sizes: str = typer.Option("", "--sizes", help="Numbers of training images for --curve, as in 500,2000."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of sentences."),
) -> None:
    """Say what epsilon training with differential privacy spends, and what that covers."""
    kind = _accountant(accountant)
    if samples is None and curve is None:
        raise BadInput("--samples: missing; give the number of training images of the site")
    found: JsonObject = {}
    if samples is not None:
        found = _figures(samples, batch, noise, epochs, delta, kind, target_epsilon)
    if curve is not None:
        chosen = _sizes(sizes, samples)
        found |= _draw(curve, chosen, batch=batch, noise=noise, epochs=epochs, accountant=kind)
    typer.echo(json_format.dumps(found) if json else "\n".join(_sentences(found)))


def _figures(
    samples: int,
    batch: int,
    noise: float | None,
    epochs: float | None,
    delta: float | None,
    accountant: Accountant,
    target: float | None,
) -> JsonObject:
    """Everything that can be said from what was given, as plain values."""
    from polyclinic.privacy.epsilon import (
        compute_epsilon,
        default_delta,
        noise_for,
        sampling_rate_for,
        steps_for,
        steps_in,
    )

    if target is None and (noise is None or epochs is None):
        missing = "--noise" if noise is None else "--epochs"
        raise BadInput(f"{missing}: missing; give it, or --target-epsilon to have it found")
    if noise is None and epochs is None:
        raise BadInput("--target-epsilon: give --noise to have the epochs found, or --epochs to have the noise found")
    _check("--noise", noise)
    _check("--epochs", epochs)
    _check("--target-epsilon", target)
    sampling_rate = sampling_rate_for(samples, batch)
    delta = delta if delta is not None else default_delta(samples)
    found: JsonObject = {"samples": samples, "batch": batch, "sampling_rate": sampling_rate}
    found |= {"delta": delta, "accountant": accountant}
    steps = steps_in(epochs, samples, batch) if epochs is not None else None
    if noise is not None and epochs is not None:
        found |= {"noise": noise, "epochs": epochs, "steps": steps}
        found["epsilon"] = compute_epsilon(sampling_rate, noise, steps or 0, delta, accountant)
    if target is not None:
        found["target_epsilon"] = target
    if target is not None and epochs is not None:
        found["noise_for_target"] = {"noise": noise_for(target, sampling_rate, steps or 1, delta, accountant)}
        found["noise_for_target"] |= {"epochs": epochs, "steps": steps}
    if target is not None and noise is not None:
        allowed = steps_for(target, sampling_rate, noise, delta, accountant)
        whole = math.floor(allowed * sampling_rate * 100) / 100
        found["epochs_for_target"] = {"epochs": whole, "steps": allowed, "noise": noise}
    return found | {"covers": [COVERS], "does_not_cover": list(DOES_NOT_COVER)}


def _draw(
    path: Path,
    sizes: list[int],
    *,
    batch: int,
    noise: float | None,
    epochs: float | None,
    accountant: Accountant,
) -> dict[str, str]:
    from polyclinic.privacy.epsilon import draw_curves as draw

    _check("--noise", noise)
    _check("--epochs", epochs)
    settings: JsonObject = {"epochs": round(epochs or 300) or 1, "noise": noise if noise is not None else 0.7}
    if path.suffix.lower() != ".png":
        raise BadInput(f"--curve {path}: must end in .png")
    try:
        draw(path, sizes, batch_size=batch, accountant=accountant, **settings)
    except OSError as error:
        raise BadInput(f"--curve {path}: cannot be written: {error.strerror}; name another file") from None
    return {"curve": str(path)}


def _sentences(found: JsonObject) -> list[str]:
    lines = []
    name = str(found.get("accountant", "")).upper()
    if "epsilon" in found:
        lines.append(
            f"epsilon {found['epsilon']:.4g} at delta {found['delta']:.3g} ({name}) for {found['steps']} steps: "
            f"{found['epochs']:g} epochs of {found['samples']} images in batches of {found['batch']} on average, "
            f"noise {found['noise']:g}."
        )
    if "noise_for_target" in found:
        one = found["noise_for_target"]
        lines.append(
            f"epsilon {found['target_epsilon']:g} at delta {found['delta']:.3g} ({name}): noise {one['noise']:.4g} "
            f"for {one['epochs']:g} epochs ({one['steps']} steps)."
        )
    if "epochs_for_target" in found:
        one = found["epochs_for_target"]
        lines.append(
            f"epsilon {found['target_epsilon']:g} at delta {found['delta']:.3g} ({name}): {one['epochs']:.2f} epochs "
            f"({one['steps']} steps) with noise {one['noise']:g}."
        )
    if lines:
        lines.append(f"It covers {COVERS}. It does not cover {'; nor '.join(DOES_NOT_COVER)}.")
    return [*lines, f"drawn in {found['curve']}"] if "curve" in found else lines


def _check(flag: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        why = " (without noise there is no privacy)" if flag == "--noise" else ""
        raise BadInput(f"{flag} {value:g}: must be a number above 0{why}")


def _accountant(name: str) -> Accountant:
    if name == "rdp" or name == "prv":
        return "rdp" if name == "rdp" else "prv"
    raise BadInput(f"--accountant: no such accountant: '{name}'; choose rdp or prv")


def _sizes(text: str, samples: int | None) -> list[int]:
    from polyclinic.privacy.epsilon import SIZES

    try:
        given = [int(part) for part in text.split(",")] if text else list(SIZES)
    except ValueError:
        raise BadInput(f"--sizes {text}: must be whole numbers with commas between them, as in 500,2000") from None
    if min(given) < 1:
        raise BadInput(f"--sizes {text}: must be numbers above 0")
    return sorted({*given, *([samples] if samples else [])})
