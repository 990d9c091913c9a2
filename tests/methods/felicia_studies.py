"""Small studies of FELICIA, and what a site of one keeps."""

import json

from torch import Tensor

from polyclinic.federation.site import SitePosition, SiteState, read_state
from polyclinic.methods.shared.gan_plans import NETWORKS

SITES = ("site-1", "site-2")
#: two hospitals with photographs of skin, and a GAN that takes a moment
STUDY = {
    **{"data.source": "skin-phantom", "data.samples": 120, "sites.count": 2},
    **{"generator.name": "gan", "generator.width": 2, "generator.latent": 4, "generator.batch_size": 8},
}
QUICK = {"steps": 2, "rounds": 2, "learner_steps": 1, "images": 12}


def state_of(run, site: str) -> SiteState:
    """What a site of a finished run keeps."""
    manifest = json.loads((run.folder / "checkpoint" / "manifest.json").read_text())
    return read_state(run.folder, site, SitePosition(*manifest["sites"][site]))


def gan_of(run, site: str) -> dict[str, Tensor]:
    """The GAN that a site of a finished run keeps."""
    return state_of(run, site).group(NETWORKS)
