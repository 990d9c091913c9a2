"""The scores of somebody who has seen no image: always the most frequent class, or the mean label of training images.

A score means little without them: an accuracy of 0.75 is poor where seven of ten images are of one class.
"""

from __future__ import annotations

import numpy as np

from polyclinic.data.parts import PreparedSites, open_site
from polyclinic.json_types import JsonMapping
from polyclinic.study import Study


def guessed_scores(study: Study, parts: PreparedSites) -> dict[str, float]:
    """By metric, on the images that score the model. Empty for masks, one class only, deployed sites (their labels are
    their own) and a study without a last evaluation."""
    task, split = study.task, study.evaluation.final
    if task.like == "classification" and split != "none":
        return _most_frequent_class(parts.info, split)
    return _mean_label(parts, split) if task.like == "regression" and split != "none" else {}


def _most_frequent_class(info: JsonMapping, split: str) -> dict[str, float]:
    counts = [of_site[split] for of_site in (info.get("class_counts") or {}).values() if of_site]
    total = np.sum(counts, axis=0) if counts else np.zeros(0)
    if (total > 0).sum() < 2:
        return {}
    return {"accuracy": float(total.max() / total.sum()), "balanced_accuracy": 1 / int((total > 0).sum())}


def _mean_label(parts: PreparedSites, split: str) -> dict[str, float]:
    if not all((parts.folder / site).is_dir() for site in parts.names):
        return {}  # at deployed sites nobody sees the labels
    sites = [open_site(parts.folder, name) for name in parts.names]
    known = np.concatenate([site.train.labels for site in sites])
    asked = np.concatenate([getattr(site, split).labels for site in sites])
    if not len(known) or not len(asked):
        return {}
    errors = asked - known.mean()
    return {"mae": float(np.abs(errors).mean()), "rmse": float(np.sqrt((errors**2).mean()))}
