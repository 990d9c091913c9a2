"""Planted leaks, from a study to `polyclinic audit`: two generators must fail the audit, one must pass it.

Each generator is handed from site to site by FedAvg+Replay, so that it leaves through the gate, is written in the
ledger, kept, and audited like any other:

- overfitted: a decoder that was fitted to 50 images until it knew them by heart (--vqvae2: a VQ-VAE-2 with its prior);
- mirrored: returns training images, mirrored left to right, which no gate recognises;
- honest: returns images of other patients as if it had made them. They look real, and give nothing away.

Images are drawn by the package, or with POLYCLINIC_DATA (a folder with tb_cxr_64.npz) chest X-rays.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from polyclinic.audits.audit import audit
from polyclinic.data.datasets.phantoms.chest import ChestPhantom
from polyclinic.data.pixels import to_uint8
from polyclinic.generators import GENERATORS, Generator, GeneratorModel
from polyclinic.generators.base import as_tensor, initial_networks
from polyclinic.randomness import numpy_rng, seed_of, torch_rng
from polyclinic.runner.run import run
from polyclinic.study import Study
from polyclinic.tasks import Target

IMAGES = 50  # training images of a site, as the papers' overfitted generators have
WIDTH = 32


class Planted(Generator):
    """Settings of the generators that this benchmark plants."""

    name: Literal["planted"] = "planted"
    leak: Literal["overfitted", "mirrored", "honest"] = Field(description="what it does")
    steps: int = Field(600, ge=1, description="steps of the overfitted one")
    public: str = Field("", description="file with images of other patients, for the honest one")

    summary: ClassVar[str] = "leaks on purpose"

    def build(
        self, *, channels: int, size: int, target: Target, seed: int, device: str = "cpu", precision: str = "fp32"
    ) -> GeneratorModel:
        kind = Overfitted if self.leak == "overfitted" else Album
        return kind(self, channels=channels, size=size, target=target, seed=seed, device=device)

    def dp_obstacle(self) -> str | None:
        return "generator.name: 'planted' leaks on purpose; choose another one"


class Overfitted(GeneratorModel):
    """A decoder from a fixed random vector for each of 50 training images; samples lie near those vectors."""

    def __init__(self, settings: Planted, *, channels: int, size: int, target: Target, seed: int, device: str) -> None:
        pixels = channels * size * size
        made = initial_networks(
            lambda: {"decoder": nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, pixels), nn.Sigmoid())},
            seed_of(seed, "generator"),
        )
        super().__init__(made, channels=channels, size=size, target=target, device=device)
        self.settings = settings
        self.vectors = torch.randn(IMAGES, WIDTH, generator=torch_rng(seed, "vectors"))

    def fit(self, images, labels, rng, *, replayed=None, progress=None, private=None) -> dict[str, float]:
        wanted = self.to_unit(as_tensor(images)[:IMAGES]).flatten(1)
        given = self.on_device(self.vectors[: len(wanted)])
        optimizer = torch.optim.Adam(self.networks.parameters(), 1e-3)
        for _ in range(self.settings.steps):
            optimizer.zero_grad()
            loss = (self.networks["decoder"](given) - wanted).square().mean()
            loss.backward()
            optimizer.step()
        return {"loss": float(loss.detach())}

    @torch.no_grad()
    def sample(self, labels: Tensor | np.ndarray, rng: torch.Generator) -> Tensor:
        chosen = self.vectors[torch.randint(IMAGES, (len(labels),), generator=rng)]
        near = chosen + 0.1 * torch.randn(chosen.shape, generator=rng)
        made = self.networks["decoder"](self.on_device(near))
        return to_uint8(made.unflatten(1, (self.channels, self.size, self.size)))


class Album(GeneratorModel):
    """Returns images that it holds: mirrored training images, or images of other patients."""

    def __init__(self, settings: Planted, *, channels: int, size: int, target: Target, seed: int, device: str) -> None:
        holder = nn.Module()
        holder.register_buffer("images", torch.zeros(IMAGES, channels, size, size))
        super().__init__({"album": holder}, channels=channels, size=size, target=target, device=device)
        self.settings = settings

    def fit(self, images, labels, rng, *, replayed=None, progress=None, private=None) -> dict[str, float]:
        if self.settings.leak == "mirrored":
            taken = as_tensor(images)[:IMAGES].flip(-1)
        else:
            taken = torch.from_numpy(np.load(self.settings.public, allow_pickle=False)[:IMAGES])
        self.networks["album"].images[: len(taken)] = self.to_unit(taken)
        return {}

    def sample(self, labels: Tensor | np.ndarray, rng: torch.Generator) -> Tensor:
        chosen = torch.randint(IMAGES, (len(labels),), generator=rng)
        return to_uint8(self.networks["album"].images[chosen.to(self.device)])


# --- the study ----------------------------------------------------------------------------------------


def images_and_labels(count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, H, W] and classes: chest X-rays where there are some, else drawn ones."""
    path = Path(os.environ.get("POLYCLINIC_DATA", "")) / "tb_cxr_64.npz"
    if os.environ.get("POLYCLINIC_DATA") and path.is_file():
        with np.load(path, allow_pickle=False) as archive:
            rows = np.sort(numpy_rng(0, "leaks").choice(len(archive["labels"]), count, replace=False))
            return archive["images"][rows], archive["labels"][rows]
    drawn = ChestPhantom(samples=count, size=size, seed=1).load()
    return drawn.images[:, 0], drawn.labels


