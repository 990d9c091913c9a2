"""What we wrote by hand beside the same thing in a well-kept library: do the numbers agree, and which is faster?

    python benchmarks/dependencies.py [--quick] [--json FILE] [--only NAME,...]

Each pair gets the same inputs. Runs are interleaved (ours, theirs, ours, ...) and medians compared; a ratio above 1
means that ours is slower. `difference` is the largest one relative to the largest number. Libraries that are not
installed are skipped and named: pip install torchmetrics prdc dp-accounting (none is a dependency of Polyclinic).
docs/dependencies.md draws the conclusions. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyclinic.randomness import torch_rng

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


@dataclass(frozen=True)
class Pair:
    """One thing done twice; both functions give an array of the same shape."""

    name: str
    library: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


def images(count: int, channels: int = 1, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth images and noisy copies, in [0, 1]."""
    rng = torch_rng("dependencies", "images")
    coarse = torch.rand(count, channels, 8, 8, generator=rng)
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)
    noise = 0.05 * torch.randn(smooth.shape, generator=rng)
    return smooth, (smooth + noise).clamp(0, 1)


def features(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch_rng("dependencies", "features")
    return torch.randn(count, width, generator=rng), 1.1 * torch.randn(count, width, generator=rng) + 0.1


# --- figures of images ----------------------------------------------------------------------------------


def psnr(quick: bool) -> Iterator[Pair]:
    from polyclinic.metrics.images import psnr, ssim

    a, b = images(16 if quick else 128)

    def monai_psnr() -> Any:
        from monai.metrics import PSNRMetric

        return PSNRMetric(max_val=1.0)(a, b).flatten()

    def monai_ssim() -> Any:
        from monai.metrics import SSIMMetric

        return SSIMMetric(spatial_dims=2, data_range=1.0)(a, b).flatten()

    def torchmetrics_ssim() -> Any:
        from torchmetrics.functional.image import structural_similarity_index_measure

        return structural_similarity_index_measure(a, b, data_range=1.0, reduction="none", sigma=1.5)

    yield Pair("PSNR", "monai", lambda: psnr(a, b), monai_psnr)
    yield Pair("SSIM, Gaussian window", "monai", lambda: ssim(a, b, window=11), monai_ssim)
    yield Pair(
        "SSIM, with mirrored borders there",
        "torchmetrics",
        lambda: ssim(a, b, window=11),
        torchmetrics_ssim,
    )


def distributions(quick: bool) -> Iterator[Pair]:
    from polyclinic.metrics.distribution import frechet_distance, kernel_distance, precision_recall

    a, b = features(100 if quick else 500, 64 if quick else 512)
    few, others = a[:, :8].contiguous(), b[:, :8].contiguous()  # in 512 dimensions no ball would hold anything

    def monai_frechet() -> Any:
        from monai.metrics.fid import get_fid_score

        return float(get_fid_score(a.double(), b.double()))

    def torchmetrics_frechet() -> Any:
        from torchmetrics.image.fid import _compute_fid

        x, y = a.double(), b.double()
        return float(_compute_fid(x.mean(0), x.T.cov(), y.mean(0), y.T.cov()))

    def torchmetrics_kid() -> Any:
        from torchmetrics.image.kid import poly_mmd

        return float(poly_mmd(a.double(), b.double()))

    def package_prdc() -> Any:
        from prdc import compute_prdc

        found = compute_prdc(few.numpy(), others.numpy(), nearest_k=5)
        return [found[name] for name in ("precision", "recall", "density", "coverage")]

    yield Pair("Fréchet distance", "monai", lambda: frechet_distance(a, b), monai_frechet)
    yield Pair("Fréchet distance", "torchmetrics", lambda: frechet_distance(a, b), torchmetrics_frechet)
    yield Pair("KID", "torchmetrics", lambda: kernel_distance(a, b), torchmetrics_kid)
    yield Pair(
        "precision, recall, density, coverage",
        "prdc",
        lambda: list(precision_recall(few, others).values()),
        package_prdc,
    )


def scores(quick: bool) -> Iterator[Pair]:
    from polyclinic.data.heterogeneity import mean_ks
    from polyclinic.metrics.roc import auc

    rng = np.random.default_rng(0)
    yes, no = rng.normal(1, 1, 200 if quick else 5000), rng.normal(0, 1, 300 if quick else 8000)

    def sklearn_auc() -> Any:
        from sklearn.metrics import roc_auc_score

        return roc_auc_score(np.r_[np.ones(len(yes)), np.zeros(len(no))], np.r_[yes, no])

    def scipy_ks() -> Any:
        from scipy.stats import ks_2samp

        return ks_2samp(yes, no).statistic

    yield Pair("AUC", "scikit-learn", lambda: auc(yes, no), sklearn_auc)
    yield Pair("Kolmogorov-Smirnov distance", "scipy", lambda: mean_ks({"a": yes, "b": no}), scipy_ks)


def masks(quick: bool) -> Iterator[Pair]:
    from polyclinic.tasks.segmentation import Segmentation, dice
    from polyclinic.tasks.task import Target

    first, second = (image > 0.5 for image in images(16 if quick else 128))
    logits, truth = first.float() * 20 - 10, second.float()

    def ours() -> Any:
        return dice(Segmentation().observe(logits, truth, Target())[:, :3])

    def monai_dice() -> Any:
        from monai.metrics import DiceMetric

        return DiceMetric(ignore_empty=False)(first.float(), truth).flatten()

    yield Pair("Dice", "monai", ours, monai_dice)


# --- images in files and in training --------------------------------------------------------------------


def augmentation(quick: bool) -> Iterator[Pair]:
    from polyclinic.training.augmentation import augment

    batch = images(32, 3)[0]

    def ours() -> Any:
        augment(batch, None, ("flip", "turn"), torch_rng("dependencies", "augment"))

    def monai_transforms() -> Any:
        from monai.transforms import Compose, RandFlip, RandRotate90

        chain = Compose([RandFlip(0.5, spatial_axis=1), RandRotate90(0.75, spatial_axes=(0, 1))])
        chain.set_random_state(0)
        torch.stack([chain(image).as_tensor() for image in batch])

    yield Pair("flips and quarter turns of 32 images (other draws)", "monai", ours, monai_transforms)


def files(quick: bool, folder: Path) -> Iterator[Pair]:
    import nibabel

    from polyclinic.data.fit import Fit, fit_image
    from polyclinic.data.reading import _load_volume, load_volume

    volume = np.random.default_rng(0).normal(size=(32, 32, 8) if quick else (128, 128, 32)).astype(np.float32)
    file = folder / "volume.nii.gz"
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1.0, -1.0, 1.0, 1.0])), file)
    picture = (images(1, 3, 96 if quick else 512)[0][0] * 255).byte().permute(1, 2, 0).numpy().copy()

    def ours() -> Any:
        _load_volume.cache_clear()
        return np.sort(load_volume(file)[0], axis=None)  # axes are ordered otherwise

    def monai_nifti() -> Any:
        from monai.transforms import LoadImage

        return np.sort(np.asarray(LoadImage(image_only=True, reader="NibabelReader")(file)), axis=None)

    def monai_resize() -> Any:
        from monai.transforms import Resize

        resized = Resize((64, 64), mode="bicubic", anti_aliasing=True)(torch.from_numpy(picture).permute(2, 0, 1))
        return resized.as_tensor().clamp(0, 255).round()

    yield Pair("reading a NIfTI volume", "monai", ours, monai_nifti)
    yield Pair(
        "resizing to 64 px, bicubic", "monai", lambda: fit_image(picture, Fit(64), 3).astype(float), monai_resize
    )


