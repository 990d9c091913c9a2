"""Attack: weights that sort a site's images into bins; what the coordinator gets back from a deployed site."""

import numpy as np
import torch
from attacked_site import ask
from PIL import Image

from polyclinic.attacks.coordinator import Imprint
from polyclinic.attacks.scoring import identified


def test_a_site_without_a_check_of_what_comes_in_gives_images_away(kit, monkeypatch):
    monkeypatch.setattr("polyclinic.federation.host.secrets.token_hex", lambda count: "5e" * count)
    host = kit.host(model={"backbone": "cnn-64-128-64-32"}, method={"name": "fedsgd", "rounds": 3})
    rng = torch.Generator().manual_seed(5)
    public, others = (torch.rand(count, 1, 16, 16, generator=rng) for count in (80, 60))
    attack, model = Imprint(), host.spec.trainer.model
    crafted = attack.craft(model.cpu(), public)
    reply = ask(host, "gradient", weights=crafted.state_dict())
    [gradients] = [parcel.tensors for parcel in reply.parcels if parcel.kind == "gradients"]
    found = attack.recover(gradients, crafted, public)
    scans = [np.asarray(Image.open(file)) for file in sorted(kit.folder.parent.glob("scans/*/*.png"))]
    truth = torch.from_numpy(np.stack(scans))[:, None] / 255
    scored = identified(found, truth, others, least=30.0)
    assert scored.images >= 5
    assert scored.by_chance == 0