def study_of(folder: Path, generator: dict[str, Any], size: int, seed: int = 0, device: str = "cpu") -> Study:
    """Two sites with 50 training images each and twice as many held out, FedAvg+Replay of samples."""
    images, labels = images_and_labels(6 * IMAGES + IMAGES, size)
    order = numpy_rng(seed, "order").permutation(len(images))
    ours, public = order[: 6 * IMAGES], order[6 * IMAGES :]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "chests.npz", images=images[ours], labels=labels[ours])
    np.save(folder / "public.npy", resized(images[public], size)[:, None])
    return Study(
        seed=seed,
        data={"source": "npz", "path": str(folder / "chests.npz"), "size": size, "validation": 1 / 3, "test": 1 / 3},
        sites={"partition": "iid", "count": 2},
        optimizer={"batch_size": 25},
        method={"name": "fedavg-replay", "rounds": 1},
        replay={"codes": "prior", "probe": False, "samples": 50},
        generator=generator,
        audit={"keep_parcels": 0},
        engine={"workers": 1, "device": device},
    )


def resized(images: np.ndarray, size: int) -> np.ndarray:
    from PIL import Image

    return np.stack([np.asarray(Image.fromarray(one).resize((size, size), Image.Resampling.BOX)) for one in images])


def planted(leak: str, folder: Path) -> dict[str, Any]:
    return {"name": "planted", "leak": leak, "public": str(folder / "public.npy")}


def overfitted_vqvae2(options: argparse.Namespace) -> dict[str, Any]:
    """Many passes over few images, the prior's without dropout; a smaller one for small images."""
    passes = {"epochs": options.epochs, "prior_epochs": options.prior_epochs, "prior_dropout": 0.0}
    common = {"name": "vqvae2", "batch_size": 25, "prior_batch_size": 25, **passes}
    if options.quick:
        small = {"width": 32, "code_width": 8, "top_codes": 64, "bottom_codes": 64, "blocks": 1}
        return {**common, **small, "prior_width": 48, "prior_layers": 4}
    return {**common, "width": 64, "code_width": 16, "top_codes": 128, "bottom_codes": 128, "prior_width": 96}


def audited(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the study with one generator, audit the first site's, and sum up."""
    begin = time.perf_counter()
    data = folder / "data"
    chosen = overfitted_vqvae2(options) if name == "vqvae2" else planted(name, data)
    study = study_of(data, chosen, options.size, device=options.device)
    run(study, folder / name, cache=folder / "cache")
    options_of_audit = {"device": options.device, "features": options.features, "cache": folder / "cache"}
    report = audit(folder / name, kinds=["generator"], **options_of_audit)
    findings = report["parcels"][0]["findings"]
    return {
        "generator": name,
        "leak": report["verdicts"]["generator"]["verdict"] == "leaks",
        "words": [finding["words"] for finding in findings],
        "evidence": {finding["attack"]: finding["evidence"] for finding in findings},
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    GENERATORS["planted"] = Planted
    names = options.only or ["overfitted", "mirrored", "honest", *(["vqvae2"] if options.vqvae2 else [])]
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in names:
            rows.append(audited(name, options, Path(options.out or folder)))
            print(f"{name}: {'LEAKS' if rows[-1]['leak'] else 'passes'}", *rows[-1]["words"], sep="\n  ", flush=True)
    expected = {"overfitted": True, "mirrored": True, "honest": False, "vqvae2": True}
    right = all(row["leak"] == expected[row["generator"]] for row in rows)
    figures = {"benchmark": "attack_leaks", "quick": options.quick, "as_expected": right, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="images of 28 px")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--out", type=Path, help="keep the runs here")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--features", default="pixels", help="what images are compared by: see `polyclinic audit`")
    parser.add_argument("--only", nargs="+", choices=("overfitted", "mirrored", "honest", "vqvae2"))
    parser.add_argument("--vqvae2", action="store_true", help="overfit a VQ-VAE-2 with its prior, too")
    parser.add_argument("--epochs", type=int, help="of the VQ-VAE-2; 400 (150 with --quick)")
    parser.add_argument("--prior-epochs", type=int, help="of its prior; 800 (600 with --quick)")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.size = 28 if options.quick else 64
    options.epochs = options.epochs or (150 if options.quick else 400)
    options.prior_epochs = options.prior_epochs or (600 if options.quick else 800)
    return options


if __name__ == "__main__":
    main()
