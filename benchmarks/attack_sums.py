"""Who is behind sums: members told by second moments of features against n/d, and by histograms of scores against n.

Hand radiographs (boneage_rsna_male_64.npz in the folder that POLYCLINIC_DATA names), or drawn hands without it, as
features of EfficientNet-Lite0 with its public weights: what `analytic` and others send X'X of. n images are summed, as
many others are asked about beside them. Fewer dimensions d are d of the features, drawn at random. The histograms are
those of metrics parcels (1,024 bins), of scores of a linear head; `--rounds` of them have heads that differ a little.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from attack_cuts import load_images
from torch import Tensor

from polyclinic.attacks.learned_decoder import FeatureDecoder
from polyclinic.attacks.sums import bins_of, histogram_scores, moment_scores, read_pair
from polyclinic.audits.recovery import correlations
from polyclinic.metrics.roc import separation
from polyclinic.models.encoders import ENCODERS
from polyclinic.randomness import torch_rng
from polyclinic.tasks.classification import BINS, EDGES

ENCODER = "efficientnet-lite0-1280"
SUMMED = (1, 2, 4, 8)  #: images of a sum that is decoded
GROUPS = 40  #: such sums, at most
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0)


def of_moments(features: Tensor, size: int, count: int, seed: int) -> dict[str, Any]:
    """One point of the curve: AUC and TPR at 1 % of false alarms, n images of d features."""
    rng = torch_rng(seed, "sums", size, count)
    columns = torch.randperm(features.shape[1], generator=rng)[:size]
    rows = torch.randperm(len(features), generator=rng)
    inside, outside = (features[rows[part]][:, columns] for part in (slice(count), slice(count, 2 * count)))
    scores = moment_scores(inside.double().T @ inside.double(), torch.cat([inside, outside]))
    found = separation(scores[:count], scores[count:])
    return {"d": size, "n": count, "n/d": round(count / size, 3), **_figures(found)}


def of_histograms(features: Tensor, count: int, rounds: int, seed: int) -> dict[str, Any]:
    """Scores of a linear head that moves a little from round to round; n images are in the histograms."""
    rng = torch_rng(seed, "histograms", count)
    rows = torch.randperm(len(features), generator=rng)[: 2 * count]
    centred = features[rows] - features.mean(0)
    head = torch.randn(features.shape[1], generator=rng)
    scores, counts = [], []
    for _ in range(rounds):
        head = head + 0.3 * torch.randn(head.shape, generator=rng)
        margin = centred @ head / (centred @ head).std()
        scores.append(margin)
        counts.append(bins_of(margin[:count], EDGES).bincount(minlength=BINS))
    told = histogram_scores(counts, scores, EDGES)
    return {"n": count, "rounds": rounds, **_figures(separation(told[:count], told[count:]))}


def of_decoded(images: Tensor, features: Tensor, steps: int, device: str) -> list[dict[str, Any]]:
    """What a decoder makes of sums of 1, 2, 4 and 8 images: half of the images are the attacker's own, the sums are of
    others. How often does the decoded image point to one of those in the sum, among all others?"""
    half = len(images) // 2
    own, site, known, asked = images[:half], images[half:], features[:half], features[half:].double()
    cases = {}
    for size in SUMMED:
        groups = torch.arange(min(len(site), GROUPS * size) // size * size).reshape(-1, size)
        cases[size, "mean" if size > 1 else "features"] = (groups, asked[groups].mean(1))
        if size == 2:  # sum and second moments give both
            pairs = [read_pair(rows.sum(0), rows.T @ rows) for rows in asked[groups]]
            cases[size, "features"] = (groups.repeat_interleave(2, 0), torch.cat(pairs))
    vectors = torch.cat([found for _, found in cases.values()]).float()
    made = FeatureDecoder(steps=steps).decode_vectors(vectors, own, known, device=device).images
    nearest = correlations(made - own.mean(0), site - own.mean(0)).argmax(1)
    rows, start = [], 0
    for (size, read), (groups, found) in cases.items():
        part = slice(start, start + len(found))
        right = (nearest[part, None] == groups).any(1)
        errors = (made[part, None] - site[groups]).square().flatten(2).mean(2).amin(1)
        told = {
            "images": size,
            "read": read,
            "sums": len(groups),
            "points_right": round(float(right.float().mean()), 3),
        }
        rows.append(
            {**told, "chance": round(size / len(site), 4), "psnr": round(float(-10 * errors.log10().mean()), 1)}
        )
        start += len(found)
    return rows


def _figures(found: Any) -> dict[str, float]:
    return {name: round(getattr(found, name), 3) for name in ("auc", "auc_low", "auc_high", "hits")}


def draw(path: Path, moments: list[dict[str, Any]], histograms: list[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    for size in sorted({row["d"] for row in moments}):
        line = [row for row in moments if row["d"] == size]
        drawn = left.plot([row["n/d"] for row in line], [row["auc"] for row in line], marker="o", label=f"d = {size}")
        lows, highs = ([row[name] for row in line] for name in ("auc_low", "auc_high"))
        left.fill_between([row["n/d"] for row in line], lows, highs, alpha=0.15, color=drawn[0].get_color())
    left.set(xlabel="images behind the sum / features (n/d)", ylabel="AUC: members told from others", xscale="log")
    left.set_title("Second moments of features (statistics)", loc="left", fontsize=10)
    for rounds in sorted({row["rounds"] for row in histograms}):
        line = [row for row in histograms if row["rounds"] == rounds]
        words = "1 round" if rounds == 1 else f"{rounds} rounds"
        right.plot([row["n"] for row in line], [row["auc"] for row in line], marker="o", label=words)
    right.set(xlabel="images of the site (n)", xscale="log")
    right.set_title("Histograms of scores, 1,024 bins (metrics)", loc="left", fontsize=10)
    for axes in (left, right):
        axes.axhline(0.5, color="grey", linestyle="--", linewidth=1)
        axes.set_ylim(0.45, 1.02)
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    images = load_images(options.images, 64, options.seed)
    features = ENCODERS[ENCODER](options.device, options.side).features((images * 255).round().to(torch.uint8))
    most = len(features) // 2
    sizes = [size for size in options.features if size <= features.shape[1]]
    points = [(size, round(size * share)) for size in sizes for share in SHARES if 4 <= round(size * share) <= most]
    moments = [of_moments(features, size, count, options.seed) for size, count in points]
    counts = [count for count in (5, 10, 20, 50, 100, 200, 500, 1000) if count <= most]
    histograms = [of_histograms(features, n, rounds, options.seed) for rounds in options.rounds for n in counts]
    figures: dict[str, Any] = {
        "benchmark": "attack_sums",
        "quick": options.quick,
        "images": len(images),
        "moments": moments,
        "histograms": histograms,
    }
    if options.decode:
        figures["decoded"] = of_decoded(images, features, options.decode, options.device)
    if options.picture:
        draw(options.picture, moments, histograms)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="64 images")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--decode", type=int, default=0, help="train a decoder of so many steps for sums of few images")
    parser.add_argument("--picture", type=Path, help="draw both curves")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--side", type=int, default=64, help="of the images that the encoder sees")
    parser.add_argument("--features", type=int, nargs="+", default=[64, 256, 1280])
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.images = 64 if options.quick else options.images
    return options


if __name__ == "__main__":
    main()