# --- privacy, attacks, generators -----------------------------------------------------------------------


def epsilons(quick: bool) -> Iterator[Pair]:
    from polyclinic.privacy.epsilon import compute_epsilon

    rate, steps, delta = 0.0032, 100 if quick else 93_750, 1e-5  # Qu 2022: 10,000 images, 300 epochs, noise 0.7
    noises = (0.7 + 1e-12 * i for i in itertools.count())  # always another one: our function remembers its answers

    def accounted(name: str) -> float:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant

        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(next(noises)))
        accountant = {"rdp": RdpAccountant, "pld": PLDAccountant}[name]()
        accountant.compose(event, steps)
        return accountant.get_epsilon(delta)

    def ours(accountant: Any) -> float:
        return compute_epsilon(rate, next(noises), steps, delta, accountant)

    yield Pair("epsilon, RDP", "dp-accounting", lambda: ours("rdp"), lambda: accounted("rdp"))
    yield Pair("epsilon, PRV beside PLD", "dp-accounting", lambda: ours("prv"), lambda: accounted("pld"))


def many_searches(quick: bool) -> Iterator[Pair]:
    from polyclinic.attacks.solvers.lbfgs import LBFGS

    count, size, steps = (8, 16, 5) if quick else (32, 64, 10)
    rng = torch_rng("dependencies", "searches")
    bends = torch.rand(count, generator=rng, dtype=torch.float64) + 0.5
    start = torch.randn(count, size, generator=rng, dtype=torch.float64) / 4

    def height(x: torch.Tensor, bend: torch.Tensor) -> torch.Tensor:
        return (10 * (x[..., 1:] - x[..., :-1] ** 2) ** 2 + (bend - x[..., :-1]) ** 2).sum(-1)

    def together() -> Any:
        solver = LBFGS(start, lr=0.1, steps=steps, inner=4)
        for _ in range(solver.limit + steps):
            point = solver.point.detach().requires_grad_()
            loss = height(point, bends[:, None])
            solver.update(loss.detach(), torch.autograd.grad(loss.sum(), point)[0])
            if not solver.active.any():
                break
        return height(solver.point, bends[:, None])

    def one_by_one() -> Any:
        return torch.stack([_torch_lbfgs(height, start[i], bends[i], steps) for i in range(count)])

    yield Pair(f"L-BFGS on {count} targets", "torch", together, one_by_one)


