"""What the generators of finished runs can make: coverage (FELICIA, Fig. 5) and projection (FedER, Fig. 3).

No audit can do this: both methods keep their generators, so that the state of the sites is read here.
"""

from __future__ import annotations

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
from polyclinic.metrics.images import principal_components
from polyclinic.metrics.perceptual import Pixels
from polyclinic.randomness import torch_rng
from polyclinic.study import Study, load_run_study
from polyclinic.tasks import Target

#: images of each generator, as in the paper
SAMPLED = 2000
#: training images of each site that are projected
PROJECTED = 32
DISTANCE = "distance, pixels"


def coverage(run: Path) -> dict[str, float]:
    """Coverage and recall of the held-out images of the first class, mean over the sites' generators."""
    study = load_run_study(run)
    parts = prepare(study.data, study.sites)
    held = {name: open_site(parts.folder, name) for name in parts.names}
    train, tested = (
        torch.from_numpy(np.concatenate([first_class(getattr(one, split)) for one in held.values()]))
        for split in ("train", "test")
    )
    components = principal_components(train[:SAMPLED])
    real = components.project(tested)
    classes = tuple(parts.info["classes"])
    found = [precision_recall(real, components.project(sample(run, study, name, classes))) for name in parts.names]
    return {name: statistics.fmean(one[name] for one in found) for name in ("coverage", "recall")}


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


def projected(run: Path) -> dict[str, float]:
    """Mean distance of training images to the nearest images of their site's generator, mean over sites.

    Squared differences of pixels; the paper has LPIPS, which means little for images of 32 px.
    """
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
