"""The model card of a run: what the model is, how good, on whose images, and what it must not be used for; Markdown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyclinic.run_folder import read_result
from polyclinic.runner.predict.model_file import Card
from polyclinic.tasks import TASKS
from polyclinic.templates import render

#: what a result calls its model where there is one of each site
EACH_ITS_OWN = "one of each site"
LIMITS = (
    "It is a research model. Nobody has approved it as a medical device, and this card is no such approval.",
    "It was tested on images of the sites of this study, or of the same kind. Other scanners, other patients and other "
    "rates of disease can make it much worse: test it on your own patients first.",
    "A person who can judge the image decides. The model's figures are help, and not a diagnosis.",
    "The test figures say nothing about groups of patients that the test images hold few of.",
)
SITES_TOGETHER = "On the test images of all sites together"

Rows = list[tuple[object, ...]]
#: title, unit of the bootstrap, head and rows of a table
Scores = tuple[str, str, list[str], Rows]


def model_card(folder: Path, card: Card, file: str, to: str | None = None) -> str:
    """The card of the model of a run folder; `file` is what the model is called, and `to` the format it is in."""
    result = read_result(folder) if (folder / "result.json").is_file() else {}
    counts = result.get("data", {}).get("counts", {})
    name = card.task["name"]
    like = TASKS[name].like if name in TASKS else None  # a plug-in's task, where nobody has loaded the plug-in
    says = {
        "classification": f"says which of {len(card.classes)} classes an image belongs to",
        "regression": f"estimates a value in {card.unit or 'the unit of the labels'}",
        "segmentation": "draws a mask in an image",
        None: f"does the task {name}",
    }
    splits = list(dict.fromkeys(split for of_site in counts.values() for split in of_site))
    return render(
        "model_card.md",
        card=card,
        result=result,
        to=to,
        limits=LIMITS,
        networks=", ".join(dict.fromkeys(card.backbones.values())),
        says=says[like],
        classes=list(enumerate(card.classes)),
        scores=_scores(result),
        calibrations=[
            (
                site or "all sites",
                one.cases,
                one.temperature if one.temperature is not None else "-",
                "; ".join(f"{coverage}: {value:g}" for coverage, value in one.quantiles.items()) or "-",
                "; ".join(f"{specificity}: {value:g}" for specificity, value in one.thresholds.items()) or "-",
            )
            for site, one in card.calibrations.items()
        ],
        counts=counts,
        splits=splits,
        images=[(site, *(of_site.get(split, 0) for split in splits)) for site, of_site in counts.items()],
        identity=[
            ("file", file),
            ("SHA-256 of the released weights", card.weights_sha256),
            ("method", card.method),
            ("seed", result.get("seed", "not known")),
            ("trained with polyclinic", result.get("environment", {}).get("polyclinic", "not known")),
        ],
    )


def _scores(result: Mapping[str, Any]) -> list[Scores]:
    """Tables of test figures: of all sites, then of each."""
    metrics = result.get("metrics", {})
    tested = metrics.get("test")
    if not tested:
        return []
    known, head = metrics.get("intervals", {}), ["metric", "value", "95 % interval"]
    intervals = known.get("pooled", {}) if known.get("split") == "test" else {}
    unit = known.get("unit", "") if intervals else ""

    def rows(values: Mapping[str, Any]) -> Rows:
        spans = {n: f"{_number(one['low'])} to {_number(one['high'])}" for n, one in intervals.items() if "low" in one}
        return [(name, _number(value), spans.get(name, "not computed")) for name, value in values.items()]

    found: list[Scores] = [(SITES_TOGETHER, unit, head, rows(tested))]
    if result.get("model") == EACH_ITS_OWN:  # the intervals are not of the mean over the models
        plain: Rows = [(name, _number(value)) for name, value in tested.items()]
        found = [(f"{SITES_TOGETHER}, the mean over the sites' models", "", head[:2], plain)]
        if intervals:
            values = {name: some.get("value") for name, some in intervals.items()}
            found.append(("Each image by its own site's model", unit, head, rows(values)))
    sites: Rows = [(site, *(_number(own.get(name)) for name in tested)) for site, own in metrics["per_site"].items()]
    return [*found, ("Of each site", "", ["site", *tested], sites)]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "-"
