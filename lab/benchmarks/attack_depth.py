"""Table 3 of Qu et al. 2022: what comes back from latents as FedReplay's cut goes deeper, and from FedAvg's gradients.

Retinal photographs (dr_multisite_128_jpeg.npz in the folder that POLYCLINIC_DATA names, enlarged to 224 px), a
ResNet trained on some of them to tell grade 0 from grades 2 to 4, and held-out images to attack: latents at each cut by
Eq. 2 (encoder frozen, so batch norm in evaluation mode), and the gradient of one image by Eq. 1 (cosine and total
variation). One image per gradient is the attacker's best case: a FedAvg site takes many steps on batches.
`batch norm: train` is what a site's training computes with; `eval` is how the attack's papers report it.

--paper takes what the paper states: ResNet-34, 224 px, 50 images, AdamW for both attacks, 20,000 iterations. Ours, the
default, is ResNet-18, 2,000 iterations, and Geiping et al.'s signed Adam with pixels held in [0, 1] for gradients. Any
single option can be given as well. AdamW starts from uniform noise, as the latent inversion does.

PSNR is the mean over all images, converged or not. The baseline is an "attack" that returns the mean training image.
"""

import argparse
import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import finish, flags, keep
from torch import Tensor, nn
from torch.nn import functional as F

from polyclinic.attacks import scoring
from polyclinic.attacks.gradient_inversion.objective import cross_entropy
from polyclinic.attacks.gradient_inversion.settings import PRESETS
from polyclinic.attacks.gradient_inversion.solver import Knowledge
from polyclinic.attacks.latent_inversion import LatentInversion
from polyclinic.federation.ledger.parcel import Parcel
from polyclinic.metrics.images import psnr, ssim
from polyclinic.models import build, split
from polyclinic.randomness import numpy_rng, torch_rng

FILE = "dr_multisite_128_jpeg.npz"
#: the paper's PSNR, 224 px, 50 test images of its Retina data
PAPER = {"gradients": (11.82, 1.86), "conv1": (11.64, 0.98), "layer2": (10.48, 1.23), "layer3": (9.22, 1.28)}


