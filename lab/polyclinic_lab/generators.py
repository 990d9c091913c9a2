"""What the generators of finished runs can make: coverage (FELICIA, Fig. 5) and projection (FedER, Fig. 3).

No audit can do this: both methods keep their generators, so that the state of the sites is read here.
"""

import json
import statistics
from pathlib import Path

import numpy as np
import torch

from polyclinic.attacks.projection import Projection
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.federation.site import SitePosition, read_state
from polyclinic.files import read_tensors
from polyclinic.generators import GeneratorModel
from polyclinic.generators.gan.settings import GAN
from polyclinic.metrics.distribution import precision_recall
from polyclinic.metrics.images import as_unit, principal_components
from polyclinic.metrics.perceptual import Pixels, perceptual_distance
from polyclinic.randomness import torch_rng
from polyclinic.study import Study, load_run_study
from polyclinic.tasks import Target

#: images of each generator, as in the paper
SAMPLED = 2000
#: training images of each site that are projected, and shown
PROJECTED, SHOWN = 50, 10
#: figures of `coverage` about two clusters
BORDER = ("at the border", "beyond the border")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def coverage(run: Path) -> dict[str, float]:
    """Coverage and recall of the held-out images of the first class, mean over the sites' generators; the share of
    samples at the border of the sites' clusters, and beyond it; `scatter.png` as in Fig. 5."""
    study = load_run_study(run)
    parts = prepare(study.data, study.sites)
    held = [open_site(parts.folder, name) for name in parts.names]
    train, tested = (
        [torch.from_numpy(first_class(getattr(one, split)).copy()) for one in held] for split in ("train", "test")
    )
    components = principal_components(torch.cat(train)[:SAMPLED])
    real, clusters = components.project(torch.cat(tested)), [components.project(one) for one in train]
    classes = tuple(parts.info["classes"])
    samples = [components.project(sample(run, study, name, classes)) for name in parts.names]
    found = [precision_recall(real, one) | border(one, clusters, own) for own, one in enumerate(samples)]
    draw_scatter(clusters, samples, run / "scatter.png")
    return {name: statistics.fmean(one[name] for one in found) for name in ("coverage", "recall", *BORDER)}


def border(points: torch.Tensor, clusters: list[torch.Tensor], own: int) -> dict[str, float]:
    """The share of points [N, P] at the border of two clusters and beyond it: along the line through both centres, the
    border is the middle half, and the other cluster lies beyond it."""
    here, there = clusters[own].mean(0), clusters[1 - own].mean(0)
    place = (points - here) @ (there - here) / (there - here).square().sum()
    shares = ((place > 0.25) & (place <= 0.75)).float().mean(), (place > 0.75).float().mean()
    return dict(zip(BORDER, map(float, shares), strict=True))


def draw_scatter(clusters: list[torch.Tensor], samples: list[torch.Tensor], file: Path) -> None:
    """A panel for each site's generator: its samples before both clusters, in the first two components."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(samples), 3.6), layout="constrained")
    for number, (axes, made) in enumerate(zip(figure.subplots(1, len(samples)), samples, strict=True), 1):
        for points, colour in ((clusters[0], "tab:blue"), (clusters[1], "tab:red"), (made, "tab:green")):
            axes.scatter(points[:, 0], points[:, 1], s=2, color=colour, alpha=0.4)
        axes.set_title(f"generator {number}", fontsize=9)
        axes.set_axis_off()
    figure.suptitle(file.parent.name, fontsize=9)
    figure.savefig(file, dpi=110)


def first_class(part: ImageSet) -> np.ndarray:
    """The images of the first class, uint8 [N, C, H, W]."""
    return np.asarray(part.images)[np.asarray(part.labels) == 0]


def sample(run: Path, study: Study, site: str, classes: tuple[str, ...]) -> torch.Tensor:
    """Images of the generator that a site of a finished run has, uint8."""
    manifest = json.loads((run / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
    state = read_state(run, site, SitePosition(*manifest["sites"][site])).group("gan")
    settings = study.generator
    assert isinstance(settings, GAN), "FELICIA trains GANs"
    model = settings.build(channels=1, size=study.data.size, target=Target(classes=classes), seed=study.seed)
    model.load(state)
    return model.sample(torch.zeros(SAMPLED, dtype=torch.long), torch_rng(study.seed, site, "coverage"))


def projected(plain: Path, private: Path) -> list[list[float]]:
    """Distances of training images of all sites to the closest images of their site's generator, without the privacy
    loss and with it; a histogram and a sheet of both (Figs. 3 and 4) as `projected.png` in the first run's folder.

    For each image both searches begin at one point, the closest of some random ones of the first generator. The
    distance is the one that the study tunes with.
    """
    study = load_run_study(plain)
    parts = prepare(study.data, study.sites)
    classes = tuple(parts.info["classes"])
    name = study.tuning.distance if study.tuning else "pixels"
    distance = Pixels() if name == "pixels" else perceptual_distance(name, device=DEVICE)
    shown, found = [], []
    for site in parts.names:
        part = open_site(parts.folder, site).train
        images, start, pair = torch.as_tensor(part.images[:PROJECTED].copy()), None, []
        for run in (plain, private):
            space = _generator(run, study, site, tuple(images.shape[1:]), classes).latent_space()
            assert space is not None, "GANs have a latent space"
            labels = torch.as_tensor(part.labels[:PROJECTED].copy()) if space.labelled else None
            search = Projection(conditional=space.labelled)
            pair.append(search.run(space, images, distance, labels=labels, start=start, seed=study.seed, device=DEVICE))
            start = pair[-1].start
        shown.append((images, *(one.images for one in pair)))
        found.append([one.distances.tolist() for one in pair])
    both = [[value for site in found for value in site[which]] for which in (0, 1)]
    draw_projections(both, shown[0], plain / "projected.png")
    return both


def draw_projections(distances: list[list[float]], sheet: tuple[torch.Tensor, ...], file: Path) -> None:
    """Histograms of both distances above some images and what came nearest to them."""
    from matplotlib.figure import Figure

    names = ("real images", "nearest, no privacy loss", "nearest, privacy loss")
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    top, *rows = figure.subplots(4, 1, height_ratios=(3, 1, 1, 1))
    edges = np.linspace(0, max(map(max, distances)), 31)
    for values, name in zip(distances, names[1:], strict=True):
        top.hist(values, edges, alpha=0.55, label=f"{name} (median {statistics.median(values):.2f})")
    top.set_xlabel("distance of a training image to the nearest image of the generator")
    top.set_ylabel("training images")
    top.legend()
    for axes, images, name in zip(rows, sheet, names, strict=True):
        row = torch.cat(list(as_unit(images[:SHOWN], "images")), dim=2).permute(1, 2, 0).clamp(0, 1)
        axes.imshow(row if row.shape[2] == 3 else row[:, :, 0], cmap="gray", vmin=0, vmax=1)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_axis_off()
    figure.savefig(file, dpi=120)


def _generator(run: Path, study: Study, site: str, shape: tuple[int, ...], classes: tuple[str, ...]) -> GeneratorModel:
    state = read_tensors(run / "sites" / site / "generator.safetensors")
    target = Target(classes=classes)
    return study.generator.build_for(shape, target, seed=study.seed, state=state, device=DEVICE)
