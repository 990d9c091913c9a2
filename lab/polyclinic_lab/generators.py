"""What generators of finished runs can make: coverage and utility (FELICIA, Figs. 5 to 10), projection (FedER, Fig. 3).

No audit can do this: both methods keep their generators, so that the state of the sites is read here.
"""

import json
import statistics
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import torch

from polyclinic.attacks.projection import Projection
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.federation.site import SitePosition, read_state
from polyclinic.files import read_tensors
from polyclinic.generators import GeneratorModel
from polyclinic.generators.gan.settings import GAN
from polyclinic.methods.shared.central_discriminator import FeliciaSettings
from polyclinic.methods.shared.downstream_utility import training_sets
from polyclinic.metrics.distribution import precision_recall
from polyclinic.metrics.images import as_unit, principal_components
from polyclinic.metrics.perceptual import Pixels, perceptual_distance
from polyclinic.randomness import torch_rng
from polyclinic.runner.run.assembly import Assembly
from polyclinic.study import Study, load_run_study
from polyclinic.tasks import Target
from polyclinic.training.loop import Trainer

#: images of each generator, as in the paper
SAMPLED = 2000
#: training images of each site that are projected, and shown
PROJECTED, SHOWN = 50, 10
#: networks that are trained on each set of images: one alone is a draw
NETWORKS = 8
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
    fours = torch.zeros(SAMPLED, dtype=torch.long)
    samples = [components.project(sample(run, study, name, classes, fours)) for name in parts.names]
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


def sample(run: Path, study: Study, site: str, classes: tuple[str, ...], labels: torch.Tensor) -> torch.Tensor:
    """Images of the generator that a site of a finished run has, uint8, for labels [N]."""
    manifest = json.loads((run / "checkpoint" / "manifest.json").read_text(encoding="utf-8"))
    state = read_state(run, site, SitePosition(*manifest["sites"][site])).group("gan")
    settings = study.generator
    assert isinstance(settings, GAN), "FELICIA trains GANs"
    channels = prepare(study.data, study.sites).info["channels"]
    model = settings.build(channels=channels, size=study.data.size, target=Target(classes=classes), seed=study.seed)
    model.load(state)
    return model.sample(labels, torch_rng(study.seed, site, "coverage"))


def utility(run: Path) -> dict[str, float]:
    """Scores of networks that learn the first site's real images, its generator's, and both: means over NETWORKS of
    each, as they are after their last step, on the test images of all sites, which nothing was chosen by. `accuracy` is
    the mean over sub-groups."""
    study = load_run_study(run)
    parts = prepare(study.data, study.sites)
    held = [open_site(parts.folder, name) for name in parts.names]
    real, tested = held[0].train, [part for part in (one.test for one in held) if len(part)]
    classes = tuple(parts.info["classes"])
    method = study.method
    assert isinstance(method, FeliciaSettings), "others have no local GANs"
    labels = torch.arange(method.images or len(real)) % len(classes)
    made = ImageSet(sample(run, study, parts.names[0], classes, labels).numpy(), labels.numpy())
    found: dict[str, list[float]] = {}
    for number in range(NETWORKS):
        assembly = Assembly(study.with_settings({"seed": 1000 * study.seed + number}), parts, run)
        trainer = assembly.trainer()
        for name, part in training_sets(real, made, None).items():
            optimizer = trainer.optimizer.make(trainer.load(assembly.initial_weights()).parameters(), 1)
            batches = trainer.batches(part, torch_rng(study.seed, "networks", number))
            trainer.train(batches, method.learner_steps, optimizer)
            for metric, value in scores(trainer, tested).items():
                found.setdefault(f"{metric}, {name}", []).append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def scores(trainer: Trainer, parts: Sequence[ImageSet]) -> dict[str, float]:
    """AUC of all images, the accuracy of each sub-group, and the mean of these."""
    sums: dict[str, list[dict[str, torch.Tensor]]] = {}
    for part in parts:
        known = np.asarray(part.subgroup)
        groups = {str(one): part.take(known == one) for one in np.unique(known)}
        for group, some in {"": part, **groups}.items():
            sums.setdefault(group, []).append(trainer.evaluate(some))
    found = {group: trainer.task.finish(reduce(trainer.task.add, of)) for group, of in sums.items()}
    accuracies = {group: one["accuracy"] for group, one in found.items() if group}
    own = {f"accuracy of {group}": value for group, value in accuracies.items()}
    return {"auc": found[""]["auc"], "accuracy": statistics.fmean(accuracies.values()), **own}


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
