"""Gradient inversion of all gradients that a run kept, many at once, with the attack of `[audit.gradient_inversion]`.

`polyclinic audit` attacks the same parcels with the same search one after another, and adds verdicts and power checks.
For a table over a hundred images one batch of them all takes a small part of that time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polyclinic.attacks.scoring import score
from polyclinic.audits.attack_updates import AttackPlan
from polyclinic.audits.audit import build_tools
from polyclinic.audits.open_run import open_run
from polyclinic.audits.parcels import parcels_to_audit
from polyclinic.audits.views import Truth
from polyclinic.errors import BadInput

#: all kept releases
BUDGET = "thorough"


def invert_together(folder: Path, *, device: str = "auto", cache: Path | None = None) -> dict[str, Any]:
    """For each image behind a kept gradient: errors, similarity, and whether the search converged by the papers' rule.

    Figures are None where an image that came back is not finite.
    """
    assembly, lines = open_run(folder, cache=cache)
    wanted = parcels_to_audit(folder, assembly.study, lines, BUDGET, ("gradients",), ())
    tools = build_tools(assembly, BUDGET, "pixels", device)
    plans = [AttackPlan(audited.seen(tools)) for audited in wanted]
    truths = [audited.truth(tools) for audited in wanted]
    check_alike(folder, plans)
    settings, knowledge = plans[0].settings(), plans[0].knowledge(truths[0])
    labels = torch.stack([plan.true_labels(truth) for plan, truth in zip(plans, truths, strict=True)])
    known = replace(
        knowledge,
        model=[plan.seen.network for plan in plans],
        labels=None if knowledge.labels is None else labels,
    )
    parcels = [plan.seen.parcel for plan in plans]
    back = settings.run(parcels, known, threat=tools.threat, seed=tools.seed, device=tools.device)
    found = score(back.images, torch.stack([images_behind(truth) for truth in truths]), back.start)
    columns = {"mse": found.mse, "psnr": found.psnr, "ssim": found.ssim}
    figures = {name: [None if value != value else value for value in told.tolist()] for name, told in columns.items()}
    return {"attack": str(settings), **figures, "non_converging": found.non_converging.tolist()}


def images_behind(truth: Truth) -> torch.Tensor:
    """The images that a gradient was computed of, [B, C, H, W]."""
    return truth.images(torch.cat(truth.batches))


def check_alike(folder: Path, plans: list[AttackPlan]) -> None:
    """BadInput unless every gradient is of as many images, few enough to be searched for as they were."""
    if not all(plan.exact for plan in plans) or len({plan.batch_size for plan in plans}) > 1:
        raise BadInput(
            f"{folder}: gradients are searched for together where each is of as many images, and of few; "
            "`polyclinic audit` attacks others one by one"
        )
