"""How the generators of FELICIA's first experiment cover the held-out digits of both sites (Fig. 5)."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import torch

from polyclinic.claims.measures import kept
from polyclinic.data.parts import ImageSet, open_site, prepare
from polyclinic.federation.site import SitePosition, read_state
from polyclinic.generators.gan.settings import GAN
from polyclinic.metrics.distribution import precision_recall
from polyclinic.metrics.principal_components import principal_components
from polyclinic.randomness import torch_rng
from polyclinic.study import Study, load_run_study
from polyclinic.tasks import Target

#: images of each generator, as in the paper
SAMPLED = 2000


def coverage(run: Path) -> dict[str, float]:
    """Coverage and recall of the held-out images of the first class, mean over the sites' generators."""
    return kept(run, "coverage.json", _measured)


def _measured(run: Path) -> dict[str, float]:
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
