"""`polyclinic privacy`: what training with differential privacy costs, before any is done."""

import json as json_format
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyclinic.cli.run import check_choice
from polyclinic.errors import BadInput
from polyclinic.json_types import JsonObject

if TYPE_CHECKING:
    from polyclinic.privacy.epsilon import Accountant

COVERS = "what DP-SGD with Poisson sampling learns from these images, and whatever is computed from that alone"
DOES_NOT_COVER = (
    "anything else computed from real images: codes, latents, batch-norm statistics, an EMA codebook, scores",
    "a patient with several images: epsilon is for one image and its label",
)
COVERAGE = {"covers": [COVERS], "does_not_cover": list(DOES_NOT_COVER)}


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
    check_choice("--accountant", accountant, "rdp", "prv")
    if samples is None and curve is None:
        raise BadInput("--samples: missing; give the number of training images of the site")
    for flag, value in (("--noise", noise), ("--epochs", epochs), ("--target-epsilon", target_epsilon)):
        if value is not None and not 0 < value < float("inf"):
            why = " (without noise there is no privacy)" if flag == "--noise" else ""
            raise BadInput(f"{flag} {value:g}: must be a number above 0{why}")
    plan = Plan(batch, noise, epochs, delta, accountant, target_epsilon)  # type: ignore[arg-type]
    found: JsonObject = {} if samples is None else plan.figures(samples)
    if curve is not None:
        found |= {"curve": str(plan.draw(curve, _sizes(sizes, samples)))}
    typer.echo(json_format.dumps(found) if json else "\n".join(_sentences(found)))


@dataclass(frozen=True)
class Plan:
    """Training with differential privacy, as far as it is given."""

    batch: int
    noise: float | None
    epochs: float | None
    delta: float | None
    accountant: "Accountant"
    target: float | None

    def figures(self, samples: int) -> JsonObject:
        """Everything that can be said from what was given, as plain values."""
        from polyclinic.privacy import epsilon

        noise, epochs, target, accountant = self.noise, self.epochs, self.target, self.accountant
        if target is None and (noise is None or epochs is None):
            missing = "--noise" if noise is None else "--epochs"
            raise BadInput(f"{missing}: missing; give it, or --target-epsilon to have it found")
        if noise is None and epochs is None:
            cure = "give --noise to have the epochs found, or --epochs to have the noise found"
            raise BadInput(f"--target-epsilon: {cure}")
        rate = epsilon.sampling_rate_for(samples, self.batch)
        delta = self.delta if self.delta is not None else epsilon.default_delta(samples)
        found: JsonObject = {"samples": samples, "batch": self.batch, "sampling_rate": rate}
        found |= {"delta": delta, "accountant": accountant}
        steps = epsilon.steps_in(epochs, samples, self.batch) if epochs is not None else 0
        if noise is not None and epochs is not None:
            found |= {"noise": noise, "epochs": epochs, "steps": steps}
            found["epsilon"] = epsilon.compute_epsilon(rate, noise, steps, delta, accountant)
        if target is None:
            return found | COVERAGE
        found["target_epsilon"] = target
        if epochs is not None:
            needed = epsilon.noise_for(target, rate, steps or 1, delta, accountant)
            found["noise_for_target"] = {"noise": needed, "epochs": epochs, "steps": steps}
        if noise is not None:
            allowed = epsilon.steps_for(target, rate, noise, delta, accountant)
            whole = math.floor(allowed * rate * 100) / 100
            found["epochs_for_target"] = {"epochs": whole, "steps": allowed, "noise": noise}
        return found | COVERAGE

    def draw(self, path: Path, sizes: list[int]) -> Path:
        """Draw epsilon against epochs for several numbers of images."""
        from polyclinic.privacy.epsilon import draw_curves

        epochs, noise = round(self.epochs or 300) or 1, self.noise if self.noise is not None else 0.7
        if path.suffix.lower() != ".png":
            raise BadInput(f"--curve {path}: must end in .png")
        try:
            draw_curves(path, sizes, batch_size=self.batch, accountant=self.accountant, epochs=epochs, noise=noise)
        except OSError as error:
            raise BadInput(f"--curve {path}: cannot be written: {error.strerror}; name another file") from None
        return path


def _sentences(found: JsonObject) -> list[str]:
    from polyclinic.privacy.account import certainty_in_words

    lines = []
    name, at_delta = str(found.get("accountant", "")).upper(), f"at delta {found.get('delta', 0):.3g}"
    if "epsilon" in found:
        lines.append(
            f"epsilon {found['epsilon']:.4g} {at_delta} ({name}) for {found['steps']} steps: "
            f"{found['epochs']:g} epochs of {found['samples']} images in batches of {found['batch']} on average, "
            f"noise {found['noise']:g}."
        )
        lines.append(f"In words: {certainty_in_words(found['epsilon'], found['delta'])}.")
    reached = f"epsilon {found.get('target_epsilon', 0):g} {at_delta} ({name}):"
    if one := found.get("noise_for_target"):
        lines.append(f"{reached} noise {one['noise']:.4g} for {one['epochs']:g} epochs ({one['steps']} steps).")
    if one := found.get("epochs_for_target"):
        lines.append(f"{reached} {one['epochs']:.2f} epochs ({one['steps']} steps) with noise {one['noise']:g}.")
    if lines:
        lines.append(f"It covers {COVERS}. It does not cover {'; nor '.join(DOES_NOT_COVER)}.")
    return [*lines, f"drawn in {found['curve']}"] if "curve" in found else lines


def _sizes(text: str, samples: int | None) -> list[int]:
    from polyclinic.privacy.epsilon import SIZES

    try:
        given = [int(part) for part in text.split(",")] if text else list(SIZES)
    except ValueError:
        raise BadInput(f"--sizes {text}: must be whole numbers with commas between them, as in 500,2000") from None
    if min(given) < 1:
        raise BadInput(f"--sizes {text}: must be numbers above 0")
    return sorted({*given, *([samples] if samples else [])})