def load_images(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """[N, 3, size, size] in [0, 1], and whether each has a retinopathy of grade 2 or more."""
    from PIL import Image

    path = Path(os.environ.get("POLYCLINIC_DATA", "")) / FILE
    if not os.environ.get("POLYCLINIC_DATA") or not path.is_file():
        raise SystemExit(f"POLYCLINIC_DATA: no {FILE} in '{path.parent}'; set it to the folder with the images")
    with np.load(path, allow_pickle=False) as archive:
        grades, patients = archive["labels"], archive["patient"]
        rows = np.flatnonzero(grades != 1)
        rows = rows[np.unique(patients[rows], return_index=True)[1]]  # one image a patient: none is on both sides
        rows = numpy_rng(seed, "images").permutation(rows)[:count]
        data, offsets = archive["jpeg"], archive["jpeg_off"]
        pictures = [Image.open(io.BytesIO(data[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB") for i in rows]
        pixels = np.stack([np.asarray(p.resize((size, size), Image.Resampling.BICUBIC)) for p in pictures])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255, torch.from_numpy((grades[rows] > 1).astype("i8"))


def trained(images: Tensor, labels: Tensor, options: argparse.Namespace) -> nn.Module:
    """A ResNet that has learned the task, as the site that trains FedReplay's encoder would."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        model = build(options.backbone, channels=3, outputs=2, size=options.size)
    model = model.to(options.device).train()
    optimizer, rng = torch.optim.Adam(model.parameters(), 1e-3), torch_rng(options.seed, "batches")
    for epoch in range(options.epochs):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - epoch / options.epochs)
        for index in torch.randperm(len(images), generator=rng)[: len(images) // 32 * 32].split(32):
            flip = torch.rand((), generator=rng) < 0.5
            batch = (images[index].flip(-1) if flip else images[index]).to(options.device)
            optimizer.zero_grad()
            F.cross_entropy(model(batch), labels[index].to(options.device)).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: str) -> float:
    guesses = torch.cat([model(some.to(device)).argmax(1).cpu() for some in images.split(64)])
    return float((guesses == labels).double().mean())


def from_latents(model: Any, cut: str, images: Tensor, options: argparse.Namespace) -> tuple[Tensor, scoring.Score]:
    front, _ = split(model, cut)
    with torch.no_grad():
        latents = torch.cat([front(some.to(options.device)).cpu() for some in images.split(64)])
    attack = LatentInversion(iterations=options.iterations, total_variation=options.total_variation)
    found = attack.run(latents, front, tuple(images.shape[1:]), seed=options.seed, device=options.device)
    return found.images, found.score(images)


def from_gradients(
    model: nn.Module, mode: str, images: Tensor, labels: Tensor, options: argparse.Namespace
) -> tuple[Tensor, scoring.Score]:
    sent = [gradient(model, mode, i, t, options.device) for i, t in zip(images, labels, strict=True)]
    changes = {"iterations": options.gradient_iterations, "label": "sign", "batch_norm": mode}
    changes |= {"at_once": options.at_once, "precision": "tf32"}
    if options.gradient_optimizer == "adamw":  # the paper's; its learning rate is not stated
        changes |= {"optimizer": "adamw", "signed": False, "box": False, "lr": options.gradient_lr, "start": "uniform"}
    attack = PRESETS["geiping"].model_copy(update=changes)
    knowledge = Knowledge(model, tuple(images.shape[1:]), classes=2)
    found = attack.run(sent, knowledge, seed=options.seed, device=options.device)
    return found.images[:, 0], scoring.score(found.images, images[:, None], found.start)


def gradient(model: nn.Module, mode: str, image: Tensor, label: Tensor, device: str) -> Parcel:
    """The update that a site would send for one step on one image."""
    model.train(mode == "train")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    hot = F.one_hot(label, 2)[None].float().to(device)
    found = torch.autograd.grad(cross_entropy(model(image[None].to(device)), hot), list(model.parameters()))
    model.load_state_dict(buffers, strict=False)
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    return Parcel("gradients", dict(zip(names, [g.cpu() for g in found], strict=True)))


def row_of(what: str, cut: str, found: scoring.Score, seconds: float) -> dict[str, Any]:
    paper = PAPER.get(cut if what == "latents" else what)
    return {
        "attacked": what,
        "cut": cut,
        "psnr": round(float(found.psnr.nanmean()), 2),
        "psnr_std": round(float(found.psnr[~found.psnr.isnan()].std(correction=1)), 2),
        "ssim": round(float(found.ssim.nanmean()), 3),
        "non_converging": int(found.non_converging.sum()),
        "images": len(found.psnr),
        "paper_psnr": paper and paper[0],
        "paper_psnr_std": paper and paper[1],
        "seconds": round(seconds, 1),
    }


def baseline_of(images: Tensor, guess: Tensor) -> dict[str, Any]:
    same = guess.expand_as(images)
    values = psnr(same, images)
    return {
        "psnr": round(float(values.mean()), 2),
        "psnr_std": round(float(values.std()), 2),
        "ssim": round(float(ssim(same, images).mean()), 3),
    }


def picture(path: Path, rows: dict[str, Tensor], shown: int = 6) -> None:
    from polyclinic.data.pixels import to_uint8
    from polyclinic.data.plots import contact_sheet

    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet({name: to_uint8(images[:shown]) for name, images in rows.items()}, path)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    images, labels = load_images(options.training + options.images, options.size, options.seed)
    targets, wanted = images[: options.images], labels[: options.images]
    rest, rest_labels = images[options.images :], labels[options.images :]
    model = trained(rest, rest_labels, options)
    figures: dict[str, Any] = {
        "benchmark": "attack_depth",
        "quick": options.quick,
        "backbone": options.backbone,
        "size": options.size,
        "iterations": options.iterations,
        "gradient_iterations": options.gradient_iterations,
        "gradient_optimizer": options.gradient_optimizer,
        "accuracy_on_attacked_images": round(accuracy(model, targets, wanted, options.device), 3),
        "mean_image": baseline_of(targets, rest.mean(0)),
        "rows": [],
    }
    made: dict[str, Tensor] = {"real": targets}
    jobs = [("latents", cut) for cut in options.cuts] + [("gradients", mode) for mode in options.modes]
    for what, which in jobs:
        begin = time.perf_counter()
        if what == "latents":
            back, found = from_latents(model, which, targets, options)
        else:
            back, found = from_gradients(model, which, targets, wanted, options)
        made[which if what == "latents" else f"gradient, {which}"] = back
        figures["rows"].append(row_of(what, which, found, time.perf_counter() - begin))
        print(figures["rows"][-1], flush=True)
        keep(figures, options)
        if options.picture:
            picture(options.picture, made)
    finish(figures, options)


def arguments() -> argparse.Namespace:
    parser = flags(__doc__, "4 images of 64 px, 30 steps, 64 training images")
    parser.add_argument("--picture", type=Path, help="draw truth and reconstructions")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--paper", action="store_true", help="the paper's settings, for all that is not given")
    parser.add_argument("--backbone", help="resnet18 (default) or resnet34 (the paper's)")
    parser.add_argument("--size", type=int)
    parser.add_argument("--images", type=int, help="attacked images; 50 if not given")
    parser.add_argument("--training", type=int, help="images that the network learns from; 600 if not given")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--iterations", type=int, help="of the latent inversion; 2000 (the paper: up to 20,000)")
    parser.add_argument("--gradient-iterations", type=int, help="of the gradient inversion; 2000")
    parser.add_argument("--gradient-optimizer", choices=("signed-adam", "adamw"), help="of the gradient inversion")
    parser.add_argument("--gradient-lr", type=float, default=0.1, help="of AdamW there; the paper states none")
    parser.add_argument("--at-once", type=int, default=50, help="gradients in one batch; fewer need less memory")
    parser.add_argument("--total-variation", type=float, default=1e-3)
    parser.add_argument("--cuts", nargs="*", default=["conv1", "layer1", "layer2", "layer3"])
    parser.add_argument("--modes", nargs="*", default=["train", "eval"], help="batch norm of attacked gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    usual = {"size": 224, "images": 50, "training": 600, "epochs": 8, "iterations": 2000, "gradient_iterations": 2000}
    usual |= {"backbone": "resnet18", "gradient_optimizer": "signed-adam"}
    paper = {"iterations": 20000, "gradient_iterations": 20000, "backbone": "resnet34", "gradient_optimizer": "adamw"}
    quick = {"size": 64, "images": 4, "training": 64, "epochs": 1, "iterations": 30, "gradient_iterations": 10}
    chosen = usual | (paper if options.paper else {}) | (quick if options.quick else {})
    for name, value in chosen.items():
        setattr(options, name, getattr(options, name) or value)
    return options


if __name__ == "__main__":
    main()
