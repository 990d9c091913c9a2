"""How near FedER's generators come to the images that they learnt from (Fig. 3): projection into the latent space.

FedER sends no generator, so no audit can search one: the file that a run leaves at each site is read here.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import torch

from polyclinic.attacks.projection import Projection
from polyclinic.claims.measures import kept
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.files import read_tensors
from polyclinic.generators import GeneratorModel
from polyclinic.metrics.perceptual import Pixels
from polyclinic.study import Study, load_run_study
from polyclinic.tasks import Target

#: training images of each site that are projected
PROJECTED = 32
DISTANCE = "distance, pixels"


def projected(run: Path) -> dict[str, float]:
    """Mean distance of training images to the nearest images of their site's generator, mean over sites.

    Squared differences of pixels; the paper has LPIPS, which means little for images of 32 px.
    """
    return kept(run, "projected.json", _measured)


def _measured(run: Path) -> dict[str, float]:
    study = load_run_study(run)
    parts = prepare(study.data, study.sites)
    classes = tuple(parts.info["classes"])
    found = [_distance(run, study, open_site(parts.folder, name).train, name, classes) for name in parts.names]
    return {DISTANCE: statistics.fmean(found)}


def _distance(run: Path, study: Study, part: ImageSet, site: str, classes: tuple[str, ...]) -> float:
    images = torch.as_tensor(part.images[:PROJECTED].copy())
    model = _generator(run, study, site, tuple(images.shape[1:]), classes)
    space = model.latent_space()
    assert space is not None, "GANs have a latent space"
    search = Projection(conditional=space.labelled)
    labels = torch.as_tensor(part.labels[:PROJECTED].copy()) if space.labelled else None
    return float(search.run(space, images, Pixels(), labels=labels, seed=study.seed).distances.mean())


def _generator(run: Path, study: Study, site: str, shape: tuple[int, ...], classes: tuple[str, ...]) -> GeneratorModel:
    state = read_tensors(run / "sites" / site / "generator.safetensors")
    return study.generator.build_for(shape, Target(classes=classes), seed=study.seed, state=state)
