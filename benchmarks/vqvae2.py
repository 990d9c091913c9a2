"""How fast VQ-VAE-2 trains: images a second of whole epochs, moving averages of the codebooks included.

    python benchmarks/vqvae2.py [--quick] [--json FILE]

In the precision that studies have on the device: bf16 on a GPU, where steps are recorded, and fp32 on a CPU. Images are
noise; the first two epochs warm up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

import torch
from clock import now

from polyclinic.generators.vqvae2.model import VQVAE2
from polyclinic.tasks import Target

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: channels of the autoencoder, numbers in a code's vector: the default, and those of the examples
WIDTHS = ((64, 16), (128, 64))


def measure(width: int, code_width: int, *, size: int, images: int, epochs: int, profile: Path | None = None) -> float:
    """Images a second after two epochs: the median of epochs. `profile`: a file for what takes longest in the last."""
    settings = VQVAE2(epochs=epochs, batch_size=32, width=width, code_width=code_width, prior_epochs=0)
    precision = "bf16" if DEVICE == "cuda" else "fp32"
    model = settings.build(channels=3, size=size, target=Target(("a", "b")), seed=0, device=DEVICE, precision=precision)
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (images, 3, size, size), dtype=torch.uint8, generator=rng)
    ends: list[float] = []
    profiler = torch.profiler.profile()

    def watch(*_: object) -> None:
        ends.append(now())
        if profile is not None and len(ends) == epochs - 1:
            profiler.start()

    model.fit(noise, torch.zeros(images, dtype=torch.long), rng, progress=watch)
    if profile is not None:
        profiler.stop()
        table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=110)
        profile.write_text(f"width {width}, an epoch of {images} images\n{table}\n", encoding="utf-8")
        ends.pop()
    taken = [end - start for start, end in itertools.pairwise(ends[1:])]
    return images / statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small images, few epochs")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--profile", type=Path, help="write what takes longest with the first width to this file")
    options = parser.parse_args()
    amount = {"size": 32, "images": 64, "epochs": 4} if options.quick else {"size": 256, "images": 512, "epochs": 12}
    widths = WIDTHS[:1] if options.quick else WIDTHS
    rows = [[f"VQ-VAE-2, width {width}", round(measure(width, code, **amount))] for width, code in widths]
    if options.profile:
        measure(*widths[0], **amount, profile=options.profile)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    figures = json.dumps({"benchmark": "vqvae2", "device": device, **amount, "rows": rows})
    if options.json:
        options.json.write_text(figures + "\n", encoding="utf-8")
    print(figures)


if __name__ == "__main__":
    main()