def _torch_lbfgs(height: Callable, start: torch.Tensor, bend: torch.Tensor, steps: int) -> torch.Tensor:
    point = start.clone().requires_grad_()
    solver = torch.optim.LBFGS([point], lr=0.1, max_iter=4)

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = height(point, bend)
        loss.backward()
        return loss

    for _ in range(steps):
        solver.step(closure)
    return height(point.detach(), bend)


def codebooks(quick: bool) -> Iterator[Pair]:
    from polyclinic.generators.vqvae2.codebook import Codebook

    torch.manual_seed(0)
    book, latents = Codebook(128, 16, "gradient"), torch.randn(4 if quick else 32, 16, 16, 16)

    def monai_quantizer() -> Any:
        from monai.networks.layers.vector_quantizer import EMAQuantizer

        theirs = EMAQuantizer(2, 128, 16, ddp_sync=False)
        theirs.embedding.weight.data.copy_(book.vectors.weight.data)
        return theirs.quantize(latents)[2]

    yield Pair("nearest code of a codebook", "monai", lambda: book.nearest(latents), monai_quantizer)


# --- measuring ------------------------------------------------------------------------------------------


def pairs(quick: bool, folder: Path) -> Iterator[Pair]:
    for group in (psnr, distributions, scores, masks, augmentation, epsilons, many_searches, codebooks):
        yield from group(quick)
    yield from files(quick, folder)


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """Agreement and median seconds, from interleaved runs after one that is not counted."""
    ours, theirs = pair.ours(), pair.theirs()
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repeats):
        for name, work in (("ours", pair.ours), ("theirs", pair.theirs)):
            begin = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    row = {"name": pair.name, "library": pair.library, "difference": difference(ours, theirs)}
    return row | {f"{name}_seconds": float(f"{value:.3g}") for name, value in medians.items()} | {
        "ratio": float(f"{medians['ours'] / medians['theirs']:.3g}")
    }  # fmt: skip


def difference(ours: Any, theirs: Any) -> float | None:
    """The largest one, relative to the largest number; None where nothing is compared."""
    if ours is None:
        return None
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    return float(f"{np.abs(a - b).max() / max(np.abs(b).max(), 1e-300):.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small inputs, three runs each")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--only", default="", help="libraries to compare with, by comma")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = {name for name in options.only.split(",") if name}
    rows, missing = [], set()
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs(options.quick, Path(folder)):
            if wanted and pair.library not in wanted:
                continue
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # some libraries talk
                    row = measure(pair, 3 if options.quick else 15)
            except ImportError:
                missing.add(pair.library)
                continue
            rows.append(row)
            figures = f"difference {row['difference']}  ratio {row['ratio']}"
            print(f"{row['name']:<60} {row['library']:<14} {figures}", flush=True)
    result = {"benchmark": "dependencies", "quick": options.quick, "rows": rows, "not_installed": sorted(missing)}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
