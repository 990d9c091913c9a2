"""What latents give away when the encoder is unknown: the claim of Qu et al.'s preprint, tried on chest X-rays.

A site trains a ResNet-18 to tell tuberculosis (tb_cxr_64.npz in the folder that POLYCLINIC_DATA names) and sends
latents of other patients, cut at several depths. Attackers, from the one who knows most to the one who knows least:

  white box        the encoder itself (Eq. 2 of the paper)
  pairs N          N X-rays of another hospital (NIH's, in covid_cxr_64.npz) with latents by the same encoder
  surrogates       those X-rays, no pairs; neither structure nor weights of the encoder: draws encoders of its own
  mean image       no latents: always the mean of the other hospital's X-rays

PSNR and SSIM are means over all attacked images. `identified`: the share of images whose reconstruction correlates with
the right one of all attacked images more than with any other (brightness and contrast do not count, and the mean image
is taken off); by chance it is one in as many as there are.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attack_depth import picture
from measuring import finish, flags, keep
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks.decoders import PairedDecoder, SurrogateDecoder
from polyclinic.attacks.latent_inversion import LatentInversion
from polyclinic.metrics.images import psnr, ssim
from polyclinic.models import build, split
from polyclinic.randomness import numpy_rng, torch_rng


def load(name: str, count: int, size: int, seed: int, *, site: str = "") -> tuple[Tensor, Tensor]:
    """[N, 1, size, size] in [0, 1], drawn at random, and labels [N]; of one source where `site` names it."""
    path = Path(os.environ.get("POLYCLINIC_DATA", "")) / name
    if not os.environ.get("POLYCLINIC_DATA") or not path.is_file():
        raise SystemExit(f"POLYCLINIC_DATA: no {name} in '{path.parent}'; set it to the folder with the images")
    with np.load(path, allow_pickle=False) as archive:
        rows = np.arange(len(archive["labels"]))
        if site:
            rows = np.flatnonzero(archive["site"] == [str(one) for one in archive["site_names"]].index(site))
        rows = numpy_rng(seed, "images", name).permutation(rows)[:count]
        images, labels = archive["images"][rows], archive["labels"][rows]
    pixels = torch.from_numpy(images)[:, None].float() / 255
    return F.adaptive_avg_pool2d(pixels, size), torch.from_numpy(labels.astype(np.int64))


def trained(images: Tensor, labels: Tensor, options: argparse.Namespace) -> nn.Module:
    """The site's network, of which the front is the encoder."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        model = build(options.backbone, channels=1, outputs=2, size=options.size).to(options.device).train()
    optimizer, rng = torch.optim.Adam(model.parameters(), 1e-3), torch_rng(options.seed, "batches")
    for _ in range(options.epochs):
        for rows in torch.randperm(len(images), generator=rng)[: len(images) // 32 * 32].split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(images[rows].to(options.device)), labels[rows].to(options.device)).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def encode(front: nn.Module, images: Tensor, device: str) -> Tensor:
    return torch.cat([front(some.to(device)).cpu() for some in images.split(256)])


def identified(found: Tensor, truth: Tensor, mean: Tensor) -> float:
    flat = [(images - mean).flatten(1) for images in (found, truth)]
    unit = [F.normalize(rows - rows.mean(1, keepdim=True), dim=1) for rows in flat]
    nearest = (unit[0] @ unit[1].T).argmax(1)
    return float((nearest == torch.arange(len(truth))).double().mean())


def row_of(cut: str, attacker: str, found: Tensor, truth: Tensor, mean: Tensor, seconds: float = 0) -> dict[str, Any]:
    row = {
        "cut": cut,
        "attacker": attacker,
        "psnr": round(float(psnr(found, truth).mean()), 2),
        "ssim": round(float(ssim(found, truth).mean()), 3),
        "identified": round(identified(found, truth, mean), 3),
        "images": len(truth),
        "seconds": round(seconds, 1),
    }
    print(row, flush=True)
    return row


def attacks_at(
    front: nn.Module, truth: Tensor, own: Tensor, options: argparse.Namespace
) -> Iterator[tuple[str, Tensor]]:
    """The name of each attacker, and the images that it makes of the latents at one cut."""
    latents, own_latents = (encode(front, images, options.device) for images in (truth, own))
    shape = tuple(truth.shape[1:])
    where = {"seed": options.seed, "device": options.device}
    white = LatentInversion(iterations=options.iterations, at_once=len(truth))
    yield "white box", white.run(latents, front, shape, **where).images
    for count in options.pairs:
        paired = PairedDecoder(steps=options.steps)
        yield f"pairs {count}", paired.run(latents, own[:count], own_latents[:count], **where).images
    surrogate = SurrogateDecoder(steps=options.steps, surrogates=options.surrogates)
    yield "surrogates", surrogate.run(latents, own, **where).images


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    images, labels = load("tb_cxr_64.npz", options.training + options.images, options.size, options.seed)
    own, _ = load("covid_cxr_64.npz", max(options.pairs), options.size, options.seed, site="NIH_ChestXray8")
    truth, rest = images[: options.images], images[options.images :]
    model = trained(rest, labels[options.images :], options)
    mean = own.mean(0, keepdim=True)
    figures: dict[str, Any] = {"benchmark": "attack_black_box", "quick": options.quick, "backbone": options.backbone}
    figures |= {
        "size": options.size,
        "rows": [row_of("", "mean image", mean.expand_as(truth), truth, mean)],
    }
    for cut in options.cuts:
        front, _ = split(model, cut)
        sheet, begin = {"real": truth[:6]}, time.perf_counter()
        for attacker, found in attacks_at(front, truth, own, options):
            figures["rows"].append(row_of(cut, attacker, found, truth, mean, time.perf_counter() - begin))
            sheet[attacker], begin = found[:6], time.perf_counter()
        keep(figures, options)
        if options.pictures:
            picture(options.pictures / f"black-box-{cut}.png", sheet)
    finish(figures, options)


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, "16 images of 32 px, 40 steps, one cut")
    parser.add_argument("--pictures", type=Path, help="draw truth and reconstructions of each cut into this folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--cuts", nargs="+", help="of the backbone; conv1, layer1, layer2 and layer3")
    parser.add_argument("--size", type=int, help="64 px")
    parser.add_argument("--images", type=int, help="attacked images; 200")
    parser.add_argument("--training", type=int, help="images that the site trains on; 1600")
    parser.add_argument("--epochs", type=int, help="of that training; 6")
    parser.add_argument("--pairs", type=int, nargs="+", help="pairs that an attacker has; 1000 100 10")
    parser.add_argument("--surrogates", type=int, help="encoders that the attacker draws; 24")
    parser.add_argument("--steps", type=int, help="of a decoder's training; 1500")
    parser.add_argument("--iterations", type=int, help="of the white-box search; 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    usual = {"cuts": ["conv1", "layer1", "layer2", "layer3"], "size": 64, "images": 200, "training": 1600, "epochs": 6}
    usual |= {"pairs": [1000, 100, 10], "surrogates": 24, "steps": 1500, "iterations": 1000}
    quick = {"cuts": ["conv1"], "size": 32, "images": 16, "training": 64, "epochs": 1}
    quick |= {"pairs": [32], "surrogates": 2, "steps": 40, "iterations": 20}
    for name, value in (quick if options.quick else usual).items():
        setattr(options, name, getattr(options, name) or value)
    return options


if __name__ == "__main__":
    main()
