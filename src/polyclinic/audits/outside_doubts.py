"""Whether an update of one image that others saved was searched to its end, and is of the images that were named."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from polyclinic.audits.outside_update import Update
from polyclinic.audits.run_inversion import ENOUGH

MOST = 64  #: images of a folder that are looked at
BETTER = 0.5  #: what was found explains the update, and the named images do not, where its distance is below this share


def doubt_about(update: Update, truth: Tensor, found: Tensor) -> str:
    """Why nothing found would say nothing: a longer search may win, or the images named are not those trained on."""
    settings = update.settings
    if settings.images > 1 or settings.optimizer != "sgd" or not len(truth):
        return ""
    best, own = (float(distances(update, images).min()) for images in (truth[:MOST], found[:1]))
    if not own <= best * (1 + ENOUGH):  # as NaN is, too
        return f"the search had not ended: its distance is {own:.2g}, that of the true image {best:.2g}; use --budget"
    if own < BETTER * best:
        return "what was found explains the update, and none of --images does; name the images that the site used"
    return ""


def distances(update: Update, images: Tensor) -> Tensor:
    """How far the gradient of each image [N, C, H, W] points from the change that was sent, [N]: 0 for the same
    direction, with the class that fits best."""
    network = copy.deepcopy(update.network).train(update.settings.batch_norm == "train")
    names = [name for name, _ in network.named_parameters()]
    moved = [(update.before[n] - update.after[n]) / update.settings.lr for n in names]
    sent = torch.cat([
        (one - update.settings.weight_decay * update.before[name]).flatten()
        for name, one in zip(names, moved, strict=True)
    ])  # fmt: skip
    return torch.stack([_nearest(network, image[None], sent, update.outputs) for image in images])


def _nearest(network: nn.Module, image: Tensor, sent: Tensor, outputs: int) -> Tensor:
    found = []
    for label in range(outputs):
        loss = nn.functional.cross_entropy(network(image), torch.tensor([label]))
        gradients = torch.autograd.grad(loss, list(network.parameters()), allow_unused=True)
        pairs = zip(gradients, network.parameters(), strict=True)
        flat = torch.cat([(torch.zeros_like(one) if g is None else g).flatten() for g, one in pairs])
        found.append(1 - nn.functional.cosine_similarity(flat, sent, dim=0))
    return torch.stack(found).min()
