"""What a decoder, trained on other people's images, gives back from latents at every cut of a public encoder.

Hand radiographs (boneage_rsna_male_64.npz in the folder that POLYCLINIC_DATA names), or drawn hands without it. The
encoder is EfficientNet-Lite0 with its public weights, which nobody trains. The attacker has the encoder and images of
other patients. Beside PSNR and SSIM stands how often a reconstruction points to the right one of all attacked images.
`--noise`: deviations of noise that are added to the latents, in deviations of the latents.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyclinic.attacks.latent_inversion import LatentInversion
from polyclinic.attacks.learned_decoder import LearnedDecoder, as_maps, encode_images, pick_out
from polyclinic.data.datasets.phantoms.hand import HandPhantom
from polyclinic.metrics.images import psnr, ssim
from polyclinic.models import build, cuts, public_weights, split
from polyclinic.randomness import numpy_rng, torch_rng

BACKBONE, FILE = "efficientnet-lite0", "boneage_rsna_male_64.npz"
MEASURES = {"psnr": psnr, "ssim": ssim}


def load_images(count: int, size: int, seed: int) -> Tensor:
    """[N, 3, size, size] in [0, 1]."""
    path = Path(os.environ.get("POLYCLINIC_DATA", "")) / FILE
    if os.environ.get("POLYCLINIC_DATA") and path.is_file():
        with np.load(path, allow_pickle=False) as archive:
            images = archive["images"]
        images = images[numpy_rng(seed, "hands").permutation(len(images))[:count]]
    else:
        images = np.array(HandPhantom(samples=count, size=size, seed=seed).load().images)[:, 0]
    return torch.from_numpy(images).float()[:, None].expand(-1, 3, -1, -1).contiguous() / 255


def encoder(size: int) -> Any:
    model = build(BACKBONE, channels=3, outputs=1, size=size)
    state = model.state_dict()
    known = {name: one for name, one in public_weights(BACKBONE).tensors.items() if name in state}
    fitting = {name: one for name, one in known.items() if one.shape == state[name].shape}
    model.load_state_dict({**state, **fitting})
    return model.eval()


def decode(model: Any, cut: str, own: Tensor, targets: Tensor, noise: float, options: argparse.Namespace) -> dict:
    """One row: the decoder's figures at one cut with so much noise on the latents."""
    begin = time.perf_counter()
    front, _ = split(model, cut)
    latents = encode_images(front, targets, device=options.device)
    spread = latents.std(0, keepdim=True)
    latents = latents + noise * spread * torch.randn(latents.shape, generator=torch_rng(options.seed, "noise"))
    side = latents.shape[-1] if latents.dim() == 4 else 1
    attack = LearnedDecoder(steps=options.steps, width=max(32, min(128, 2048 // side // 8 * 8)))
    found = attack.decode(latents, front, own, seed=options.seed, device=options.device).images
    return {"attack": "decoder", **row(cut, as_maps(latents), noise, found, targets, begin)}


def search(model: Any, cut: str, targets: Tensor, options: argparse.Namespace) -> dict:
    """The same for a search for images with these latents, of fewer images."""
    begin = time.perf_counter()
    front, _ = split(model, cut)
    latents = encode_images(front, targets, device=options.device)
    attack = LatentInversion(iterations=options.search_steps)
    shape = tuple(targets.shape[1:])
    found = attack.run(latents, front, shape, seed=options.seed, device=options.device).images
    return {"attack": "search", **row(cut, as_maps(latents), 0.0, found, targets, begin)}


def row(cut: str, latents: Tensor, noise: float, found: Tensor, targets: Tensor, begin: float) -> dict[str, Any]:
    found = found.float().clamp(0, 1)
    picked = pick_out(found, targets, targets[:0])
    return {
        "cut": cut,
        "shape": list(latents.shape[1:]),
        "noise": noise,
        "psnr": round(float(psnr(found, targets).mean()), 2),
        "ssim": round(float(ssim(found, targets).mean()), 3),
        "picked": round(picked.share, 4),
        "picked_interval": [round(end, 4) for end in picked.interval],
        "among": picked.among,
        "images": len(targets),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    images = load_images(options.own + options.images, options.size, options.seed)
    own, targets = images[: options.own], images[options.own :]
    model, mean = encoder(options.size), own.mean(0).expand_as(targets)
    figures: dict[str, Any] = {
        "benchmark": "attack_cuts",
        "quick": options.quick,
        "own_images": len(own),
        "steps": options.steps,
        "search_steps": options.search_steps,
        "mean_image": {name: round(float(of(mean, targets).mean()), 3) for name, of in MEASURES.items()},
        "rows": [],
    }
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    for cut in options.cuts or cuts(BACKBONE):
        for noise in () if options.only_search else options.noise:
            if time.monotonic() < deadline:
                _add(figures, decode(model, cut, own, targets, noise, options), options)
        if options.search_steps and time.monotonic() < deadline:
            _add(figures, search(model, cut, targets[: options.searched], options), options)
    print(json.dumps(figures))


def _add(figures: dict[str, Any], found: dict[str, Any], options: argparse.Namespace) -> None:
    figures["rows"].append(found)
    print(found, flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few images, few steps, two cuts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--own", type=int, default=1000, help="the attacker's own images")
    parser.add_argument("--images", type=int, default=500, help="attacked images")
    parser.add_argument("--steps", type=int, default=2000, help="of the decoder's training")
    parser.add_argument("--search-steps", type=int, default=500, help="of the search; 0: none")
    parser.add_argument("--searched", type=int, default=50, help="images that the search is tried on")
    parser.add_argument("--only-search", action="store_true", help="train no decoder")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.0, 2.0])
    parser.add_argument("--cuts", nargs="*", default=[])
    parser.add_argument("--minutes", type=float, default=0, help="begin no further cut after so many minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.quick:
        options.own, options.images, options.steps, options.search_steps, options.searched = 32, 8, 5, 5, 4
        options.cuts = options.cuts or ["stem", "block8"]
    return options


if __name__ == "__main__":
    main()
